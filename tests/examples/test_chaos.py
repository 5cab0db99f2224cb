"""The parts of the soak: a seed repeats its faults, and the verdict detects every violation."""

from __future__ import annotations

from math import inf

import pytest

from kvferry.lab.demo.near_tie import Expectation
from tests.support.chaos.schedule import Fault, Kind, schedule
from tests.support.chaos.traffic import Answer, Ask, Ending, Outcome
from tests.support.chaos.verdict import violations

KINDS: dict[str, tuple[Kind, ...]] = {"node": ("kill", "terminate", "pause", "cut"), "router": ("kill",)}
KILL = Fault(at_s=5.0, kind="kill", target="router", lasts_s=1.0)


def single_node(prompt: object, max_tokens: int) -> Expectation:
    """Answer for a single node: after 7, tokens 8 and 6 have the same logit; after 7 and 6, the next token is
    5.
    """
    is_second = prompt == (1, 7, 6)
    return Expectation((), (5,) if is_second else (), [(8, 1.0), (6, 1.0)] if prompt == (1, 7) else [])


def outcome(
    ending: Ending, *token_ids: int, message: str = "", code: str = "", began_s: float = 4.0
) -> Outcome:
    """Make the outcome of a request that took two seconds and whose expected answer is 7, 8, 9."""
    answer = Answer(list(token_ids), {"message": message, "code": code} if message else {})
    return Outcome(Ask("router", (1,), 3, False, inf), ending, began_s, began_s + 2, answer, [7, 8, 9])


def test_a_seed_repeats_its_faults_and_another_seed_has_others() -> None:
    first, again, other = (schedule(seed, 60, KINDS) for seed in (1, 1, 2))
    assert first == again != other
    assert {fault.kind for fault in first} == {"kill", "terminate", "pause", "cut"}


@pytest.mark.parametrize(
    ("ended", "complaint"),
    [
        (outcome("whole", 7, 8, 9), ""),
        (outcome("whole", 7, 8), "single node"),
        (outcome("whole", 7, 8, 8), "single node"),
        (outcome("whole", 7, 6, 5), ""),
        (outcome("whole", 7, 6, 4), "single node"),
        (outcome("broken", 7, 6), ""),
        (outcome("refused", 7, message="the decode node was lost in the middle: reset"), ""),
        (outcome("refused", 8, message="the decode node was lost in the middle: reset"), "single node"),
        (outcome("refused", message="KeyError: 3"), "without an allowed reason"),
        (outcome("refused", message="the producer is gone", code="generation_failed"), ""),
        (outcome("broken", 7), ""),
        (outcome("broken", 7, began_s=2.0), "without a fault of its router"),
        (outcome("broken", 7, began_s=11.0), "without a fault of its router"),
        (outcome("hung up"), ""),
    ],
)
def test_the_verdict_on_a_request(ended: Outcome, complaint: str) -> None:
    found = violations([KILL], [outcome("whole", 7, 8, 9), ended], single_node)
    assert len(found) == bool(complaint)
    assert complaint in "".join(found)


def test_a_run_without_an_answer_is_a_violation() -> None:
    assert violations([KILL], [outcome("hung up")], single_node) == ["no request was answered"]
