"""A streamed answer outlives its decode node: another one goes on with it, and the client sees no difference."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from kvferry.reference.demo.launcher import LaunchedProcess, Launcher
from tests.e2e.conftest import LEASE, START_TIMEOUT_S
from tests.e2e.test_first_token import normalized
from tests.support.client import Client, wait_until

pytestmark = pytest.mark.slow

#: Lost nodes per transport and kind of loss; KVFERRY_LOSSES=300 loses more.
NUM_LOSSES = int(os.environ.get("KVFERRY_LOSSES", "4"))
SEED = int(os.environ.get("KVFERRY_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 16)
PROMPT = "A ferry that sinks leaves its cargo to the next one, which goes on from where it was. " * 3
NUM_TOKENS = 240
#: What a stream may ask for, and be continued.
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "stream_options": {"include_usage": True}},
    {"temperature": 0, "return_token_ids": True},
    {"temperature": 0.9, "seed": 7, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0, "stop": ["\x00\x01\x02"]},
)


@dataclass
class Pair:
    """A prefill node, two decode nodes, and a router in front of them. A decode node that was lost is started again."""

    launcher: Launcher
    arguments: Sequence[str]
    prefill: Client
    decodes: list[Client]
    router: Client

    @contextmanager
    def losing(self, lose: Callable[[LaunchedProcess], None]) -> Iterator[Callable[[], None]]:
        """Yield what loses the decode node that has a request. After the block there are two nodes again."""
        lost: list[Client] = []

        def lose_it() -> None:
            nodes = json.loads(self.router.get("/nodes")[1])["nodes"]
            busy = {node["url"] for node in nodes if node["role"] == "decode" and node["in_flight"]}
            for node in [each for each in self.decodes if each.process.url in busy]:
                lost.append(node)
                lose(node.process)

        yield lose_it
        for node in lost:
            node.process.kill()
            port = node.process.url.rpartition(":")[2]
            self.decodes[self.decodes.index(node)] = start_decode(self.launcher, self.arguments, port)
        wait_until(lambda: all(node["state"] == "ready" for node in self.nodes()))

    def nodes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.router.get("/nodes")[1])["nodes"]
        return found


def start_decode(launcher: Launcher, arguments: Sequence[str], port: str = "0") -> Client:
    node = launcher.start_node("decode", "decode", *arguments, *LEASE, "--port", port)
    launcher.wait_ready([node], START_TIMEOUT_S)
    return Client(node)


@pytest.fixture
def pair(launcher: Launcher, tiny_arguments: tuple[str, ...]) -> Pair:
    prefill = launcher.start_node("prefill", "prefill", *tiny_arguments, *LEASE)
    launcher.wait_ready([prefill], START_TIMEOUT_S)
    decodes = [start_decode(launcher, tiny_arguments) for _ in range(2)]
    checks = ("--check-interval-s", "0.2", "--check-timeout-s", "0.6")
    router = launcher.start_router("router", [prefill], [node.process for node in decodes], *checks)
    launcher.wait_ready([router], START_TIMEOUT_S)
    return Pair(launcher, tiny_arguments, Client(prefill), decodes, Client(router))


def kill(process: LaunchedProcess) -> None:
    process.kill()


def freeze(process: LaunchedProcess) -> None:
    process.send_signal(signal.SIGSTOP)


def expected_of(single: Client, body: dict[str, Any]) -> bytes:
    with single.requesting("/v1/completions", body, {"X-Request-Id": "same"}) as response:
        return normalized(response.read())


def is_used_up(pair: Pair) -> bool:
    return pair.prefill.is_whole() and all(node.is_whole() for node in pair.decodes)


@pytest.mark.every_transport
@pytest.mark.timeout(60 + 30 * NUM_LOSSES)
@pytest.mark.parametrize("lose", [kill, freeze], ids=["killed", "frozen"])
def test_a_stream_outlives_its_decode_node(
    pair: Pair, tiny_single: Client, lose: Callable[[LaunchedProcess], None]
) -> None:
    drawn = random.Random(SEED)
    gaps: list[float] = []
    for number in range(NUM_LOSSES):
        body = {"prompt": f"{number} {PROMPT}", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
        body |= ASKED[number % len(ASKED)]
        expected = expected_of(tiny_single, body)
        moved = pair.router.metric("kvferry_router_moved_answers_total")
        with (
            pair.losing(lose) as lose_it,
            pair.router.requesting("/v1/completions", body, {"X-Request-Id": "same"}) as response,
        ):
            found = b""
            for _ in range(2 * drawn.randrange(1, NUM_TOKENS // 4)):
                found += response.readline()
            lose_it()
            gaps.append(longest_gap(response, pieces := []))
            found += b"".join(pieces)
        assert normalized(found) == expected, f"seed {SEED}, loss {number}"
        assert pair.router.metric("kvferry_router_moved_answers_total") <= moved + 1
    assert pair.router.metric("kvferry_router_moved_answers_total") > 0
    wait_until(lambda: is_used_up(pair))
    print(f"\nlongest pause per answer: {sorted(round(gap * 1e3) for gap in gaps)} ms")


def longest_gap(response: Any, pieces: list[bytes]) -> float:
    """Read the rest of a stream. Returns the longest time in seconds between two of its lines."""
    longest, before = 0.0, time.monotonic()
    while line := response.readline():
        pieces.append(line)
        longest, before = max(longest, time.monotonic() - before), time.monotonic()
    return longest
