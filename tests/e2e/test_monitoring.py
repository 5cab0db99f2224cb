"""The dashboard and the alerts of `docker/monitoring`, with a real Prometheus that scrapes a real pair."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import wait_until
from tests.support.prometheus import FILES, MONITORING, Prometheus, program, scraping

DASHBOARD = json.loads((FILES / "dashboard.json").read_text())
#: (title, query) of each panel.
QUERIES = [
    (panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())
]


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", str(FILES / "alerts.yml")),
        ("test", "rules", "alerts_test.yml"),
        ("check", "config", "--syntax-only", "prometheus.yml"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_promtool_is_content_with(arguments: tuple[str, ...]) -> None:
    command = [program("promtool"), *arguments]
    ran = subprocess.run(command, cwd=MONITORING, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_alert_has_a_test_that_fires_it() -> None:
    alerts = re.findall(r"alert: (\w+)", (FILES / "alerts.yml").read_text())
    fired = re.findall(r'alertname="(\w+)"', (MONITORING / "alerts_test.yml").read_text())
    assert set(alerts) == set(fired)


@pytest.fixture
def prometheus(tiny_fleet: Any, tmp_path: Path) -> Iterator[Prometheus]:
    """It has scraped a pair and its router while they worked."""
    program("prometheus")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = {name: getattr(tiny_fleet, name).process for name in ("prefill", "decode", "router")}
    targets = {name: f"127.0.0.1:{process.port}" for name, process in processes.items()}
    with scraping(targets, tmp_path, port) as prometheus:
        wait_until(lambda: prometheus.values("count(kvferry_build_info)") == [3.0], timeout_s=30)

        def is_scraped_under_load() -> bool:
            with tiny_fleet.router.streaming("Load for a dashboard. " * 6, max_tokens=4) as events:
                for _ in events:
                    pass
            return min(prometheus.values("count_over_time(kvferry_load_bytes_sum[1m])"), default=0) >= 4

        wait_until(is_scraped_under_load, timeout_s=30)
        yield prometheus


@pytest.mark.full
def test_every_query_of_the_dashboard_has_data_and_no_alert_fires(prometheus: Prometheus) -> None:
    empty = []
    for title, query in QUERIES:
        wanted = query.replace("$__rate_interval", "20s").replace("$instance", ".*")
        assert "$" not in wanted
        values = prometheus.values(wanted)
        if not values or all(map(math.isnan, values)):
            empty.append(f"{title}: {wanted}")
    assert not empty, "\n".join(empty)
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
    variable = DASHBOARD["templating"]["list"][1]["query"]
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable).groups()  # type: ignore[union-attr]
    assert {series[label] for series in prometheus.get("series", **{"match[]": name})} == {
        "prefill",
        "decode",
        "router",
    }
