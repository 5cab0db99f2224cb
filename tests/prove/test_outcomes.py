"""Each class of outcome means what the table says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvferry.lab.demo.near_tie import Expectation
from kvferry.lab.prove.outcomes import (
    BAD,
    MEANINGS,
    Expected,
    Outcome,
    Reply,
    Rest,
    Verdict,
    judge,
    judge_rest,
    worst,
)

PROMPT, TOKENS = [1, 2, 3], [7, 8, 9]
EXPECTED = Expected(PROMPT, TOKENS, [-1.0, -2.0, -3.0])


def _alone(prompt: str | Sequence[int], max_tokens: int) -> Expectation:
    """A single server for which tokens 8 and 5 are a near-tie at the second place, and which then says 6."""
    if list(prompt) == [*PROMPT, 7]:
        return Expectation(list(prompt), TOKENS[1:], [(8, -2.0), (5, -2.00001)])
    if list(prompt) == [*PROMPT, 7, 5]:
        return Expectation(list(prompt), [6], [(6, -0.1), (9, -4.0)])
    return Expectation(list(prompt), [9], [(9, -1.0), (1, -5.0)])


def verdict(reply: Reply) -> Verdict:
    return judge(reply, EXPECTED, _alone, 2e-4)


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (Reply(200, TOKENS, [-1.0, -2.0, -3.0], True), Outcome.RIGHT),
        (Reply(200, [7, 5, 6], [], True), Outcome.RIGHT),
        (Reply(200, [7, 5, 9], [], True), Outcome.WRONG),
        (Reply(200, [7, 8, 1], [], True), Outcome.WRONG),
        (Reply(200, TOKENS, [-1.0, -2.1, -3.0], True), Outcome.WRONG),
        (Reply(200, [7, 8], [], True), Outcome.WRONG),
        (Reply(200, [7, 8], [], False, "the stream ended without [DONE]"), Outcome.ERROR),
        (Reply(200, [1], [], False, "the stream ended without [DONE]"), Outcome.WRONG),
        (Reply(200, [7], [], False, is_late=True, seconds=40.0), Outcome.HANG),
        (Reply(is_late=True, seconds=40.0), Outcome.HANG),
        (Reply(500, error="cannot load"), Outcome.ERROR),
        (Reply(error="ConnectionResetError: …"), Outcome.ERROR),
    ],
)
def test_a_reply_is_judged_by_its_tokens_and_its_end(reply: Reply, outcome: Outcome) -> None:
    assert verdict(reply).outcome is outcome


def test_a_verdict_says_why_in_one_line() -> None:
    assert verdict(Reply(500, error="cannot load\na traceback")).why == "cannot load"
    assert "token 2 of the answer" in verdict(Reply(200, [7, 8, 1], [], True)).why
    assert verdict(Reply(200, [7, 5, 6], [], True)).near_ties == 1
    assert verdict(Reply(is_late=True, seconds=40.0)).why == "no end after 40.0 s"


RIGHT, REFUSED, WRONG = (Verdict(each, "why") for each in (Outcome.RIGHT, Outcome.ERROR, Outcome.WRONG))


@pytest.mark.parametrize(
    ("rest", "outcome", "why"),
    [
        (Rest({}, {}, RIGHT, 13.0), Outcome.RIGHT, ""),
        (
            Rest({"prefill": 0.25}, {}, RIGHT, 13.0),
            Outcome.LEAK,
            "prefill still uses 25.0% of its pool after 13 s",
        ),
        (Rest({"prefill": 0.25}, {"decode": "it ended"}, RIGHT, 13.0), Outcome.DEAD, "decode: it ended"),
        (Rest({}, {}, REFUSED, 13.0), Outcome.DEAD, "no new handoff succeeds: error: why"),
        (Rest({"prefill": 0.25}, {"decode": "it ended"}, WRONG, 13.0), Outcome.WRONG, "a new handoff: why"),
    ],
)
def test_what_is_left_is_judged_by_the_worst_of_it(rest: Rest, outcome: Outcome, why: str) -> None:
    found = judge_rest(rest)
    assert (found.outcome, found.why) == (outcome, why)


def test_every_class_is_explained_and_ordered() -> None:
    assert list(MEANINGS) == list(Outcome)
    assert worst([Outcome.ERROR, Outcome.WRONG, Outcome.DEAD]) is Outcome.WRONG
    assert worst([Outcome.RIGHT, Outcome.ERROR]) not in BAD
