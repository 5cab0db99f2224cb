"""Run a server that is not ours, so that a launcher can treat it as one of our nodes: see `Launcher.start_server`.

    python foreign.py SETTINGS --launcher-fd N

Such a server can neither report that it is ready, nor end with the process that started it. This program does both for
it. The launcher runs it by its path, so it imports nothing of ours.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

POLL_S = 0.25
#: Seconds that the server has to end after SIGTERM.
STOP_S = 15.0


def main() -> int:
    """Run the server until it ends, or until its launcher or a signal ends it.

    Returns:
        The server's exit status; 0 if the launcher has ended.
    """
    settings, launcher_fd = json.loads(sys.argv[1]), int(sys.argv[sys.argv.index("--launcher-fd") + 1])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if settings["cpus"]:
        os.sched_setaffinity(0, settings["cpus"])  # the server inherits it
    server = subprocess.Popen(settings["command"], env={**os.environ, **settings["environment"]})
    with socket.socket(fileno=launcher_fd) as launcher:
        try:
            _report(launcher, listening=settings["port"], host=settings["host"])
            return _watch(
                server, launcher, f"http://{settings['host']}:{settings['port']}{settings['ready_path']}"
            )
        finally:
            _stop(server)


def _report(launcher: socket.socket, **facts: object) -> None:
    launcher.send(json.dumps(facts).encode() + b"\n")


def _watch(server: subprocess.Popen[bytes], launcher: socket.socket, ready_url: str) -> int:
    is_ready = False
    with selectors.DefaultSelector() as selector:
        selector.register(launcher, selectors.EVENT_READ)
        while (status := server.poll()) is None:
            if selector.select(POLL_S):
                return 0  # the launcher has ended
            if not is_ready and _answers(ready_url):
                is_ready = True
                _report(launcher, ready=True)
    return status


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=POLL_S) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def _stop(server: subprocess.Popen[bytes]) -> None:
    # The launcher may both signal and hang up. A second reason to end must not end this wait, which would leave the server behind.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server.terminate()
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
