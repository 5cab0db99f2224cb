"""A prefill and a decode engine in one process: the answer is the single node's, and every block is freed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

LAYOUTS = ["uniform", "per-layer"]


@pytest.fixture
def make_pair(make_node: Any) -> Callable[..., tuple[Any, Any]]:
    def make(family: str = "llama", connector: str = "inproc", **settings: Any) -> tuple[Any, Any]:
        return (
            make_node(family, connector=connector, role="kv_producer", **settings),
            make_node(family, connector=connector, role="kv_consumer", **settings),
        )

    return make


def _prefill(drive: Any, node: Any, request_id: str, prompt: Sequence[int]) -> Any:
    node.add(request_id, prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    drive(node, until=lambda: node.is_over(request_id))
    return node.last(request_id).kv_transfer_params


def _prompts(lengths: Sequence[int]) -> list[list[int]]:
    dice = random.Random(8)
    return [[dice.randrange(256) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("connector", "family"),
    [("inproc", "llama"), ("inproc", "mistral"), ("inproc", "gemma2"), ("shm", "llama")],
)
def test_the_answer_is_the_single_nodes(
    connector: str, family: str, layout: str, make_pair: Any, drive: Any, assert_same: Any
) -> None:
    prefill, decode = make_pair(family, connector, layout=layout)
    prompts = _prompts([1, 3, 4, 5, 16, 17, 33, 60])
    params = [_prefill(drive, prefill, f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    for index, prompt in enumerate(prompts):
        decode.add(f"r{index}", prompt, max_tokens=20, kv_transfer_params=params[index])
    drive(prefill, decode, until=lambda: not prefill.core.has_work and not decode.core.has_work)
    for index, prompt in enumerate(prompts):
        assert_same(decode.tokens(f"r{index}"), family, prompt, 20)
        num_loaded = decode.last(f"r{index}").metrics.num_loaded_tokens
        # Where layers forget tokens, the last token is not loaded.
        assert num_loaded == (len(prompt) - (family != "llama") if len(prompt) > 1 else 0)
    assert prefill.is_whole
    assert decode.is_whole


def test_a_request_that_is_preempted_after_its_load_is_recomputed(
    make_pair: Any, drive: Any, assert_same: Any
) -> None:
    prefill, decode = make_pair(num_blocks=24, max_model_len=80)
    prompts = _prompts([16] * 5)
    params = [_prefill(drive, prefill, f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    for index, prompt in enumerate(prompts):
        decode.add(f"r{index}", prompt, max_tokens=24, kv_transfer_params=params[index])
    drive(prefill, decode, until=lambda: not prefill.core.has_work and not decode.core.has_work)
    for index, prompt in enumerate(prompts):
        assert_same(decode.tokens(f"r{index}"), "llama", prompt, 24)
    assert decode.core.stats().totals.num_preemptions > 0
    assert decode.is_whole
