"""Claims and releases that reach a producer before it knows of the offer."""

from __future__ import annotations

import math

import pytest

from kvferry.connector.handoff.events import (
    Action,
    OfferEnded,
    Send,
    SetGuard,
)
from kvferry.connector.handoff.messages import (
    Claim,
    Deny,
    Grant,
    Release,
)
from kvferry.connector.handoff.producer import ProducerProtocol

TABLES = ((4, 5, 6),)
PEER, OTHER = 1, 2


def denial(actions: list[Action]) -> str:
    (action,) = actions
    assert isinstance(action, Send)
    assert isinstance(action.message, Deny)
    return action.message.reason


def test_an_early_claim_is_granted_when_the_offer_comes(producer: ProducerProtocol) -> None:
    assert producer.receive(PEER, Claim("r", 1, 0, 1), now=0.0) == []
    guarded, granted = producer.offer("r", 1, TABLES, 12, now=2.0)
    assert isinstance(guarded, SetGuard)
    assert granted == Send(PEER, Grant("r", 1, guarded.index, 12, 12, TABLES))


def test_an_early_claim_waits_no_longer_than_it_may(producer: ProducerProtocol) -> None:
    producer.receive(PEER, Claim("r", 1, 0, 1), now=0.0)
    assert producer.next_deadline() == 3.0
    assert "in time" in denial(producer.advance(now=3.0))
    assert producer.next_deadline() == math.inf


def test_an_early_claim_of_a_number_that_was_left_out_is_denied(producer: ProducerProtocol) -> None:
    producer.receive(PEER, Claim("r", 1, 0, 1), now=0.0)
    denied, guarded = producer.offer("s", 2, TABLES, 12, now=1.0)
    assert "never made" in denial([denied])
    assert isinstance(guarded, SetGuard)


def test_an_early_claim_of_another_request_is_denied(producer: ProducerProtocol) -> None:
    producer.receive(PEER, Claim("not r", 1, 0, 1), now=0.0)
    denied, guarded = producer.offer("r", 1, TABLES, 12, now=1.0)
    assert "never made" in denial([denied])
    assert isinstance(guarded, SetGuard)


def test_early_claims_are_bounded(producer: ProducerProtocol) -> None:
    for lease in (1, 2):
        assert producer.receive(PEER, Claim("r", lease, 0, 1), now=0.0) == []
    assert "too many" in denial(producer.receive(PEER, Claim("r", 3, 0, 1), now=0.0))
    assert producer.receive(PEER, Release("r", 4, False, 0, 1), now=0.0) == []


def test_a_second_early_claimant_is_denied(producer: ProducerProtocol) -> None:
    producer.receive(PEER, Claim("r", 1, 0, 1), now=0.0)
    assert "another consumer" in denial(producer.receive(OTHER, Claim("r", 1, 0, 1), now=0.0))
    assert producer.receive(OTHER, Release("r", 1, False, 0, 1), now=0.0) == []
    assert isinstance(producer.offer("r", 1, TABLES, 12, now=1.0)[1], Send)


@pytest.mark.parametrize("claims_first", [True, False])
def test_an_early_release_ends_the_offer_as_soon_as_it_comes(
    producer: ProducerProtocol, claims_first: bool
) -> None:
    if claims_first:
        producer.receive(PEER, Claim("r", 1, 0, 1), now=0.0)
    producer.receive(PEER, Release("r", 1, False, 0, 1), now=0.0)
    producer.peer_lost(PEER, now=0.5)
    (ended,) = producer.offer("r", 1, TABLES, 12, now=1.0)
    assert isinstance(ended, OfferEnded)
    assert ended.outcome == "aborted"
    assert producer.num_offers == 0


def test_an_offer_whose_early_claimant_is_gone_ends_as_soon_as_it_comes(producer: ProducerProtocol) -> None:
    producer.receive(PEER, Claim("r", 1, 0, 1), now=0.0)
    producer.peer_lost(PEER, now=0.5)
    (ended,) = producer.offer("r", 1, TABLES, 12, now=1.0)
    assert isinstance(ended, OfferEnded)
    assert ended.outcome == "aborted"


def test_an_early_claim_without_a_guard_is_denied(producer: ProducerProtocol) -> None:
    producer.offer("a", 1, TABLES, 12, now=0.0)
    producer.offer("b", 2, TABLES, 12, now=0.0)
    producer.receive(PEER, Claim("r", 3, 0, 1), now=0.0)
    denied, ended = producer.offer("r", 3, TABLES, 12, now=1.0)
    assert "too many" in denial([denied])
    assert isinstance(ended, OfferEnded)


def test_who_claims_what_was_withdrawn_is_denied_at_once(producer: ProducerProtocol) -> None:
    producer.receive(PEER, Claim("r", 1, 0, 1), now=0.0)
    assert "lost its blocks" in denial(producer.withdraw(1))
    assert producer.next_deadline() == math.inf
    assert "never made" in denial(producer.receive(PEER, Claim("r", 1, 0, 1), now=1.0))


def test_a_withdrawn_number_may_come_after_that_of_a_later_offer(producer: ProducerProtocol) -> None:
    producer.receive(PEER, Claim("r", 1, 0, 1), now=0.0)
    assert "never made" in denial(producer.offer("s", 2, TABLES, 12, now=0.0)[:1])
    assert producer.withdraw(1) == []
    assert [type(action) for action in producer.offer("t", 3, TABLES, 12, now=0.0)] == [SetGuard]


def test_all_ranks_may_be_early(producer: ProducerProtocol) -> None:
    producer.receive(PEER, Claim("r", 1, 0, 1), now=0.0)
    assert "no share" in denial(producer.receive(OTHER, Claim("s", 2, 1, 1), now=0.0))
    assert [type(action) for action in producer.offer("r", 1, TABLES, 12, now=1.0)] == [SetGuard, Send]
