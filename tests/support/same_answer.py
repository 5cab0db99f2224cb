"""Answers that must be those of a single node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.lab.demo.near_tie import AskAlone, compare, tolerance_of


def assert_same_answer(
    prompt: str | Sequence[int],
    answer: Sequence[int],
    expected: Sequence[int],
    ask_alone: AskAlone,
    tolerance: float = tolerance_of("float32"),
    **scores: Any,
) -> None:
    """Fail unless an answer is the single node's apart from near-ties, which are printed. See `compare`.

    Raises:
        AssertionError: there is a mismatch; the message has its position and both logits.
    """
    comparison = compare(prompt, answer, expected, ask_alone, tolerance=tolerance, **scores)
    for near_tie in comparison.near_ties:
        print(near_tie)
    assert comparison.mismatch is None, f"{comparison}; answer {list(answer)}, expected {list(expected)}"
