"""Two routers before the same nodes, and a restart of the only one: only the requests in flight are lost, and
nothing leaks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvferry.lab.servers import Spawn
from tests.e2e.conftest import LEASE, START_TIMEOUT_S
from tests.support.chaos.services import Service
from tests.support.client import Client
from tests.support.losses import NUM_CLIENTS, SEED, Load, Outcome, Question, leaks, learn

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

PROMPT = "Two pilots know the same river, and either of them can bring the ferry in. "
NUM_TOKENS = 80


@pytest.fixture(scope="module")
def questions(tiny_single: Client) -> list[Question]:
    bodies = (
        {
            "prompt": f"{number} {PROMPT * (1 + number % 3)}",
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": number % 2 == 0,
        }
        for number in range(8)
    )
    return [each for body in bodies if (each := learn(tiny_single.process, "/v1/completions", body))]


@pytest.fixture
def services(spawn: Spawn, tiny_arguments: Sequence[str], tmp_path: Path) -> Iterator[list[Service]]:
    """A prefill node, two decode nodes, and two routers before them, each at a port that it keeps."""
    with ExitStack() as stack:

        def start(name: str, program: str, *words: str) -> Service:
            return stack.enter_context(Service(name, spawn, program, words, tmp_path))

        roles = ("prefill", "decode", "decode")
        nodes = [start(role, "serve", "--role", role, *tiny_arguments, *LEASE) for role in roles]
        urls = [word for node in nodes for word in (f"--{node.name}", f"http://127.0.0.1:{node.port}")]
        routers = [
            start(name, "router", *urls, "--check-interval-s", "0.25", "--drain-delay-s", "1")
            for name in ("first", "second")
        ]
        for number, node in enumerate(nodes):
            node.wait_ready(START_TIMEOUT_S)
            node.name += f" {number}"
        for router in routers:
            router.wait_ready(START_TIMEOUT_S)
        yield [*nodes, *routers]


def test_a_lost_router_costs_the_requests_in_flight(
    services: list[Service], questions: list[Question]
) -> None:
    *nodes, first, second = services
    drawn = random.Random(SEED)
    load = Load([first.port, second.port], questions)
    load.await_answers(2 * NUM_CLIENTS)
    load.stop()
    assert problems(load) == []
    assert leaks(nodes, before := {node.name: node.holdings() for node in nodes}) == []

    load = Load([first.port, second.port], questions)
    try:
        load.await_answers(NUM_CLIENTS)
        load.await_pieces(drawn.randrange(1, 200))
        first.kill()
        load.await_answers(2 * NUM_CLIENTS)
        first.start()
        first.wait_ready(START_TIMEOUT_S)
        # The second one may leave as soon as the first one is back: it answers what it has.
        second.terminate()
        second.await_end()
        load.await_answers(2 * NUM_CLIENTS)
        second.start()
        second.wait_ready(START_TIMEOUT_S)
    finally:
        load.stop()
    lost = problems(load)
    assert all(one.problem.startswith("lost") and one.port == first.port for one in lost), lost
    assert len(lost) <= NUM_CLIENTS // 2, "each client of the first router had one request in flight"
    assert {one.port for one in load.outcomes.values() if not one.problem} == {first.port, second.port}

    second.terminate()
    second.await_end()
    load = Load([first.port], questions)
    try:
        load.await_answers(NUM_CLIENTS)
        load.await_pieces(drawn.randrange(1, 200))
        first.kill()
        first.start()
        load.await_answers(3 * NUM_CLIENTS)
    finally:
        load.stop()
    lost = problems(load)
    assert all(one.problem.startswith("lost") for one in lost), lost
    assert len(lost) <= NUM_CLIENTS, "each client had one request in flight"
    assert leaks(nodes, before) == []


def problems(load: Load) -> list[Outcome]:
    return [one for one in load.outcomes.values() if one.problem]
