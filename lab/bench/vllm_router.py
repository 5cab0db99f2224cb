"""vllm-router, the router of the vLLM project. `make build/vllm-router` gets it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from kvferry.lab.servers import LaunchedProcess, Launcher, free_port

#: For nodes that come and go on one machine. By default it would notice a dead node after minutes: it checks
#: every 60 s, and believes the third failure.
CHECKS = (
    *("--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"),
    *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
)


def find_vllm_router() -> str | None:
    """Return the path of the program, of the checkout or on PATH; None if there is none."""
    built = Path(__file__).resolve().parents[2] / "build/vllm-router/bin/vllm-router"
    return shutil.which(str(built)) or shutil.which("vllm-router")


def start_vllm_router(
    launcher: Launcher,
    name: str,
    prefill: Iterable[LaunchedProcess],
    decode: Iterable[LaunchedProcess],
    *arguments: str,
) -> LaunchedProcess:
    """Start it in front of nodes that already listen. Returns at once."""
    urls = [("--prefill", node.url) for node in prefill] + [("--decode", node.url) for node in decode]
    words = [word for pair in urls for word in pair]
    return start_router_program(launcher, name, "--vllm-pd-disaggregation", *words, *arguments)


def start_router_program(launcher: Launcher, name: str, *arguments: str) -> LaunchedProcess:
    """Start it with these options on a free port. Returns at once."""
    port = free_port()
    # It serves its metrics on a port of their own, and cannot do without.
    ports = ("--port", str(port), "--prometheus-port", str(free_port()))
    command = (find_vllm_router() or "", "--host", "127.0.0.1", *ports, *CHECKS, "--log-level", "warning")
    return launcher.start_server(name, (*command, *arguments), port, "/readiness")
