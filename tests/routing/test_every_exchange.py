"""A request's exchange keeps its promises in every state that it can reach, and the explorer finds what
breaks them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.router.answer.exchange import Exchange, State
from tests.support.exchange_bugs import BUGS
from tests.support.exchange_states import LARGE, SMALL, Bound, explore_every
from tests.support.explore import Counterexample

RELIABILITY = Path(__file__).parents[2] / "docs" / "reliability.md"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("bound", SMALL, ids=str)
def test_promises_hold_in_every_state_within_small_bounds(bound: Bound) -> None:
    explored = explore_every(bound)
    row = f"| {bound} | {explored.num_states:,} | {explored.num_steps:,} | {explored.num_ends:,} |"
    assert row in RELIABILITY.read_text()
    # What is queued or moving goes on within the step in which it became so.
    assert set(explored.counts) == {state.value for state in State} - {"queued", "moving"}


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_each_planted_bug_is_found(bug: type[Exchange]) -> None:
    with pytest.raises(Counterexample, match=f"^{BUGS[bug]}"):
        # The last two have more faults: a node that goes on with an answer, and chooses other tokens; and one
        # loss after the other.
        [explore_every(bound, bug) for bound in (*SMALL, *LARGE[-2:])]


def test_a_counterexample_is_a_numbered_sequence_of_events() -> None:
    class EndsTwice(Exchange):
        def decode_ended(self):
            return super().decode_ended() * 2

    with pytest.raises(Counterexample) as caught:
        explore_every(Bound(0, 1, 1, SMALL[1].fixed), EndsTwice)
    assert caught.value.promise == "the client gets exactly one end"
    assert caught.value.steps[0].startswith("begin()\n       → Place()")
    assert "decode_ended()" in caught.value.steps[-1]
