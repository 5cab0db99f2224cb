"""The producer's table, row by row, and what happens between the rows."""

from __future__ import annotations

import math

import pytest

from kvferry.connector.handoff.config import HandoffConfig
from kvferry.connector.handoff.events import (
    Action,
    ClearGuard,
    Disconnect,
    Identity,
    OfferEnded,
    Send,
    SetGuard,
)
from kvferry.connector.handoff.messages import (
    PROTOCOL_VERSION,
    Claim,
    Deny,
    Grant,
    Heartbeat,
    Hello,
    Release,
    Revoke,
    Welcome,
)
from kvferry.connector.handoff.producer import ProducerProtocol
from kvferry.connector.planning.layout import KVLayout
from kvferry.transports.errors import KVTransferStateError

TABLES = ((4, 5, 6),)
PEER, OTHER = 1, 2


@pytest.fixture
def producer(identity: Identity, config: HandoffConfig) -> ProducerProtocol:
    """A producer with two guards and two consumers that have said hello."""
    producer = ProducerProtocol(identity, config, num_guards=2)
    for peer in (PEER, OTHER):
        producer.peer_connected(peer, now=0.0)
        producer.receive(peer, Hello(PROTOCOL_VERSION, f"peer-{peer}", 5, "d"), now=0.0)
    return producer


def offered(producer: ProducerProtocol, lease: int = 1, request_id: str = "r", now: float = 0.0) -> int:
    """Make an offer; return its guard."""
    (action,) = producer.offer(request_id, lease, TABLES, 12, now)
    assert isinstance(action, SetGuard)
    assert action.value == lease
    return action.index


def claimed(producer: ProducerProtocol, lease: int = 1, now: float = 0.0) -> int:
    guard = offered(producer, lease, now=now)
    assert producer.receive(PEER, Claim("r", lease), now) == [
        Send(PEER, Grant("r", lease, guard, 12, TABLES))
    ]
    return guard


def denial(actions: list[Action]) -> str:
    (action,) = actions
    assert isinstance(action, Send)
    assert isinstance(action.message, Deny)
    return action.message.reason


# -- the table ---------------------------------------------------------------------------------------


def test_an_offer_sets_its_guard(producer: ProducerProtocol) -> None:
    offered(producer, lease=7)
    assert producer.num_offers == 1


def test_a_claim_is_granted_and_renews_the_lease(producer: ProducerProtocol) -> None:
    offered(producer)
    (granted,) = producer.receive(PEER, Claim("r", 1), now=20.0)
    assert isinstance(granted, Send)
    assert isinstance(granted.message, Grant)
    assert producer.next_deadline() == 50.0


@pytest.mark.parametrize("prepare", [offered, claimed])
def test_a_heartbeat_renews_the_lease(producer: ProducerProtocol, prepare) -> None:
    prepare(producer)
    assert producer.receive(PEER, Heartbeat((1, 99)), now=25.0) == []
    assert producer.advance(now=54.9) == []
    assert producer.next_deadline() == 55.0


@pytest.mark.parametrize(("delivered", "outcome"), [(True, "delivered"), (False, "aborted")])
def test_a_release_ends_a_claimed_offer(producer: ProducerProtocol, delivered: bool, outcome: str) -> None:
    guard = claimed(producer)
    cleared, ended = producer.receive(PEER, Release("r", 1, delivered), now=1.0)
    assert cleared == ClearGuard(guard)
    assert isinstance(ended, OfferEnded)
    assert (ended.request_id, ended.outcome) == ("r", outcome)
    assert producer.num_offers == 0
    assert producer.next_deadline() == math.inf


@pytest.mark.parametrize("delivered", [True, False])
def test_a_release_without_a_claim_is_never_a_delivery(producer: ProducerProtocol, delivered: bool) -> None:
    guard = offered(producer)
    cleared, ended = producer.receive(PEER, Release("r", 1, delivered), now=1.0)
    assert cleared == ClearGuard(guard)
    assert isinstance(ended, OfferEnded)
    assert ended.outcome == "aborted"


def test_an_unclaimed_lease_runs_out(producer: ProducerProtocol) -> None:
    guard = offered(producer)
    assert producer.advance(now=29.9) == []
    cleared, ended = producer.advance(now=30.0)
    assert cleared == ClearGuard(guard)
    assert isinstance(ended, OfferEnded)
    assert ended.outcome == "expired"


def test_a_claimed_lease_runs_out_and_is_revoked(producer: ProducerProtocol) -> None:
    guard = claimed(producer)
    cleared, revoked, ended = producer.advance(now=30.0)
    assert cleared == ClearGuard(guard)
    assert isinstance(revoked, Send)
    assert isinstance(revoked.message, Revoke)
    assert isinstance(ended, OfferEnded)
    assert ended.outcome == "expired"


def test_a_lost_claimant_ends_its_offers_only(producer: ProducerProtocol) -> None:
    guard = claimed(producer)
    offered(producer, lease=2, request_id="s")
    cleared, ended = producer.peer_lost(PEER, now=1.0)
    assert cleared == ClearGuard(guard)
    assert isinstance(ended, OfferEnded)
    assert (ended.request_id, ended.outcome) == ("r", "aborted")
    assert producer.num_offers == 1
    assert producer.peer_lost(PEER, now=2.0) == []


def test_an_abort_clears_revokes_and_reports(producer: ProducerProtocol) -> None:
    guard = claimed(producer)
    cleared, revoked, ended = producer.abort("r", now=1.0)
    assert cleared == ClearGuard(guard)
    assert isinstance(revoked, Send)
    assert revoked.peer_id == PEER
    assert isinstance(revoked.message, Revoke)
    assert isinstance(ended, OfferEnded)
    assert ended.outcome == "aborted"
    assert producer.abort("r", now=2.0) == []


def test_shutdown_ends_everything(producer: ProducerProtocol) -> None:
    claimed(producer)
    offered(producer, lease=2, request_id="s")
    producer.receive(OTHER, Claim("t", 3), now=1.0)
    actions = producer.shutdown(now=1.0)
    assert [type(action) for action in actions].count(ClearGuard) == 2
    assert {action.request_id for action in actions if isinstance(action, OfferEnded)} == {"r", "s"}
    assert [action for action in actions if isinstance(action, Disconnect)] == [
        Disconnect(PEER),
        Disconnect(OTHER),
    ]
    assert producer.next_deadline() == math.inf


# -- stale, foreign and hostile ----------------------------------------------------------------------


def test_an_ended_offer_is_denied(producer: ProducerProtocol) -> None:
    claimed(producer)
    producer.receive(PEER, Release("r", 1, True), now=1.0)
    assert "is over" in denial(producer.receive(PEER, Claim("r", 1), now=2.0))


def test_a_lease_of_another_request_is_denied(producer: ProducerProtocol) -> None:
    offered(producer)
    assert "was never made" in denial(producer.receive(PEER, Claim("not r", 1), now=1.0))
    assert producer.receive(PEER, Release("not r", 1, True), now=1.0) == []


def test_a_second_claimant_is_denied_and_can_do_nothing(producer: ProducerProtocol) -> None:
    claimed(producer)
    assert "another consumer" in denial(producer.receive(OTHER, Claim("r", 1), now=1.0))
    assert producer.receive(OTHER, Release("r", 1, True), now=1.0) == []
    producer.receive(OTHER, Heartbeat((1,)), now=20.0)
    assert producer.next_deadline() == 30.0


def test_more_offers_than_guards_end_at_once(producer: ProducerProtocol) -> None:
    guard = offered(producer)
    offered(producer, lease=2, request_id="s")
    assert producer.offer("t", 3, TABLES, 12, now=1.0) == [
        OfferEnded("t", "aborted", "too many offers are held")
    ]
    producer.abort("r", now=2.0)
    assert offered(producer, lease=4, request_id="u") == guard


def test_lease_numbers_only_grow(producer: ProducerProtocol) -> None:
    offered(producer, lease=5)
    with pytest.raises(KVTransferStateError):
        producer.offer("s", 5, TABLES, 12, now=1.0)
    with pytest.raises(KVTransferStateError):
        producer.offer("r", 6, TABLES, 12, now=1.0)


# -- early -------------------------------------------------------------------------------------------


def test_an_early_claim_is_granted_when_the_offer_comes(producer: ProducerProtocol) -> None:
    assert producer.receive(PEER, Claim("r", 1), now=0.0) == []
    guarded, granted = producer.offer("r", 1, TABLES, 12, now=2.0)
    assert isinstance(guarded, SetGuard)
    assert granted == Send(PEER, Grant("r", 1, guarded.index, 12, TABLES))


def test_an_early_claim_waits_no_longer_than_it_may(producer: ProducerProtocol) -> None:
    producer.receive(PEER, Claim("r", 1), now=0.0)
    assert producer.next_deadline() == 3.0
    assert "in time" in denial(producer.advance(now=3.0))
    assert producer.next_deadline() == math.inf


def test_an_early_claim_of_a_number_that_was_left_out_is_denied(producer: ProducerProtocol) -> None:
    producer.receive(PEER, Claim("r", 1), now=0.0)
    denied, guarded = producer.offer("s", 2, TABLES, 12, now=1.0)
    assert "never made" in denial([denied])
    assert isinstance(guarded, SetGuard)


def test_an_early_claim_of_another_request_is_denied(producer: ProducerProtocol) -> None:
    producer.receive(PEER, Claim("not r", 1), now=0.0)
    guarded, denied = producer.offer("r", 1, TABLES, 12, now=1.0)
    assert isinstance(guarded, SetGuard)
    assert "never made" in denial([denied])


def test_early_claims_are_bounded(producer: ProducerProtocol) -> None:
    for lease in (1, 2):
        assert producer.receive(PEER, Claim("r", lease), now=0.0) == []
    assert "too many" in denial(producer.receive(PEER, Claim("r", 3), now=0.0))
    assert producer.receive(PEER, Release("r", 4, False), now=0.0) == []


def test_a_second_early_claimant_is_denied(producer: ProducerProtocol) -> None:
    producer.receive(PEER, Claim("r", 1), now=0.0)
    assert "another consumer" in denial(producer.receive(OTHER, Claim("r", 1), now=0.0))
    assert producer.receive(OTHER, Release("r", 1, False), now=0.0) == []
    assert isinstance(producer.offer("r", 1, TABLES, 12, now=1.0)[1], Send)


@pytest.mark.parametrize("claims_first", [True, False])
def test_an_early_release_ends_the_offer_as_soon_as_it_comes(
    producer: ProducerProtocol, claims_first: bool
) -> None:
    if claims_first:
        producer.receive(PEER, Claim("r", 1), now=0.0)
    producer.receive(PEER, Release("r", 1, False), now=0.0)
    producer.peer_lost(PEER, now=0.5)
    (ended,) = producer.offer("r", 1, TABLES, 12, now=1.0)
    assert isinstance(ended, OfferEnded)
    assert ended.outcome == "aborted"
    assert producer.num_offers == 0


def test_an_early_claim_dies_with_its_sender(producer: ProducerProtocol) -> None:
    producer.receive(PEER, Claim("r", 1), now=0.0)
    producer.peer_lost(PEER, now=0.5)
    offered(producer)


def test_an_early_claim_without_a_guard_is_denied(producer: ProducerProtocol) -> None:
    offered(producer, lease=1, request_id="a")
    offered(producer, lease=2, request_id="b")
    producer.receive(PEER, Claim("r", 3), now=0.0)
    denied, ended = producer.offer("r", 3, TABLES, 12, now=1.0)
    assert "too many" in denial([denied])
    assert isinstance(ended, OfferEnded)


# -- peers -------------------------------------------------------------------------------------------


def test_hello_is_answered_with_everything_a_consumer_must_know(
    producer: ProducerProtocol, identity: Identity
) -> None:
    producer.peer_connected(3, now=0.0)
    (answer,) = producer.receive(3, Hello(PROTOCOL_VERSION, "x", 5, "another digest"), now=0.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Welcome)
    assert (answer.message.engine_id, answer.message.epoch) == ("here", 11)
    assert (answer.message.digest, answer.message.fields) == (identity.digest, identity.fields)
    assert KVLayout.from_plain(answer.message.layout) == identity.layout


def test_a_peer_that_says_nothing_is_dropped(producer: ProducerProtocol) -> None:
    producer.peer_connected(3, now=10.0)
    assert producer.next_deadline() == 14.0
    assert producer.advance(now=14.0) == [Disconnect(3)]
    assert producer.next_deadline() == math.inf


def test_a_peer_that_does_not_say_hello_first_is_dropped(producer: ProducerProtocol) -> None:
    offered(producer)
    producer.peer_connected(3, now=0.0)
    assert producer.receive(3, Claim("r", 1), now=0.0) == [Disconnect(3)]
    assert producer.receive(3, Claim("r", 1), now=0.0) == []


def test_an_unknown_peer_is_ignored(producer: ProducerProtocol) -> None:
    offered(producer)
    assert producer.receive(99, Claim("r", 1), now=0.0) == []
    assert producer.receive(99, Hello(PROTOCOL_VERSION, "x", 5, "d"), now=0.0) == []
