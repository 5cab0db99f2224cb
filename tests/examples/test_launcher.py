"""What a launcher reports about a process that ended by itself, that it ends the others quickly, and servers
of others.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvferry.lab.servers import Child, LaunchedProcess, Launcher, free_port
from tests.support.client import is_alive, wait_until

#: A program that reports to its launcher as a node does: it listens, is ready, and then ends in one of
#: several ways.
SCRIPT = """
import os, signal, socket, sys, time
link = socket.socket(fileno=int(sys.argv[2]))
for index in range(40):
    print(f"line {index}", flush=True)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
link.send(b'{"listening": 1}\\n{"ready": true}\\n')
if sys.argv[1] != "runs":
    signal.sigwait([signal.SIGUSR1])
if sys.argv[1] == "fails":
    print("the last words", flush=True)
    link.send(b'{"failed": "the engine ended: worker 1 was lost"}\\n')
    sys.exit(1)
if sys.argv[1] == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a node that drains
link.recv(1)
"""


def spawn(script: str, arguments: Sequence[str], log: int, link: int) -> Child:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, script, str(link)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(link,),
        process_group=0,
    )


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    with Launcher(spawn) as launcher:
        yield launcher


def test_the_description_of_an_end_has_the_status_the_cause_and_the_last_lines(launcher: Launcher) -> None:
    node = launcher.start("decode node", "fails").wait_ready(20)
    node.send_signal(signal.SIGUSR1)
    wait_until(lambda: node.describe_end(within_s=20) != "")
    said = node.describe_end()
    assert said.startswith(
        "the decode node ended with status 1: the engine ended: worker 1 was lost; the end of"
    )
    assert said.endswith("line 39\nthe last words")
    assert "line 20" not in said


def test_a_launcher_does_not_wait_for_a_process_that_would_finish_its_answers_first() -> None:
    with Launcher(spawn) as launcher:
        launcher.start("decode node", "runs").wait_ready(20)
        began = time.monotonic()
    assert time.monotonic() - began < 4.0


def test_a_signal_while_a_process_is_being_started_leaves_no_process_behind() -> None:
    """The handler raises, as after Ctrl-C, when the process exists and the launcher has not noted it yet."""
    started: list[Child] = []

    def spawn_interrupted(script: str, arguments: Sequence[str], log: int, link: int) -> Child:
        started.append(spawn(script, arguments, log, link))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), Launcher(spawn_interrupted) as launcher:
            launcher.start("decode node", "runs")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    # The launcher has waited for its end; a process that it did not know would still run.
    assert started[0].poll() is not None


#: A server that is not ours. It answers each request with what it found at its start, but 404 at `/missing`.
SERVER = """
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404 if self.path == "/missing" else 200)
        self.end_headers()
        self.wfile.write(json.dumps([os.environ["MARK"], os.getpid()]).encode())
print("about to listen", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def start_server(launcher: Launcher, port: str, ready_path: str = "/health", **more: Any) -> LaunchedProcess:
    return launcher.start_server(
        "server", [sys.executable, "-c", SERVER, port], int(port), ready_path, **more
    )


@pytest.fixture
def port() -> str:
    return str(free_port())


def test_a_server_of_others_has_its_environment_and_ends(port: str) -> None:
    with Launcher() as launcher:
        server = start_server(launcher, port, environment={"MARK": "x"})
        server.wait_ready(20)
        with urllib.request.urlopen(server.url) as answer:
            mark, pid = json.load(answer)
        assert (mark, server.port) == ("x", int(port))
        server.stop()
        assert not server.is_running
        assert "about to listen" in server.log_tail
        assert not is_alive(pid)


def test_a_server_that_ends_while_it_starts_leaves_no_child_if_its_launcher_is_gone(port: str) -> None:
    with Launcher() as launcher:
        words = ["sh", "-c", "sleep 600 & echo $!; wait"]
        server = launcher.start_server("server", words, int(port), "/health")
        wait_until(lambda: server.log_tail.endswith("\n"))
        child = int(server.log_tail)
        assert is_alive(child)
        server.hang_up()  # as the end of the launcher would, which sends no signal
        wait_until(lambda: not is_alive(child))
