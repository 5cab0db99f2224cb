"""`kvferry explain` tells what two `vllm serve` processes spent the time until the first token on."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import pytest

from kvferry.cli.explain import ask
from kvferry.lab.servers import LaunchedProcess, Launcher
from kvferry.router.seen.explain import Told, tell
from tests.support.client import Client
from tests.support.slow_vllm_connector import SLOW_S

from .conftest import START_S, SlowPair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_TOKENS = 300
#: How a busy machine may change a part from one request to the next, in seconds. It is far less than
#: `SLOW_S`.
NOISE_S = 0.7
QUEUE, PROMPT, CACHE, STEP = "queue", "prompt", "cache, what the prompt did not hide of it", "first step"


@dataclass(frozen=True)
class Explained:
    """A request through the router, and the account that `kvferry explain` gives of it.

    Attributes:
        ttft_s: The time until its first token, by the client.
        told_s: The same, as told.
        parts: The parts of it, in seconds.
    """

    ttft_s: float
    told_s: float
    parts: dict[str, float]
    servers: list[Told]
    lines: list[str]


class Pair:
    """A router before a pair of servers that a test can slow down."""

    def __init__(self, router: LaunchedProcess, places: Mapping[str, Path]) -> None:
        self._router = router
        self._places = places
        self._dice = random.Random(7)

    def ask(self, role: str = "", place: str = "") -> Explained:
        """Send a request of `NUM_TOKENS` tokens that no cache has, with a server that is slow once if one is
        named.
        """
        prompt = [self._dice.randrange(10, 200) for _ in range(NUM_TOKENS)]
        name = f"{role}-{place}-{prompt[0]}-{prompt[1]}"
        body = {"model": "model", "prompt": prompt, "max_tokens": 4, "stream": True, "ignore_eos": True}
        if place:
            (self._places[role] / place).touch()
        began = time.monotonic()
        headers = {"X-Request-Id": name}
        with Client(self._router).requesting("/v1/completions", body, headers) as response:
            assert response.status == 200
            response.readline()
            ttft_s = time.monotonic() - began
            response.read()
        assert not place or not (self._places[role] / place).exists(), "nothing was slow"
        servers = ask(name, [self._router.url])
        lines = tell(name, servers)
        first = next(number for number, line in enumerate(lines) if line.startswith("the first token came"))
        parts: dict[str, float] = {}
        for line in takewhile(lambda line: " ms " in line, lines[first + 1 :]):
            taken, rest = line.strip().split(" ms ", 1)
            # A share, a bar, what it was, and its node. What has no word for what it was is the router's own.
            words = [word for word in rest.split("  ") if word.strip(" =")][1:]
            what = words[0].strip() if words else "router"
            parts[what] = parts.get(what, 0.0) + float(taken) / 1e3
        return Explained(ttft_s, float(lines[first].split()[-2]) / 1e3, parts, servers, lines)


@pytest.fixture(scope="module")
def pair(slow_pair: SlowPair) -> Iterator[Pair]:
    with Launcher() as launcher:
        router = launcher.start_router("router", slow_pair.servers[:1], slow_pair.servers[1:], "--dev")
        router.wait_ready(START_S)
        yield Pair(router, slow_pair.places)


def test_the_parts_are_all_of_the_time_until_the_first_token(pair: Pair) -> None:
    """The servers tell what only they know, and together the parts are what the client waited."""
    one = pair.ask()
    ours, prefill, decode = ([span.name for span in server.spans] for server in one.servers)
    assert "router" in ours
    assert (prefill, decode) == (
        ["queue", "prefill", "generate", "node"],
        ["queue", "load_wait", "first_step", "generate", "node"],
    )
    assert one.told_s == pytest.approx(one.ttft_s, rel=0.02, abs=0.005)
    assert sum(one.parts.values()) == pytest.approx(one.told_s, rel=0.02)
    assert {QUEUE, PROMPT, STEP} <= one.parts.keys(), one.lines  # the prompt may have hidden all of the load
    assert not any("tell apart" in line for line in one.lines)
    assert f"{NUM_TOKENS} prompt tokens" in "\n".join(one.lines)


@pytest.mark.parametrize(
    ("role", "place", "part"),
    [
        ("prefill", "queue", QUEUE),
        ("prefill", "step", PROMPT),
        ("decode", "load", CACHE),
        ("decode", "first_step", STEP),
    ],
)
def test_what_is_slow_inside_vllm_is_the_part_that_grows(
    pair: Pair, role: str, place: str, part: str
) -> None:
    tries = []
    for _ in range(3):  # a busy machine may slow down something else at the same time
        usual, slow = pair.ask(), pair.ask(role, place)
        more = {
            name: slow.parts.get(name, 0.0) - usual.parts.get(name, 0.0)
            for name in {*slow.parts, *usual.parts}
        }
        tries.append(more)
        with suppress(AssertionError):
            assert more.pop(part) == pytest.approx(SLOW_S, abs=NOISE_S)
            assert all(abs(seconds) < NOISE_S for seconds in more.values())
            return
    pytest.fail(f"the part {part!r} did not grow by {SLOW_S:g} s alone: {tries}")
