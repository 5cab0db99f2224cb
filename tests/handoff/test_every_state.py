"""The protocol keeps its promises in every state that two or three nodes can reach, and the explorer finds
what breaks them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.explore import Counterexample
from tests.support.handoff_simulator import Spread
from tests.support.handoff_simulator.every_state import (
    COMPUTED,
    SMALL,
    Bound,
    State,
    explore_bound,
    new_state,
    three_nodes,
)
from tests.support.handoff_simulator.planted import HIDDEN, PLANTED, Planted

RELIABILITY = Path(__file__).parents[2] / "docs" / "reliability.md"
EVERY_OFFER, RENDEZVOUS, ONE_FAULT, _ = SMALL
TWO_RANKS_TO_ONE = Bound(1, 0, 0, (COMPUTED,), spreads=(Spread(2), Spread(1)))
TWO_PRODUCERS = three_nodes(2, 0, 0, producers=(0, 1), consumers=(2,))
ONE_RANK_TO_TWO = Bound(1, 0, 0, (COMPUTED,), spreads=(Spread(1), Spread(2)))


@pytest.mark.slow
@pytest.mark.timeout(600)  # half a minute, but not on a machine that does much else
def test_promises_hold_in_every_state_within_small_bounds() -> None:
    outcomes: Counter[str] = Counter()
    for bound in SMALL:
        explored = explore_bound(bound)
        assert f"| {bound} | {explored.num_states:,} | {explored.num_steps:,} |" in RELIABILITY.read_text()
        outcomes.update(explored.counts)
    # Nothing that can happen to an offer or a load was out of reach.
    assert set(outcomes) == {
        "offer delivered",
        "offer aborted",
        "offer expired",
        "load loaded",
        "load failed",
        "load dropped",
    }


#: One fault of these kinds: enough for some bugs, and much smaller.
ABORT = replace(ONE_FAULT, faults=frozenset({"abort", "drop"}))
#: The bound in which each planted bug shows, if it is not the first one.
BOUNDS = {
    "awaits-forever": RENDEZVOUS,
    "guard-checked-before-the-copy": ABORT,
    "stale-bytes-accepted": ABORT,
    "load-reported-while-reading": ABORT,
    "content-not-compared": ONE_FAULT,
    "offers-outlive-weights": ONE_FAULT,
    "loads-outlive-weights": ONE_FAULT,
    "claim-forgotten": RENDEZVOUS,
    "pairing-by-number": TWO_PRODUCERS,
    "rank-not-released": TWO_RANKS_TO_ONE,
    "one-part-is-the-load": TWO_RANKS_TO_ONE,
    "one-rank-is-the-node": ONE_RANK_TO_TWO,
}
#: What is broken sooner than the promise that the random schedules find broken.
SOONER = {"announced-forever": "what was announced is offered or withdrawn"}


def counterexample(bound: Bound, planted: Planted) -> Counterexample:
    with pytest.raises(Counterexample) as caught:
        explore_bound(bound, planted)
    return caught.value


@pytest.mark.parametrize(("name", "planted"), {**PLANTED, **HIDDEN}.items())
def test_a_planted_bug_is_found(name: str, planted: Planted) -> None:
    found = counterexample(BOUNDS.get(name, EVERY_OFFER), planted)
    assert SOONER.get(name, planted.promise) in found.promise


def test_a_counterexample_is_a_numbered_sequence_of_events() -> None:
    found = counterexample(ONE_FAULT, PLANTED["content-not-compared"])
    assert str(found).splitlines()[:6] == [
        "what was loaded was computed from the same prompt",
        "  1. a's engine offers a prompt of 1 block(s)",
        "  2. c's engine gets decode-1, which names prefill-1 wrongly: "
        + str(found).partition("wrongly: ")[2].partition("\n")[0],
        "  3. c's engine gives blocks to decode-1",
        "from here on without further faults:",
        "  4. a carries out the order make_offer prefill-1",
    ]


def after(*choices: tuple[str, tuple[int | float, ...]]) -> State:
    state = new_state(ONE_FAULT)
    for choice in choices:
        state.do(choice)
    return state


OFFER, CLAIM = ("offer", (0, COMPUTED)), ("claim", (1, 0, 0))
A_ORDERED, C_ORDERED = ("carry_out", (0,)), ("carry_out", (1,))


def test_the_order_of_events_that_do_not_meet_makes_no_other_state() -> None:
    one, other = (
        after(OFFER, CLAIM, A_ORDERED, ("carry_out", (0,))),
        after(OFFER, CLAIM, C_ORDERED, A_ORDERED),
    )
    assert one.fingerprint() == other.fingerprint()


def test_numbers_of_connections_and_the_time_make_no_other_state() -> None:
    later = new_state(ONE_FAULT)
    later.simulation.next_number("peer")
    later.simulation.now = 64.0
    for choice in (OFFER, CLAIM, A_ORDERED, ("carry_out", (0,))):
        later.do(choice)
    assert later.fingerprint() == after(OFFER, CLAIM, A_ORDERED, ("carry_out", (0,))).fingerprint()


def test_whatever_differs_makes_another_state() -> None:
    state = after(OFFER, CLAIM, A_ORDERED)
    known = {state.fingerprint()}
    (offer,) = state.simulation.ranks[0].protocol.producer.offers
    offer.deadline += 1.0
    known.add(state.fingerprint())
    state.simulation.ranks[1].pool[0] += 1
    known.add(state.fingerprint())
    state.simulation.ranks[0].protocol.producer.new_attribute = 1  # type: ignore[attr-defined]
    known.add(state.fingerprint())
    state.do(C_ORDERED if state.simulation.num_waiting > 1 else ("carry_out", (0,)))
    known.add(state.fingerprint())
    assert len(known) == 5


def test_a_copy_of_a_state_is_the_same_and_goes_its_own_way() -> None:
    state = after(OFFER, CLAIM, A_ORDERED, ("carry_out", (0,)), ("deliver", (0,)))
    copy = state.keep()()
    assert copy.fingerprint() == state.fingerprint()
    assert list(copy.choices()) == list(state.choices())
    copy.do(("deliver", (0,)))
    assert copy.fingerprint() != state.fingerprint()
