"""Hostile peers of the `zeromq` transport are dropped with a typed error, and the other peers are still
served.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.transports import Connected, Guard, PeerLost
from kvferry.transports.errors import (
    BackpressureError,
    PeerLostError,
    PeerRefusedError,
    ProtocolError,
    VersionMismatchError,
)
from kvferry.transports.sums import SUM_BYTES, sum_of
from kvferry.transports.testing import Link, Node, World, pairs_of
from kvferry.transports.zeromq.frames import Frame
from kvferry.transports.zeromq.options import Address
from kvferry.transports.zeromq.wire import PROTOCOL_VERSION, Fetch, Hello, Message, Slice, Stale, decode

POOL_BYTES = 4 << 20
HELD = Guard(5, 77)
HELLO = Hello(64, (POOL_BYTES,))
ROWS = np.array([(0, POOL_BYTES)], dtype=np.int64)

#: What a peer of the oldest ZMTP sends: an empty identity, then messages. That version needs no handshake.
ZMTP_1 = b"\x01\x00" + b"\x05\x01\x01kvf\x02\x00x" * 50

Parts = list[bytes]
MakeWorld = Callable[..., World]


def greeting() -> Parts:
    return [HELLO.head(), HELLO.body()]


def next_version() -> Parts:
    head = bytearray(HELLO.head()[:-SUM_BYTES])
    head[15] = PROTOCOL_VERSION + 1  # after the kind and the magic
    return [bytes(head) + sum_of(bytes(head) + HELLO.body()), HELLO.body()]


def fetch(rows: list[tuple[int, int]], guard: Guard = HELD) -> Parts:
    asked = Fetch(1, 0, guard, True, np.array(rows, dtype=np.int64))
    return [asked.head(), asked.body()]


def still_serves(world: World, address: str) -> None:
    """Check that a well-behaved peer can connect and read."""
    server, node = world.nodes[0], world.node(POOL_BYTES)
    peer_id = node.endpoint.start_connect(address, timeout_s=20)
    world.serve(lambda: bool(node.of_type(Connected)))
    server.transport.guards.set(HELD.index, HELD.value)
    link = Link(server, node, peer_id, 0)
    assert world.read(link, pairs_of((0, 0, POOL_BYTES)), HELD).error is None
    world.forget(node)


class TestStrangers:
    """Connections that do not come from a kvferry node."""

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=4), min_size=1, max_size=4),
        st.booleans(),
    )
    def test_frames_of_garbage(self, fuzzed: World, raw: Any, messages: list[Parts], greets: bool) -> None:
        """The node drops or ignores the peer, and frees what the peer cost."""
        server = fuzzed.nodes[0]
        client = raw.dial(server.endpoint.listen("zeromq://127.0.0.1:0"))
        for message in [greeting(), *messages] if greets else messages:
            client.send_multipart(message)
        if greets:
            known = len(server.of_type(Connected))
            fuzzed.serve(lambda: len(server.of_type(Connected)) > known)
        client.close(linger=0)
        if greets:
            fuzzed.serve(lambda: len(server.of_type(PeerLost)) == len(server.of_type(Connected)))

    @pytest.fixture
    def fuzzed(self, world: World) -> Iterator[World]:
        world.node(POOL_BYTES)
        yield world
        still_serves(world, world.nodes[0].endpoint.listen(""))

    @pytest.mark.parametrize(
        "data", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\xff\0\0\0\0\0\0\0\1\x7f\3", ZMTP_1]
    )
    def test_bytes_that_are_not_zeromq(self, world: World, data: bytes) -> None:
        server = world.node(POOL_BYTES)
        address = server.endpoint.listen("")
        with socket.create_connection(("127.0.0.1", Address.parse(address).port)) as client:
            client.sendall(data)
            still_serves(world, address)
        assert not [event for event in server.history if isinstance(event, Connected)][1:]

    def test_silence_is_hung_up_on(self, raw: Any, make_world: MakeWorld) -> None:
        """A correct ZeroMQ peer that never sends a hello."""
        world = make_world(handshake_timeout_s=0.3)
        server = world.node(POOL_BYTES)
        client = raw.dial(server.endpoint.listen(""))
        watcher = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        world.serve(lambda: bool(watcher.poll(0)))
        client.disable_monitor()
        watcher.close()
        assert server.history == []

    def test_another_version_is_named_on_the_side_that_connects(self, world: World, raw: Any) -> None:
        node = world.node(POOL_BYTES)
        router = raw.socket(zmq.ROUTER)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        node.endpoint.start_connect(f"zeromq://127.0.0.1:{port}", timeout_s=20)
        routing_id, *_ = raw.receive(world, router)
        router.send_multipart([routing_id, *next_version()])
        world.serve(lambda: bool(node.of_type(PeerLost)))
        error = node.of_type(PeerLost)[0].error
        assert isinstance(error, VersionMismatchError)
        assert (error.local, error.remote) == (PROTOCOL_VERSION, PROTOCOL_VERSION + 1)

    def test_another_version_learns_ours(self, world: World, raw: Any) -> None:
        server = world.node(POOL_BYTES)
        client = raw.dial(server.endpoint.listen(""))
        client.send_multipart(next_version())
        assert isinstance(decode([Frame.copy_of(part) for part in raw.receive(world, client)]), Hello)
        assert server.history == []

    def test_a_port_that_is_none_of_ours(self, world: World) -> None:
        """The peer accepts our connection and closes it."""
        node = world.node(POOL_BYTES)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            node.endpoint.start_connect(f"zeromq://127.0.0.1:{listener.getsockname()[1]}", timeout_s=20)
            listener.accept()[0].close()
            world.serve(lambda: bool(node.of_type(PeerLost)))
        assert isinstance(node.of_type(PeerLost)[0].error, PeerRefusedError | PeerLostError)

    def test_a_port_that_says_nothing(self, world: World) -> None:
        node = world.node(POOL_BYTES)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            node.endpoint.start_connect(f"zeromq://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.3)
            world.serve(lambda: bool(node.of_type(PeerLost)))
        assert isinstance(node.of_type(PeerLost)[0].error, PeerLostError)


@pytest.mark.parametrize("make_world", ["main memory", "GPU"], indirect=True)
class TestReaders:
    """Peers that complete the handshake and then send requests that are not allowed."""

    @pytest.mark.parametrize(
        "parts",
        [
            greeting(),
            fetch([(POOL_BYTES, 1)]),
            fetch([(POOL_BYTES - 1, 2)]),
            fetch([(-1, 2)]),
            fetch([(0, POOL_BYTES)], Guard(1 << 30, 1)),
            fetch([(0, POOL_BYTES)], Guard(0, -1)),
            [Slice(1, 0, True, 0, ()).head(), b"unasked"],
            [Stale(1, 0).head(), b""],
            [b"\x99", b""],
            [Message(b"").head()],
        ],
    )
    def test_what_the_protocol_forbids(self, world: World, raw: Any, parts: Parts) -> None:
        server = world.node(POOL_BYTES)
        server.transport.guards.set(HELD.index, HELD.value)
        address = server.endpoint.listen("")
        client = raw.dial(address)
        client.send_multipart(greeting())
        client.send_multipart(parts)
        world.serve(lambda: bool(server.of_type(PeerLost)))
        assert isinstance(server.of_type(PeerLost)[0].error, ProtocolError)
        still_serves(world, address)

    def test_a_message_that_is_too_long(self, world: World, raw: Any) -> None:
        server = world.node(POOL_BYTES)
        address = server.endpoint.listen("")
        client = raw.dial(address)
        client.send_multipart(greeting())
        world.serve(lambda: bool(server.of_type(Connected)))
        client.send_multipart([Message(b"").head(), bytes(64 << 20)])
        world.serve(lambda: bool(server.of_type(PeerLost)))
        still_serves(world, address)

    def test_no_byte_without_a_guard_that_holds(self, world: World, raw: Any) -> None:
        server = world.node(POOL_BYTES)
        client = raw.dial(server.endpoint.listen(""))
        client.send_multipart(greeting())
        client.send_multipart(fetch([(0, POOL_BYTES)]))
        assert isinstance(decode([Frame.copy_of(part) for part in raw.receive(world, client)]), Hello)
        assert decode([Frame.copy_of(part) for part in raw.receive(world, client)]) == Stale(1, 0)

    def test_a_peer_that_fetches_and_does_not_take(self, world: World, raw: Any) -> None:
        """The peer is dropped before much is queued for it."""
        server = world.node(POOL_BYTES)
        server.transport.guards.set(HELD.index, HELD.value)
        address = server.endpoint.listen("")
        client = raw.dial(address, rcvhwm=1)
        client.send_multipart(greeting())
        asked = Fetch(1, 0, HELD, False, ROWS)
        for _ in range(400):
            client.send_multipart([asked.head(), asked.body()])
        world.serve(lambda: bool(server.of_type(PeerLost)))
        still_serves(world, address)

    def test_a_peer_that_takes_no_message_is_dropped_in_time(self, raw: Any, make_world: MakeWorld) -> None:
        """Both the queue for the peer and the time that it may stall are bounded."""
        world = make_world(peer_timeout_s=0.5)
        server = world.node(POOL_BYTES)
        client = raw.dial(server.endpoint.listen(""), rcvhwm=1)
        client.send_multipart(greeting())
        world.serve(lambda: bool(server.of_type(Connected)))
        with pytest.raises(BackpressureError):
            send_for_ever(server, server.of_type(Connected)[0].peer_id)
        world.serve(lambda: bool(server.of_type(PeerLost)))


def send_for_ever(node: Node, peer_id: int) -> None:
    while True:
        node.endpoint.send(peer_id, bytes(1 << 20))


def test_a_stalled_reader_does_not_starve_others(raw: Any, world: World) -> None:
    """While one peer does not receive its slices, another one reads."""
    server = world.node(POOL_BYTES)
    server.transport.guards.set(HELD.index, HELD.value)
    address = server.endpoint.listen("")
    client = raw.dial(address)
    client.send_multipart(greeting())
    asked = Fetch(1, 0, HELD, False, ROWS)
    for _ in range(8):
        client.send_multipart([asked.head(), asked.body()])
    still_serves(world, address)


def test_a_new_connection_never_pays_for_an_old_one(world: World, raw: Any) -> None:
    """Descriptors are reused at once, and each drop closes the connection that it is meant for."""
    server = world.node(POOL_BYTES)
    address = server.endpoint.listen("")
    for number in range(1, 31):
        bad, good = raw.dial(address), raw.dial(address)
        bad.send_multipart(greeting())
        bad.send_multipart([b"\x99", b""])
        bad.close()
        good.send_multipart(greeting())
        world.serve(lambda: len(server.of_type(Connected)) >= number + len(server.of_type(PeerLost)))  # noqa: B023
        raw.receive(world, good)
    world.serve(lambda: len(server.of_type(Connected)) - len(server.of_type(PeerLost)) == 30)
    world.serve_quietly()
    assert len(server.of_type(Connected)) - len(server.of_type(PeerLost)) == 30
