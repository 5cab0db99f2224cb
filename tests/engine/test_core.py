"""The engine computes what transformers computes, however the work is split, and frees every block."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.transports.errors import ConfigurationError
from tests.support.tiny_models import FAMILIES, write_tiny_model

Reference = Callable[[str, Sequence[int], int], list[int]]


def _prompts(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(256) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers(family: str, make_node: Any, reference: Reference) -> None:
    """One token, lengths around a block, several chunks, sliding windows: all at the same time, in a small
    pool.
    """
    node = make_node(family, num_blocks=60, max_model_len=120)
    prompts = _prompts(1, [1, 3, 4, 5, 16, 17, 40, 60])
    for index, prompt in enumerate(prompts):
        node.add(f"r{index}", prompt, max_tokens=24)
    node.run()
    for index, prompt in enumerate(prompts):
        assert node.tokens(f"r{index}") == reference(family, prompt, 24), f"prompt of {len(prompt)} tokens"
    assert node.is_whole


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("block_size", [1, 7, 32])
def test_chunks_and_blocks_of_any_size_give_the_same_answer(
    chunk: int, block_size: int, make_node: Any, reference: Reference
) -> None:
    node = make_node("gemma3", max_num_batched_tokens=chunk, max_num_seqs=1, block_size=block_size)
    (prompt,) = _prompts(2, [37])
    assert node.answer(prompt, max_tokens=12) == reference("gemma3", prompt, 12)


def test_preempted_requests_give_the_same_answers(make_node: Any, reference: Reference) -> None:
    node = make_node(num_blocks=20, max_model_len=60)
    prompts = _prompts(3, [12] * 5)
    for index, prompt in enumerate(prompts):
        node.add(f"r{index}", prompt, max_tokens=30)
    node.run()
    assert [node.tokens(f"r{i}") for i in range(5)] == [reference("llama", p, 30) for p in prompts]
    assert node.core.stats().totals.num_preemptions > 0
    assert node.is_whole


def test_cached_prefixes_are_not_computed_again_and_change_nothing(
    make_node: Any, reference: Reference
) -> None:
    node = make_node()
    (prompt,) = _prompts(4, [30])
    assert node.answer(prompt, max_tokens=8) == node.answer(prompt, max_tokens=8)
    assert node.last("q1").metrics.num_cached_tokens == 28
    longer = [*prompt, *reference("llama", prompt, 7), 5]
    assert node.answer(longer, max_tokens=8) == reference("llama", longer, 8)
    assert node.last("q2").metrics.num_cached_tokens == 36


def test_a_seed_gives_the_same_answer_alone_in_a_batch_and_after_a_preemption(make_node: Any) -> None:
    (prompt, *others) = _prompts(5, [12] * 5)
    seeded = {"temperature": 1.0, "seed": 11, "max_tokens": 30}
    alone = make_node().answer(prompt, **seeded)
    node = make_node(num_blocks=20, max_model_len=60)
    for index, other in enumerate(others):
        node.add(f"o{index}", other, temperature=1.0, seed=index, max_tokens=30)
    node.add("seeded", prompt, **seeded)
    node.run()
    assert node.tokens("seeded") == alone
    assert node.last("seeded").metrics.num_preemptions > 0


def test_an_answer_ends_at_max_tokens_at_the_longest_sequence_at_the_end_token_and_at_stop(
    make_node: Any,
) -> None:
    node = make_node(max_model_len=50)
    (prompt,) = _prompts(6, [10])
    whole = node.answer(prompt, max_tokens=1000)
    assert (len(whole), node.last("q0").finish_reason) == (40, "length")
    assert len(node.answer(prompt, max_tokens=3)) == 3
    text = node.text("q0")
    stop = text[4:7]
    node.answer(prompt, max_tokens=30, stop=("never", stop))
    assert node.text("q2") == text[: text.index(stop)]
    assert node.last("q2").finish_reason == "stop"


def test_an_aborted_request_ends_with_its_blocks_free(make_node: Any) -> None:
    node = make_node()
    for steps in (0, 1, 4):
        node.add("a", range(50), max_tokens=100)
        for _ in range(steps):
            node.step()
        node.abort("a")
        assert node.last("a").finish_reason == "abort"
        assert node.is_whole
    node.abort("a")


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("llama", {"layer_types": ["linear_attention"] * 3}, "linear_attention"),
        ("llama", {"layer_types": ["hybrid"] * 3}, "hybrid"),
        ("llama", {"model_type": "bloom"}, "does not use the attention interface"),
    ],
)
def test_a_model_that_this_engine_would_compute_wrongly_is_refused(
    family: str, overrides: dict[str, Any], message: str, make_node: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_node(model=str(write_tiny_model(tmp_path, family, **overrides)))


def test_a_block_that_is_held_and_free_is_reported(make_node: Any, caplog: pytest.LogCaptureFixture) -> None:
    node = make_node()
    node.add("a", range(8))
    node.step()
    (block, _) = node.core.parts.manager.get_block_ids("a-1")[0]
    pool = node.core.parts.manager._pool
    pool._free.append(pool.blocks[block])
    node.core.close()
    assert "lost track of its blocks: block pool is inconsistent: held or free, not both: " in caplog.text
    assert f"block_id={block}," in caplog.text
