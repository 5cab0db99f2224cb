"""Choose the next token of each request of a batch from the logits."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from .types import Logprobs, SamplingParams


class TokenSampler:
    """Draw the tokens of one request, with its parameters and its own stream of random numbers.

    The stream belongs to the request, so a seed gives the same answer whatever else is in the batch.

    Attributes:
        num_to_skip: Tokens that another node has drawn from the same stream, so that their numbers are used
            up. They are skipped with the first draw, which knows how many numbers a token takes.
    """

    def __init__(self, params: SamplingParams, num_to_skip: int = 0) -> None:
        self.params = params
        self.generator = torch.Generator(device="cpu")
        # Not `generator.seed()`: it opens /dev/urandom, which fails when the process is out of file
        # descriptors.
        self.generator.manual_seed(secrets.randbits(63) if params.seed is None else params.seed)
        self.num_to_skip = num_to_skip

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0.0


@contextmanager
def same_numbers_after_failure(samplers: Sequence[TokenSampler]) -> Iterator[None]:
    """If the body raises, reset each stream: the step runs again and must draw the same numbers."""
    states = [(one, one.generator.get_state(), one.num_to_skip) for one in samplers if not one.is_greedy]
    try:
        yield
    except Exception:
        for sampler, before, num_to_skip in states:
            sampler.generator.set_state(before)
            sampler.num_to_skip = num_to_skip
        raise


def logprobs_of(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    """Return the log probability of one token per row, and of the likeliest tokens of the row.

    Args:
        logits: `(num_rows, vocab_size)`, any float type, any device, as the model computed them.
        token_ids: One per row.
        counts: How many of the likeliest tokens to return for each row.
    """
    if not token_ids:
        return []
    scores = logits.float()
    total = scores.logsumexp(dim=-1, keepdim=True)
    chosen = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    largest = scores.topk(min(max(counts), scores.shape[-1]), dim=-1)
    # The same subtraction for all of them: the token that a client compares with the likeliest one may be
    # that one.
    ids = torch.cat([chosen, largest.indices], dim=-1).tolist()
    values = (torch.cat([scores.gather(1, chosen), largest.values], dim=-1) - total).tolist()
    return [
        tuple(zip(row_ids[: count + 1], row_values[: count + 1], strict=True))
        for row_ids, row_values, count in zip(ids, values, counts, strict=True)
    ]


def sample(logits: torch.Tensor, samplers: Sequence[TokenSampler]) -> list[int]:
    """Choose a token for each row.

    Args:
        logits: `(num_requests, vocab_size)`, any float type, any device.
        samplers: One per row.

    Returns:
        Token ids, one per row.
    """
    tokens = logits.argmax(dim=-1)
    random_rows = [row for row, sampler in enumerate(samplers) if not sampler.is_greedy]
    if random_rows:
        rows = torch.tensor(random_rows, device=logits.device)
        tokens[rows] = _sample_random(logits[rows].float(), [samplers[row] for row in random_rows])
    return [int(token) for token in tokens.tolist()]


def _sample_random(logits: torch.Tensor, samplers: Sequence[TokenSampler]) -> torch.Tensor:
    """Draw from `(num_requests, vocab_size)` float32 logits; return `(num_requests,)` token ids."""
    shape = torch.tensor([(s.params.temperature, s.params.top_p) for s in samplers], device=logits.device)
    temperature, top_p = shape[:, :1], shape[:, 1:]
    # Shift first, because a tiny temperature would otherwise turn large logits into infinities.
    shifted = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    probabilities = _keep_top_p(shifted.softmax(dim=-1), top_p)
    # An exponential race: argmax(p / e) with e ~ Exp(1) is a draw from p. Each row uses its own request's
    # random numbers.
    races = torch.stack([_race(logits.shape[-1], s) for s in samplers])
    return (probabilities / races.to(logits.device).clamp_min(1e-10)).argmax(dim=-1)


def _race(vocab_size: int, sampler: TokenSampler) -> torch.Tensor:
    race = torch.empty(vocab_size)
    for _ in range(sampler.num_to_skip):
        race.exponential_(generator=sampler.generator)
    sampler.num_to_skip = 0
    return race.exponential_(generator=sampler.generator)


def _keep_top_p(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set probabilities outside each row's smallest set that reaches `top_p` to zero.

    The most likely token always stays.
    """
    if bool((top_p >= 1.0).all()):
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(dim=-1) - ordered
    kept = ordered.masked_fill((mass_before >= top_p) & (top_p < 1.0), 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, order, kept)
