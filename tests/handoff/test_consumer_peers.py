"""A consumer with peers that fail, are incompatible or lie, and with an engine whose orders come in a wrong
order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest

from kvferry.connector.errors import InvalidTransferParamsError, StaleLeaseError
from kvferry.connector.handoff.config import HandoffConfig
from kvferry.connector.handoff.consumer import ConsumerProtocol
from kvferry.connector.handoff.events import (
    Action,
    Connect,
    Disconnect,
    GroupBlocks,
    Identity,
    LayersLeftOut,
    LoadEnded,
    PeerDiffers,
    RemoteOffer,
    Send,
    StartRead,
)
from kvferry.connector.handoff.messages import (
    Claim,
    Deny,
    Grant,
    Release,
    Revoke,
    Welcome,
)
from kvferry.connector.planning.layout import draft_layer_name, uniform_layout
from kvferry.transports.errors import (
    ConfigurationError,
    ForeignTransportError,
    IncompatiblePeerError,
    KVTransferError,
    KVTransferStateError,
    PeerLostError,
    ProtocolError,
    RegionError,
    TransferTimeoutError,
    TransportClosedError,
)
from tests.support.handoff_simulator.load_states import (
    ADDRESS,
    BLOCKS,
    GRANT,
    OFFER,
    PEER,
    READ,
    Reach,
    claiming,
    connecting,
    draining,
    granted,
    only_end,
    only_message,
    reading,
)
from tests.support.ranks import ONLY_RANK

before_reading = pytest.mark.parametrize("reach", [connecting, claiming, granted])
after_the_handshake = pytest.mark.parametrize("reach", [claiming, granted])


# -- peers -------------------------------------------------------------------------------------------


def test_a_failed_connection_fails_its_claims_and_is_retried_after_a_backoff(
    consumer: ConsumerProtocol, welcome: Welcome
) -> None:
    connecting(consumer, welcome)
    consumer.peer_lost(PEER, PeerLostError("no node there"), 1.0)
    assert isinstance(only_end(consumer.load("ours", BLOCKS, 1.0)).error, PeerLostError)
    # The backoff is 1 s. The claim waits for the next attempt.
    assert consumer.claim("second", OFFER, 1.5) == []
    assert consumer.next_deadline() == 2.0
    assert consumer.advance(2.0) == [Connect(ADDRESS, 4.0)]


def test_the_backoff_doubles_up_to_its_limit_and_is_forgotten(consumer: ConsumerProtocol) -> None:
    now = 0.0
    rests = []
    for number in range(4):
        actions = consumer.claim(f"request {number}", OFFER, now)
        if not actions:
            rests.append(consumer.next_deadline() - now)
            now = consumer.next_deadline()
            actions = consumer.advance(now)
        assert actions == [Connect(ADDRESS, 4.0)]
        consumer.connect_failed(ADDRESS, ConfigurationError("no such scheme"), now)
        consumer.load(f"request {number}", BLOCKS, now)
    assert rests == [1.0, 2.0, 3.0]
    now = consumer.next_deadline()
    assert consumer.advance(now) == []
    assert consumer.next_deadline() == math.inf
    assert consumer.claim("late", OFFER, now) == [Connect(ADDRESS, 4.0)]


def test_a_restarted_node_is_a_different_node(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    connecting(consumer, welcome)
    consumer.receive(PEER, replace(welcome, epoch=23), 0.0)
    error = only_end(consumer.load("ours", BLOCKS, 0.0)).error
    assert isinstance(error, StaleLeaseError)
    assert "restarted" in str(error)
    fresh = replace(OFFER, epoch=23)
    assert only_message(consumer.claim("fresh", fresh, 1.0)) == Claim("theirs", 3, **ONLY_RANK)


@pytest.mark.parametrize(
    ("change", "error", "what"),
    [
        ({"digest": "x", "fields": {"model": "m", "block_size": 8}}, IncompatiblePeerError, "block_size"),
        ({"digest": "x"}, IncompatiblePeerError, "digest"),
        ({"layout": {}}, ProtocolError, "layout.num_blocks is missing"),
    ],
)
def test_an_incompatible_peer_is_dropped_and_the_field_is_named(
    consumer: ConsumerProtocol,
    welcome: Welcome,
    change: dict[str, object],
    error: type[KVTransferError],
    what: str,
) -> None:
    connecting(consumer, welcome)
    assert consumer.receive(PEER, replace(welcome, **change), 0.0) == [Disconnect(PEER)]
    failure = only_end(consumer.load("ours", BLOCKS, 0.0)).error
    assert isinstance(failure, error)
    assert what in str(failure)


def test_an_allowed_difference_of_a_peer_is_warned_about_once(
    identity: Identity, config: HandoffConfig, welcome: Welcome
) -> None:
    def fields(tokenizer: str, chat_template: str) -> dict[str, str | int]:
        return {**identity.fields, "tokenizer": tokenizer, "chat_template": chat_template}

    clock = count(0.0, 100.0)

    def warnings(consumer: ConsumerProtocol, welcome: Welcome) -> list[PeerDiffers]:
        """Return the warnings of a successful handshake. The connection is lost afterwards."""
        now = next(clock)
        assert consumer.claim("ours", replace(OFFER, epoch=welcome.epoch), now) == [Connect(ADDRESS, 4.0)]
        consumer.connecting(ADDRESS, PEER, now)
        consumer.peer_connected(PEER, now)
        actions = consumer.receive(PEER, welcome, now)
        assert any(isinstance(action, Send) and isinstance(action.message, Claim) for action in actions)
        consumer.peer_lost(PEER, PeerLostError("gone"), now)
        consumer.load("ours", BLOCKS, now)
        return [action for action in actions if isinstance(action, PeerDiffers)]

    consumer = ConsumerProtocol(replace(identity, fields=fields("t", "c")), config)
    other = replace(welcome, fields=fields("t", "d"))
    (warning,) = warnings(consumer, other)
    assert warning.differences == (("chat_template", "c", "d"),)
    assert "chat_template differs (local 'c', remote 'd')" in str(warning)
    assert "tokenize differently will not be handed over" in str(warning)
    assert warnings(consumer, other) == []
    assert len(warnings(consumer, replace(other, epoch=23, fields=fields("u", "d")))) == 1
    second_rank = ConsumerProtocol(replace(identity, fields=fields("t", "c")), config, rank=1, num_ranks=2)
    assert warnings(second_rank, other) == []


def test_layouts_that_cannot_be_paired_are_refused_at_the_handshake(
    consumer: ConsumerProtocol, welcome: Welcome
) -> None:
    layout = uniform_layout(["a", "b"], page_bytes=8, num_blocks=50, block_size=4, page_format="g")
    connecting(consumer, welcome)
    consumer.receive(PEER, replace(welcome, layout=layout.to_plain()), 0.0)
    failure = only_end(consumer.load("ours", BLOCKS, 0.0)).error
    assert isinstance(failure, IncompatiblePeerError)
    assert failure.field == "layers.a.page_format"


def test_draft_layers_that_a_peer_does_not_have_are_named_once(
    identity: Identity, config: HandoffConfig, welcome: Welcome
) -> None:
    names = ["a", "b", draft_layer_name("3f", "c")]
    layout = uniform_layout(names, page_bytes=8, num_blocks=50, block_size=4, page_format="f")
    consumer = ConsumerProtocol(replace(identity, layout=layout), config)
    connecting(consumer, welcome)
    (warning,) = (
        action for action in consumer.receive(PEER, welcome, 0.0) if isinstance(action, LayersLeftOut)
    )
    assert warning == LayersLeftOut(welcome.engine_id, ("draft:3f:c",))
    assert "does not have layers draft:3f:c of this node's draft model" in str(warning)
    consumer.drop("ours", 0.0)
    again = consumer.claim("again", replace(OFFER, lease=OFFER.lease + 1), 0.0)
    assert not any(isinstance(action, LayersLeftOut) for action in again)


@pytest.mark.parametrize("reach", [connecting, claiming])
def test_a_peer_that_sends_a_message_out_of_turn_is_dropped(
    consumer: ConsumerProtocol, welcome: Welcome, reach: Reach
) -> None:
    reach(consumer, welcome)
    message = GRANT if reach is connecting else welcome
    assert consumer.receive(PEER, message, 0.0) == [Disconnect(PEER)]
    assert isinstance(only_end(consumer.load("ours", BLOCKS, 0.0)).error, ProtocolError)


def test_a_connection_that_no_claim_waits_for_is_closed(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    assert consumer.connecting("sim://elsewhere", 9, 0.0) == [Disconnect(9)]
    assert consumer.peer_connected(9, 0.0) == []
    assert consumer.receive(9, welcome, 0.0) == []
    assert consumer.peer_lost(9, PeerLostError("gone"), 0.0) == []


# -- offers and grants that are not what they seem ---------------------------------------------------


def test_an_offer_is_claimed_once(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    claiming(consumer, welcome)
    assert consumer.claim("again", OFFER, 1.0) == []
    assert "'ours'" in str(only_end(consumer.load("again", BLOCKS, 1.0)).error)


def test_an_offer_that_names_an_address_twice_is_refused(consumer: ConsumerProtocol) -> None:
    assert consumer.claim("ours", replace(OFFER, addresses=(ADDRESS, ADDRESS)), 0.0) == []
    assert isinstance(only_end(consumer.load("ours", BLOCKS, 0.0)).error, StaleLeaseError)


def test_a_grant_of_fewer_tokens_than_promised_is_refused(
    consumer: ConsumerProtocol, welcome: Welcome
) -> None:
    claiming(consumer, welcome)
    assert only_message(consumer.receive(PEER, replace(GRANT, num_tokens=8, num_ready=8), 0.0)) == Release(
        "theirs", 3, delivered=False, **ONLY_RANK
    )
    assert isinstance(only_end(consumer.load("ours", BLOCKS, 0.0)).error, StaleLeaseError)


@pytest.mark.parametrize(
    ("grant", "blocks"),
    [
        (replace(GRANT, block_ids=((14, 15),)), BLOCKS),
        (replace(GRANT, block_ids=()), BLOCKS),
        (replace(GRANT, block_ids=((14, 15, 50),)), BLOCKS),
        (replace(GRANT, block_ids=((14, 15, 0),)), BLOCKS),
        (GRANT, (GroupBlocks(-1, (31,)),)),
        (GRANT, (GroupBlocks(0, (50,)),)),
        (GRANT, (GroupBlocks(0, (31, 31)),)),
        (GRANT, ()),
    ],
)
def test_blocks_that_cannot_be_read_fail_the_load(
    consumer: ConsumerProtocol, welcome: Welcome, grant: Grant, blocks: tuple[GroupBlocks, ...]
) -> None:
    claiming(consumer, welcome)
    consumer.receive(PEER, grant, 0.0)
    actions = consumer.load("ours", blocks, 0.0)
    assert actions[0] == Send(PEER, Release("theirs", 3, delivered=False, **ONLY_RANK))
    assert isinstance(only_end(actions).error, RegionError)


@pytest.mark.parametrize("blocks", [(GroupBlocks(3, ()),), (GroupBlocks(1, (0, 0)),)])
def test_a_load_without_blocks_ends_at_once(
    consumer: ConsumerProtocol, welcome: Welcome, blocks: tuple[GroupBlocks, ...]
) -> None:
    granted(consumer, welcome)
    released, ended = consumer.load("ours", blocks, 0.0)
    assert released == Send(PEER, Release("theirs", 3, delivered=True, **ONLY_RANK))
    assert ended == LoadEnded("ours", "loaded", None, blocks)


@pytest.mark.parametrize(
    "message",
    [
        GRANT,
        replace(GRANT, lease=99),
        Deny("theirs", 99, ""),
        Revoke("another", 3, ""),
        Deny("another", 3, ""),
    ],
)
def test_messages_about_unknown_requests_are_ignored(
    consumer: ConsumerProtocol, welcome: Welcome, message
) -> None:
    granted(consumer, welcome)
    assert consumer.receive(PEER, message, 0.0) == []
    assert isinstance(consumer.load("ours", BLOCKS, 0.0)[0], StartRead)


def test_a_grant_for_a_dropped_request_is_ignored(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    claiming(consumer, welcome)
    consumer.drop("ours", 0.0)
    assert consumer.receive(PEER, GRANT, 0.0) == []


# -- orders out of order -----------------------------------------------------------------------------


def test_a_load_without_a_claim_fails(consumer: ConsumerProtocol) -> None:
    assert isinstance(only_end(consumer.load("ours", BLOCKS, 0.0)).error, StaleLeaseError)


def test_orders_that_come_twice_are_refused(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    reading(consumer, welcome)
    with pytest.raises(KVTransferStateError):
        consumer.claim("ours", OFFER, 1.0)
    with pytest.raises(KVTransferStateError):
        consumer.load("ours", BLOCKS, 1.0)
    consumer.read_ended(READ, None, 1.0)
    with pytest.raises(KVTransferStateError):
        consumer.read_ended(READ, None, 1.0)


def test_remembered_failures_are_bounded_and_a_drop_forgets_them(
    identity: Identity, config: HandoffConfig
) -> None:
    consumer = ConsumerProtocol(identity, config)
    for number in range(5):
        consumer.claim(f"request {number}", replace(OFFER, addresses=(ADDRESS, ADDRESS)), 0.0)
    assert consumer.num_loads == 2
    consumer.drop("request 4", 0.0)
    assert consumer.num_loads == 1


@pytest.mark.parametrize("reach", [connecting, claiming, granted, reading, draining])
def test_shutdown_ends_every_load_and_drops_every_peer(
    consumer: ConsumerProtocol, welcome: Welcome, reach: Reach
) -> None:
    reach(consumer, welcome)
    if reach in (connecting, claiming):
        consumer.load("ours", BLOCKS, 0.0)
    actions = consumer.shutdown(1.0)
    assert actions[-1] == Disconnect(PEER)
    if consumer.num_reads:
        actions += consumer.read_ended(READ, TransportClosedError("closed"), 1.0)
    if reach is not granted:
        ended = only_end(actions)
        assert ended.outcome == ("dropped" if reach is draining else "failed")
    assert consumer.num_loads == 0
    assert consumer.next_deadline() == math.inf
    # What was in flight from the peer is nobody's any more, and it is dropped once.
    assert consumer.receive(PEER, welcome, 1.0) == []
    assert consumer.shutdown(2.0) == []


@pytest.mark.parametrize(
    "other",
    [
        replace(GRANT, num_tokens=16),  # of which as many are ready
        replace(GRANT, block_ids=((14, 15, 17),)),
    ],
)
def test_ranks_that_grant_different_things_fail_the_load(
    consumer: ConsumerProtocol, welcome: Welcome, other: Grant
) -> None:
    consumer.claim("ours", BY_TWO, 0.0)
    for address, peer, grant in ((ADDRESS, PEER, GRANT), (LATE, LATE_PEER, other)):
        consumer.connecting(address, peer, 0.0)
        consumer.peer_connected(peer, 0.0)
        consumer.receive(peer, welcome, 0.0)
        consumer.receive(peer, grant, 0.0)
    error = only_end(consumer.load("ours", BLOCKS, 0.0)).error
    assert isinstance(error, StaleLeaseError)
    assert "the ranks of the producer granted different" in str(error)


# -- a rank that is late -------------------------------------------------------------------------------


LATE, LATE_PEER = "sim://late", 8
BY_TWO = replace(OFFER, addresses=(ADDRESS, LATE))


def time_out(consumer: ConsumerProtocol) -> list[Action]:
    return consumer.advance(4.0)


def hear_of_a_timeout(consumer: ConsumerProtocol) -> list[Action]:
    """Network transports report the loss of a peer whose handshake takes too long."""
    return consumer.peer_lost(LATE_PEER, PeerLostError("timed out"), 4.0)


def lose_the_late_rank(
    consumer: ConsumerProtocol,
    welcome: Welcome,
    lose: Callable[[ConsumerProtocol], list[Action]] = time_out,
) -> None:
    """Claim an offer of two ranks, of which one does not answer until the load has failed."""
    assert consumer.claim("ours", BY_TWO, 0.0) == [Connect(ADDRESS, 4.0), Connect(LATE, 4.0)]
    for address, peer in ((ADDRESS, PEER), (LATE, LATE_PEER)):
        consumer.connecting(address, peer, 0.0)
    consumer.peer_connected(PEER, 0.0)
    consumer.receive(PEER, welcome, 0.0)
    consumer.load("ours", BLOCKS, 0.0)
    actions = lose(consumer)
    assert isinstance(only_end(actions).error, TransferTimeoutError | PeerLostError)
    assert Send(PEER, Release("theirs", 3, delivered=False, **ONLY_RANK)) in actions


@pytest.mark.parametrize("lose", [time_out, hear_of_a_timeout])
def test_a_rank_that_answers_after_the_load_has_failed_is_released(
    consumer: ConsumerProtocol, welcome: Welcome, lose: Callable[[ConsumerProtocol], list[Action]]
) -> None:
    """Otherwise it would hold the blocks, and so its node would, until the lease ends."""
    lose_the_late_rank(consumer, welcome, lose)
    assert consumer.next_deadline() == 5.0  # after the backoff
    assert consumer.advance(5.0) == [Connect(LATE, 4.0)]
    consumer.connecting(LATE, LATE_PEER + 1, 5.0)
    consumer.peer_connected(LATE_PEER + 1, 5.0)
    assert consumer.receive(LATE_PEER + 1, welcome, 5.0) == [
        Send(LATE_PEER + 1, Claim("theirs", 3, **ONLY_RANK)),
        Send(LATE_PEER + 1, Release("theirs", 3, delivered=False, **ONLY_RANK)),
    ]


def test_a_rank_that_was_not_claimed_yet_is_released_if_another_one_was_restarted(
    consumer: ConsumerProtocol, welcome: Welcome
) -> None:
    """It would hold the blocks until the lease ends, and a release of a rank that has not claimed is
    ignored.
    """
    consumer.claim("first", BY_TWO, 0.0)
    for address, peer, epoch in ((ADDRESS, PEER, 23), (LATE, LATE_PEER, welcome.epoch)):
        consumer.connecting(address, peer, 0.0)
        consumer.peer_connected(peer, 0.0)
        consumer.receive(peer, replace(welcome, epoch=epoch), 0.0)
    assert consumer.claim("second", BY_TWO, 1.0) == [
        Send(LATE_PEER, Claim("theirs", 3, **ONLY_RANK)),
        Send(LATE_PEER, Release("theirs", 3, delivered=False, **ONLY_RANK)),
    ]
    assert isinstance(only_end(consumer.load("second", BLOCKS, 1.0)).error, StaleLeaseError)


def test_a_rank_that_never_answers_is_not_tried_for_ever(
    consumer: ConsumerProtocol, welcome: Welcome
) -> None:
    lose_the_late_rank(consumer, welcome)
    consumer.peer_lost(PEER, PeerLostError("it is gone"), 4.0)
    num_tries = 0
    while (now := consumer.next_deadline()) < math.inf:
        num_tries += Connect(LATE, 4.0) in consumer.advance(now)
        assert now < 30.0  # an offer's lease
    assert num_tries == 3


def test_a_rank_that_refuses_is_not_tried_again(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    consumer.claim("ours", BY_TWO, 0.0)
    consumer.connect_failed(LATE, PeerLostError("no node there"), 0.0)
    assert Connect(LATE, 4.0) not in consumer.advance(1.0)


# -- many addresses ------------------------------------------------------------------------------------


def offer_at(name: str, *addresses: str) -> RemoteOffer:
    return replace(OFFER, request_id=name, lease=1 + len(name), addresses=addresses)


def test_an_offer_of_more_ranks_than_allowed_is_not_claimed(
    identity: Identity, config: HandoffConfig
) -> None:
    consumer = ConsumerProtocol(identity, replace(config, max_peer_ranks=2))
    assert len(consumer.claim("fits", offer_at("a", "sim://1", "sim://2"), 0.0)) == 2
    assert consumer.claim("ours", offer_at("b", "sim://3", "sim://4", "sim://5"), 0.0) == []
    error = only_end(consumer.load("ours", BLOCKS, 0.0)).error
    assert isinstance(error, InvalidTransferParamsError)
    assert "names 3 addresses, and max_peer_ranks is 2" in str(error)


class TestConnectionsInProgress:
    @pytest.fixture
    def consumer(self, identity: Identity, config: HandoffConfig) -> ConsumerProtocol:
        return ConsumerProtocol(identity, replace(config, max_connecting=2))

    def test_further_connections_wait_and_their_timeout_runs_meanwhile(
        self, consumer: ConsumerProtocol
    ) -> None:
        many = offer_at("many", *(f"sim://{number}" for number in range(4)))
        assert consumer.claim("many", many, 0.0) == [Connect("sim://0", 4.0), Connect("sim://1", 4.0)]
        consumer.connecting("sim://0", 1, 0.0)
        consumer.connecting("sim://1", 2, 0.0)
        assert consumer.peer_lost(1, PeerLostError("no node there"), 1.0) == [
            Disconnect(1),
            Connect("sim://2", 3.0),
        ]
        assert consumer.connect_failed("sim://2", PeerLostError("no node there"), 1.0) == [
            Connect("sim://3", 3.0)
        ]

    def test_an_address_that_failed_waits_after_those_that_were_not_tried(
        self, consumer: ConsumerProtocol
    ) -> None:
        consumer.claim("many", offer_at("many", *(f"sim://{number}" for number in range(4))), 0.0)
        consumer.connecting("sim://0", 1, 0.0)
        consumer.connecting("sim://1", 2, 0.0)
        consumer.peer_lost(1, PeerLostError("no node there"), 0.0)
        assert consumer.claim("again", offer_at("again", "sim://0"), 0.5) == []
        assert consumer.advance(1.0) == []  # its backoff is over
        assert consumer.peer_lost(2, PeerLostError("no node there"), 1.5) == [
            Disconnect(2),
            Connect("sim://3", 2.5),
        ]

    def test_a_finished_handshake_makes_room(self, consumer: ConsumerProtocol, welcome: Welcome) -> None:
        assert consumer.claim("ours", replace(OFFER, addresses=(ADDRESS,)), 0.0) == [Connect(ADDRESS, 4.0)]
        consumer.connecting(ADDRESS, PEER, 0.0)
        assert len(consumer.claim("more", offer_at("more", "sim://1", "sim://2"), 0.0)) == 1
        assert consumer.advance(0.5) == []
        consumer.receive(PEER, welcome, 1.0)
        assert consumer.next_deadline() <= 1.0
        assert consumer.advance(1.0) == [Connect("sim://2", 3.0)]

    def test_a_load_whose_connection_waits_too_long_fails_with_the_reason(
        self, consumer: ConsumerProtocol
    ) -> None:
        consumer.claim("first", offer_at("first", "sim://1", "sim://2"), 0.0)
        assert consumer.claim("late", offer_at("late", "sim://3"), 0.0) == []
        consumer.load("late", BLOCKS, 0.0)
        ends = [action for action in consumer.advance(4.0) if isinstance(action, LoadEnded)]
        (late,) = [end for end in ends if end.request_id == "late"]
        assert "max_connecting=2 other connections were in progress" in str(late.error)
        assert consumer.next_deadline() > 4.0


def test_another_transports_address_is_tried_again_at_once(consumer: ConsumerProtocol) -> None:
    for number in range(3):
        assert consumer.claim(f"request {number}", OFFER, 0.0) == [Connect(ADDRESS, 4.0)]
        error = ForeignTransportError(local="other://here", remote=ADDRESS)
        consumer.connect_failed(ADDRESS, error, 0.0)
        assert only_end(consumer.load(f"request {number}", BLOCKS, 0.0)).error is error
