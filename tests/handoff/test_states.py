"""The states of offers and loads have the tables in `docs/design.md`, and no other transition happens."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvferry.connector.handoff.config import HandoffConfig
from kvferry.connector.handoff.loads import LOAD_TRANSITIONS, Load, LoadState, Verdict
from kvferry.connector.handoff.messages import Grant
from kvferry.connector.handoff.offers import OFFER_TRANSITIONS, Offer, OfferState
from kvferry.connector.handoff.producer import ProducerProtocol
from kvferry.connector.p2p.scheduler import RequestState
from kvferry.lab.engine.handoffs import Hold
from kvferry.lab.engine.request import RequestStatus
from kvferry.transports.errors import KVTransferStateError
from tests.support.handoff_simulator import PromiseBroken, Simulation, explore
from tests.support.handoff_simulator.load_states import GRANT, OFFER

DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
#: A lease number. It must not be shown, because a peer that knows it can read the offer.
LEASE = 4611686018427387904


def changes_in_design(heading: str) -> set[tuple[str, str]]:
    """Return the transitions in a table of the design."""
    _, _, section = DESIGN.read_text().partition(f"### {heading}\n")
    rows = [
        line.split("|")[1:4] for line in section.partition("\n### ")[0].splitlines() if line.startswith("|")
    ]
    found = set()
    for states, _, targets in rows[2:]:
        for state in states.split(","):
            for target in targets.split(","):
                found.add((state.strip(), state.strip() if target.strip() == "same" else target.strip()))
    return {(state, target) for state, target in found if state not in ("–", target)}


def changes_in_code(table: Mapping[Any, frozenset[Any]]) -> set[tuple[str, str]]:
    return {(name(state), name(target)) for state, targets in table.items() for target in targets}


def name(state: enum.Enum) -> str:
    return state.name.lower()


@pytest.mark.parametrize(
    ("heading", "table"),
    [("Producer, one offer", OFFER_TRANSITIONS), ("Consumer, one load", LOAD_TRANSITIONS)],
)
def test_the_tables_of_the_design_are_those_of_the_code(
    heading: str, table: Mapping[Any, frozenset[Any]]
) -> None:
    assert changes_in_design(heading) == changes_in_code(table)


def test_a_word_for_states_of_several_things_has_one_meaning() -> None:
    """It stands in the glossary, once."""
    _, _, section = DESIGN.read_text().partition("## Glossary\n")
    glossary = Counter(
        word.strip()
        for line in section.partition("\n## ")[0].splitlines()
        if line.startswith("|")
        for word in line.split("|")[1].split(",")
    )
    uses = Counter(
        name(state)
        for states in (RequestState, OfferState, LoadState, Hold, RequestStatus)
        for state in states
    )
    shared = {word for word, count in uses.items() if count > 1}
    assert shared == {"announced", "open", "offered", "loading", "draining", "ended"}
    assert {word: glossary[word] for word in shared} == dict.fromkeys(shared, 1)


@pytest.fixture
def offer() -> Offer:
    return Offer("r", LEASE, HandoffConfig())


def test_an_offers_repr_shows_its_state_and_hides_its_number(offer: Offer) -> None:
    assert repr(offer) == "<offer of request 'r': announced, 0 read>"
    offer.open(Grant("r", LEASE, guard_index=0, num_tokens=12, num_ready=8, block_ids=((4, 5),)))
    assert repr(offer) == "<offer of request 'r': open, 8 of 12 tokens ready, 0 read>"


def test_an_offer_ends_once(offer: Offer) -> None:
    offer.end()
    with pytest.raises(KVTransferStateError, match="ended, 0 read> cannot become ended"):
        offer.end()


def test_a_loads_repr_shows_its_state_and_hides_its_number() -> None:
    load = Load("ours", OFFER)
    assert repr(load) == "<load of request 'ours': connecting, ranks: connecting>"
    (part,) = load.parts
    load.claim(part, 1.0)
    load.accept(part, GRANT, 1.0)
    load.start_read(part, 1.0)
    load.decide(Verdict("dropped"))
    assert repr(load) == "<load of request 'ours': draining, ranks: reading>"
    load.end_read(part)
    assert load.state is LoadState.ENDED


def test_a_load_is_not_granted_before_it_claims() -> None:
    load = Load("ours", OFFER)
    with pytest.raises(KVTransferStateError, match="rank 0 cannot become granted"):
        load.accept(load.parts[0], GRANT, 1.0)


def explore_many(producer: type[ProducerProtocol]) -> None:
    for seed in range(100):
        explore(Simulation(producer), seed)


class EndsTwice(ProducerProtocol):
    def _end(self, offer, *args):
        actions = super()._end(offer, *args)
        offer.end()
        return actions


def test_the_simulator_finds_a_transition_that_is_in_no_table_and_shows_all_states() -> None:
    with pytest.raises(PromiseBroken, match="cannot become ended.*sim://a/0: ") as caught:
        explore_many(EndsTwice)
    assert "offer of request 'prefill-" in caught.value.shown
