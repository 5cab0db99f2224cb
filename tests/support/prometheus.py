"""A real Prometheus that scrapes processes of a test."""

from __future__ import annotations

import json
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.lab.servers import Launcher

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
MONITORING = ROOT / "docker" / "monitoring"
#: Of the chart, which needs them in its folder: alerts and dashboard.
FILES = ROOT / "deploy" / "helm" / "kvferry" / "files"
#: A rate needs a few scrapes in its window.
SCRAPE_INTERVAL = "250ms"


def program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`; skip the test if there is none."""
    found = shutil.which(name) or ((BUILD / name).is_file() and str(BUILD / name))
    if not found:
        pytest.skip(f"{name} is not installed; `make tools` gets it on Debian")
    return found


class Prometheus:
    """Answers queries."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of the API."""
        url = f"{self._url}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.loads(response.read())["data"]

    def values(self, query: str) -> list[float]:
        """Return the values of an instant query, one per series."""
        return [float(series["value"][1]) for series in self.get("query", query=query)["result"]]


@contextmanager
def scraping(targets: Mapping[str, str], folder: Path, port: int) -> Iterator[Prometheus]:
    """Run Prometheus with the project's rules inside the block.

    Args:
        targets: Name of an instance → its `host:port`.
    """
    config = {
        "global": {"scrape_interval": SCRAPE_INTERVAL, "evaluation_interval": SCRAPE_INTERVAL},
        "rule_files": [str(FILES / "alerts.yml")],
        "scrape_configs": [
            {
                "job_name": "kvferry",
                "static_configs": [
                    {"targets": [address], "labels": {"instance": name}} for name, address in targets.items()
                ],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    command = [
        program("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with Launcher(logs=folder) as launcher:
        launcher.start_server("prometheus", command, port, "/-/ready").wait_ready(30)
        yield Prometheus(port)
