"""A prefill and a decode engine with different cache layouts give the single node's answer."""

from __future__ import annotations

import random
from typing import Any

import pytest

NHD_UNIFORM_4 = {"page_order": "NHD", "layout": "uniform", "block_size": 4}
HND_UNIFORM_4 = {**NHD_UNIFORM_4, "page_order": "HND"}
HND_PER_LAYER_8 = {"page_order": "HND", "layout": "per-layer", "block_size": 8}
NHD_PER_LAYER_8 = {**HND_PER_LAYER_8, "page_order": "NHD"}

NUM_LAYERS, NUM_PARTS, NUM_HEADS, NUM_TOKENS = 3, 2, 2, 40
#: Bytes that are contiguous on both sides: one vector, or the vectors of several consecutive tokens or heads.
VECTORS = NUM_LAYERS * NUM_PARTS * NUM_HEADS * NUM_TOKENS


@pytest.mark.parametrize(
    ("producer", "consumer", "num_regions"),
    [
        (NHD_UNIFORM_4, HND_PER_LAYER_8, VECTORS),
        (HND_PER_LAYER_8, NHD_UNIFORM_4, VECTORS),
        (HND_PER_LAYER_8, HND_UNIFORM_4, VECTORS // 4),
        (NHD_UNIFORM_4, NHD_PER_LAYER_8, VECTORS // 4 // NUM_HEADS),
        (HND_UNIFORM_4, HND_UNIFORM_4, 1),
    ],
    ids=["4 NHD to 8 HND", "8 HND to 4 NHD", "8 to 4 HND", "4 to 8 NHD", "like HND"],
)
def test_the_answer_is_the_single_nodes(
    producer: dict[str, Any],
    consumer: dict[str, Any],
    num_regions: int,
    make_node: Any,
    drive: Any,
    assert_same: Any,
) -> None:
    prefill = make_node(connector="inproc", role="kv_producer", **producer)
    decode = make_node(connector="inproc", role="kv_consumer", **consumer)
    dice = random.Random(8)
    for length in (NUM_TOKENS, 61):
        name, prompt = f"of {length}", [dice.randrange(256) for _ in range(length)]
        prefill.add(name, prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
        drive(prefill, until=lambda name=name: prefill.is_over(name))
        params = prefill.last(name).kv_transfer_params
        decode.add(name, prompt, max_tokens=20, kv_transfer_params=params)
        drive(prefill, decode, until=lambda: not prefill.core.has_work and not decode.core.has_work)
        assert_same(decode.tokens(name), "llama", prompt, 20)
        assert decode.last(name).metrics.num_loaded_tokens == length
    first = decode.last(f"of {NUM_TOKENS}").metrics.transfer
    assert first.num_regions == num_regions
    assert prefill.is_whole
    assert decode.is_whole


def test_a_window_that_begins_inside_a_larger_block_is_recomputed(
    make_node: Any, drive: Any, assert_same: Any
) -> None:
    prefill = make_node("mistral", connector="inproc", role="kv_producer", block_size=4)
    decode = make_node("mistral", connector="inproc", role="kv_consumer", block_size=16)
    prompt = [(7919 * index) % 251 for index in range(66)]  # the last token's window begins at token 42
    prefill.add("a", prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    drive(prefill, until=lambda: prefill.is_over("a"))
    params = prefill.last("a").kv_transfer_params
    decode.add("a", prompt, max_tokens=20, kv_transfer_params=params)
    drive(prefill, decode, until=lambda: not prefill.core.has_work and not decode.core.has_work)
    assert "remote block 0 cannot be transferred" in decode.last("a").metrics.transfer.error
    assert_same(decode.tokens("a"), "mistral", prompt, 20)
    assert prefill.is_whole
    assert decode.is_whole


@pytest.mark.parametrize("family", ["gemma2", "qwen3"])
def test_a_single_node_gives_the_same_answer_in_either_page_order(
    family: str, make_node: Any, assert_same: Any
) -> None:
    prompt = [(7919 * index) % 251 for index in range(70)]
    node = make_node(family, page_order="HND")
    assert_same(node.answer(prompt, max_tokens=12), family, prompt, 12)
