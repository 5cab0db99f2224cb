"""Every row of the producer's state table, and the cases between the rows."""

from __future__ import annotations

import math

import pytest

from kvferry.connector.handoff.config import HandoffConfig
from kvferry.connector.handoff.events import (
    ClearGuard,
    Disconnect,
    ExtendGuard,
    Identity,
    OfferEnded,
    Send,
    SetGuard,
)
from kvferry.connector.handoff.messages import (
    PROTOCOL_VERSION,
    Claim,
    Grant,
    Heartbeat,
    Hello,
    Parked,
    Progress,
    Release,
    Revoke,
    Welcome,
)
from kvferry.connector.handoff.producer import ProducerProtocol
from kvferry.connector.planning.layout import KVLayout
from kvferry.transports.errors import KVTransferStateError
from tests.support.handoff_simulator.load_states import denial, outcome
from tests.support.ranks import ONLY_RANK

TABLES = ((4, 5, 6),)
PEER, OTHER = 1, 2


def offered(producer: ProducerProtocol, lease: int = 1, request_id: str = "r", now: float = 0.0) -> int:
    """Make an offer; return its guard."""
    (action,) = producer.offer(request_id, lease, TABLES, 12, now)
    assert isinstance(action, SetGuard)
    assert action.value == lease
    return action.index


def claimed(producer: ProducerProtocol, lease: int = 1, now: float = 0.0) -> int:
    guard = offered(producer, lease, now=now)
    assert producer.receive(PEER, Claim("r", lease, **ONLY_RANK), now) == [
        Send(PEER, Grant("r", lease, guard_index=guard, num_tokens=12, num_ready=12, block_ids=TABLES))
    ]
    return guard


# -- the table ---------------------------------------------------------------------------------------


def test_an_offer_sets_its_guard(producer: ProducerProtocol) -> None:
    offered(producer, lease=7)
    assert producer.num_offers == 1


def test_a_claim_is_granted_and_renews_the_lease(producer: ProducerProtocol) -> None:
    offered(producer)
    (granted,) = producer.receive(PEER, Claim("r", 1, **ONLY_RANK), now=20.0)
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
    cleared, ended = producer.receive(PEER, Release("r", 1, delivered=delivered, **ONLY_RANK), now=1.0)
    assert cleared == ClearGuard(guard)
    assert isinstance(ended, OfferEnded)
    assert (ended.request_id, ended.outcome) == ("r", outcome)
    assert producer.num_offers == 0
    assert producer.next_deadline() == math.inf


@pytest.mark.parametrize("delivered", [True, False])
def test_a_release_without_a_claim_changes_nothing(producer: ProducerProtocol, delivered: bool) -> None:
    """A peer that only knows an offer's lease number cannot end the offer, before or after it is claimed."""
    offered(producer)
    assert producer.receive(OTHER, Release("r", 1, delivered=delivered, **ONLY_RANK), now=1.0) == []
    producer.receive(PEER, Claim("r", 1, **ONLY_RANK), now=1.0)
    assert producer.receive(OTHER, Release("r", 1, delivered=delivered, **ONLY_RANK), now=1.0) == []
    assert producer.num_offers == 1


def test_an_offer_that_no_consumer_will_claim_is_given_up(producer: ProducerProtocol) -> None:
    guard = offered(producer)
    assert producer.give_up("another", 1) == producer.give_up("r", 2) == []
    actions = producer.give_up("r", 1)
    assert actions[0] == ClearGuard(guard)
    assert outcome(actions) == "aborted"


def test_a_claimed_offer_is_not_given_up(producer: ProducerProtocol) -> None:
    claimed(producer)
    assert producer.give_up("r", 1) == []
    assert producer.num_offers == 1


def test_an_unclaimed_lease_runs_out(producer: ProducerProtocol) -> None:
    guard = offered(producer)
    assert producer.advance(now=29.9) == []
    actions = producer.advance(now=30.0)
    assert actions[0] == ClearGuard(guard)
    assert outcome(actions) == "expired"
    assert len(actions) == 2


def test_a_claimed_lease_runs_out_and_is_revoked(producer: ProducerProtocol) -> None:
    guard = claimed(producer)
    cleared, revoked, ended = producer.advance(now=30.0)
    assert cleared == ClearGuard(guard)
    assert isinstance(revoked, Send)
    assert isinstance(revoked.message, Revoke)
    assert outcome([ended]) == "expired"


def test_a_consumer_cannot_hold_an_offer_forever(producer: ProducerProtocol, config: HandoffConfig) -> None:
    """The consumer sends heartbeats, but never finishes."""
    claimed(producer)
    now = 0.0
    while producer.num_offers and now < 2 * config.max_hold_s:
        now += config.heartbeat_s
        producer.receive(PEER, Heartbeat((1,)), now)
        actions = producer.advance(now)
    assert config.max_hold_s < now <= config.max_hold_s + config.lease_s
    assert actions[-1] == OfferEnded(
        "r", "expired", "expired: its consumer was not done 600.0 s after the request finished"
    )


def test_a_lost_claimant_ends_only_its_offers(producer: ProducerProtocol) -> None:
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
    producer.receive(OTHER, Claim("t", 3, **ONLY_RANK), now=1.0)
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
    producer.receive(PEER, Release("r", 1, delivered=True, **ONLY_RANK), now=1.0)
    assert "is over" in denial(producer.receive(PEER, Claim("r", 1, **ONLY_RANK), now=2.0))


def test_a_lease_of_another_request_is_denied(producer: ProducerProtocol) -> None:
    offered(producer)
    assert "was never made" in denial(producer.receive(PEER, Claim("not r", 1, **ONLY_RANK), now=1.0))
    assert producer.receive(PEER, Release("not r", 1, delivered=True, **ONLY_RANK), now=1.0) == []


def test_a_second_claimant_is_denied_and_can_do_nothing(producer: ProducerProtocol) -> None:
    claimed(producer)
    assert "another consumer" in denial(producer.receive(OTHER, Claim("r", 1, **ONLY_RANK), now=1.0))
    assert producer.receive(OTHER, Release("r", 1, delivered=True, **ONLY_RANK), now=1.0) == []
    producer.receive(OTHER, Heartbeat((1,)), now=20.0)
    assert producer.next_deadline() == 30.0


def test_only_the_connection_that_claimed_can_release(producer: ProducerProtocol) -> None:
    """Any peer can name the node that reads in its hello."""
    claimed(producer)
    producer.peer_connected(3, now=1.0)
    producer.receive(3, Hello(PROTOCOL_VERSION, f"peer-{PEER}", 5, "d"), now=1.0)
    assert producer.receive(3, Release("r", 1, delivered=True, **ONLY_RANK), now=1.0) == []
    assert producer.num_offers == 1
    assert (
        outcome(producer.receive(PEER, Release("r", 1, delivered=True, **ONLY_RANK), now=1.0)) == "delivered"
    )


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


# -- while the prompt is computed --------------------------------------------------------------------


def opened(producer: ProducerProtocol) -> None:
    """Open an offer with 8 of 12 tokens ready, and let a consumer claim it."""
    producer.open("r", 1, ((4, 5),), 12, 8)
    (granted,) = producer.receive(PEER, Claim("r", 1, **ONLY_RANK), now=0.0)
    assert isinstance(granted, Send)
    assert isinstance(granted.message, Grant)
    assert (granted.message.num_tokens, granted.message.num_ready) == (12, 8)
    assert granted.message.block_ids == ((4, 5),)


def test_claimants_are_told_which_blocks_become_ready(producer: ProducerProtocol) -> None:
    opened(producer)
    assert producer.extend("r", ((4, 5),), 8) == []
    assert producer.complete("r", TABLES, now=1.0) == [
        ExtendGuard(1, TABLES),
        Send(PEER, Progress("r", 1, num_ready=12, more_block_ids=((6,),))),
    ]
    assert producer.num_offers == 1


def test_a_lease_runs_from_the_end_of_the_prompt(producer: ProducerProtocol) -> None:
    opened(producer)
    producer.receive(PEER, Heartbeat((1,)), now=5.0)
    assert producer.advance(90.0) == [Send(PEER, Parked("r", 1))]
    producer.complete("r", TABLES, now=100.0)
    assert producer.next_deadline() == 130.0


def test_an_open_offer_ends_with_its_blocks(producer: ProducerProtocol) -> None:
    opened(producer)
    assert isinstance(producer.abort("r", now=1.0)[0], ClearGuard)
    assert producer.extend("r", TABLES, 12) == []
    assert producer.complete("r", TABLES, now=2.0) == []


def test_an_offer_ends_if_its_blocks_change(producer: ProducerProtocol) -> None:
    opened(producer)
    actions = producer.extend("r", ((4, 9, 6),), 12)
    assert isinstance(actions[0], ClearGuard)
    assert outcome(actions) == "aborted"


# -- several ranks -----------------------------------------------------------------------------------


@pytest.fixture
def two_ranks(producer: ProducerProtocol) -> ProducerProtocol:
    """A producer with an offer that both ranks of one consumer have claimed, over two connections."""
    for peer in (3, 4):
        producer.peer_connected(peer, now=0.0)
        producer.receive(peer, Hello(PROTOCOL_VERSION, "pair", 6, "d"), now=0.0)
    offered(producer)
    for rank, peer in enumerate((3, 4)):
        (granted,) = producer.receive(peer, Claim("r", 1, rank=rank, num_ranks=2), now=1.0)
        assert isinstance(granted, Send)
        assert isinstance(granted.message, Grant)
    return producer


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(True, True, "delivered"), (True, False, "aborted"), (False, True, "aborted")],
)
def test_an_offer_is_delivered_when_every_rank_has_loaded_it(
    two_ranks: ProducerProtocol, first: bool, second: bool, expected: str
) -> None:
    assert two_ranks.receive(3, Release("r", 1, delivered=first, rank=0, num_ranks=2), now=2.0) == []
    assert two_ranks.receive(3, Release("r", 1, delivered=first, rank=0, num_ranks=2), now=2.0) == []
    assert (
        outcome(two_ranks.receive(4, Release("r", 1, delivered=second, rank=1, num_ranks=2), now=3.0))
        == expected
    )


def test_a_rank_that_is_lost_ends_only_its_own_share(two_ranks: ProducerProtocol) -> None:
    assert two_ranks.peer_lost(3, now=2.0) == []
    two_ranks.receive(4, Heartbeat((1,)), now=3.0)
    assert two_ranks.next_deadline() == 33.0
    assert (
        outcome(two_ranks.receive(4, Release("r", 1, delivered=True, rank=1, num_ranks=2), now=4.0))
        == "aborted"
    )


def test_the_wait_for_a_rank_that_never_claims_is_bounded(two_ranks: ProducerProtocol) -> None:
    offered(two_ranks, lease=2, request_id="s", now=1.0)
    two_ranks.receive(3, Claim("s", 2, rank=0, num_ranks=2), now=1.0)
    two_ranks.receive(3, Release("s", 2, delivered=True, rank=0, num_ranks=2), now=2.0)
    assert any(
        isinstance(action, OfferEnded) and action.outcome == "expired" for action in two_ranks.advance(31.0)
    )


def test_every_rank_is_told_about_the_end(two_ranks: ProducerProtocol) -> None:
    actions = two_ranks.abort("r", now=2.0)
    told = [action.peer_id for action in actions if isinstance(action, Send)]
    assert told == [3, 4]
    assert isinstance(actions[0], ClearGuard)


@pytest.mark.parametrize(
    ("peer", "claim", "reason"),
    [
        (3, Claim("r", 1, rank=0, num_ranks=3), "another consumer"),
        (3, Claim("r", 1, rank=1, num_ranks=2), "another consumer"),
        (3, Claim("r", 1, rank=2, num_ranks=2), "no share for rank 2 of 2"),
        (PEER, Claim("r", 1, rank=0, num_ranks=2), "another consumer"),
    ],
    ids=["another-number", "anothers-share", "no-such-rank", "another-node"],
)
def test_a_contradictory_claim_is_denied(
    two_ranks: ProducerProtocol, peer: int, claim: Claim, reason: str
) -> None:
    assert reason in denial(two_ranks.receive(peer, claim, now=2.0))
    assert (
        two_ranks.receive(
            peer, Release("r", 1, delivered=True, rank=claim.rank, num_ranks=claim.num_ranks), now=2.0
        )
        == []
    )
    assert two_ranks.num_offers == 1


def test_a_rank_cannot_claim_again_after_its_release(two_ranks: ProducerProtocol) -> None:
    two_ranks.receive(3, Release("r", 1, delivered=True, rank=0, num_ranks=2), now=2.0)
    assert "over for this rank" in denial(two_ranks.receive(3, Claim("r", 1, rank=0, num_ranks=2), now=3.0))


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
    assert producer.receive(3, Claim("r", 1, **ONLY_RANK), now=0.0) == [Disconnect(3)]
    assert producer.receive(3, Claim("r", 1, **ONLY_RANK), now=0.0) == []


def test_an_unknown_peer_is_ignored(producer: ProducerProtocol) -> None:
    offered(producer)
    assert producer.receive(99, Claim("r", 1, **ONLY_RANK), now=0.0) == []
    assert producer.receive(99, Hello(PROTOCOL_VERSION, "x", 5, "d"), now=0.0) == []
