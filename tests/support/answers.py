"""Greedy answers of real models, with the log probability of each token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from kvferry.lab.demo.near_tie import tolerance_of

#: Two answers of models in float32 differ by less. Tests in other types compare by `compare` with a tolerance
#: of their own.
_TOLERANCE = tolerance_of("float32")


class Answer(list[int]):
    """The tokens of an answer.

    Two of them are equal if their tokens are, and their log probabilities nearly: a wrong block often changes
    no token. Beside a plain list the tokens count alone.

    Attributes:
        logprobs: One per token; empty if they were not asked for.
    """

    __hash__ = None

    def __init__(self, tokens: Iterable[int] = (), logprobs: Iterable[float] = ()) -> None:
        super().__init__(tokens)
        self.logprobs = list(logprobs)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Answer(found, self.logprobs[index]) if isinstance(index, slice) else found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Answer):
            return super().__eq__(other)
        return super().__eq__(other) and self.logprobs == pytest.approx(other.logprobs, abs=_TOLERANCE)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __repr__(self) -> str:
        return f"{super().__repr__()} with log probabilities {[round(one, 6) for one in self.logprobs]}"
