"""Nodes die, clients leave, leases expire: answers stay right, and every block comes free."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvferry.lab.servers import Launcher
from tests.support.answers import Answer
from tests.support.client import (
    Client,
    assert_answers_like,
    streamed_answer,
    wait_until,
)

pytestmark = pytest.mark.slow

PROMPT = "A ferry takes what others have packed; it does not open the boxes. " * 4
MAX_TOKENS = 12
ASKED = {"max_tokens": MAX_TOKENS, "logprobs": 0}
#: The lease of the nodes that all tests share.
LEASE_S = 6.0


@pytest.fixture(scope="module")
def failing_decode(module_launcher: Launcher, tiny_arguments: Sequence[str]) -> Client:
    """A decode node that fails the requests that it cannot load."""
    policy = ("--load-failure-policy", "fail")
    node = module_launcher.start_node("decode/fail", "decode", *policy, *tiny_arguments).wait_ready(110)
    return Client(node)


@pytest.fixture
def mortal_prefill(launcher: Launcher, tiny_arguments: Sequence[str]) -> Client:
    """A prefill node that a test may kill."""
    return Client(launcher.start_node("mortal prefill", "prefill", *tiny_arguments).wait_ready(110))


def stream(decode: Client, prompt: str, params: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return all chunks of a streamed answer."""
    with decode.streaming(prompt, kv_transfer_params=params, **ASKED) as events:
        return list(events)


#: Fails unless this is the single node's answer, apart from near-ties.
Expected = Callable[[Answer], None]


def in_flight_at(router: Client, node: Client) -> int:
    """Return how many requests of a router a node has."""
    nodes = json.loads(router.get("/nodes")[1])["nodes"]
    return sum(each["in_flight"] for each in nodes if each["url"] == node.process.url)


@pytest.fixture
def unique_prompt(request: pytest.FixtureRequest) -> str:
    """A prompt that no earlier test has left in a prefix cache."""
    return f"{request.node.name}: {PROMPT}"


@pytest.fixture
def expected(tiny_fleet: Any, unique_prompt: str) -> Expected:
    """A function that compares an answer with the single node's."""
    return lambda answer: assert_answers_like(tiny_fleet.single, unique_prompt, answer, MAX_TOKENS)


@pytest.mark.every_transport
def test_prefill_killed_in_the_middle(
    tiny_fleet: Any, failing_decode: Client, mortal_prefill: Client, unique_prompt: str, expected: Expected
) -> None:
    decodes = (tiny_fleet.decode, failing_decode)
    offers = [mortal_prefill.offer(unique_prompt) for _ in decodes]
    mortal_prefill.process.send_signal(signal.SIGSTOP)  # it gets the claims, and never answers
    with ThreadPoolExecutor(2) as background:
        answers = [
            background.submit(stream, decode, unique_prompt, params)
            for decode, params in zip(decodes, offers, strict=True)
        ]
        wait_until(lambda: all(decode.metric("kvferry_engine_loading_requests") == 1 for decode in decodes))
        mortal_prefill.process.kill()
        recomputed, failed = (answer.result() for answer in answers)
    expected(streamed_answer(recomputed))
    assert [chunk["choices"][0]["finish_reason"] for chunk in failed] == ["error"]
    assert len(failed[-1]["error"]["message"]) > 20
    for decode in decodes:
        wait_until(decode.is_whole)


def test_a_client_that_leaves_while_the_prompt_is_computed(tiny_fleet: Any, unique_prompt: str) -> None:
    prefill, router = tiny_fleet.prefill, tiny_fleet.router
    prefill.process.send_signal(signal.SIGSTOP)
    try:
        router.hang_up_during(lambda: in_flight_at(router, prefill) == 1, unique_prompt)
        wait_until(lambda: in_flight_at(router, prefill) == 0)
    finally:
        prefill.process.send_signal(signal.SIGCONT)
    wait_until(prefill.is_whole)
    wait_until(lambda: router.get("/ready")[0] == 200)


@pytest.mark.every_transport
@pytest.mark.full
def test_a_client_that_leaves_while_the_cache_is_loaded(tiny_fleet: Any, unique_prompt: str) -> None:
    decode = tiny_fleet.decode
    params = tiny_fleet.prefill.offer(unique_prompt)
    tiny_fleet.prefill.process.send_signal(signal.SIGSTOP)
    try:
        decode.hang_up_during(
            lambda: decode.metric("kvferry_engine_loading_requests") == 1,
            unique_prompt,
            kv_transfer_params=params,
        )
        wait_until(lambda: decode.metric("kvferry_engine_loading_requests") == 0)
    finally:
        tiny_fleet.prefill.process.send_signal(signal.SIGCONT)
    wait_until(decode.is_whole)
    # Sooner than the lease ends, because the decode node releases the offer.
    wait_until(tiny_fleet.prefill.is_whole, timeout_s=LEASE_S / 2)


@pytest.mark.full
def test_a_pair_that_cannot_hand_over_says_so_and_holds_no_blocks(
    launcher: Launcher,
    tiny_fleet: Any,
    tiny_single_arguments: Sequence[str],
    transport: str,
    unique_prompt: str,
    expected: Expected,
) -> None:
    other = "zeromq" if transport == "shm" else "shm"
    decode = launcher.start_node("decode", "decode", *tiny_single_arguments, "--connector", other)
    launcher.wait_ready([decode], 110)
    prefill = tiny_fleet.prefill
    router = launcher.start_router("router", [prefill.process], [decode]).wait_ready(30)
    client = Client(router)
    for _ in range(3):
        expected(client.complete(unique_prompt, **ASKED).answer)
    # Sooner than the lease ends, because the router releases offers of failed handoffs.
    wait_until(prefill.is_whole, timeout_s=LEASE_S / 2)
    health = json.loads(client.get("/health")[1])
    urls = prefill.process.url, decode.url
    assert health["status"].startswith("ok, but 3 of 3 handoffs from {} to {} failed: ".format(*urls))
    assert [pair["failed"] for pair in health["handoffs"]] == [3]
    warnings = [line for line in router.log_tail.splitlines() if "WARNING handoffs from" in line]
    assert [[url in line for url in urls] for line in warnings] == [[True, True]]
