"""Put vllm-router, the router of the vLLM project, in front of nodes: `kvferry demo --router vllm-router`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from .launcher import LaunchedProcess, Launcher, LaunchError, free_port

PROGRAM = "vllm-router"
#: Where `make build/vllm-router` installs it, seen from the folder of the checkout.
BUILT = Path("build", "vllm-router", "bin", PROGRAM)
#: Names the program, where neither PATH nor the checkout has it.
PROGRAM_VARIABLE = "KVFERRY_VLLM_ROUTER"
#: For nodes that come and go on one machine. By default it would notice a dead node after minutes: it checks every 60 s,
#: and believes the third failure.
CHECKS = (
    *("--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"),
    *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
)


def find_program() -> str | None:
    """Return the path of `vllm-router`: of the variable, on PATH, or of the checkout; None if there is none."""
    checkout = Path(__file__).resolve().parents[2]
    for candidate in (os.environ.get(PROGRAM_VARIABLE, ""), PROGRAM, str(checkout / BUILT)):
        if candidate and (found := shutil.which(candidate)):
            return found
    return None


def start_vllm_router(
    launcher: Launcher,
    name: str,
    prefill: Iterable[LaunchedProcess],
    decode: Iterable[LaunchedProcess],
    *arguments: str,
) -> LaunchedProcess:
    """Start vllm-router in front of nodes that already listen. Returns at once.

    Args:
        arguments: Further options of vllm-router.

    Raises:
        LaunchError: the program is not installed.
    """
    urls = [("--prefill", node.url) for node in prefill] + [("--decode", node.url) for node in decode]
    flat = [word for pair in urls for word in pair]
    return start_program(launcher, name, "--vllm-pd-disaggregation", *flat, *arguments)


def start_program(launcher: Launcher, name: str, *arguments: str) -> LaunchedProcess:
    """Start `vllm-router` with these options on a free port. Returns at once.

    Raises:
        LaunchError: the program is not installed.
    """
    program = find_program()
    if program is None:
        raise LaunchError(
            f"cannot start the {name}: {PROGRAM} is not installed; run `make {BUILT.parents[1]}` in a checkout, or "
            f"`pip install {PROGRAM}`, or set {PROGRAM_VARIABLE} to its path"
        )
    port = free_port()
    # It serves its metrics on a port of their own, and cannot do without.
    ports = ("--port", str(port), "--prometheus-port", str(free_port()))
    command = (program, "--host", "127.0.0.1", *ports, *CHECKS, "--log-level", "warning", *arguments)
    return launcher.start_server(name, command, port, "/readiness")
