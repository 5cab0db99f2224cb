"""`docker/compose.yaml` without Docker: its commands, with other addresses, start a pair that answers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry.lab.servers import LaunchedProcess, Launcher
from tests.support.client import Client, assert_answers_like
from tests.support.zygote import EXAMPLES

COMPOSE: Mapping[str, Any] = yaml.safe_load((EXAMPLES.parent / "docker" / "compose.yaml").read_text())
SERVICES: Mapping[str, Mapping[str, Any]] = COMPOSE["services"]
SHARED = "/run/kvferry"


def start(
    launcher: Launcher, service: str, places: Mapping[str, str], *more: str, port: int = 0
) -> LaunchedProcess:
    """Run a service's command. `places` maps folders and addresses in the command to those of this test."""
    script, *arguments = SERVICES[service]["command"]
    for here, there in {**places, "=0.0.0.0": "=127.0.0.1", "--port=8000": f"--port={port}"}.items():
        arguments = [argument.replace(here, there) for argument in arguments]
    return launcher.start(service, script, *arguments, *more)


@pytest.fixture
def shared(socket_dir: Path, transport: str) -> Path:
    """The volume that the nodes of a profile share."""
    for name in {"zeromq": ["secret"], "tcp": ["certificates"]}.get(transport, []):
        program = SERVICES[name]["command"][1].replace(SHARED, str(socket_dir))
        for here in ("prefill", "decode"):
            program = program.replace(f"DNS:{here}.caches", "IP:127.0.0.1")
        for _ in range(2):  # once as on the first start, once as on the next
            subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True)
    return socket_dir


@pytest.mark.full
@pytest.mark.every_transport
def test_a_profile_is_a_pair_that_answers(
    launcher: Launcher,
    tiny_single: Client,
    tiny_single_arguments: Sequence[str],
    transport: str,
    shared: Path,
) -> None:
    places = {SHARED: str(shared), "prefill.caches": "127.0.0.1", "decode.caches": "127.0.0.1"}
    nodes = {
        f"http://{role}-{transport}:8000": start(
            launcher, f"{role}-{transport}", places, *tiny_single_arguments
        )
        for role in ("prefill", "decode")
    }
    launcher.wait_ready(nodes.values(), 110)
    router = start(launcher, f"router-{transport}", {url: node.url for url, node in nodes.items()})
    launcher.wait_ready([router], 30)
    prompt = "A box that holds a box. " * 4
    reply = Client(router).complete(prompt, max_tokens=4, logprobs=0)
    assert_answers_like(tiny_single, prompt, reply.answer, 4)
    assert reply.transfer["transport"] == transport
    assert reply.transfer["num_blocks"] > 0
    if transport == "tcp":
        assert reply.transfer["mechanism"] == "tcp+tls"
        # The CA's key is not there.
        assert sorted(path.name for path in shared.iterdir()) == [
            *("ca.pem", "decode.key", "decode.pem", "prefill.key", "prefill.pem")
        ]
        assert (shared / "prefill.key").stat().st_mode & 0o777 == 0o600
    if transport == "zeromq":
        assert (shared / "secret").stat().st_mode & 0o777 == 0o600
        assert re.fullmatch("[0-9a-f]{64}", (shared / "secret").read_text())


def test_monitoring_scrapes_every_profile_and_mounts_what_exists() -> None:
    folder = EXAMPLES.parent / "docker"
    config = yaml.safe_load((folder / "monitoring" / "prometheus.yml").read_text())
    (discovery,) = config["scrape_configs"][0]["dns_sd_configs"]
    serving = {name for name, service in SERVICES.items() if "--port=8000" in service.get("command", ())}
    assert set(discovery["names"]) == serving
    for name in ("prometheus", "grafana"):
        assert SERVICES[name]["profiles"] == ["monitoring"]
        for volume in SERVICES[name]["volumes"]:
            source = volume.split(":")[0]
            assert (folder / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"]
        assert all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])


@pytest.mark.parametrize("profile", ["shm", "zeromq", "tcp", "ucx"])
def test_a_profile_has_all_that_its_services_name(profile: str) -> None:
    members = {name: service for name, service in SERVICES.items() if profile in service["profiles"]}
    assert {f"{role}-{profile}" for role in ("prefill", "decode", "router")} <= members.keys()
    for name, service in members.items():
        assert set(service.get("depends_on", ())) <= members.keys()
        assert {volume.split(":")[0] for volume in service.get("volumes", ())} <= COMPOSE["volumes"].keys()
        assert set(service.get("networks", ())) - {"default"} <= COMPOSE["networks"].keys()
        assert ("ports" in service) == name.startswith("router")
    nodes = [members[f"{role}-{profile}"] for role in ("prefill", "decode")]
    shared = set(nodes[0]["volumes"]) & set(nodes[1]["volumes"])
    assert any(SHARED in volume for volume in shared) == (profile != "ucx")
