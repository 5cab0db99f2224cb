"""Distinguish a near-tie of logits from a wrong answer.

A floating-point sum depends on its order, and the order depends on what else is in the batch. If the two most
likely tokens have almost the same logit, even a single node does not always choose the same one. Such a
choice is a near-tie. A greedy answer that differs from the single node's is still right if every difference
is a near-tie. Any other difference is a mismatch. So is a token that the answer gives another log
probability: a wrong cache often changes no token. All but `ask_alone` is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..client import Answer, complete

#: dtype → two logits that differ by less than this are a near-tie. We measured how much the gap between the
#: two largest logits changes if a prompt is computed alone, in chunks, and beside others. In float32 it
#: changes by up to 1.8e-5 on tiny random models and 2.5e-5 on SmolLM2-135M; the tolerance is eight times
#: that. In bfloat16 it changes by up to 0.09 and 0.25. The latter is one step of bfloat16 at SmolLM2's logits
#: of 32 to 64; the tolerance is two steps. float16 was not measured; its steps are an eighth of bfloat16's.
_TOLERANCES = {"float32": 2e-4, "bfloat16": 0.5, "float16": 0.0625}


@dataclass(frozen=True)
class Expectation:
    """The answer of a node without transfers to a prompt.

    Attributes:
        prompt_token_ids: The prompt's tokens.
        token_ids: Its greedy answer.
        top_logits: The two largest logits for the answer's first token, as (token id, logit), the largest
            first. Log probabilities will do, because they differ by as much.
        logprobs: The log probability of each token of the answer; empty if they are not known.
    """

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    top_logits: Sequence[tuple[int, float]]
    logprobs: Sequence[float] = ()


#: (prompt, max_tokens) → what a single node answers when it computes this prompt alone.
AskAlone = Callable[[str | Sequence[int], int], Expectation]


@dataclass(frozen=True)
class Difference:
    """A place where an answer differs from the single node's.

    Attributes:
        position: Index of the token in the answer.
        token: The answer's token there; None: the answer ends before it.
        expected: The single node's token there; None: its answer ends before it.
        top_logits: The single node's largest logits there; see `Expectation`.
        tolerance: See `tolerance_of`.
        logprobs: The token's log probability in the answer and on the single node, if only these differ;
            otherwise None.
    """

    position: int
    token: int | None
    expected: int | None
    top_logits: tuple[tuple[int, float], ...]
    tolerance: float
    logprobs: tuple[float, float] | None = None

    @property
    def is_near_tie(self) -> bool:
        """Whether both tokens are the two most likely ones, and their logits are nearly equal."""
        if len(self.top_logits) < 2 or self.token == self.expected:
            return False
        (first, larger), (second, smaller) = self.top_logits[:2]
        gap = larger - smaller
        return {self.token, self.expected} == {first, second} and 0.0 <= gap < self.tolerance

    def __str__(self) -> str:
        if self.logprobs is not None:
            ours, theirs = self.logprobs
            return (
                f"a mismatch at token {self.position} of the answer: {_named(self.token)} has log probability {ours:.6f} "
                f"instead of {theirs:.6f}; they may differ by {self.tolerance:g}"
            )
        kind = "a near-tie" if self.is_near_tie else "a mismatch"
        logits = ", ".join(f"token {token} has logit {logit:.6f}" for token, logit in self.top_logits)
        return (
            f"{kind} at token {self.position} of the answer: {_named(self.token)} instead of {_named(self.expected)}; "
            f"on the single node {logits or 'no logits are known'}; logits within {self.tolerance:g} of each other "
            "are a near-tie"
        )


@dataclass(frozen=True)
class Comparison:
    """The comparison of an answer with a single node's.

    Attributes:
        near_ties: The differences that are near-ties, in order.
        mismatch: The first difference that is not a near-tie; None if there is none.
    """

    near_ties: tuple[Difference, ...] = ()
    mismatch: Difference | None = None

    @property
    def is_identical(self) -> bool:
        """Whether the answer has the single node's tokens."""
        return not self.near_ties and self.mismatch is None

    def __str__(self) -> str:
        found = [*self.near_ties, *([self.mismatch] if self.mismatch is not None else [])]
        return "\n".join(map(str, found)) or "identical"


def tolerance_of(dtype: str, device: str = "cpu") -> float:
    """Return the difference below which two logits of a model are a near-tie, and two log probabilities are
    equal.

    Args:
        dtype: Type of the activations; `"auto"` is the type that the engine chooses on `device`.
    """
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    return _TOLERANCES[dtype]


def compare(
    prompt: str | Sequence[int],
    answer: Sequence[int],
    expected: Sequence[int],
    ask_alone: AskAlone,
    *,
    tolerance: float = _TOLERANCES["float32"],
    is_whole: bool = True,
    logprobs: Sequence[float] = (),
    expected_logprobs: Sequence[float] = (),
) -> Comparison:
    """Compare a greedy answer with a single node's.

    After a near-tie the two answers differ in what follows as well. So ask the single node to continue after
    the token that the answer chose. The rest of the answer must be that continuation: a near-tie excuses one
    token only.

    Args:
        answer: The answer to judge.
        expected: The single node's answer. It must have been asked for at least as many tokens.
        ask_alone: Called only where the two differ.
        is_whole: Whether the answer is complete. If not, it may be a prefix of the expected one.
        logprobs, expected_logprobs: The log probability of each token of the two answers. They are compared
            as far as both are known.
    """
    near_ties: list[Difference] = []
    start, rest, num_tokens = 0, tuple(expected), max(len(answer), len(expected))
    rest_logprobs = tuple(expected_logprobs)
    while True:
        index = _first_difference(answer[start:], rest, is_whole)
        scores = zip(answer[start : start + len(rest[:index])], logprobs[start:], rest_logprobs, strict=False)
        for place, (chosen, ours, theirs) in enumerate(scores, start):
            if not abs(ours - theirs) <= tolerance:  # nor if one is not a number
                unlike = Difference(place, chosen, chosen, (), tolerance, (ours, theirs))
                return Comparison(tuple(near_ties), unlike)
        if index is None:
            return Comparison(tuple(near_ties))
        position = start + index
        before = _prompt_ids(prompt, ask_alone) + tuple(answer[:position])
        token = answer[position] if position < len(answer) else None
        top_logits = tuple((token, logit) for token, logit in ask_alone(before, 1).top_logits)
        following = rest[index] if index < len(rest) else None
        difference = Difference(position, token, following, top_logits, tolerance)
        if not difference.is_near_tie:
            return Comparison(tuple(near_ties), difference)
        near_ties.append(difference)
        start = position + 1
        if start == len(answer):  # the answer may end with the token that it chose
            return Comparison(tuple(near_ties))
        continued = ask_alone((*before, answer[position]), num_tokens - start)
        rest, rest_logprobs = tuple(continued.token_ids), tuple(continued.logprobs)


def ask_alone(port: int, **fields: Any) -> AskAlone:
    """Return a function that asks a single node or `vllm serve` on this host for its answer and its log
    probabilities, which differ by as much as its logits.

    Args:
        fields: Further fields of the body of every request.
    """

    def ask(prompt: str | Sequence[int], max_tokens: int) -> Expectation:
        answer = Answer()
        scores = {"logprobs": 2, "return_tokens_as_token_ids": True}
        whole = complete(port, prompt, max_tokens=max_tokens, **scores, **fields)
        answer.add(whole)
        (choice,) = whole["choices"]
        return Expectation(choice["prompt_token_ids"], answer.token_ids, answer.likeliest, answer.logprobs)

    return ask


def _first_difference(answer: Sequence[int], expected: Sequence[int], is_whole: bool) -> int | None:
    for index, (ours, theirs) in enumerate(zip(answer, expected, strict=False)):
        if ours != theirs:
            return index
    is_cut = len(answer) < len(expected) and not is_whole
    return None if len(answer) == len(expected) or is_cut else min(len(answer), len(expected))


def _prompt_ids(prompt: str | Sequence[int], ask_alone: AskAlone) -> tuple[int, ...]:
    return tuple(ask_alone(prompt, 1).prompt_token_ids if isinstance(prompt, str) else prompt)


def _named(token: int | None) -> str:
    return "the end" if token is None else f"token {token}"
