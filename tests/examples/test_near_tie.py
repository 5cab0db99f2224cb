"""A near-tie of logits allows one token of an answer to differ, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from kvferry.lab.client import Answer
from kvferry.lab.demo.cli import parse_arguments
from kvferry.lab.demo.near_tie import (
    AskAlone,
    Expectation,
    compare,
    tolerance_of,
)
from kvferry.lab.demo.run import _show
from tests.support.same_answer import assert_same_answer

PROMPT = (1, 2, 3)
TOLERANCE = tolerance_of("float32")
#: Two answers of four tokens that differ from the second token on, which is 11 or 12.
EXPECTED = (10, 11, 20, 21)
ANSWER = (10, 12, 30, 31)

TopLogits = Sequence[tuple[int, float]]


def single_node(
    top_logits: TopLogits, continuations: Mapping[tuple[int, ...], tuple[int, ...]] | None = None
) -> AskAlone:
    """A single node that always returns the same top logits, and continues `(10, 12)` with 30, 31."""
    answers = {(10, 12): (30, 31), **(continuations or {})}

    def ask(prompt: str | Sequence[int], max_tokens: int) -> Expectation:
        ids = PROMPT if isinstance(prompt, str) else tuple(prompt)
        assert ids[: len(PROMPT)] == PROMPT
        return Expectation(ids, answers.get(ids[len(PROMPT) :], EXPECTED)[:max_tokens], top_logits)

    return ask


@pytest.mark.parametrize("prompt", [PROMPT, "as text"])
@pytest.mark.parametrize(
    "top_logits",
    [
        ((11, 5.0), (12, 5.0)),
        ((12, 5.0), (11, 5.0)),
        ((11, 5.0 + TOLERANCE / 2), (12, 5.0), (13, 5.0)),
    ],
    ids=["exact tie", "exact tie in the other order", "near tie"],
)
def test_a_tie_is_recognised(prompt: str | Sequence[int], top_logits: TopLogits) -> None:
    comparison = compare(prompt, ANSWER, EXPECTED, single_node(top_logits))
    assert comparison.mismatch is None
    assert not comparison.is_identical
    (tie,) = comparison.near_ties
    assert (tie.position, tie.token, tie.expected, tie.top_logits) == (1, 12, 11, top_logits)
    text = str(comparison)
    assert "near-tie at token 1" in text
    assert all(f"token {token} has logit {logit:.6f}" in text for token, logit in top_logits)
    assert_same_answer(prompt, ANSWER, EXPECTED, single_node(top_logits))


@pytest.mark.parametrize(
    "top_logits",
    [
        ((11, 5.0 + 2 * TOLERANCE), (12, 5.0)),
        ((11, 5.0), (13, 5.0)),
        ((13, 5.0), (12, 5.0)),
        ((13, 5.0), (11, 5.0), (12, 5.0)),
        ((11, float("nan")), (12, float("nan"))),
        ((11, 5.0),),
        (),
    ],
    ids=["large gap", "ours not in the top two", "theirs not", "neither", "no numbers", "one logit", "none"],
)
def test_anything_else_is_a_mismatch(top_logits: TopLogits) -> None:
    comparison = compare(PROMPT, ANSWER, EXPECTED, single_node(top_logits))
    assert comparison.near_ties == ()
    assert comparison.mismatch is not None
    assert "mismatch at token 1" in str(comparison)
    with pytest.raises(
        AssertionError, match="mismatch at token 1 of the answer: token 12 instead of token 11"
    ):
        assert_same_answer(PROMPT, ANSWER, EXPECTED, single_node(top_logits))


TIE = ((11, 5.0), (12, 5.0))


@pytest.mark.parametrize(
    ("answer", "position"),
    [((10, 12, 30, 32), 3), ((10, 12, 33, 31), 2), ((10, 12, 30), 3), ((10, 12, 30, 31, 32), 4)],
)
def test_after_a_tie_the_answer_must_continue_as_the_single_node_does(
    answer: tuple[int, ...], position: int
) -> None:
    comparison = compare(PROMPT, answer, EXPECTED, single_node(TIE))
    assert len(comparison.near_ties) == 1
    assert comparison.mismatch is not None
    assert comparison.mismatch.position == position


@pytest.mark.parametrize("answer", [(), (10, 11), (10, 11, 20, 21, 22)])
def test_a_different_length_is_not_a_tie(answer: tuple[int, ...]) -> None:
    comparison = compare(PROMPT, answer, EXPECTED, single_node(((20, 5.0), (21, 5.0))))
    assert comparison.mismatch is not None
    assert comparison.mismatch.position == min(len(answer), len(EXPECTED))


def test_a_prefix_of_an_answer_can_be_compared() -> None:
    for part in ((), (10,), (10, 11, 20)):
        assert compare(PROMPT, part, EXPECTED, single_node(()), is_whole=False).is_identical
    begun = compare(PROMPT, (10, 12, 30), EXPECTED, single_node(TIE), is_whole=False)
    assert (len(begun.near_ties), begun.mismatch) == (1, None)
    wrong = compare(PROMPT, (10, 13), EXPECTED, single_node(TIE), is_whole=False)
    assert wrong.mismatch is not None


def test_the_tolerance_depends_on_the_dtype_of_the_nodes() -> None:
    assert tolerance_of("auto") == tolerance_of("float32") < tolerance_of("bfloat16")
    assert tolerance_of("auto", "cuda:0") == tolerance_of("bfloat16")


def verdict_of(out: str) -> str:
    """Return the last cell of the table. An empty line and the meaning of its columns follow it."""
    table, _, _ = out.partition("\n\ntransfer ")
    return table.split()[-1]


class TestDemo:
    """What the demo prints and returns."""

    @staticmethod
    def _run(answer: Sequence[int], top_logits: TopLogits, transfer: Mapping[str, object]) -> int:
        comparison = compare(PROMPT, answer, EXPECTED, single_node(top_logits))
        answers = [Answer("text", list(answer), metrics={"transfer": transfer})]
        references = [Answer(token_ids=list(EXPECTED))]
        return _show(parse_arguments(["--prompt", "A ferry"]), answers, references, [comparison])

    @pytest.mark.parametrize("error", ["", "the producer is gone"])
    def test_a_near_tie_is_shown_with_both_logits_and_a_failed_transfer(
        self, error: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self._run(ANSWER, TIE, {"num_bytes": 4096, "seconds": 0.1, "error": error}) == 0
        out, err = capsys.readouterr()
        assert verdict_of(out) == "near-tie"
        assert "near-tie at token 1" in err
        assert "token 11 has logit 5.000000, token 12 has logit 5.000000" in err
        assert ("the transfer failed" in err) == bool(error)
        assert error in err

    def test_a_mismatch_is_reported(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self._run(ANSWER, ((11, 5.0), (12, 4.0)), {"num_bytes": 4096, "error": ""}) == 1
        out, err = capsys.readouterr()
        assert verdict_of(out) == "NO"
        assert "mismatch at token 1" in err
