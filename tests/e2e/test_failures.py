"""Nodes that die, clients that leave, leases that run out: answers stay right, and every block comes back."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import pytest
from demo.launcher import Launcher
from demo.testing import DO_REMOTE_DECODE, Client, Reply, wait_until

PROMPT = "A ferry takes what others have packed; it does not open the boxes. " * 4
NUM_BLOCKS = -(-len(PROMPT) // 16)
MAX_TOKENS = 12
POLICIES = ["recompute", "fail"]


@pytest.fixture(scope="module")
def failing_decode(session_launcher: Launcher, tiny_arguments: Sequence[str]) -> Client:
    """A decode node that fails what it cannot load."""
    node = session_launcher.start_node(
        "decode/fail", "decode", "--load-failure-policy", "fail", *tiny_arguments
    )
    session_launcher.wait_ready([node], 110)
    return Client(node)


@pytest.fixture
def mortal_prefill(launcher: Launcher, tiny_arguments: Sequence[str]) -> Client:
    """A prefill node that a test may kill."""
    node = launcher.start_node("mortal prefill", "prefill", *tiny_arguments)
    launcher.wait_ready([node], 110)
    return Client(node)


@pytest.fixture(params=POLICIES)
def decode(request: pytest.FixtureRequest, tiny_fleet: Any, failing_decode: Client) -> Client:
    """One decode node of each policy."""
    return tiny_fleet.decode if request.param == "recompute" else failing_decode


def offer(prefill: Client, prompt: str) -> dict[str, Any]:
    """Prefill `prompt`; what the decode node needs."""
    reply = prefill.complete(prompt, max_tokens=1, kv_transfer_params=DO_REMOTE_DECODE)
    assert reply.status == 200
    params: dict[str, Any] = reply.body["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    return params


def assert_recomputed_or_failed(
    reply: Reply, expected: Sequence[int], decode: Client, failing: Client
) -> None:
    """By policy: the right answer without a transfer, or an error that says why."""
    if decode is failing:
        assert reply.status == 500
        assert reply.body["error"]["code"] == "generation_failed"
        assert len(reply.error) > 20
    else:
        assert reply.token_ids == expected
        assert reply.transfer["num_blocks"] == 0
        assert reply.transfer["error"]


@pytest.fixture
def unique_prompt(request: pytest.FixtureRequest) -> str:
    """A prompt that no prefix cache knows from an earlier test."""
    return f"{request.node.name}: {PROMPT}"


@pytest.fixture
def expected(tiny_fleet: Any, unique_prompt: str) -> list[int]:
    """The single node's answer."""
    return tiny_fleet.single.complete(unique_prompt, max_tokens=MAX_TOKENS).token_ids


def test_prefill_killed_before_the_transfer(
    decode: Client, failing_decode: Client, mortal_prefill: Client, unique_prompt: str, expected: list[int]
) -> None:
    params = offer(mortal_prefill, unique_prompt)
    mortal_prefill.process.kill()
    reply = decode.complete(unique_prompt, max_tokens=MAX_TOKENS, kv_transfer_params=params)
    assert_recomputed_or_failed(reply, expected, decode, failing_decode)
    wait_until(decode.is_whole)


def test_prefill_killed_in_the_middle(
    decode: Client, failing_decode: Client, mortal_prefill: Client, unique_prompt: str, expected: list[int]
) -> None:
    params = offer(mortal_prefill, unique_prompt)
    mortal_prefill.process.send_signal(signal.SIGSTOP)  # it hears the claim, and never answers
    with decode.streaming(unique_prompt, max_tokens=MAX_TOKENS, kv_transfer_params=params) as events:
        wait_until(lambda: decode.metric("kvferry_loading_requests") == 1)
        mortal_prefill.process.kill()
        chunks = list(events)
    if decode is failing_decode:
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == ["error"]
        assert len(chunks[-1]["error"]["message"]) > 20
    else:
        assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == expected
    wait_until(decode.is_whole)


def test_prefill_killed_after_the_transfer(
    decode: Client, mortal_prefill: Client, unique_prompt: str, expected: list[int]
) -> None:
    params = offer(mortal_prefill, unique_prompt)
    with decode.streaming(unique_prompt, max_tokens=MAX_TOKENS, kv_transfer_params=params) as events:
        chunks = [next(events)]
        mortal_prefill.process.kill()
        chunks += events
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == expected
    assert chunks[-1]["metrics"]["transfer"]["num_blocks"] > 0
    wait_until(decode.is_whole)


def test_a_restarted_prefill_node_is_another_one(
    decode: Client,
    failing_decode: Client,
    mortal_prefill: Client,
    tiny_fleet: Any,
    unique_prompt: str,
    expected: list[int],
) -> None:
    params = offer(mortal_prefill, unique_prompt) | {
        "remote_epoch": offer(tiny_fleet.prefill, "x" * 40)["remote_epoch"]
    }
    reply = decode.complete(unique_prompt, max_tokens=MAX_TOKENS, kv_transfer_params=params)
    assert_recomputed_or_failed(reply, expected, decode, failing_decode)


def test_a_lease_that_ran_out_is_a_stale_error_and_never_other_bytes(
    decode: Client,
    failing_decode: Client,
    launcher: Launcher,
    tiny_arguments: Sequence[str],
    unique_prompt: str,
    expected: list[int],
) -> None:
    short = ("--connector-option", "lease_s=0.6", "--connector-option", "heartbeat_s=0.2")
    node = launcher.start_node("short lease", "prefill", *short, *tiny_arguments)
    launcher.wait_ready([node], 110)
    prefill = Client(node)
    params = offer(prefill, unique_prompt)
    assert not prefill.is_whole()
    wait_until(prefill.is_whole)
    for index in range(8):  # the freed blocks now hold something else
        prefill.complete(f"{index} other bytes {PROMPT}", max_tokens=1)
    reply = decode.complete(unique_prompt, max_tokens=MAX_TOKENS, kv_transfer_params=params)
    assert_recomputed_or_failed(reply, expected, decode, failing_decode)
    why = reply.error if decode is failing_decode else reply.transfer["error"]
    assert "lease" in why or "offer" in why
    wait_until(decode.is_whole)


def test_an_offer_can_be_taken_once(
    decode: Client, failing_decode: Client, tiny_fleet: Any, unique_prompt: str
) -> None:
    params = offer(tiny_fleet.prefill, unique_prompt)
    first = decode.complete(unique_prompt, max_tokens=MAX_TOKENS, kv_transfer_params=params)
    assert first.transfer["num_blocks"] > 0
    # The node's own cache now has all whole blocks; the last token's block is asked for, and refused.
    late = decode.complete(unique_prompt + "!", max_tokens=1, kv_transfer_params=params)
    assert late.status in (200, 500)
    wait_until(tiny_fleet.prefill.is_whole)
    wait_until(decode.is_whole)


def test_a_client_that_leaves_while_the_prompt_is_computed(tiny_fleet: Any, unique_prompt: str) -> None:
    prefill = tiny_fleet.prefill
    in_flight = f'kvferry_router_node_in_flight{{role="prefill",url="{prefill.process.url}"}}'
    prefill.process.send_signal(signal.SIGSTOP)
    try:
        tiny_fleet.router.hang_up_during(lambda: tiny_fleet.router.metric(in_flight) == 1, unique_prompt)
        wait_until(lambda: tiny_fleet.router.metric(in_flight) == 0)
    finally:
        prefill.process.send_signal(signal.SIGCONT)
    wait_until(prefill.is_whole)
    wait_until(lambda: tiny_fleet.router.get("/health")[0] == 200)


def test_a_client_that_leaves_while_the_cache_is_loaded(
    decode: Client, tiny_fleet: Any, unique_prompt: str
) -> None:
    params = offer(tiny_fleet.prefill, unique_prompt)
    tiny_fleet.prefill.process.send_signal(signal.SIGSTOP)
    try:
        decode.hang_up_during(
            lambda: decode.metric("kvferry_loading_requests") == 1,
            unique_prompt,
            kv_transfer_params=params,
        )
        wait_until(lambda: decode.metric("kvferry_loading_requests") == 0)
    finally:
        tiny_fleet.prefill.process.send_signal(signal.SIGCONT)
    wait_until(decode.is_whole)
    wait_until(tiny_fleet.prefill.is_whole, timeout_s=10)  # told, not by the end of its 30 s lease


def test_a_client_that_leaves_while_the_answer_is_computed(tiny_fleet: Any, unique_prompt: str) -> None:
    with tiny_fleet.router.streaming(unique_prompt, max_tokens=200, ignore_eos=True) as events:
        assert next(events)["choices"][0]["finish_reason"] is None
    wait_until(tiny_fleet.decode.is_whole)
    wait_until(tiny_fleet.prefill.is_whole, timeout_s=10)


def test_a_client_that_never_comes_back_after_the_prefill(
    launcher: Launcher, tiny_arguments: Sequence[str], unique_prompt: str
) -> None:
    short = ("--connector-option", "lease_s=0.6", "--connector-option", "heartbeat_s=0.2")
    node = launcher.start_node("short lease", "prefill", *short, *tiny_arguments)
    launcher.wait_ready([node], 110)
    prefill = Client(node)
    for index in range(3):
        offer(prefill, f"{index} {unique_prompt}")
    assert prefill.metric("kvferry_offered_requests") > 0
    wait_until(prefill.is_whole)


def test_the_router_goes_round_nodes_that_are_gone(
    launcher: Launcher,
    tiny_fleet: Any,
    mortal_prefill: Client,
    tiny_arguments: Sequence[str],
    unique_prompt: str,
) -> None:
    mortal_decode = launcher.start_node("mortal decode", "decode", *tiny_arguments)
    launcher.wait_ready([mortal_decode], 110)
    router = launcher.start_router(
        "router",
        [mortal_prefill.process, tiny_fleet.prefill.process],
        [mortal_decode, tiny_fleet.decode.process],
        "--check-interval-s",
        "60",  # it must find out by itself
    )
    launcher.wait_ready([router], 30)
    client = Client(router)
    prompts = [f"{index} {unique_prompt}" for index in range(4)]
    expected = [tiny_fleet.single.complete(prompt, max_tokens=4).token_ids for prompt in prompts]
    mortal_prefill.process.kill()
    mortal_decode.kill()
    assert [client.complete(prompt, max_tokens=4).token_ids for prompt in prompts] == expected
    wait_until(tiny_fleet.prefill.is_whole, timeout_s=40)  # a dead decode node's offers end with their lease
    wait_until(tiny_fleet.decode.is_whole)


def test_a_router_without_a_prefill_node_says_so(
    launcher: Launcher, tiny_fleet: Any, mortal_prefill: Client, unique_prompt: str
) -> None:
    router = launcher.start_router("router", [mortal_prefill.process], [tiny_fleet.decode.process])
    launcher.wait_ready([router], 30)
    client = Client(router)
    mortal_prefill.process.kill()
    reply = client.complete(unique_prompt, max_tokens=2)
    assert reply.status == 503
    assert "prefill" in reply.error
    wait_until(lambda: client.get("/health")[0] == 503)
