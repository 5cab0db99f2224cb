"""Offers that several nodes load, or one node several times."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.connector.handoff.events import Action, ClearGuard, OfferEnded, Send, SetGuard
from kvferry.connector.handoff.messages import (
    PROTOCOL_VERSION,
    Claim,
    Deny,
    Grant,
    Heartbeat,
    Hello,
    Parked,
    Release,
)
from kvferry.connector.handoff.producer import ProducerProtocol
from tests.support.ranks import ONLY_RANK

TABLES = ((4, 5, 6),)
ONE, OTHER, THIRD = 1, 2, 3


@pytest.fixture
def shared(producer: ProducerProtocol) -> ProducerProtocol:
    """A producer that has offered a request for two loads, and three consumers."""
    _connect(producer, THIRD, "peer-3")
    producer.announce("r", 1, num_loads=2)
    _offer(producer)
    return producer


def _connect(producer: ProducerProtocol, peer: int, engine_id: str) -> None:
    producer.peer_connected(peer, now=0.0)
    producer.receive(peer, Hello(PROTOCOL_VERSION, engine_id, 5, "d"), now=0.0)


def _offer(producer: ProducerProtocol) -> list[Action]:
    return producer.offer("r", 1, TABLES, 12, now=0.0)


def claim(producer: ProducerProtocol, peer: int, now: float = 1.0, **rank: int) -> Any:
    (answer,) = producer.receive(peer, Claim("r", 1, **(rank or ONLY_RANK)), now)
    assert isinstance(answer, Send)
    assert answer.peer_id == peer
    return answer.message


def release(producer: ProducerProtocol, peer: int, *, delivered: bool = True, **rank: int) -> list[Action]:
    return producer.receive(peer, Release("r", 1, delivered=delivered, **(rank or ONLY_RANK)), now=2.0)


def outcome(actions: list[Action]) -> str:
    cleared, ended = actions
    assert isinstance(cleared, ClearGuard)
    assert isinstance(ended, OfferEnded)
    return ended.outcome


def test_two_nodes_read_and_the_offer_ends_with_the_later_one(shared: ProducerProtocol) -> None:
    assert isinstance(claim(shared, ONE), Grant)
    assert isinstance(claim(shared, OTHER), Grant)
    assert release(shared, ONE) == []
    assert outcome(release(shared, OTHER)) == "delivered"
    assert shared.num_offers == 0


def test_a_node_that_comes_too_late_still_finds_its_load(shared: ProducerProtocol) -> None:
    claim(shared, ONE)
    assert release(shared, ONE) == []
    assert isinstance(claim(shared, OTHER), Grant)
    assert outcome(release(shared, OTHER)) == "delivered"


def test_one_node_loads_twice(shared: ProducerProtocol) -> None:
    for _ in range(2):
        assert isinstance(claim(shared, ONE), Grant)
        ended = release(shared, ONE)
    assert outcome(ended) == "delivered"


@pytest.mark.parametrize("is_over", [False, True])
def test_no_further_node_reads(shared: ProducerProtocol, is_over: bool) -> None:
    claim(shared, ONE)
    claim(shared, OTHER)
    if is_over:
        release(shared, ONE)
    denied = claim(shared, THIRD)
    assert isinstance(denied, Deny)
    assert "another consumer" in denied.reason
    assert release(shared, THIRD) == []


def test_claims_of_two_nodes_wait_for_the_offer(producer: ProducerProtocol) -> None:
    producer.announce("r", 1, num_loads=2)
    assert isinstance(claim(producer, ONE), Parked)
    assert isinstance(claim(producer, OTHER), Parked)
    guard, *grants = _offer(producer)
    assert isinstance(guard, SetGuard)
    assert {each.peer_id for each in grants if isinstance(each, Send)} == {ONE, OTHER}


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_load_that_fails_costs_the_others_nothing(shared: ProducerProtocol, is_lost: bool) -> None:
    claim(shared, ONE)
    claim(shared, OTHER)
    if is_lost:
        assert shared.peer_lost(ONE, now=2.0) == []
    else:
        assert release(shared, ONE, delivered=False) == []
    assert outcome(release(shared, OTHER)) == "aborted"  # not everything was delivered


def test_only_nodes_that_read_renew_the_lease(shared: ProducerProtocol) -> None:
    claim(shared, ONE, now=10.0)
    shared.receive(OTHER, Heartbeat((1,)), now=20.0)
    assert shared.next_deadline() == 40.0
    release(shared, ONE)
    # Between two loads none renews it: the next one comes within the lease, or never.
    shared.receive(ONE, Heartbeat((1,)), now=30.0)
    cleared, ended = shared.advance(40.0)
    assert isinstance(cleared, ClearGuard)
    assert isinstance(ended, OfferEnded)
    assert ended.outcome == "expired"


def test_each_rank_goes_through_the_loads_by_itself(producer: ProducerProtocol) -> None:
    """One rank of a node is in its second load while the other one is in its first."""
    for peer in (11, 12):
        _connect(producer, peer, "node")
    producer.announce("r", 1, num_loads=2)
    _offer(producer)
    ranks = [{"rank": rank, "num_ranks": 2} for rank in range(2)]
    claim(producer, 11, **ranks[0])
    assert release(producer, 11, **ranks[0]) == []
    assert isinstance(claim(producer, 11, **ranks[0]), Grant)
    # The node has begun all there are, and its other rank follows.
    assert isinstance(claim(producer, ONE), Deny)
    assert isinstance(claim(producer, 12, **ranks[1]), Grant)
    assert release(producer, 12, **ranks[1]) == []
    assert isinstance(claim(producer, 12, **ranks[1]), Grant)
    assert release(producer, 12, **ranks[1]) == []
    assert outcome(release(producer, 11, **ranks[0])) == "delivered"


def test_what_has_not_begun_is_given_up(shared: ProducerProtocol) -> None:
    claim(shared, ONE)
    assert shared.give_up("r", 1) == []
    assert isinstance(claim(shared, OTHER), Deny)
    assert outcome(release(shared, ONE)) == "delivered"


def test_a_load_that_is_not_needed_any_more_is_given_up(shared: ProducerProtocol) -> None:
    claim(shared, ONE)
    release(shared, ONE)
    assert outcome(shared.give_up("r", 1)) == "delivered"


def test_an_offer_that_no_node_has_read_is_given_up(shared: ProducerProtocol) -> None:
    assert outcome(shared.give_up("r", 1)) == "aborted"
