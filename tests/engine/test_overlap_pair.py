"""A prompt's cache is transferred while the prompt is computed: the decode node begins before the prefill node ends."""

from __future__ import annotations

from typing import Any

import pytest

PROMPT = [3, *range(20, 79)]
WISH = {"do_remote_decode": True, "overlap": True}


@pytest.fixture
def pair(make_node: Any) -> tuple[Any, Any]:
    return _make_pair(make_node)


def _make_pair(make_node: Any, connector: str = "inproc", **options: Any) -> tuple[Any, Any]:
    prefill = make_node(connector=connector, role="kv_producer", options=options)
    return prefill, make_node(connector=connector, role="kv_consumer", options=options)


def _early(prefill: Any, request_id: str, prompt: list[int] = PROMPT) -> Any:
    """Begin to compute a prompt. Returns the node's params after the first chunk."""
    prefill.add(request_id, prompt, max_tokens=1, kv_transfer_params=WISH)
    prefill.step()
    (output,) = prefill.outputs[request_id]
    assert (output.new_token_ids, output.finish_reason) == ((), None)
    return output.kv_transfer_params


@pytest.mark.parametrize(
    ("connector", "connector_options"),
    [
        ("inproc", {}),
        ("MultiConnector", {"connectors": [{"kv_connector": "inproc"}, {"kv_connector": "shm"}]}),
    ],
    ids=["inproc", "several"],
)
def test_the_decode_node_reads_computed_blocks_early_and_answers_like_one_node(
    connector: str, connector_options: Any, make_node: Any, drive: Any, assert_same: Any
) -> None:
    prefill, decode = _make_pair(make_node, connector, kv_connector_extra_config=connector_options)
    decode.add("a", PROMPT, max_tokens=9, kv_transfer_params=_early(prefill, "a"))
    drive(decode, until=lambda: decode.core.is_loading)
    drive(prefill, decode, until=lambda: decode.is_over("a"))
    assert_same(decode.tokens("a"), "llama", PROMPT, 9)
    transfer = decode.last("a").metrics.transfer
    assert (decode.last("a").metrics.num_loaded_tokens, transfer.num_blocks, transfer.error) == (60, 15, "")
    assert 0 <= transfer.exposed_seconds <= transfer.seconds
    drive(prefill, decode, until=lambda: prefill.is_whole and decode.is_whole)
    assert [output.kv_transfer_params is None for output in prefill.outputs["a"]] == [False, False]


def test_early_offers_are_made_only_on_request_and_only_for_prompts_of_several_steps(
    pair: tuple[Any, Any],
) -> None:
    prefill, _ = pair
    prefill.add("short", PROMPT[:16], max_tokens=1, kv_transfer_params=WISH)
    prefill.add("plain", PROMPT, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    while not (prefill.is_over("short") and prefill.is_over("plain")):
        prefill.step()
    assert [len(prefill.outputs[name]) for name in ("short", "plain")] == [1, 1]
    assert prefill.last("plain").kv_transfer_params is not None


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_prefill_that_is_aborted_during_the_transfer_ends_as_the_policy_says(
    policy: str, make_node: Any, drive: Any, assert_same: Any
) -> None:
    prefill, decode = _make_pair(make_node, kv_load_failure_policy=policy)
    decode.add("a", PROMPT, max_tokens=9, kv_transfer_params=_early(prefill, "a"))
    drive(decode, until=lambda: decode.core.is_loading)
    prefill.abort("a")
    drive(prefill, decode, until=lambda: decode.is_over("a"))
    if policy == "recompute":
        assert_same(decode.tokens("a"), "llama", PROMPT, 9)
    else:
        assert "could not be loaded" in decode.last("a").error
    drive(prefill, decode, until=lambda: prefill.is_whole and decode.is_whole)


@pytest.mark.slow
def test_many_concurrent_handoffs_succeed_while_both_pools_are_too_small(
    make_node: Any, drive: Any, assert_same: Any
) -> None:
    # A lease is longer than this test waits, so a prompt that is recomputed must not be held for a consumer that never
    # comes.
    prefill = make_node(connector="inproc", role="kv_producer", num_blocks=40, max_num_batched_tokens=8)
    decode = make_node(connector="inproc", role="kv_consumer", num_blocks=60)
    prompts = {f"r{index}": [index, *range(40, 60 + 7 * index)] for index in range(1, 9)}
    for name in ("old", "older"):  # their answers grow, and take blocks from prompts that are being computed
        prefill.add(name, PROMPT[:12], max_tokens=60)
    for name, prompt in prompts.items():
        prefill.add(name, prompt, max_tokens=1, kv_transfer_params=WISH)
    asked: set[str] = set()

    def everything_is_over() -> bool:
        for name in prefill.outputs.keys() & prompts.keys() - asked:
            # One in four prefills is aborted in the middle, and so is one decode.
            params = prefill.outputs[name][0].kv_transfer_params
            decode.add(name, prompts[name], max_tokens=9, kv_transfer_params=params)
            asked.add(name)
            if name in ("r3", "r7") and not prefill.is_over(name):
                prefill.abort(name)
            if name == "r5":
                decode.abort(name)
        return len(asked) == len(prompts) and all(map(decode.is_over, prompts))

    drive(prefill, decode, until=everything_is_over)
    for name in prompts.keys() - {"r5"}:
        assert_same(decode.tokens(name), "llama", prompts[name], 9)
    drive(prefill, decode, until=lambda: prefill.is_whole and decode.is_whole)
    assert prefill.core.stats().totals.num_preemptions > 0
