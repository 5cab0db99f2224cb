"""A rolling restart of every process under load loses no request."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvferry.lab.client import Answer, call, events_of, parsed
from kvferry.lab.servers import Launcher, Spawn
from tests.support.chaos.services import Service

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

START_TIMEOUT_S = 110.0
REQUEST_TIMEOUT_S = 60.0
NUM_CLIENTS = 4


class Load:
    """Clients that send one request after another, each over a connection that it keeps open, and never
    repeat one.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._is_over = threading.Event()
        self.num_answered = 0
        self.losses: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(2 * REQUEST_TIMEOUT_S)

    def _run(self, number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_TIMEOUT_S)
        for turn in itertools.count():
            if self._is_over.is_set():
                break
            num_tokens = (2, 60)[turn % 2]
            try:
                found = self._ask(
                    connection, f"{number} asks for the time {turn} " * 6, num_tokens, stream=turn % 3 == 0
                )
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                self.losses.append(f"{type(error).__name__}: {error}")
                connection.close()
                continue
            if found == num_tokens:
                self.num_answered += 1
            else:
                self.losses.append(f"{found} of {num_tokens} tokens arrived")
        connection.close()

    def _ask(
        self, connection: http.client.HTTPConnection, prompt: str, num_tokens: int, *, stream: bool
    ) -> int:
        """Return how many tokens arrived."""
        fields = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body = {"prompt": prompt, "max_tokens": num_tokens, "stream": stream, **fields}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            raw = response.read()
        if response.status != 200:
            raise ValueError(f"status {response.status}: {raw.decode()}")
        answer = Answer()
        for part in events_of(raw.splitlines()) if stream else [json.loads(raw)]:
            answer.add(part)
        return len(answer.token_ids)


@pytest.fixture
def nodes(spawn: Spawn, tiny_arguments: Sequence[str], socket_dir: Path) -> Iterator[list[Service]]:
    """Two prefill nodes, then two decode nodes, each at a port that it keeps."""
    with ExitStack() as stack:
        services = []
        for role in ("prefill", "prefill", "decode", "decode"):
            service = Service(role, spawn, "serve.py", ("--role", role, *tiny_arguments), socket_dir)
            services.append(stack.enter_context(service))
        for service in services:
            service.wait_ready(START_TIMEOUT_S)
        yield services


def test_a_rolling_restart_of_all_nodes_and_of_the_router_loses_no_request(
    nodes: list[Service], launcher: Launcher
) -> None:
    options = [word for node in nodes for word in (f"--{node.name}", f"http://127.0.0.1:{node.port}")]
    options += ["--reuse-port", "--check-interval-s", "0.25"]
    old = launcher.start("old router", "router.py", "--port", "0", *options).wait_ready(START_TIMEOUT_S)
    load = Load(old.port)
    try:
        for first, second in ((nodes[0], nodes[2]), (nodes[1], nodes[3])):
            answered_until(load, 5)
            for node in (first, second):  # one of each role at the same time
                node.terminate()
            for node in (first, second):
                node.await_end()
                node.start()
            for node in (first, second):
                node.wait_ready(START_TIMEOUT_S)
            assert wait_ready_in(old.port, 4)
        new = launcher.start("new router", "router.py", "--port", str(old.port), *options)
        launcher.wait_ready([new], START_TIMEOUT_S)
        old.terminate()
        assert old.wait(REQUEST_TIMEOUT_S) == 0
        answered_until(load, 10)
    finally:
        load.stop()
    assert load.losses == []


def answered_until(load: Load, more: int) -> None:
    """Wait until `more` further requests were answered."""
    wanted, deadline = load.num_answered + more, time.monotonic() + REQUEST_TIMEOUT_S
    while load.num_answered < wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert load.num_answered >= wanted, load.losses


def wait_ready_in(port: int, num_nodes: int) -> bool:
    """Wait until the router finds this many nodes ready."""
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    while time.monotonic() < deadline:
        found = parsed(call("GET", f"http://127.0.0.1:{port}", "/health"))["nodes"]
        if sum(node["state"] == "ready" for node in found) == num_nodes:
            return True
        time.sleep(0.02)
    return False
