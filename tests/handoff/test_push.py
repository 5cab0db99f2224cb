"""The rows of the tables that are about pushes: a consumer reserves, its producer writes, and nobody writes later."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from kvferry.connector.handoff.config import HandoffConfig
from kvferry.connector.handoff.consumer import ConsumerProtocol
from kvferry.connector.handoff.events import (
    Action,
    ClearGuard,
    Disconnect,
    GroupBlocks,
    Identity,
    LoadEnded,
    OfferEnded,
    PushEnded,
    RemoteOffer,
    Send,
    SetGuard,
    StartPush,
    StartRead,
    StartWrite,
)
from kvferry.connector.handoff.messages import (
    MAX_PUSH_REGIONS,
    PROTOCOL_VERSION,
    Claim,
    Grant,
    Hello,
    Message,
    NotWritten,
    Progress,
    Release,
    Reserve,
    Revoke,
    Welcome,
    Written,
)
from kvferry.connector.handoff.producer import ProducerProtocol
from kvferry.connector.planning.layout import per_layer_layout
from kvferry.transports.errors import (
    KVTransferError,
    PeerLostError,
    RegionError,
    StaleRegionError,
    TransferTimeoutError,
    TransportClosedError,
)
from kvferry.transports.regions import Guard

PEER, OTHER = 7, 8
ADDRESS = "sim://there"
OFFER = RemoteOffer("there", 22, "theirs", 3, (ADDRESS,), 12, ((4, 5, 6),))
BLOCKS = (GroupBlocks(0, (31, 32, 33)),)
#: The blocks' bytes are one run at both ends: two 8-byte pages a block.
SOURCES, TARGETS, LENGTHS = (14 * 16,), (31 * 16,), (48,)


# -- the consumer ------------------------------------------------------------------------------------


@pytest.fixture
def consumer(identity: Identity, config: HandoffConfig) -> ConsumerProtocol:
    """A consumer with one guard to be pushed to under, and a grant of all of an offer."""
    return granted(identity, config, num_ready=12)


def granted(identity: Identity, config: HandoffConfig, num_ready: int) -> ConsumerProtocol:
    consumer = ConsumerProtocol(identity, config, push_guards=range(5, 6))
    consumer.claim("ours", OFFER, 0.0)
    consumer.connecting(ADDRESS, PEER, 0.0)
    consumer.peer_connected(PEER, 0.0)
    welcome = Welcome(
        PROTOCOL_VERSION, "there", 22, identity.digest, identity.fields, identity.layout.to_plain()
    )
    consumer.receive(PEER, welcome, 0.0)
    consumer.receive(PEER, Grant("theirs", 3, 1, 12, num_ready, ((14, 15, 16),)), 0.0)
    return consumer


def pushed(actions: list[Action]) -> StartPush:
    """The one push that was started, under a guard that was set before."""
    guard, push = actions
    assert isinstance(push, StartPush)
    assert guard == SetGuard(push.reserve.guard_index, push.reserve.guard_value)
    return push


def start(consumer: ConsumerProtocol) -> StartPush:
    return pushed(consumer.load("ours", BLOCKS, 0.0))


def written(push: StartPush) -> Message:
    return Written("theirs", 3, push.reserve.guard_value, "mapped")


def not_written(push: StartPush) -> Message:
    return NotWritten("theirs", 3, push.reserve.guard_value, "it is over")


def ends(actions: list[Action]) -> list[LoadEnded]:
    return [action for action in actions if isinstance(action, LoadEnded)]


def test_blocks_are_reserved_where_the_offer_is_to_go(consumer: ConsumerProtocol) -> None:
    push = start(consumer)
    value = push.reserve.guard_value
    assert push.reserve == Reserve("theirs", 3, 5, value, 20_000, SOURCES, TARGETS, LENGTHS)
    assert consumer.num_reads == 1


def test_what_is_written_is_loaded(consumer: ConsumerProtocol) -> None:
    push = start(consumer)
    assert consumer.receive(PEER, written(push), 1.0) == [
        ClearGuard(5),
        PushEnded(push, None, "mapped"),
        Send(PEER, Release("theirs", 3, True, 0, 1)),
        LoadEnded("ours", "loaded", None, BLOCKS),
    ]
    assert (consumer.num_loads, consumer.num_reads) == (0, 0)


def test_what_is_not_written_fails(consumer: ConsumerProtocol) -> None:
    push = start(consumer)
    cleared, told, release, ended = consumer.receive(PEER, not_written(push), 1.0)
    assert cleared == ClearGuard(5)
    assert isinstance(told, PushEnded)
    assert isinstance(told.error, StaleRegionError)
    assert release == Send(PEER, Release("theirs", 3, False, 0, 1))
    assert isinstance(ended, LoadEnded)
    assert isinstance(ended.error, StaleRegionError)


CANCELS: dict[str, tuple[Callable[[ConsumerProtocol], list[Action]], str]] = {
    "drop": (lambda consumer: consumer.drop("ours", 1.0), "dropped"),
    "revoke": (lambda consumer: consumer.receive(PEER, Revoke("theirs", 3, "expired"), 1.0), "failed"),
}


@pytest.mark.parametrize("answer", [written, not_written])
@pytest.mark.parametrize(("cancel", "outcome"), CANCELS.values(), ids=CANCELS)
def test_a_cancelled_push_is_over_when_the_producer_says_so(
    consumer: ConsumerProtocol,
    cancel: Callable[[ConsumerProtocol], list[Action]],
    outcome: str,
    answer: Callable[[StartPush], Message],
) -> None:
    push = start(consumer)
    assert cancel(consumer) == [ClearGuard(5)]
    (ended,) = ends(consumer.receive(PEER, answer(push), 2.0))
    assert ended.outcome == outcome
    assert ends(consumer.receive(PEER, answer(push), 3.0)) == []


@pytest.mark.parametrize(
    "lose",
    [
        lambda consumer: consumer.peer_lost(PEER, PeerLostError("gone"), 1.0),
        lambda consumer: consumer.advance(41.0),
        lambda consumer: consumer.shutdown(1.0),
    ],
    ids=["lost", "too late", "shutdown"],
)
def test_a_push_ends_with_its_peer(consumer: ConsumerProtocol, lose) -> None:
    start(consumer)
    actions = lose(consumer)
    (ended,) = ends(actions)
    assert isinstance(ended.error, PeerLostError | TransferTimeoutError | TransportClosedError)
    # Blocks are the engine's again only when the transport has dropped who may write into them.
    assert actions.index(Disconnect(PEER)) < actions.index(ended)
    assert ClearGuard(5) in actions
    assert consumer.num_reads == 0


def test_a_node_that_cannot_be_written_to_reads_and_says_why(consumer: ConsumerProtocol) -> None:
    push = start(consumer)
    cleared, read = consumer.pull_instead(push, "no way")
    assert cleared == ClearGuard(5)
    assert isinstance(read, StartRead)
    assert (read.guard, read.not_pushed) == (Guard(1, 3), "no way")
    assert ends(consumer.read_ended(read, None, 1.0))[0].outcome == "loaded"


def test_what_cannot_be_accepted_fails(consumer: ConsumerProtocol) -> None:
    push = start(consumer)
    error: KVTransferError = RegionError("outside")
    (ended,) = ends(consumer.push_ended(push, error, "", 1.0))
    assert ended.error is error
    assert consumer.push_ended(push, error, "", 1.0) == consumer.pull_instead(push, "") == []


def test_without_a_free_guard_it_is_read(consumer: ConsumerProtocol) -> None:
    start(consumer)
    second = RemoteOffer("there", 22, "second", 4, (ADDRESS,), 12, ((4, 5, 6),))
    consumer.claim("next", second, 0.0)
    consumer.receive(PEER, Grant("second", 4, 2, 12, 12, ((17, 18, 19),)), 0.0)
    (read,) = consumer.load("next", (GroupBlocks(0, (41, 42, 43)),), 0.0)
    assert isinstance(read, StartRead)
    assert read.not_pushed == "no guard is free"


def test_more_regions_than_a_message_holds_are_read(config: HandoffConfig, identity: Identity) -> None:
    num_layers = MAX_PUSH_REGIONS // 32 + 1
    names = [str(index) for index in range(num_layers)]
    layout = per_layer_layout(names, page_bytes=8, num_blocks=80, block_size=4, page_format="f")
    many = Identity("here", 11, identity.digest, identity.fields, layout)
    consumer = granted(many, config, num_ready=12)
    offer = RemoteOffer("there", 22, "long", 4, (ADDRESS,), 128, ((),))
    consumer.claim("next", offer, 0.0)
    consumer.receive(PEER, Grant("long", 4, 2, 128, 128, (tuple(range(1, 65, 2)),)), 0.0)
    (read,) = consumer.load("next", (GroupBlocks(0, tuple(range(40, 72))),), 0.0)
    assert isinstance(read, StartRead)
    assert "regions" in read.not_pushed


def test_an_offer_that_is_still_computed_is_pushed_in_rounds(
    identity: Identity, config: HandoffConfig
) -> None:
    consumer = granted(identity, config, num_ready=4)
    first = start(consumer)
    assert (first.reserve.sources, first.reserve.lengths) == ((14 * 16,), (16,))
    assert consumer.receive(PEER, Progress("theirs", 3, 12, ((),)), 1.0)[1:] == []
    cleared, told, *rest = consumer.receive(PEER, written(first), 2.0)
    assert (cleared, told) == (ClearGuard(5), PushEnded(first, None, "mapped"))
    second = pushed(rest)
    assert (second.reserve.sources, second.reserve.lengths) == ((15 * 16,), (32,))
    assert second.reserve.guard_value != first.reserve.guard_value
    assert (
        consumer.receive(PEER, written(first), 3.0) == []
    )  # what was said of the first is not of the second
    assert ends(consumer.receive(PEER, written(second), 4.0))[0].outcome == "loaded"


def test_an_answer_that_nobody_waits_for_is_ignored(identity: Identity, config: HandoffConfig) -> None:
    consumer = granted(identity, config, num_ready=12)
    assert consumer.receive(PEER, Written("theirs", 3, 77, "mapped"), 1.0) == []
    push = start(consumer)
    assert consumer.receive(PEER, Written("theirs", 3, 77, "mapped"), 1.0) == []
    assert consumer.receive(PEER, Written("others", 3, push.reserve.guard_value, "mapped"), 1.0) == []
    assert consumer.num_reads == 1


# -- the producer ------------------------------------------------------------------------------------

RESERVE = Reserve("r", 1, 5, 99, 500, (16,), (32,), (16,))


@pytest.fixture
def producer(identity: Identity, config: HandoffConfig) -> ProducerProtocol:
    """A producer with two consumers that have said hello, of which the first has claimed the offer."""
    producer = ProducerProtocol(identity, config, num_guards=2)
    for peer in (PEER, OTHER):
        producer.peer_connected(peer, now=0.0)
        producer.receive(peer, Hello(PROTOCOL_VERSION, f"peer-{peer}", 5, "d"), now=0.0)
    producer.offer("r", 1, ((1, 2),), 8, 0.0)
    producer.receive(PEER, Claim("r", 1, 0, 1), 0.0)
    return producer


def writing(producer: ProducerProtocol) -> StartWrite:
    (write,) = producer.receive(PEER, RESERVE, 20.0)
    assert isinstance(write, StartWrite)
    return write


def refused(actions: list[Action]) -> str:
    (action,) = actions
    assert isinstance(action, Send)
    assert isinstance(action.message, NotWritten)
    assert action.message.guard_value == RESERVE.guard_value
    return action.message.reason


def test_a_reservation_is_written_and_renews_the_lease(producer: ProducerProtocol) -> None:
    write = writing(producer)
    assert (write.peer_id, write.guard, write.timeout_s) == (PEER, Guard(5, 99), 0.5)
    np.testing.assert_array_equal(write.pairs.table, [[16, 32, 16]])
    assert producer.next_deadline() == 50.0


def test_the_consumer_is_told_of_the_end(producer: ProducerProtocol) -> None:
    assert producer.write_ended(writing(producer), None, "mapped") == [
        Send(PEER, Written("r", 1, 99, "mapped"))
    ]
    assert refused(producer.write_ended(writing(producer), StaleRegionError("stale"), "")) == "stale"


@pytest.mark.parametrize(
    "reserve",
    [
        Reserve("other", 1, 5, 99, 500, (16,), (32,), (16,)),
        Reserve("r", 2, 5, 99, 500, (16,), (32,), (16,)),
        Reserve("r", 1, 5, 99, 500, (16, 48), (32,), (16,)),
        Reserve("r", 1, 5, 99, 500, (), (), ()),
    ],
    ids=["another request", "another lease", "unequal columns", "nothing"],
)
def test_what_was_not_granted_is_not_written(producer: ProducerProtocol, reserve: Reserve) -> None:
    assert refused(producer.receive(PEER, reserve, 1.0))


def test_only_who_claimed_is_written_to(producer: ProducerProtocol) -> None:
    assert "claimed" in refused(producer.receive(OTHER, RESERVE, 1.0))


def test_one_write_at_a_time(producer: ProducerProtocol) -> None:
    write = writing(producer)
    assert "under way" in refused(producer.receive(PEER, RESERVE, 1.0))
    producer.write_ended(write, None, "mapped")
    writing(producer)


@pytest.mark.parametrize(
    "end",
    [lambda producer: producer.abort("r", 21.0), lambda producer: producer.advance(60.0)],
    ids=["abort", "expiry"],
)
def test_blocks_that_are_written_from_are_reported_after_the_write(producer: ProducerProtocol, end) -> None:
    write = writing(producer)
    actions = end(producer)
    assert [type(action) for action in actions] == [ClearGuard, Send]
    told, ended = producer.write_ended(write, None, "mapped")
    assert refused([told]) == "the offer is over"  # however well it went: nobody may take these bytes
    assert isinstance(ended, OfferEnded)


def test_nobody_is_told_who_is_gone(producer: ProducerProtocol) -> None:
    write = writing(producer)
    producer.shutdown(21.0)
    (ended,) = producer.write_ended(write, TransportClosedError("closed"), "")
    assert isinstance(ended, OfferEnded)
    assert producer.next_deadline() == math.inf


def test_the_blocks_of_an_open_offer_do_not_wait(producer: ProducerProtocol) -> None:
    producer.open("o", 2, ((3,),), 8, 4)
    producer.receive(PEER, Claim("o", 2, 0, 1), 0.0)
    (write,) = producer.receive(PEER, Reserve("o", 2, 5, 99, 500, (16,), (32,), (16,)), 1.0)
    assert isinstance(write, StartWrite)
    assert [type(action) for action in producer.abort("o", 1.0)] == [ClearGuard, Send, OfferEnded]
    assert refused(producer.write_ended(write, None, "mapped")) == "the offer is over"
