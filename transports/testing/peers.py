"""One part of the conformance suite: promises about messages, peers and the owner's loop."""

from __future__ import annotations

import threading
import time

import pytest

from ..base import MAX_MESSAGE_BYTES, MessageReceived, PeerLost, TransferEnded
from ..errors import (
    BackpressureError,
    ConfigurationError,
    PeerLostError,
    ProtocolError,
    StaleRegionError,
    TransferTimeoutError,
    TransportClosedError,
)
from .harness import DEADLINE_S, HELD, PAGE, POOL_BYTES, Link, World, pairs_of


class MessagePromises:
    """`send`: messages arrive whole and in order, and what waits is bounded."""

    def test_messages_keep_their_order_both_ways(self, world: World, link: Link) -> None:
        sizes = [1, 0, 17, 100_000, 2, MAX_MESSAGE_BYTES, 3, 5000]
        sent = [bytes([index]) * size for index, size in enumerate(sizes)]
        for message in sent:
            link.consumer.endpoint.send(link.producer_id, message)
            link.producer.endpoint.send(link.consumer_id, message[::-1])
            # Receive each before the next is sent, because what may wait is bounded.
            count = sent.index(message) + 1
            world.serve(lambda: len(link.producer.messages(link.consumer_id)) >= count)  # noqa: B023
            world.serve(lambda: len(link.consumer.messages(link.producer_id)) >= count)  # noqa: B023
        assert link.producer.messages(link.consumer_id) == sent
        assert link.consumer.messages(link.producer_id) == [message[::-1] for message in sent]

    def test_many_messages_at_once_keep_their_order(self, world: World, link: Link) -> None:
        sent = [str(number).encode() for number in range(2000)]
        for message in sent:
            link.consumer.endpoint.send(link.producer_id, message)
        world.serve(lambda: len(link.producer.messages(link.consumer_id)) == len(sent))
        assert link.producer.messages(link.consumer_id) == sent

    def test_an_oversized_message_is_refused_and_harms_nothing(self, world: World, link: Link) -> None:
        with pytest.raises(ProtocolError):
            link.consumer.endpoint.send(link.producer_id, bytes(MAX_MESSAGE_BYTES + 1))
        link.consumer.endpoint.send(link.producer_id, b"fine")
        world.serve(lambda: link.producer.messages(link.consumer_id) == [b"fine"])

    def test_a_peer_that_does_not_drain_is_noticed(self, world: World, link: Link) -> None:
        """What waits for a peer is bounded, and every accepted message arrives."""
        message = bytes(1 << 20)
        num_sent = _send_until_refused(link, message, limit=256)
        world.serve(lambda: len(link.producer.messages(link.consumer_id)) == num_sent)
        link.consumer.endpoint.send(link.producer_id, b"again")
        world.serve(lambda: link.producer.messages(link.consumer_id)[-1] == b"again")


class PeerPromises:
    """`listen`, `start_connect`, `disconnect`, and peers that are lost."""

    def test_several_peers_are_told_apart(self, world: World) -> None:
        producer = world.node(PAGE)
        links = [world.link(producer, world.node(PAGE)) for _ in range(3)]
        for number, link in enumerate(links):
            link.consumer.endpoint.send(link.producer_id, b"from %d" % number)
            producer.endpoint.send(link.consumer_id, b"to %d" % number)
        world.serve(lambda: len(producer.of_type(MessageReceived)) == 3)
        for number, link in enumerate(links):
            assert producer.messages(link.consumer_id) == [b"from %d" % number]
            world.serve(lambda: bool(link.consumer.of_type(MessageReceived)))  # noqa: B023
            assert link.consumer.messages(link.producer_id) == [b"to %d" % number]

    def test_one_address_serves_many(self, world: World) -> None:
        producer, address = world.node(PAGE), ""
        address = producer.endpoint.listen(address)
        consumers = [world.node(PAGE) for _ in range(4)]
        for consumer in consumers:
            consumer.endpoint.start_connect(address, timeout_s=DEADLINE_S)
        world.serve(lambda: all(consumer.history for consumer in consumers) and len(producer.history) == 4)

    def test_connecting_to_a_closed_address_ends_in_time(self, world: World) -> None:
        gone = world.node(PAGE)
        address = gone.endpoint.listen("")
        world.forget(gone)
        node = world.node(PAGE)
        began = time.monotonic()
        peer_id = node.endpoint.start_connect(address, timeout_s=1.0)
        world.serve(lambda: bool(node.history))
        assert time.monotonic() - began < 5.0
        (lost,) = node.of_type(PeerLost)
        assert lost.peer_id == peer_id
        assert isinstance(lost.error, (PeerLostError, TransferTimeoutError))

    @pytest.mark.parametrize("address", ["", "nonsense", "gopher://somewhere", "://"])
    def test_a_malformed_address_is_refused(self, world: World, address: str) -> None:
        with pytest.raises(ConfigurationError):
            world.node(PAGE).endpoint.start_connect(address, timeout_s=1.0)

    def test_an_address_is_taken_once(self, world: World) -> None:
        address = world.node(PAGE).endpoint.listen("")
        with pytest.raises(ConfigurationError, match="in use"):
            world.node(PAGE).endpoint.listen(address)

    def test_disconnect_is_reported_to_the_other_side_only(self, world: World, link: Link) -> None:
        link.consumer.endpoint.disconnect(link.producer_id)
        link.consumer.endpoint.disconnect(link.producer_id)
        link.consumer.endpoint.disconnect(123456)
        world.serve(lambda: bool(link.producer.of_type(PeerLost)))
        world.serve_quietly()
        assert [lost.peer_id for lost in link.producer.of_type(PeerLost)] == [link.consumer_id]
        assert not link.consumer.of_type(PeerLost)
        for node, peer_id in ((link.consumer, link.producer_id), (link.producer, link.consumer_id)):
            with pytest.raises(PeerLostError):
                node.endpoint.send(peer_id, b"too late")

    def test_disconnect_ends_reads_once(self, world: World, link: Link) -> None:
        ids = _start_reads(link, 8)
        link.consumer.endpoint.disconnect(link.producer_id)
        world.serve(lambda: len(link.consumer.of_type(TransferEnded)) >= len(ids))
        world.serve_quietly()
        ended = link.consumer.of_type(TransferEnded)
        assert sorted(event.transfer_id for event in ended) == ids
        assert all(event.error is None or isinstance(event.error, TransportClosedError) for event in ended)
        assert not link.consumer.of_type(PeerLost)

    def test_reads_end_before_their_peer_is_lost(self, world: World, link: Link) -> None:
        ids = _start_reads(link, 8)
        link.producer.endpoint.send(link.consumer_id, b"goodbye")
        world.forget(link.producer)
        world.serve(lambda: bool(link.consumer.of_type(PeerLost)))
        world.serve_quietly()
        assert isinstance(link.consumer.history[-1], PeerLost)
        assert isinstance(link.consumer.history[-1].error, PeerLostError)
        ended = link.consumer.of_type(TransferEnded)
        assert sorted(event.transfer_id for event in ended) == ids
        allowed = (PeerLostError, StaleRegionError)  # the guards may be cleared before the connection closes
        assert all(event.error is None or isinstance(event.error, allowed) for event in ended)


class LoopPromises:
    """`wait_events`, `wake`, `close`."""

    def test_waiting_ends_without_events(self, world: World) -> None:
        endpoint = world.node(PAGE).endpoint
        assert endpoint.wait_events(0) == []
        began = time.monotonic()
        assert endpoint.wait_events(0.05) == []
        assert time.monotonic() - began >= 0.04

    def test_wake_before_waiting_is_not_lost(self, world: World) -> None:
        endpoint = world.node(PAGE).endpoint
        endpoint.wake()
        began = time.monotonic()
        endpoint.wait_events(DEADLINE_S)
        assert time.monotonic() - began < DEADLINE_S / 2

    def test_any_thread_may_wake(self, world: World) -> None:
        endpoint = world.node(PAGE).endpoint
        waker = threading.Timer(0.05, endpoint.wake)
        waker.start()
        began = time.monotonic()
        endpoint.wait_events(DEADLINE_S)
        waker.join()
        assert time.monotonic() - began < DEADLINE_S / 2

    def test_closing_twice_is_harmless_and_final(self, world: World, link: Link) -> None:
        transport, endpoint = link.consumer.transport, link.consumer.endpoint
        _start_reads(link, 4)
        world.forget(link.consumer)
        transport.close()
        endpoint.close()
        endpoint.wake()
        endpoint.disconnect(link.producer_id)
        for call in (
            lambda: endpoint.wait_events(0),
            lambda: endpoint.send(link.producer_id, b"x"),
            lambda: endpoint.listen(""),
            lambda: transport.allocate(PAGE),
            lambda: endpoint.start_read(link.producer_id, pairs_of((0, 0, 1)), HELD, timeout_s=1),
        ):
            with pytest.raises(TransportClosedError):
                call()
        world.serve(lambda: bool(link.producer.of_type(PeerLost)))


def _send_until_refused(link: Link, message: bytes, limit: int) -> int:
    for num_sent in range(limit):
        try:
            link.consumer.endpoint.send(link.producer_id, message)
        except BackpressureError:
            return num_sent
    pytest.fail(
        f"send accepted {limit} messages of {len(message)} bytes for a peer that takes none: what waits has no bound; "
        "raise BackpressureError above a bound"
    )


def _start_reads(link: Link, count: int) -> list[int]:
    pairs = pairs_of((0, 0, POOL_BYTES))
    start = link.consumer.endpoint.start_read
    return [start(link.producer_id, pairs, HELD, timeout_s=DEADLINE_S) for _ in range(count)]
