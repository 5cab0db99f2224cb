"""A decode node that drains has its running answers moved, with their cache: it ends in seconds, and no client notices."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from kvferry.lab.demo.launcher import Launcher, Spawn
from tests.e2e.conftest import LEASE, PATIENT, START_TIMEOUT_S
from tests.support.client import Client, wait_until
from tests.support.tiny_models import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = "A ferry that is called home hands its cargo to the next one, which goes on from where it was. " * 3
NUM_ANSWERS = 8
NUM_TOKENS = 1500
#: The node drains as soon as each client has this many lines of its answer, two per token.
NUM_LINES = 20
#: Seconds from the signal until a node has nothing left to do. Its answers would take longer.
DRAIN_S = 10.0
#: Seconds that a process may take to end on a busy machine.
END_S = 60.0
#: What a stream may ask for, and be moved.
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "stream_options": {"include_usage": True}},
    {"temperature": 0, "return_token_ids": True},
    {"temperature": 0.9, "seed": 7, "top_p": 0.9},
)
STOPPED, LOST = "kvferry_router_stopped_answers_total", "kvferry_router_moved_answers_total"


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options of a node, whose model has room for answers that take a while."""
    model = write_tiny_model(tmp_path_factory.mktemp("models") / "long", max_position_embeddings=4096)
    return (
        *("--model", str(model), "--threads", "1", "--num-blocks", "1400", "--block-size", "16"),
        *("--max-num-batched-tokens", "64", "--log-level", "warning"),
    )


@pytest.fixture(scope="module")
def single(spawn: Spawn, arguments: Sequence[str]) -> Iterator[Client]:
    with Launcher(spawn) as launcher:
        node = launcher.start_node("single", "single", *arguments)
        launcher.wait_ready([node], START_TIMEOUT_S)
        yield Client(node)


def normalized(payload: bytes) -> bytes:
    """Return a stream without what differs between two answers of one node: the time, and how it was computed."""
    created = set(re.findall(rb'"created": (\d+)', payload))
    assert len(created) == 1, "all parts of an answer have one time"
    payload = re.sub(rb'"created": \d+', b'"created": 0', payload)
    payload = re.sub(rb'"metrics": \{.*?"queue_s": [^}]*\}', b'"metrics": {}', payload)
    return re.sub(rb'"cached_tokens": \d+', b'"cached_tokens": 0', payload)


class Fleet:
    """A prefill node, three decode nodes and a router."""

    def __init__(self, launcher: Launcher, arguments: Sequence[str], transport: str) -> None:
        patience = PATIENT if transport in ("zeromq", "tcp", "ucx") else ()
        self._launcher = launcher
        self._arguments = (*arguments, "--connector", transport, *patience, *LEASE)
        self.prefill, *self.decodes = [self.start(role) for role in ("prefill", *["decode"] * 3)]
        decodes = [node.process for node in self.decodes]
        router = launcher.start_router("router", [self.prefill.process], decodes, "--check-interval-s", "0.3")
        launcher.wait_ready([router], START_TIMEOUT_S)
        self.router = Client(router)
        wait_until(lambda: self.states() == ["ready"] * 4)

    def start(self, role: str) -> Client:
        node = self._launcher.start_node(role, role, *self._arguments, "--drain-timeout-s", "120")
        self._launcher.wait_ready([node], START_TIMEOUT_S)
        return Client(node)

    def states(self) -> list[str]:
        return [node["state"] for node in json.loads(self.router.get("/nodes")[1])["nodes"]]

    def is_whole(self) -> bool:
        return self.prefill.is_whole() and all(node.is_whole() for node in self.decodes)


class Reading:
    """One client that reads its stream in a thread."""

    def __init__(self, client: Client, body: dict[str, Any]) -> None:
        self.lines: list[bytes] = []
        self.longest_gap_s = 0.0
        self.has_begun = threading.Event()
        self._client, self._body = client, body

    def __call__(self) -> bytes:
        before = None
        with self._client.requesting("/v1/completions", self._body, {"X-Request-Id": "same"}) as response:
            assert response.status == 200, response.read()
            while line := response.readline():
                now = time.monotonic()
                self.longest_gap_s = max(self.longest_gap_s, 0.0 if before is None else now - before)
                before = now
                self.lines.append(line)
                if len(self.lines) == NUM_LINES:
                    self.has_begun.set()
        return normalized(b"".join(self.lines))


def body_of(number: int) -> dict[str, Any]:
    body = {"prompt": f"{number} {PROMPT}", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    return body | ASKED[number % len(ASKED)]


def read_all(client: Client, pool: ThreadPoolExecutor) -> tuple[list[Reading], list[Future[bytes]]]:
    """Begin one answer after the other, so that the router knows the load when it chooses a node."""
    readings, answers = [Reading(client, body_of(number)) for number in range(NUM_ANSWERS)], []
    for reading in readings:
        answers.append(pool.submit(reading))
        assert reading.has_begun.wait(60)
    return readings, answers


def figures_of(lines: Sequence[bytes]) -> dict[str, Any]:
    """Return the figures with which the last node has ended an answer."""
    (line,) = (line for line in lines if b'"metrics"' in line)
    figures: dict[str, Any] = json.loads(line.removeprefix(b"data: "))["metrics"]
    return figures


def drain(node: Client) -> float:
    """Stop a node. Returns how many seconds it took to finish its work, without the end of its process."""
    began = time.monotonic()
    node.process.terminate()

    def has_closed() -> bool:
        try:
            node.get("/health")
        except OSError:
            return True
        return False

    wait_until(has_closed, DRAIN_S)
    return time.monotonic() - began


@pytest.mark.every_transport
def test_nodes_under_load_drain_in_seconds_and_their_answers_go_on_elsewhere(
    launcher: Launcher, arguments: Sequence[str], transport: str, single: Client
) -> None:
    """Two of three decode nodes drain one after the other, so that some answers move twice."""
    fleet = Fleet(launcher, arguments, transport)
    first, second, last = fleet.decodes
    with ThreadPoolExecutor(NUM_ANSWERS) as pool:
        readings, answers = read_all(fleet.router, pool)
        num_there = running(first)
        took_s = [drain(first)]
        num_there += running(second)
        took_s.append(drain(second))
        assert not any(answer.done() for answer in answers)
        drained = time.monotonic()
        found = [answer.result() for answer in answers]
        left_s = time.monotonic() - drained
        expected = [answer.result() for answer in read_all(single, pool)[1]]
    assert found == expected
    for node in (first, second):
        assert node.process.wait(END_S) == 0
        assert "aborted" not in node.process.log_tail
        fleet.decodes.remove(node)
    assert num_there > NUM_ANSWERS // 2
    assert fleet.router.metric(STOPPED) == num_there
    assert fleet.router.metric(LOST) == 0
    # Whatever a node has loaded or had cached it has not computed: the whole prompt, and what was answered before.
    for reading in readings:
        figures = figures_of(reading.lines)
        assert figures["num_loaded_tokens"] + figures["num_cached_tokens"] >= figures["num_prompt_tokens"] - 1
    assert len([each for each in readings if is_moved(each)]) >= NUM_ANSWERS // 2
    names = ("loaded", "cached", "prompt")
    loaded, cached, prompt = (last.metric(f"kvferry_engine_{name}_tokens_total") for name in names)
    assert loaded + cached >= prompt
    wait_until(fleet.is_whole)
    gaps = sorted(round(reading.longest_gap_s * 1e3) for reading in readings if is_moved(reading))
    print(
        f"\nthe nodes drained in {[round(each, 2) for each in took_s]} s with {num_there} moves, the answers took {left_s:.1f} s longer; "
        f"longest pauses {gaps} ms"
    )


def running(node: Client) -> int:
    return int(node.metric("kvferry_engine_running_requests"))


def is_moved(reading: Reading) -> bool:
    """Whether the last node has loaded a part of the answer."""
    figures = figures_of(reading.lines)
    return bool(figures["num_loaded_tokens"] > figures["num_prompt_tokens"])
