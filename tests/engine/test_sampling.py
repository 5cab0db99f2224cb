"""Sampling: greedy is argmax, each request has its own seed, and top-p cuts the distribution."""

from __future__ import annotations

import torch

from kvferry.lab.engine.sampling import TokenSampler, sample
from kvferry.lab.engine.types import SamplingParams

VOCAB = 50


def _logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1))


def _draws(params: SamplingParams, logits: torch.Tensor, count: int) -> list[int]:
    sampler = TokenSampler(params)
    return [sample(logits, [sampler])[0] for _ in range(count)]


def test_temperature_zero_is_argmax() -> None:
    logits = _logits(4)
    greedy = [TokenSampler(SamplingParams(temperature=0.0)) for _ in range(4)]
    assert sample(logits, greedy) == logits.argmax(dim=-1).tolist()


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    logits = _logits(1)
    alone = _draws(SamplingParams(seed=3), logits, 20)
    seeded, other = TokenSampler(SamplingParams(seed=3)), TokenSampler(SamplingParams(seed=9))
    greedy = TokenSampler(SamplingParams(temperature=0.0))
    batch = logits.expand(3, -1)
    together = [sample(batch, [other, seeded, greedy])[1] for _ in range(20)]
    assert together == alone


def test_top_p_keeps_the_smallest_set_of_tokens_that_reaches_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert set(_draws(SamplingParams(seed=1, top_p=0.75), logits, 200)) == {0, 1}
    assert set(_draws(SamplingParams(seed=1, top_p=0.01), logits, 50)) == {0}
    assert set(_draws(SamplingParams(seed=1, top_p=1.0), logits, 400)) == {0, 1, 2, 3}
