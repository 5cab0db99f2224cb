"""Run a server that is not ours under a launcher, so that the launcher can treat it as one of our nodes.

Such a server can neither choose a port and report it, nor end with the process that started it. The program that calls
`run_server` does both for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence

from .launcher import LaunchError

#: Below the ports that Linux gives to outgoing connections.
PORTS = range(20000, 32000)
POLL_S = 0.25
#: Seconds that the server has to end after SIGTERM.
STOP_S = 15.0


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens.

    The server binds it later. So the port is from a range that the kernel does not use for other sockets meanwhile.

    Raises:
        LaunchError: no port is free.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise LaunchError(f"none of the ports from {PORTS[0]} to {PORTS[-1]} is free; stop some servers")


def run_server(
    command: Sequence[str], launcher_fd: int, port: int, ready_path: str, environment: Mapping[str, str]
) -> int:
    """Run a server until it ends, or until its launcher or a signal ends it.

    Args:
        launcher_fd: The descriptor of the link to the launcher (see `web.launcher_link`).
        port: The port of 127.0.0.1 that the server will listen on.
        ready_path: The server is ready as soon as it answers this path with 200.
        environment: Variables for the server. The user's own environment overrides them.

    Returns:
        The server's exit status; 0 if the launcher has ended.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    server = subprocess.Popen(command, env={**environment, **os.environ})
    with socket.socket(fileno=launcher_fd) as launcher:
        try:
            launcher.send(json.dumps({"listening": port}).encode() + b"\n")
            return _watch(server, launcher, f"http://127.0.0.1:{port}{ready_path}")
        finally:
            _stop(server)


def _watch(server: subprocess.Popen[bytes], launcher: socket.socket, ready_url: str) -> int:
    is_ready = False
    with selectors.DefaultSelector() as selector:
        selector.register(launcher, selectors.EVENT_READ)
        while (status := server.poll()) is None:
            if selector.select(POLL_S):
                return 0  # the launcher has ended
            if not is_ready and _answers(ready_url):
                is_ready = True
                launcher.send(json.dumps({"ready": True}).encode() + b"\n")
    return status


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=POLL_S) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
