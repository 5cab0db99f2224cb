"""Models with recurrent layers, on one engine and handed over from a prefill to a decode engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvferry.reference.engine.errors import InvalidRequestError
from kvferry.transports.errors import ConfigurationError
from tests.support.tiny_models import write_tiny_model

FAMILIES = [
    pytest.param("bamba", id="bamba, attention or recurrent"),
    pytest.param("granitemoehybrid", id="granite, without rotary positions"),
    pytest.param("falcon_h1", id="falcon_h1, both in one layer"),
    pytest.param("mamba2", id="mamba2, recurrent only"),
    pytest.param("qwen3_next", id="qwen3_next, gated delta rule"),
]
#: Tokens per block. A page of this many tokens is large enough for a state.
BLOCK = 16
OFFER = {"do_remote_decode": True}


def prompt_of(num_tokens: int) -> list[int]:
    return [random.Random(num_tokens).randrange(256) for _ in range(num_tokens)]


@pytest.fixture
def make_pair(make_node: Any) -> Any:
    def make(family: str, **settings: Any) -> tuple[Any, Any]:
        small = {"connector": "shm", "block_size": BLOCK, "num_blocks": 40, **settings}
        return make_node(family, role="kv_producer", **small), make_node(family, role="kv_consumer", **small)

    return make


def hand_over(drive: Any, prefill: Any, decode: Any, prompt: Sequence[int], num_tokens: int) -> Any:
    """Prefill on one node and decode on the other. Returns the last output."""
    prefill.add("a", prompt, max_tokens=1, kv_transfer_params=OFFER)
    drive(prefill, until=lambda: prefill.is_over("a"))
    decode.add("a", prompt, max_tokens=num_tokens, kv_transfer_params=prefill.last("a").kv_transfer_params)
    drive(prefill, decode, until=lambda: not prefill.core.has_work and not decode.core.has_work)
    assert prefill.is_whole
    assert decode.is_whole
    return decode.last("a")


@pytest.mark.parametrize("family", FAMILIES)
def test_concurrent_requests_get_the_same_answers_as_alone(
    family: str, make_node: Any, reference: Any
) -> None:
    """Requests with one or several prefill chunks run beside decodes. State blocks are reset before they are reused."""
    node = make_node(family, block_size=BLOCK, num_blocks=40)
    lengths = (61, 1, 16, 5)
    for turn in range(2):
        for length in lengths:
            node.add(f"{length} {turn}", prompt_of(length), max_tokens=12)
        node.run()
    for length in lengths:
        answer = reference(family, prompt_of(length), 12)
        assert [node.tokens(f"{length} {turn}") for turn in range(2)] == [answer] * 2
    assert node.is_whole


@pytest.mark.parametrize("layout", ["uniform", "per-layer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_state_is_handed_over_and_the_answer_is_the_same(
    family: str, layout: str, make_pair: Any, drive: Any, assert_same: Any
) -> None:
    prompt = prompt_of(61)
    prefill, decode = make_pair(family, layout=layout)
    last = hand_over(drive, prefill, decode, prompt, 20)
    assert_same(decode.tokens("a"), family, prompt, 20)
    assert last.metrics.num_loaded_tokens == len(prompt) - 1
    groups = decode.core.parts.kv_cache_config.kv_cache_groups
    states = sum(type(group.kv_cache_spec).__name__ == "MambaSpec" for group in groups)
    attention_blocks = -(-60 // BLOCK)
    assert last.metrics.transfer.num_blocks == states + (len(groups) - states) * attention_blocks


def test_a_preempted_request_starts_over(make_node: Any, assert_same: Any) -> None:
    """A state is lost when its block is taken away."""
    node = make_node("bamba", block_size=BLOCK, num_blocks=11)
    prompts = {"a": prompt_of(30), "b": prompt_of(31)}
    for name, prompt in prompts.items():
        node.add(name, prompt, max_tokens=30)
    node.run()
    assert node.core.stats().totals.num_preemptions > 0
    for name, prompt in prompts.items():
        assert_same(node.tokens(name), "bamba", prompt, 30)


def test_a_state_past_the_prompts_last_token_is_not_loaded(
    make_pair: Any, drive: Any, assert_same: Any
) -> None:
    """The state of an offer that ends at or past the prompt's last token cannot be continued, so it is recomputed."""
    prefill, decode = make_pair("bamba")
    prompt = prompt_of(40)
    prefill.add("a", [*prompt, 7], max_tokens=1, kv_transfer_params=OFFER)
    drive(prefill, until=lambda: prefill.is_over("a"))
    decode.add("a", prompt, max_tokens=8, kv_transfer_params=prefill.last("a").kv_transfer_params)
    drive(prefill, decode, until=lambda: not prefill.core.has_work and not decode.core.has_work)
    assert_same(decode.tokens("a"), "bamba", prompt, 8)
    assert decode.last("a").metrics.num_loaded_tokens == 0
    assert prefill.is_whole
    assert decode.is_whole


def test_a_prompt_of_one_token_is_computed_where_it_is_decoded(
    make_pair: Any, drive: Any, assert_same: Any
) -> None:
    prefill, decode = make_pair("mamba2")
    last = hand_over(drive, prefill, decode, [65], 8)
    assert_same(decode.tokens("a"), "mamba2", [65], 8)
    assert last.metrics.transfer is None


def test_an_answer_that_would_advance_the_state_is_refused(make_pair: Any) -> None:
    prefill, _ = make_pair("mamba2")
    with pytest.raises(InvalidRequestError, match="max_tokens=2") as caught:
        prefill.add("a", [1, 2, 3], max_tokens=2, kv_transfer_params=OFFER)
    assert caught.value.param == "max_tokens"


def test_a_block_too_small_for_a_state_is_refused(make_node: Any) -> None:
    with pytest.raises(ConfigurationError, match="use block_size=13 or more"):
        make_node("bamba", block_size=4)


def test_a_state_is_not_spread_over_several_processes(make_node: Any) -> None:
    with pytest.raises(ConfigurationError, match="granitemoehybrid .* cannot cut recurrent states") as caught:
        make_node("granitemoehybrid", block_size=BLOCK, tensor_parallel_size=2)
    assert caught.value.key == "tensor_parallel_size"


def test_a_recurrent_model_without_a_maximum_length_needs_max_model_len(
    tmp_path: Any, make_node: Any
) -> None:
    write_tiny_model(tmp_path, "mamba2", max_position_embeddings=None)
    with pytest.raises(ConfigurationError, match="set max_model_len") as caught:
        make_node(model=str(tmp_path), block_size=BLOCK)
    assert caught.value.key == "max_model_len"
    assert make_node(model=str(tmp_path), block_size=BLOCK, max_model_len=64).answer([1, 2], max_tokens=2)
