"""Claims and releases that reach a producer before it makes the offer wait for as long as the request is
known.
"""

from __future__ import annotations

import math

import pytest

from kvferry.connector.handoff.config import HandoffConfig
from kvferry.connector.handoff.events import Action, OfferEnded, Send, SetGuard
from kvferry.connector.handoff.messages import (
    PROTOCOL_VERSION,
    Claim,
    Grant,
    Hello,
    Message,
    Parked,
    Release,
)
from kvferry.connector.handoff.producer import ProducerProtocol
from kvferry.transports.errors import KVTransferStateError
from tests.support.handoff_simulator.load_states import denial
from tests.support.ranks import ONLY_RANK

TABLES = ((4, 5, 6),)
PEER, OTHER = 1, 2


@pytest.fixture
def announced(producer: ProducerProtocol) -> ProducerProtocol:
    """A producer that knows a request "r", whose offer will have the lease number 7."""
    assert producer.announce("r", 7) == []
    return producer


def only(actions: list[Action]) -> Message:
    (action,) = actions
    assert isinstance(action, Send)
    return action.message


def parked(producer: ProducerProtocol, peer: int = PEER, rank: int = 0, num_ranks: int = 1) -> None:
    claim = Claim("r", 7, rank=rank, num_ranks=num_ranks)
    assert producer.receive(peer, claim, now=0.0) == [Send(peer, Parked("r", 7))]


def test_an_early_claim_is_granted_when_the_offer_comes(announced: ProducerProtocol) -> None:
    parked(announced)
    guarded, granted = announced.offer("r", 7, TABLES, 12, now=2.0, content="c")
    assert isinstance(guarded, SetGuard)
    assert granted == Send(
        PEER,
        Grant("r", 7, guard_index=guarded.index, num_tokens=12, num_ready=12, block_ids=TABLES, content="c"),
    )
    assert announced.num_announced == 0


def test_an_early_claim_is_granted_when_the_offer_is_opened(announced: ProducerProtocol) -> None:
    parked(announced)
    guarded, granted = announced.open("r", 7, TABLES, 12, 4, "c")
    assert granted == Send(
        PEER,
        Grant("r", 7, guard_index=guarded.index, num_tokens=12, num_ready=4, block_ids=TABLES, content="c"),
    )


def test_an_early_claim_waits_for_as_long_as_its_request_is_known(
    announced: ProducerProtocol, config: HandoffConfig
) -> None:
    """The prompt takes an hour to compute.

    The producer tells the consumer often enough that it should keep waiting.
    """
    parked(announced)
    now = 0.0
    while now < 3600.0:
        due = announced.next_deadline()
        assert due - now < config.claim_timeout_s / 2
        now = due
        assert announced.advance(now) == [Send(PEER, Parked("r", 7))]
    assert isinstance(only(announced.offer("r", 7, TABLES, 12, now)[1:]), Grant)
    assert announced.next_deadline() == now + config.lease_s


@pytest.mark.parametrize("is_claimed_first", [True, False])
def test_a_consumer_of_an_open_offer_is_told_that_its_chunk_is_being_computed(
    announced: ProducerProtocol, config: HandoffConfig, is_claimed_first: bool
) -> None:
    if is_claimed_first:
        parked(announced)
    announced.open("r", 7, TABLES, 12, 4)
    if not is_claimed_first:
        assert announced.next_deadline() == math.inf
        only(announced.receive(PEER, Claim("r", 7, **ONLY_RANK), now=0.0))
    now = 0.0
    while now < 3600.0:
        due = announced.next_deadline()
        assert due - now < config.claim_timeout_s / 2
        now = due
        assert announced.advance(now) == [Send(PEER, Parked("r", 7))]
    announced.complete("r", TABLES, now)
    assert announced.next_deadline() == now + config.lease_s


def test_without_claims_an_announcement_costs_nothing(announced: ProducerProtocol) -> None:
    assert announced.next_deadline() == math.inf
    parked(announced)
    announced.peer_lost(PEER, now=0.5)
    assert announced.advance(announced.next_deadline()) == []
    assert announced.next_deadline() == math.inf


def test_a_claim_of_an_unannounced_offer_is_denied_at_once(announced: ProducerProtocol) -> None:
    for claim in (Claim("r", 8, **ONLY_RANK), Claim("not r", 7, **ONLY_RANK)):
        assert "never made" in denial(announced.receive(PEER, claim, now=0.0))
    assert announced.receive(PEER, Release("r", 8, delivered=False, **ONLY_RANK), now=0.0) == []


def test_a_second_early_claimant_is_denied(announced: ProducerProtocol) -> None:
    parked(announced)
    assert "another consumer" in denial(announced.receive(OTHER, Claim("r", 7, **ONLY_RANK), now=0.0))
    assert announced.receive(OTHER, Release("r", 7, delivered=False, **ONLY_RANK), now=0.0) == []
    assert isinstance(only(announced.offer("r", 7, TABLES, 12, now=1.0)[1:]), Grant)


def test_a_peer_can_hold_only_one_early_claim_of_an_offer(announced: ProducerProtocol) -> None:
    parked(announced, num_ranks=2)
    assert "another rank" in denial(announced.receive(PEER, Claim("r", 7, rank=1, num_ranks=2), now=0.0))


def test_all_ranks_of_a_consumer_may_claim_early(announced: ProducerProtocol) -> None:
    announced.peer_connected(3, now=0.0)
    announced.receive(3, Hello(PROTOCOL_VERSION, "peer-1", 5, "d"), now=0.0)
    parked(announced, PEER, 0, 2)
    parked(announced, 3, 1, 2)
    assert "no share" in denial(announced.receive(OTHER, Claim("r", 7, rank=2, num_ranks=2), now=0.0))
    assert [type(action) for action in announced.offer("r", 7, TABLES, 12, now=1.0)] == [SetGuard, Send, Send]


def test_an_early_release_ends_the_offer_as_soon_as_it_comes(announced: ProducerProtocol) -> None:
    parked(announced)
    assert announced.receive(PEER, Release("r", 7, delivered=False, **ONLY_RANK), now=0.0) == []
    announced.peer_lost(PEER, now=0.5)
    (ended,) = announced.offer("r", 7, TABLES, 12, now=1.0)
    assert isinstance(ended, OfferEnded)
    assert ended.outcome == "aborted"
    assert announced.num_offers == 0


def test_an_early_release_without_a_claim_is_ignored(announced: ProducerProtocol) -> None:
    announced.receive(PEER, Release("r", 7, delivered=False, **ONLY_RANK), now=0.0)
    assert [type(action) for action in announced.offer("r", 7, TABLES, 12, now=1.0)] == [SetGuard]


def test_an_offer_whose_early_claimant_is_gone_ends_as_soon_as_it_comes(announced: ProducerProtocol) -> None:
    parked(announced)
    announced.peer_lost(PEER, now=0.5)
    (ended,) = announced.offer("r", 7, TABLES, 12, now=1.0)
    assert isinstance(ended, OfferEnded)
    assert ended.outcome == "aborted"


def test_an_early_claim_without_a_guard_is_denied(announced: ProducerProtocol) -> None:
    announced.offer("a", 1, TABLES, 12, now=0.0)
    announced.offer("b", 2, TABLES, 12, now=0.0)
    parked(announced)
    denied, ended = announced.offer("r", 7, TABLES, 12, now=1.0)
    assert "too many" in denial([denied])
    assert isinstance(ended, OfferEnded)


def test_a_claim_of_a_withdrawn_offer_is_denied_at_once(announced: ProducerProtocol) -> None:
    parked(announced)
    assert "lost its blocks" in denial(announced.withdraw(7))
    assert announced.next_deadline() == math.inf
    assert "never made" in denial(announced.receive(PEER, Claim("r", 7, **ONLY_RANK), now=1.0))
    assert announced.withdraw(7) == []


def test_an_offer_that_was_made_cannot_be_withdrawn(announced: ProducerProtocol) -> None:
    parked(announced)
    announced.offer("r", 7, TABLES, 12, now=1.0)
    assert announced.withdraw(7) == []
    assert announced.num_offers == 1


def test_shutting_down_denies_early_claims(announced: ProducerProtocol) -> None:
    parked(announced)
    assert "shuts down" in denial(announced.shutdown(now=1.0)[:1])
    assert announced.num_announced == 0


def test_a_number_is_announced_once(announced: ProducerProtocol) -> None:
    with pytest.raises(KVTransferStateError):
        announced.announce("s", 7)
    announced.offer("r", 7, TABLES, 12, now=0.0)
    with pytest.raises(KVTransferStateError):
        announced.announce("s", 7)
