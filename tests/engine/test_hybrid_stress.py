"""Many concurrent requests to a pair with a hybrid model: shared prefixes, small pools, aborts, and no wrong token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

NUM_TOKENS = 12


def _prompts(dice: random.Random, count: int) -> list[list[int]]:
    """Make prompts, some of which continue a prefix of another one."""
    prompts = [[dice.randrange(256) for _ in range(dice.randint(1, 90))] for _ in range(3)]
    while len(prompts) < count:
        start = dice.choice(prompts)
        tail = [dice.randrange(256) for _ in range(dice.randint(1, 40))]
        prompts.append((start[: dice.randint(0, len(start))] + tail)[:100])
    return prompts


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", ["uniform", pytest.param("per-layer", marks=pytest.mark.full)])
@pytest.mark.parametrize("family", ["gemma3", "gemma3n", "llama4", "mistral"])
def test_a_busy_pair_gives_the_answers_of_transformers(
    family: str,
    layout: str,
    make_node: Any,
    drive: Callable[..., None],
    reference: Callable[[str, Sequence[int], int], list[int]],
) -> None:
    dice = random.Random(f"{family} {layout}")
    size = {"num_blocks": 110, "max_model_len": 120, "layout": layout, "hash_seed": "ferry"}
    prefill = make_node(family, connector="shm", role="kv_producer", **size)
    decode = make_node(family, connector="shm", role="kv_consumer", **size)
    prompts = _prompts(dice, 24)
    waiting, alive, handed, aborted = list(enumerate(prompts)), set[int](), set[int](), set[int]()
    while waiting or alive:
        if waiting and len(alive) < 5:
            index, prompt = waiting.pop(0)
            prefill.add(f"p{index}", prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
            alive.add(index)
        for index in sorted(alive - handed):
            if prefill.is_over(f"p{index}"):
                params = prefill.last(f"p{index}").kv_transfer_params
                decode.add(f"d{index}", prompts[index], max_tokens=NUM_TOKENS, kv_transfer_params=params)
                handed.add(index)
        if handed & alive and dice.random() < 0.02:
            index = dice.choice(sorted(handed & alive))
            decode.abort(f"d{index}")
            aborted.add(index)
        prefill.step()
        decode.step()
        alive -= {index for index in handed & alive if decode.is_over(f"d{index}")}
    drive(prefill, decode, until=lambda: not prefill.core.has_work and not decode.core.has_work)
    for index in set(range(len(prompts))) - aborted:
        expected = reference(family, prompts[index], NUM_TOKENS)
        assert decode.tokens(f"d{index}") == expected, f"prompt {index} of {len(prompts[index])} tokens"
    num_loads, num_failed = decode.num_loads
    assert num_failed == 0
    assert num_loads > 0
    assert decode.core.stats().totals.num_cached_tokens > 0
    assert prefill.is_whole
    assert decode.is_whole
