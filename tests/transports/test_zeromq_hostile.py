"""Peers of the `zeromq` transport that lie, stall, or talk nonsense: dropped with a typed error, and others served."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.transports import Connected, Guard, PeerLost, TransferEnded
from kvferry.transports.errors import (
    BackpressureError,
    ChecksumError,
    PeerLostError,
    PeerRefusedError,
    ProtocolError,
    StaleRegionError,
    TransferTimeoutError,
    VersionMismatchError,
)
from kvferry.transports.testing import FlippingProxy, Link, Node, World, pairs_of
from kvferry.transports.zeromq import ZeroMQTransport
from kvferry.transports.zeromq.options import Address
from kvferry.transports.zeromq.serving import checksum_of
from kvferry.transports.zeromq.wire import PROTOCOL_VERSION, Fetch, Hello, Message, Slice, Stale, decode

POOL_BYTES = 4 << 20
HELD = Guard(5, 77)
HELLO = Hello(64, (POOL_BYTES,))
ROWS = np.array([(0, POOL_BYTES)], dtype=np.int64)

#: What a peer of the oldest version says: an identity of no bytes, then messages; a greeting is optional there.
ZMTP_1 = b"\x01\x00" + b"\x05\x01\x01kvf\x02\x00x" * 50

Parts = list[bytes]


@pytest.fixture
def world() -> Iterator[World]:
    with closing_world() as world:
        yield world


@contextmanager
def closing_world(**options: Any) -> Iterator[World]:
    world = World(lambda: ZeroMQTransport(options))
    try:
        yield world
    finally:
        world.close()


class Raw:
    """ZeroMQ sockets that say what a test likes."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._sockets: list[Any] = []

    def socket(self, kind: int) -> Any:
        self._sockets.append(self._context.socket(kind))
        self._sockets[-1].linger = 0
        return self._sockets[-1]

    def dial(self, address: str, **options: int) -> Any:
        client = self.socket(zmq.DEALER)
        for name, value in options.items():
            setattr(client, name, value)
        client.connect(Address.parse(address).endpoint)
        return client

    def close(self) -> None:
        for socket_ in self._sockets:
            socket_.close()
        self._context.term()


@pytest.fixture
def raw() -> Iterator[Raw]:
    raw = Raw()
    yield raw
    raw.close()


def greeting() -> Parts:
    return [HELLO.head(), HELLO.body()]


def next_version() -> Parts:
    head = bytearray(HELLO.head())
    head[15] = PROTOCOL_VERSION + 1  # after the kind and the magic
    return [bytes(head), HELLO.body()]


def still_serves(world: World, address: str) -> None:
    """Somebody decent can connect and read."""
    server, node = world.nodes[0], world.node(POOL_BYTES)
    peer_id = node.transport.start_connect(address, timeout_s=20)
    world.serve(lambda: bool(node.of_type(Connected)))
    server.transport.guards.set(HELD.index, HELD.value)
    link = Link(server, node, peer_id, 0)
    assert world.read(link, pairs_of((0, 0, POOL_BYTES)), HELD).error is None
    world.forget(node)


class TestDecoder:
    @pytest.mark.parametrize(
        "message",
        [
            HELLO,
            Fetch(2**64 - 1, 2**32 - 1, HELD, True, ROWS),
            Fetch(1, 0, HELD, False, ROWS[:0]),
            Slice(1, 2, True, 2**64 - 1, memoryview(b"abc")),
            Stale(7, 8),
        ],
    )
    def test_what_was_encoded_is_decoded(self, message: Any) -> None:
        body = (
            message.body
            if isinstance(message, Slice)
            else b""
            if isinstance(message, Stale)
            else message.body()
        )
        decoded = decode([memoryview(message.head()), memoryview(body)])
        assert type(decoded) is type(message)
        for name, value in vars(message).items():
            assert np.array_equal(getattr(decoded, name), value)

    @settings(max_examples=500, deadline=None)
    @given(
        st.lists(st.binary(max_size=64), max_size=4),
        st.sampled_from([b"", b"\x01", b"\x03", b"\x04", b"\x05"]),
    )
    def test_garbage_is_refused_and_nothing_else(self, parts: Parts, kind: bytes) -> None:
        frames = [memoryview(kind + part if index == 0 else part) for index, part in enumerate(parts)]
        try:
            decode(frames)
        except (ProtocolError, VersionMismatchError):
            pass

    @pytest.mark.parametrize(
        "rows",
        [[(0, 0)], [(0, -1)], [(0, 2**62)], [(0, 8 << 20), (0, 1)], [(0, 2**63 - 1)] * 2, [(0, 1)] * 4097],
    )
    def test_a_fetch_is_bounded(self, rows: list[tuple[int, int]]) -> None:
        fetch = Fetch(1, 0, HELD, True, np.array(rows, dtype=np.int64))
        with pytest.raises(ProtocolError):
            decode([memoryview(fetch.head()), memoryview(fetch.body())])

    @pytest.mark.parametrize("sizes", [(), (0,), (-1, 5), (2**62,), (1,) * 65537])
    def test_a_hello_is_bounded(self, sizes: tuple[int, ...]) -> None:
        hello = Hello(1, sizes)
        with pytest.raises(ProtocolError):
            decode([memoryview(hello.head()), memoryview(hello.body())])


class TestStrangers:
    """Who connects, and is none of ours."""

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=4), min_size=1, max_size=4),
        st.booleans(),
    )
    def test_frames_of_garbage(self, fuzzed: World, raw: Raw, messages: list[Parts], greets: bool) -> None:
        """They end in a drop, or in nothing, and what they cost is given back."""
        server = fuzzed.nodes[0]
        client = raw.dial(server.transport.listen("zeromq://127.0.0.1:0"))
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
        still_serves(world, world.nodes[0].transport.listen(""))

    @pytest.mark.parametrize(
        "data", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\xff\0\0\0\0\0\0\0\1\x7f\3", ZMTP_1]
    )
    def test_bytes_that_are_not_zeromq(self, world: World, data: bytes) -> None:
        server = world.node(POOL_BYTES)
        address = server.transport.listen("")
        with socket.create_connection(("127.0.0.1", Address.parse(address).port)) as client:
            client.sendall(data)
            still_serves(world, address)
        assert not [event for event in server.history if isinstance(event, Connected)][1:]

    def test_silence_is_hung_up_on(self, raw: Raw) -> None:
        """A proper ZeroMQ peer that never says hello."""
        with closing_world(handshake_timeout_s=0.3) as world:
            server = world.node(POOL_BYTES)
            client = raw.dial(server.transport.listen(""))
            watcher = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            world.serve(lambda: bool(watcher.poll(0)))
            client.disable_monitor()
            watcher.close()
        assert server.history == []

    def test_another_version_is_named_on_the_side_that_connects(self, world: World, raw: Raw) -> None:
        node = world.node(POOL_BYTES)
        router = raw.socket(zmq.ROUTER)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        node.transport.start_connect(f"zeromq://127.0.0.1:{port}", timeout_s=20)
        routing_id, *_ = receive(world, router)
        router.send_multipart([routing_id, *next_version()])
        world.serve(lambda: bool(node.of_type(PeerLost)))
        error = node.of_type(PeerLost)[0].error
        assert isinstance(error, VersionMismatchError)
        assert (error.local, error.remote) == (PROTOCOL_VERSION, PROTOCOL_VERSION + 1)

    def test_another_version_learns_ours(self, world: World, raw: Raw) -> None:
        server = world.node(POOL_BYTES)
        client = raw.dial(server.transport.listen(""))
        client.send_multipart(next_version())
        assert isinstance(decode([memoryview(part) for part in receive(world, client)]), Hello)
        assert server.history == []

    def test_a_port_that_is_none_of_ours(self, world: World) -> None:
        """It accepts, and hangs up."""
        node = world.node(POOL_BYTES)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            node.transport.start_connect(f"zeromq://127.0.0.1:{listener.getsockname()[1]}", timeout_s=20)
            listener.accept()[0].close()
            world.serve(lambda: bool(node.of_type(PeerLost)))
        assert isinstance(node.of_type(PeerLost)[0].error, PeerRefusedError | PeerLostError)

    def test_a_port_that_says_nothing(self, world: World) -> None:
        node = world.node(POOL_BYTES)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            node.transport.start_connect(f"zeromq://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.3)
            world.serve(lambda: bool(node.of_type(PeerLost)))
        assert isinstance(node.of_type(PeerLost)[0].error, PeerLostError)


class TestReaders:
    """Peers that say hello, and then ask for what they must not."""

    @pytest.mark.parametrize(
        "parts",
        [
            greeting(),
            [Fetch(1, 0, HELD, True, np.array([(POOL_BYTES, 1)], dtype=np.int64)).head(), b"x"],
            [Fetch(1, 0, HELD, True, ROWS).head(), np.array([(POOL_BYTES - 1, 2)], dtype="<i8").tobytes()],
            [Fetch(1, 0, HELD, True, ROWS).head(), np.array([(-1, 2)], dtype="<i8").tobytes()],
            [Fetch(1, 0, Guard(1 << 30, 1), True, ROWS).head(), ROWS.tobytes()],
            [Fetch(1, 0, Guard(0, -1), True, ROWS).head(), ROWS.tobytes()],
            [Slice(1, 0, True, 0, memoryview(b"")).head(), b"unasked"],
            [Stale(1, 0).head(), b""],
            [b"\x99", b""],
            [Message.head()],
        ],
    )
    def test_what_the_protocol_forbids(self, world: World, raw: Raw, parts: Parts) -> None:
        server = world.node(POOL_BYTES)
        server.transport.guards.set(HELD.index, HELD.value)
        address = server.transport.listen("")
        client = raw.dial(address)
        client.send_multipart(greeting())
        client.send_multipart(parts)
        world.serve(lambda: bool(server.of_type(PeerLost)))
        assert isinstance(server.of_type(PeerLost)[0].error, ProtocolError)
        still_serves(world, address)

    def test_a_message_that_is_too_long(self, world: World, raw: Raw) -> None:
        server = world.node(POOL_BYTES)
        address = server.transport.listen("")
        client = raw.dial(address)
        client.send_multipart(greeting())
        world.serve(lambda: bool(server.of_type(Connected)))
        client.send_multipart([Message.head(), bytes(64 << 20)])
        world.serve(lambda: bool(server.of_type(PeerLost)))
        still_serves(world, address)

    def test_no_byte_without_a_guard_that_holds(self, world: World, raw: Raw) -> None:
        server = world.node(POOL_BYTES)
        client = raw.dial(server.transport.listen(""))
        client.send_multipart(greeting())
        fetch = Fetch(1, 0, HELD, True, ROWS)
        client.send_multipart([fetch.head(), fetch.body()])
        assert isinstance(decode([memoryview(part) for part in receive(world, client)]), Hello)
        assert decode([memoryview(part) for part in receive(world, client)]) == Stale(1, 0)

    def test_a_peer_that_fetches_and_does_not_take(self, world: World, raw: Raw) -> None:
        """It is dropped before much is queued for it."""
        server = world.node(POOL_BYTES)
        server.transport.guards.set(HELD.index, HELD.value)
        address = server.transport.listen("")
        client = raw.dial(address, rcvhwm=1)
        client.send_multipart(greeting())
        fetch = Fetch(1, 0, HELD, False, ROWS)
        for _ in range(400):
            client.send_multipart([fetch.head(), fetch.body()])
        world.serve(lambda: bool(server.of_type(PeerLost)))
        still_serves(world, address)

    def test_a_peer_that_takes_no_message_is_dropped_in_time(self, raw: Raw) -> None:
        """What waits for it is bounded, and so is for how long it waits."""
        with closing_world(peer_timeout_s=0.5) as world:
            server = world.node(POOL_BYTES)
            client = raw.dial(server.transport.listen(""), rcvhwm=1)
            client.send_multipart(greeting())
            world.serve(lambda: bool(server.of_type(Connected)))
            with pytest.raises(BackpressureError):
                send_for_ever(server, server.of_type(Connected)[0].peer_id)
            world.serve(lambda: bool(server.of_type(PeerLost)))


def send_for_ever(node: Node, peer_id: int) -> None:
    while True:
        node.transport.send(peer_id, bytes(1 << 20))


class Owner:
    """A raw owner of a pool of zeros, which answers as a test tells it."""

    def __init__(self, raw: Raw, world: World) -> None:
        self._world = world
        self._router = raw.socket(zmq.ROUTER)
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.node = world.node(POOL_BYTES)
        self.peer_id = self.node.transport.start_connect(f"zeromq://127.0.0.1:{port}", timeout_s=20)
        self._routing_id, *_ = receive(world, self._router)
        self.say(HELLO.head(), HELLO.body())
        world.serve(lambda: bool(self.node.of_type(Connected)))

    def start_read(self, timeout_s: float = 20.0) -> None:
        self.node.transport.start_read(self.peer_id, pairs_of((0, 0, POOL_BYTES)), HELD, timeout_s=timeout_s)

    def say(self, head: bytes, body: bytes) -> None:
        self._router.send_multipart([self._routing_id, head, body])

    def hear(self) -> Fetch:
        _, *parts = receive(self._world, self._router)
        fetch = decode([memoryview(part) for part in parts])
        assert isinstance(fetch, Fetch)
        return fetch

    def give(self, fetch: Fetch, *, checksum: int | None = None, missing: int = 0) -> None:
        body = bytes(int(fetch.rows[:, 1].sum()) - missing)
        checksum = checksum_of(body) if checksum is None else checksum
        self.say(Slice(fetch.transfer_id, fetch.index, False, checksum, memoryview(body)).head(), body)

    def outcome(self) -> TransferEnded:
        self._world.serve(lambda: bool(self.node.of_type(TransferEnded)))
        (ended,) = self.node.of_type(TransferEnded)
        return ended


def receive(world: World, raw: Any) -> Parts:
    """Serve our nodes until a raw socket has a message."""
    world.serve(lambda: bool(raw.poll(0)))
    parts: Parts = raw.recv_multipart()
    return parts


@pytest.fixture
def owner(raw: Raw, world: World) -> Owner:
    return Owner(raw, world)


class TestOwners:
    """Peers that answer fetches as they must not."""

    def test_one_that_stalls_ends_the_read_at_its_deadline(self, owner: Owner) -> None:
        owner.start_read(timeout_s=0.3)
        owner.give(owner.hear())
        assert isinstance(owner.outcome().error, TransferTimeoutError)

    def test_what_comes_after_the_deadline_is_thrown_away(self, owner: Owner, world: World) -> None:
        owner.start_read(timeout_s=0.2)
        late = owner.hear()
        owner.outcome()
        memory = owner.node.memory()
        memory[:] = 1
        owner.give(late)
        world.serve_quietly()
        assert np.all(memory == 1)
        assert not owner.node.of_type(PeerLost)

    def test_no_more_is_fetched_than_the_window_holds(self, raw: Raw) -> None:
        with closing_world(window_slices=2, slice_bytes=1 << 20) as world:
            owner = Owner(raw, world)
            owner.start_read()
            first, second = owner.hear(), owner.hear()
            world.serve_quietly()
            assert not owner._router.poll(0)
            owner.give(first)
            assert owner.hear().index == 2
            assert second.index == 1

    def test_a_wrong_checksum(self, owner: Owner, world: World) -> None:
        owner.start_read()
        owner.give(owner.hear(), checksum=1)
        while (fetch := owner.hear()).rows.size:
            owner.give(fetch)
        owner.give(fetch)
        assert isinstance(owner.outcome().error, ChecksumError)

    def test_a_wrong_checksum_of_a_stale_offer_is_stale(self, owner: Owner) -> None:
        """The owner wrote to the memory, as he may: the guard says so, and it counts."""
        owner.start_read()
        owner.give(owner.hear(), checksum=1)
        while (fetch := owner.hear()).rows.size:
            pass
        owner.say(Stale(fetch.transfer_id, fetch.index).head(), b"")
        assert isinstance(owner.outcome().error, StaleRegionError)

    @pytest.mark.parametrize("missing", [1, -1])
    def test_a_slice_of_another_size(self, owner: Owner, world: World, missing: int) -> None:
        owner.start_read()
        owner.give(owner.hear(), missing=missing)
        assert isinstance(owner.outcome().error, PeerLostError)
        assert isinstance(owner.node.of_type(PeerLost)[0].error, ProtocolError)

    def test_a_slice_twice(self, owner: Owner) -> None:
        owner.start_read()
        fetch = owner.hear()
        owner.give(fetch)
        owner.give(fetch)
        assert isinstance(owner.outcome().error, PeerLostError)
        assert isinstance(owner.node.of_type(PeerLost)[0].error, ProtocolError)


@pytest.mark.parametrize("checksums", [True, False])
def test_a_flipped_bit_is_found_by_its_checksum(checksums: bool) -> None:
    with closing_world(checksums=checksums) as world:
        server, node = world.node(POOL_BYTES), world.node(POOL_BYTES)
        server.fill(1)
        server.transport.guards.set(HELD.index, HELD.value)
        with FlippingProxy(Address.parse(server.transport.listen("")).port, at=POOL_BYTES // 2) as proxy:
            peer_id = node.transport.start_connect(f"zeromq://127.0.0.1:{proxy.port}", timeout_s=20)
            world.serve(lambda: bool(node.of_type(Connected)))
            ended = world.read(Link(server, node, peer_id, 0), pairs_of((0, 0, POOL_BYTES)), HELD)
        num_wrong = int(np.count_nonzero(node.memory() != server.memory()))
        if checksums:
            assert isinstance(ended.error, ChecksumError)
        else:  # the test flips what it says it flips
            assert (ended.error, num_wrong) == (None, 1)


def test_a_stalled_reader_starves_nobody(raw: Raw, world: World) -> None:
    """While one peer does not take its slices, another reads."""
    server = world.node(POOL_BYTES)
    server.transport.guards.set(HELD.index, HELD.value)
    address = server.transport.listen("")
    client = raw.dial(address)
    client.send_multipart(greeting())
    fetch = Fetch(1, 0, HELD, False, ROWS)
    for _ in range(8):
        client.send_multipart([fetch.head(), fetch.body()])
    still_serves(world, address)


def test_a_new_connection_never_pays_for_an_old_one(world: World, raw: Raw) -> None:
    """Descriptors are used again at once; each drop hits the connection that it is meant for."""
    server = world.node(POOL_BYTES)
    address = server.transport.listen("")
    for number in range(1, 31):
        bad, good = raw.dial(address), raw.dial(address)
        bad.send_multipart(greeting())
        bad.send_multipart([b"\x99", b""])
        bad.close()
        good.send_multipart(greeting())
        world.serve(lambda: len(server.of_type(Connected)) >= number + len(server.of_type(PeerLost)))  # noqa: B023
        receive(world, good)
    world.serve(lambda: len(server.of_type(Connected)) - len(server.of_type(PeerLost)) == 30)
    world.serve_quietly()
    assert len(server.of_type(Connected)) - len(server.of_type(PeerLost)) == 30
