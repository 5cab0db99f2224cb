"""One part of the conformance suite: promises about messages, peers and the owner's loop."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from ..base import MAX_MESSAGE_BYTES, Connected, MessageReceived, PeerLost, TransferEnded
from ..errors import (
    BackpressureError,
    ConfigurationError,
    PeerLostError,
    ProtocolError,
    StaleRegionError,
    TransferTimeoutError,
    TransportClosedError,
)
from .harness import DEADLINE_S, HELD, PAGE, POOL_BYTES, Link, Node, World, pairs_of, refuses
from .leaks import descriptors
from .order import broken, require

ConnectRaw = Callable[[str], socket.socket]

IN_ORDER = "messages arrive whole, once each, and in the order in which they were sent"
BACKPRESSURE = "what waits for a peer is bounded: above the bound, `send` raises a `BackpressureError`"
CONNECTS = "`Connected` or `PeerLost` follows a `start_connect` within `timeout_s` seconds"
LOST_ONCE = "`disconnect` is reported to the other side by one `PeerLost`, and to this side not at all"
FREED = "`close` frees everything: the address can be used again, and no socket file is left"
ONE_PEER = "what goes wrong with one connection ends only that one"


class MessagePromises:
    """`send`: messages arrive whole and in order, and what waits is bounded."""

    def test_messages_keep_their_order_both_ways(self, world: World, link: Link) -> None:
        sizes = [1, 0, 17, 100_000, 2, MAX_MESSAGE_BYTES, 3, 5000]
        sent = [bytes([index]) * size for index, size in enumerate(sizes)]
        for count, message in enumerate(sent, start=1):
            link.consumer.endpoint.send(link.producer_id, message)
            link.producer.endpoint.send(link.consumer_id, message[::-1])
            # Receive each before the next is sent, because what may wait is bounded.
            world.serve(
                lambda: (
                    len(link.producer.messages(link.consumer_id)) >= count  # noqa: B023 - called right here
                    and len(link.consumer.messages(link.producer_id)) >= count  # noqa: B023
                ),
                promise=IN_ORDER,
            )
        _require_messages(link.producer, link.consumer_id, sent)
        _require_messages(link.consumer, link.producer_id, [message[::-1] for message in sent])

    def test_many_messages_at_once_keep_their_order(self, world: World, link: Link) -> None:
        sent = [str(number).encode() for number in range(2000)]
        for message in sent:
            link.consumer.endpoint.send(link.producer_id, message)
        self._receive(world, link, sent)

    def test_a_message_is_not_repeated(self, world: World, link: Link) -> None:
        link.consumer.endpoint.send(link.producer_id, b"once")
        self._receive(world, link, [b"once"])
        world.serve_quietly()
        _require_messages(link.producer, link.consumer_id, [b"once"])

    def test_an_oversized_message_is_refused_and_harms_nothing(self, world: World, link: Link) -> None:
        with refuses(ProtocolError, "a message longer than `MAX_MESSAGE_BYTES` is refused"):
            link.consumer.endpoint.send(link.producer_id, bytes(MAX_MESSAGE_BYTES + 1))
        link.consumer.endpoint.send(link.producer_id, b"fine")
        self._receive(world, link, [b"fine"])

    def test_a_peer_that_does_not_drain_is_noticed(self, world: World, link: Link) -> None:
        """What waits for a peer is bounded, and every accepted message arrives."""
        message = bytes(1 << 20)
        num_sent = _send_until_refused(link, message, limit=256)
        self._receive(world, link, [message] * num_sent)
        link.consumer.endpoint.send(link.producer_id, b"again")
        self._receive(world, link, [message] * num_sent + [b"again"])

    def _receive(self, world: World, link: Link, expected: list[bytes]) -> None:
        """Serve until the producer has as many messages as expected, and compare them."""
        world.serve(
            lambda: len(link.producer.messages(link.consumer_id)) >= len(expected),
            promise=f"{IN_ORDER} ({len(expected)} were sent)",
        )
        _require_messages(link.producer, link.consumer_id, expected)


class PeerPromises:
    """`listen`, `start_connect`, `disconnect`, and peers that are lost."""

    def test_several_peers_are_told_apart(self, world: World) -> None:
        producer = world.node(PAGE)
        links = [world.link(producer, world.node(PAGE)) for _ in range(3)]
        for number, link in enumerate(links):
            link.consumer.endpoint.send(link.producer_id, b"from %d" % number)
            producer.endpoint.send(link.consumer_id, b"to %d" % number)
        world.serve(
            lambda: (
                len(producer.of_type(MessageReceived)) >= 3
                and all(link.consumer.of_type(MessageReceived) for link in links)
            ),
            promise=IN_ORDER,
        )
        for number, link in enumerate(links):
            _require_messages(producer, link.consumer_id, [b"from %d" % number])
            _require_messages(link.consumer, link.producer_id, [b"to %d" % number])

    def test_one_address_serves_many(self, world: World) -> None:
        producer = world.node(PAGE)
        address = producer.endpoint.listen("")
        consumers = [world.node(PAGE) for _ in range(4)]
        for consumer in consumers:
            consumer.endpoint.start_connect(address, timeout_s=DEADLINE_S)
        world.serve(
            lambda: all(consumer.history for consumer in consumers) and len(producer.history) >= 4,
            promise="many peers can connect to one address",
        )

    def test_connecting_to_a_closed_address_ends_in_time(self, world: World) -> None:
        gone = world.node(PAGE)
        address = gone.endpoint.listen("")
        world.forget(gone)
        node = world.node(PAGE)
        began = time.monotonic()
        peer_id = node.endpoint.start_connect(address, timeout_s=1.0)
        world.serve(lambda: bool(node.history), promise=CONNECTS)
        require(time.monotonic() - began < 5.0, CONNECTS, f"it took {time.monotonic() - began:.1f} s")
        require(
            [lost.peer_id for lost in node.of_type(PeerLost)] == [peer_id],
            "a connection that we started and that fails is reported by one `PeerLost`",
            node.history,
        )
        error = node.of_type(PeerLost)[0].error
        allowed = (PeerLostError, TransferTimeoutError)
        require(
            isinstance(error, allowed),
            "the `PeerLost` has a `PeerLostError` or `TransferTimeoutError`",
            repr(error),
        )

    def test_connecting_to_a_peer_that_stopped_ends_in_time(self, world: World) -> None:
        """The other side listens and does nothing else."""
        address = world.node(PAGE).endpoint.listen("")
        node = world.node(PAGE)
        began = time.monotonic()
        node.endpoint.start_connect(address, timeout_s=0.2)
        world.serve(lambda: bool(node.history), node, promise=CONNECTS)
        require(time.monotonic() - began < 5.0, CONNECTS, f"it took {time.monotonic() - began:.1f} s")

    def test_a_close_frees_its_address(self, world: World) -> None:
        node = world.node(PAGE)
        before = set(descriptors())
        address = node.endpoint.listen("")
        files = _socket_files(set(descriptors()) - before)
        world.forget(node)
        left = [path for path in files if os.path.lexists(path)]
        require(not left, FREED, f"socket files {left} still exist")
        try:
            world.node(PAGE).endpoint.listen(address)
        except ConfigurationError as error:
            broken(FREED, f"`listen({address!r})` raised {error!r}", error)

    def test_a_peer_that_connects_again_is_a_new_peer(self, world: World) -> None:
        """Ids that were used again would fail the check of the order of events."""
        producer, consumer = world.node(PAGE), world.node(PAGE)
        producer.fill(1)
        producer.transport.guards.set(HELD.index, HELD.value)
        for number in range(1, 4):
            link = world.link(producer, consumer)
            ended = world.read(link, pairs_of((0, 0, PAGE)), HELD)
            require(ended.error is None, "a peer that connects again can be read from", ended)
            consumer.endpoint.disconnect(link.producer_id)
            world.serve(lambda: len(producer.of_type(PeerLost)) == number, promise=LOST_ONCE)  # noqa: B023

    def test_a_new_endpoint_at_an_old_address_is_a_new_peer(self, world: World, link: Link) -> None:
        """The peer was replaced by another one with other memory. No read may mistake one for the other."""
        address = link.producer.endpoint.listen("")
        consumer = world.node(POOL_BYTES)
        known = len(link.producer.of_type(Connected))
        old_id = consumer.endpoint.start_connect(address, timeout_s=DEADLINE_S)
        world.serve(lambda: bool(consumer.history) and len(link.producer.of_type(Connected)) > known)
        world.forget(link.producer)
        successor = world.node(POOL_BYTES)
        successor.memory()[:] = 99
        successor.transport.guards.set(HELD.index, HELD.value)
        with contextlib.suppress(
            ConfigurationError
        ):  # the kernel may keep the address of a lost peer for a while
            successor.endpoint.listen(address)
        promise = (
            "a peer whose endpoint was closed is lost, even if another endpoint now listens at its address"
        )
        try:
            transfer_id = consumer.endpoint.start_read(old_id, pairs_of((0, 0, PAGE)), HELD, timeout_s=1.0)
        except PeerLostError:
            pass
        else:
            world.serve(lambda: bool(consumer.ends_of(transfer_id)), promise=promise)
            (ended,) = consumer.ends_of(transfer_id)
            bytes_of_successor = bool(np.any(consumer.memory()[:PAGE] == 99))
            seen = f"{ended}, with{'' if bytes_of_successor else 'out'} bytes of the new endpoint"
            require(ended.error is not None, promise, seen)
        world.serve(lambda: old_id in [lost.peer_id for lost in consumer.of_type(PeerLost)], promise=promise)

    @pytest.mark.parametrize("piece", [b"\xff" * 65536, b"\0" * 65536, bytes(range(256)) * 256])
    def test_nonsense_costs_only_its_own_connection(
        self, world: World, link: Link, connect_raw: ConnectRaw, piece: bytes
    ) -> None:
        """A stranger sends bytes that are no protocol, such as an endless frame."""
        address = link.producer.endpoint.listen("")
        limit = 3 * MAX_MESSAGE_BYTES
        num_taken, took_last = 0, time.monotonic()
        with connect_raw(address) as stranger:
            stranger.setblocking(False)
            with contextlib.suppress(ConnectionError):  # dropped, as it should be
                # An endpoint that takes nothing more will drop the stranger when the handshake times out.
                while time.monotonic() - took_last < 1.0:
                    world.turn(timeout_s=0.001)
                    with contextlib.suppress(BlockingIOError):
                        while num_taken < limit:
                            num_taken += stranger.send(piece)
                            took_last = time.monotonic()
                    require(
                        num_taken < limit,
                        "a frame whose length the protocol forbids is refused before memory is set aside for it",
                        f"the endpoint took {num_taken} bytes of nonsense and did not close the connection",
                    )
        link.consumer.endpoint.send(link.producer_id, b"fine")
        world.serve(lambda: bool(link.producer.messages(link.consumer_id)), promise=ONE_PEER)
        _require_messages(link.producer, link.consumer_id, [b"fine"])

    @pytest.mark.parametrize("address", ["", "nonsense", "gopher://somewhere", "://"])
    def test_a_malformed_address_is_refused(self, world: World, address: str) -> None:
        with refuses(ConfigurationError, f"the malformed address {address!r} is refused"):
            world.node(PAGE).endpoint.start_connect(address, timeout_s=1.0)

    def test_an_address_is_taken_once(self, world: World) -> None:
        address = world.node(PAGE).endpoint.listen("")
        promise = "an address that is taken is refused by a `ConfigurationError` which says that it is in use"
        with refuses(ConfigurationError, promise):
            try:
                world.node(PAGE).endpoint.listen(address)
            except ConfigurationError as error:
                require("in use" in str(error), promise, repr(error))
                raise

    def test_disconnect_is_reported_to_the_other_side_only(self, world: World, link: Link) -> None:
        link.consumer.endpoint.disconnect(link.producer_id)
        link.consumer.endpoint.disconnect(link.producer_id)
        link.consumer.endpoint.disconnect(123456)
        world.serve(lambda: bool(link.producer.of_type(PeerLost)), promise=LOST_ONCE)
        world.serve_quietly()
        require(
            [lost.peer_id for lost in link.producer.of_type(PeerLost)] == [link.consumer_id]
            and not link.consumer.of_type(PeerLost),
            LOST_ONCE,
            f"there {link.producer.history}, here {link.consumer.history}",
        )
        for node, peer_id in ((link.consumer, link.producer_id), (link.producer, link.consumer_id)):
            with refuses(PeerLostError, "nothing is sent to a peer that is gone"):
                node.endpoint.send(peer_id, b"too late")

    def test_disconnect_ends_reads_once(self, world: World, link: Link) -> None:
        ids = _start_reads(link, 8)
        link.consumer.endpoint.disconnect(link.producer_id)
        _require_ends(world, link, ids, TransportClosedError)
        lost = link.consumer.of_type(PeerLost)
        require(not lost, LOST_ONCE, lost)

    def test_reads_end_before_their_peer_is_lost(self, world: World, link: Link) -> None:
        ids = _start_reads(link, 8)
        link.producer.endpoint.send(link.consumer_id, b"goodbye")
        world.forget(link.producer)
        promise = (
            "a peer that closes is lost, by a `PeerLost` with a `PeerLostError`, after its reads have ended"
        )
        world.serve(lambda: bool(link.consumer.of_type(PeerLost)), promise=promise)
        # The guards may be cleared before the connection closes.
        _require_ends(world, link, ids, PeerLostError, StaleRegionError)
        last = link.consumer.history[-1]
        require(
            isinstance(last, PeerLost) and isinstance(last.error, PeerLostError),
            promise,
            link.consumer.history[-5:],
        )


class LoopPromises:
    """`wait_events`, `wake`, `close`."""

    def test_waiting_ends_without_events(self, world: World) -> None:
        endpoint = world.node(PAGE).endpoint
        promise = "`wait_events` waits for `timeout_s` seconds if nothing happens, and not longer"
        for timeout_s in (0.0, 0.05):
            began = time.monotonic()
            events = endpoint.wait_events(timeout_s)
            took_s = time.monotonic() - began
            require(not events, "nothing is reported if nothing happened", events)
            require(
                timeout_s - 0.01 <= took_s < timeout_s + 5,
                promise,
                f"{took_s:.3f} s instead of {timeout_s} s",
            )

    def test_wake_before_waiting_is_not_lost(self, world: World) -> None:
        endpoint = world.node(PAGE).endpoint
        endpoint.wake()
        _require_woken(world, endpoint.wait_events)

    def test_any_thread_may_wake(self, world: World) -> None:
        endpoint = world.node(PAGE).endpoint
        waker = threading.Timer(0.05, endpoint.wake)
        waker.start()
        _require_woken(world, endpoint.wait_events)
        waker.join()

    def test_closing_twice_is_harmless_and_final(self, world: World, link: Link) -> None:
        transport, endpoint = link.consumer.transport, link.consumer.endpoint
        _start_reads(link, 4)
        world.forget(link.consumer)
        transport.close()
        endpoint.close()
        endpoint.wake()
        endpoint.disconnect(link.producer_id)
        calls: dict[str, Callable[[], object]] = {
            "wait_events": lambda: endpoint.wait_events(0),
            "send": lambda: endpoint.send(link.producer_id, b"x"),
            "listen": lambda: endpoint.listen(""),
            "allocate": lambda: transport.allocate(PAGE),
            "start_read": lambda: endpoint.start_read(
                link.producer_id, pairs_of((0, 0, 1)), HELD, timeout_s=1
            ),
        }
        for name, call in calls.items():
            with refuses(TransportClosedError, f"`{name}` after `close` raises a `TransportClosedError`"):
                call()
        world.serve(
            lambda: bool(link.producer.of_type(PeerLost)), promise="peers learn of a close by a `PeerLost`"
        )


def _send_until_refused(link: Link, message: bytes, limit: int) -> int:
    for num_sent in range(limit):
        try:
            link.consumer.endpoint.send(link.producer_id, message)
        except BackpressureError:
            return num_sent
    broken(BACKPRESSURE, f"{limit} messages of {len(message)} bytes were accepted for a peer that takes none")


def _start_reads(link: Link, count: int) -> list[int]:
    pairs = pairs_of((0, 0, POOL_BYTES))
    start = link.consumer.endpoint.start_read
    return [start(link.producer_id, pairs, HELD, timeout_s=DEADLINE_S) for _ in range(count)]


def _require_ends(world: World, link: Link, ids: list[int], *allowed: type[Exception]) -> None:
    """Require that reads of the consumer end once each, with one of these errors or none."""
    promise = "each read that `start_read` accepted ends with exactly one `TransferEnded`"
    world.serve(lambda: len(link.consumer.of_type(TransferEnded)) >= len(ids), promise=promise)
    world.serve_quietly()
    ended = link.consumer.of_type(TransferEnded)
    require(sorted(event.transfer_id for event in ended) == ids, promise, f"{ended} for the reads {ids}")
    wrong = [event for event in ended if event.error is not None and not isinstance(event.error, allowed)]
    names = " or ".join(kind.__name__ for kind in allowed)
    require(not wrong, f"a read whose peer goes ends with no error or with a {names}", wrong)


def _require_messages(node: Node, peer_id: int, expected: list[bytes]) -> None:
    """Require that a node has received these messages from a peer."""
    found = node.messages(peer_id)
    if found != expected:
        pairs = enumerate(zip(found, expected, strict=False))
        at = next((index for index, (one, other) in pairs if one != other), min(len(found), len(expected)))
        shown = [
            f"{message[:20]!r} of {len(message)} bytes"
            for message in (found[at : at + 1] + expected[at : at + 1])
        ]
        broken(
            IN_ORDER,
            f"{len(found)} messages instead of {len(expected)}; number {at} differs: {' instead of '.join(shown)}",
        )


def _require_woken(world: World, wait_events: Callable[[float], object]) -> None:
    """Require that a wait ends long before its timeout."""
    began = time.monotonic()
    wait_events(world.deadline_s)
    took_s = time.monotonic() - began
    promise = "`wake` ends the current or the next `wait_events` at once, from any thread"
    require(took_s < world.deadline_s / 2, promise, f"it waited for {took_s:.1f} s")


def _socket_files(found: set[tuple[int, str]]) -> list[str]:
    """Return the paths of the Unix sockets among descriptors."""
    paths = []
    for number, target in found:
        if target.startswith("socket:") and stat.S_ISSOCK(os.fstat(number).st_mode):
            with socket.socket(fileno=os.dup(number)) as copy:
                name = copy.getsockname() if copy.family == socket.AF_UNIX else ""
            if isinstance(name, str) and name:
                paths.append(name)
    return paths
