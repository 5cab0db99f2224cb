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
    DO_REMOTE_DECODE,
    Client,
    Reply,
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


@pytest.fixture(scope="module")
def short_lease_prefill(module_launcher: Launcher, tiny_arguments: Sequence[str]) -> Client:
    """A prefill node whose leases are too short for any consumer."""
    options = ("--connector-option", "lease_s=0.6")
    node = module_launcher.start_node("short lease", "prefill", *tiny_arguments, *options).wait_ready(110)
    return Client(node)


def offer(prefill: Client, prompt: str) -> dict[str, Any]:
    """Prefill `prompt`. Returns the params for the decode node."""
    reply = prefill.complete(prompt, max_tokens=1, kv_transfer_params=DO_REMOTE_DECODE)
    assert reply.status == 200
    params: dict[str, Any] = reply.body["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    return params


def stream(decode: Client, prompt: str, params: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return all chunks of a streamed answer."""
    with decode.streaming(prompt, kv_transfer_params=params, **ASKED) as events:
        return list(events)


def ask(decode: Client, prompt: str, params: Mapping[str, Any]) -> Reply:
    return decode.complete(prompt, kv_transfer_params=params, **ASKED)


#: Fails unless this is the single node's answer, apart from near-ties.
Expected = Callable[[Answer], None]


def assert_recomputed(reply: Reply, expected: Expected) -> None:
    """Check that the answer is right, and that no byte of the other node was used."""
    expected(reply.answer)
    assert reply.transfer["num_bytes"] == 0
    assert reply.transfer["error"]


def assert_failed(reply: Reply) -> None:
    """Check that the answer is an error with a reason."""
    assert reply.status == 500
    assert reply.body["error"]["code"] == "generation_failed"
    assert len(reply.error) > 20


def in_flight_at(prefill: Client) -> str:
    """Return the name of the router's metric for the requests in flight at a prefill node."""
    return f'kvferry_router_node_in_flight{{role="prefill",url="{prefill.process.url}"}}'


@pytest.fixture
def unique_prompt(request: pytest.FixtureRequest) -> str:
    """A prompt that no earlier test has left in a prefix cache."""
    return f"{request.node.name}: {PROMPT}"


@pytest.fixture
def expected(tiny_fleet: Any, unique_prompt: str) -> Expected:
    """A function that compares an answer with the single node's."""
    return lambda answer: assert_answers_like(tiny_fleet.single, unique_prompt, answer, MAX_TOKENS)


def test_prefill_killed_before_the_transfer(
    tiny_fleet: Any, failing_decode: Client, mortal_prefill: Client, unique_prompt: str, expected: Expected
) -> None:
    first, second = (offer(mortal_prefill, unique_prompt) for _ in range(2))
    mortal_prefill.process.kill()
    assert_recomputed(ask(tiny_fleet.decode, unique_prompt, first), expected)
    assert_failed(ask(failing_decode, unique_prompt, second))
    wait_until(tiny_fleet.decode.is_whole)
    wait_until(failing_decode.is_whole)


@pytest.mark.every_transport
def test_prefill_killed_in_the_middle(
    tiny_fleet: Any, failing_decode: Client, mortal_prefill: Client, unique_prompt: str, expected: Expected
) -> None:
    decodes = (tiny_fleet.decode, failing_decode)
    offers = [offer(mortal_prefill, unique_prompt) for _ in decodes]
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


@pytest.mark.full
def test_prefill_killed_after_the_transfer(
    tiny_fleet: Any, mortal_prefill: Client, unique_prompt: str, expected: Expected
) -> None:
    params = offer(mortal_prefill, unique_prompt)
    with tiny_fleet.decode.streaming(unique_prompt, kv_transfer_params=params, **ASKED) as events:
        chunks = [next(events)]
        mortal_prefill.process.kill()
        chunks += events
    expected(streamed_answer(chunks))
    assert chunks[-1]["metrics"]["transfer"]["num_blocks"] > 0
    wait_until(tiny_fleet.decode.is_whole)


@pytest.mark.full
def test_an_offer_of_a_node_that_restarted_since_is_stale(
    tiny_fleet: Any, failing_decode: Client, unique_prompt: str, expected: Expected
) -> None:
    offers = [offer(tiny_fleet.prefill, unique_prompt) for _ in range(2)]
    first, second = (params | {"remote_epoch": "00000000deadbeef"} for params in offers)
    assert_recomputed(ask(tiny_fleet.decode, unique_prompt, first), expected)
    assert_failed(ask(failing_decode, unique_prompt, second))
    wait_until(tiny_fleet.prefill.is_whole, timeout_s=2 * LEASE_S)


@pytest.mark.full
def test_an_expired_lease_is_a_stale_error_and_never_delivers_other_bytes(
    short_lease_prefill: Client,
    tiny_fleet: Any,
    failing_decode: Client,
    unique_prompt: str,
    expected: Expected,
) -> None:
    first, second = (offer(short_lease_prefill, unique_prompt) for _ in range(2))
    assert not short_lease_prefill.is_whole()
    wait_until(short_lease_prefill.is_whole)
    for index in range(8):  # the freed blocks now hold another prompt's cache
        short_lease_prefill.complete(f"{index} other bytes {PROMPT}", max_tokens=1)
    recomputed, failed = (
        ask(tiny_fleet.decode, unique_prompt, first),
        ask(failing_decode, unique_prompt, second),
    )
    assert_recomputed(recomputed, expected)
    assert_failed(failed)
    assert "offer" in failed.error
    wait_until(tiny_fleet.decode.is_whole)
    wait_until(failing_decode.is_whole)


@pytest.mark.full
def test_offers_that_no_node_takes_end_with_their_lease(
    short_lease_prefill: Client, unique_prompt: str
) -> None:
    for index in range(3):
        offer(short_lease_prefill, f"{index} {unique_prompt}")
    assert not short_lease_prefill.is_whole()
    wait_until(short_lease_prefill.is_whole)


@pytest.mark.full
def test_an_offer_can_be_taken_once(tiny_fleet: Any, failing_decode: Client, unique_prompt: str) -> None:
    params = offer(tiny_fleet.prefill, unique_prompt)
    assert ask(tiny_fleet.decode, unique_prompt, params).transfer["num_blocks"] == -(
        -len(unique_prompt) // 16
    )
    assert_failed(ask(failing_decode, unique_prompt, params))
    wait_until(tiny_fleet.prefill.is_whole)
    wait_until(failing_decode.is_whole)


def test_a_client_that_leaves_while_the_prompt_is_computed(tiny_fleet: Any, unique_prompt: str) -> None:
    prefill = tiny_fleet.prefill
    in_flight = in_flight_at(prefill)
    prefill.process.send_signal(signal.SIGSTOP)
    try:
        tiny_fleet.router.hang_up_during(lambda: tiny_fleet.router.metric(in_flight) == 1, unique_prompt)
        wait_until(lambda: tiny_fleet.router.metric(in_flight) == 0)
    finally:
        prefill.process.send_signal(signal.SIGCONT)
    wait_until(prefill.is_whole)
    wait_until(lambda: tiny_fleet.router.get("/ready")[0] == 200)


@pytest.mark.every_transport
@pytest.mark.full
def test_a_client_that_leaves_while_the_cache_is_loaded(tiny_fleet: Any, unique_prompt: str) -> None:
    decode = tiny_fleet.decode
    params = offer(tiny_fleet.prefill, unique_prompt)
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
def test_a_client_that_leaves_while_the_answer_is_computed(tiny_fleet: Any, unique_prompt: str) -> None:
    with tiny_fleet.router.streaming(unique_prompt, max_tokens=200, ignore_eos=True) as events:
        assert next(events)["choices"][0]["finish_reason"] is None
    wait_until(tiny_fleet.decode.is_whole)
    wait_until(tiny_fleet.prefill.is_whole, timeout_s=LEASE_S / 2)


@pytest.mark.full
def test_the_router_avoids_nodes_that_are_gone(
    launcher: Launcher,
    tiny_fleet: Any,
    mortal_prefill: Client,
    tiny_arguments: Sequence[str],
    unique_prompt: str,
) -> None:
    mortal_decode = launcher.start_node("mortal decode", "decode", *tiny_arguments).wait_ready(110)
    router = launcher.start_router(
        "router",
        [mortal_prefill.process, tiny_fleet.prefill.process],
        [mortal_decode, tiny_fleet.decode.process],
        "--check-interval-s",
        "60",  # the router must notice without a health check
    ).wait_ready(30)
    client = Client(router)
    prompts = [f"{index} {unique_prompt}" for index in range(4)]
    mortal_prefill.process.kill()
    mortal_decode.kill()
    for prompt in prompts:
        reply = client.complete(prompt, max_tokens=4, logprobs=0)
        assert_answers_like(tiny_fleet.single, prompt, reply.answer, 4)
    wait_until(tiny_fleet.prefill.is_whole, timeout_s=2 * LEASE_S)  # unread offers expire
    wait_until(tiny_fleet.decode.is_whole)


@pytest.mark.full
def test_a_router_that_is_stopped_tells_its_waiting_clients(
    launcher: Launcher, tiny_fleet: Any, unique_prompt: str
) -> None:
    nodes = [tiny_fleet.prefill.process], [tiny_fleet.decode.process]
    router = launcher.start_router("router", *nodes, "--drain-timeout-s", "1").wait_ready(30)
    client, prefill = Client(router), tiny_fleet.prefill
    with (
        client.streaming(unique_prompt, max_tokens=200, ignore_eos=True) as events,
        ThreadPoolExecutor(1) as one,
    ):
        next(events)
        prefill.process.send_signal(signal.SIGSTOP)
        tiny_fleet.decode.process.send_signal(signal.SIGSTOP)
        try:
            whole = one.submit(client.complete, f"another {unique_prompt}", max_tokens=2)
            wait_until(lambda: client.metric(in_flight_at(prefill)) == 1)
            router.terminate()
            assert whole.result().status == 503
            assert "error" in list(events)[-1]
        finally:
            for node in (prefill, tiny_fleet.decode):
                node.process.send_signal(signal.SIGCONT)
    assert router.wait(15) == 0
    for node in (prefill, tiny_fleet.decode):
        wait_until(node.is_whole)


@pytest.mark.full
def test_a_router_without_a_prefill_node_reports_it_and_uses_a_decode_node_alone_if_that_may_recompute(
    launcher: Launcher, tiny_fleet: Any, mortal_prefill: Client, unique_prompt: str, expected: Expected
) -> None:
    nodes = [mortal_prefill.process], [tiny_fleet.decode.process]
    routers = [
        launcher.start_router(f"router {mode}", *nodes, "--decode-alone", mode) for mode in ("never", "auto")
    ]
    launcher.wait_ready(routers, 30)
    never, auto = map(Client, routers)
    mortal_prefill.process.kill()
    reply = never.complete(unique_prompt, max_tokens=2)
    assert reply.status == 503
    assert "no prefill node" in reply.error
    assert "the process is gone: connection refused" in reply.error
    wait_until(lambda: never.get("/ready")[0] == 503)
    expected(auto.complete(unique_prompt, **ASKED).answer)
    wait_until(lambda: b"no prefill node is ready" in auto.get("/health")[1])
    assert auto.get("/ready")[0] == 200


@pytest.mark.full
def test_a_stream_whose_decode_node_is_killed_ends_with_the_cause(
    launcher: Launcher, tiny_fleet: Any, tiny_arguments: Sequence[str], unique_prompt: str
) -> None:
    decode = launcher.start_node("mortal decode", "decode", *tiny_arguments).wait_ready(110)
    router = launcher.start_router("router", [tiny_fleet.prefill.process], [decode]).wait_ready(30)
    with Client(router).streaming(unique_prompt, max_tokens=400, ignore_eos=True) as events:
        next(events)
        decode.kill()
        message = list(events)[-1]["error"]["message"]
    assert "lost in the middle" in message
    assert "the process is gone: connection refused" in message
    wait_until(tiny_fleet.prefill.is_whole, timeout_s=2 * LEASE_S)


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
