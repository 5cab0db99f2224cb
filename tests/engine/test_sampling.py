"""Sampling: greedy is argmax, each request has its own seed, top-p and temperature shape the distribution."""

from __future__ import annotations

import pytest
import torch

from kvferry.lab.engine.errors import InvalidRequestError
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


def test_different_seeds_differ_and_no_seed_draws_one() -> None:
    logits = torch.zeros(1, VOCAB)
    answers = {
        tuple(_draws(params, logits, 20))
        for params in (SamplingParams(seed=1), SamplingParams(seed=2), SamplingParams(), SamplingParams())
    }
    assert len(answers) == 4


def test_top_p_keeps_the_smallest_set_of_tokens_that_reaches_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert set(_draws(SamplingParams(seed=1, top_p=0.75), logits, 200)) == {0, 1}
    assert set(_draws(SamplingParams(seed=1, top_p=0.01), logits, 50)) == {0}
    assert set(_draws(SamplingParams(seed=1, top_p=1.0), logits, 400)) == {0, 1, 2, 3}


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([[0.6, 0.3, 0.1]]).log()
    draws = _draws(SamplingParams(seed=5), logits, 4000)
    assert [draws.count(token) / 4000 for token in range(3)] == pytest.approx([0.6, 0.3, 0.1], abs=0.03)


@pytest.mark.parametrize("temperature", [1e-6, 1e-3])
def test_a_tiny_temperature_is_as_good_as_greedy(temperature: float) -> None:
    logits = _logits(1) * 100
    assert set(_draws(SamplingParams(seed=2, temperature=temperature), logits, 20)) == {int(logits.argmax())}


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("stop", ("",)),
        ("seed", 1 << 64),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(param: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(**{param: value})  # type: ignore[arg-type]
    assert refused.value.param == param
