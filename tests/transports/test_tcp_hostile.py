"""A peer of `tcp` that breaks the protocol is dropped with a reason, writes nowhere, and affects no other
peer.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transports import Guard, PeerLost, TransferEnded
from kvferry.transports.errors import (
    ChecksumError,
    PeerLostError,
    ProtocolError,
    StaleRegionError,
    TransferTimeoutError,
    VersionMismatchError,
)
from kvferry.transports.streams import FrameReader, encode_frame
from kvferry.transports.tcp import TcpTransport
from kvferry.transports.tcp.options import Address
from kvferry.transports.tcp.wire import (
    FRAME_LIMITS,
    MAX_SLICE_BYTES,
    PROTOCOL_VERSION,
    End,
    Fetch,
    Hello,
    Kind,
    Slice,
    decode,
)
from kvferry.transports.testing import World, pairs_of
from kvferry.transports.testing.harness import Node

POOL_BYTES = 1 << 20
HELLO = Hello(4, (POOL_BYTES,), MAX_SLICE_BYTES)
FRAMES = [
    Hello(4, (4096, 1), 128 << 10),
    Slice(2**64 - 1, 2**40),
    End(7, 2**64 - 1, True),
    End(7, 0, False),
]


# -- frames ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_frames_survive_the_wire(frame: Hello) -> None:
    ((kind, body),) = FrameReader(FRAME_LIMITS).feed(frame.encode())
    assert decode(kind, body) == frame


def test_a_fetch_survives_the_wire() -> None:
    rows = np.array([[0, 5], [9, 1]], dtype=np.int64)
    ((kind, body),) = FrameReader(FRAME_LIMITS).feed(Fetch(7, True, Guard(1, 2), rows).encode())
    again = decode(kind, body)
    assert isinstance(again, Fetch)
    assert (again.tag, again.with_checksum, again.guard) == (7, True, Guard(1, 2))
    assert np.array_equal(again.rows, rows)


@given(st.integers(0, 255), st.binary(max_size=200))
def test_garbage_is_a_typed_error(kind: int, body: bytes) -> None:
    try:
        for found, content in FrameReader(FRAME_LIMITS).feed(encode_frame(kind, body)):
            if found != Kind.MESSAGE:
                decode(found, content)
    except (ProtocolError, VersionMismatchError):
        pass


POOLS_OF_BOTH_KINDS = pytest.mark.parametrize("world", ["main memory", "GPU"], indirect=True)

# -- strangers ---------------------------------------------------------------------------------------


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Its parameter, if it has one, says where the pools are: `"main memory"` or `"GPU"`."""
    if getattr(request, "param", "") == "GPU":
        request.getfixturevalue("gpu_pools")
    world = World(lambda: TcpTransport({"handshake_timeout_s": 0.3}))
    yield world
    world.close()


@pytest.fixture
def node(world: World) -> Node:
    node = world.node(POOL_BYTES)
    node.memory()[:] = 1
    return node


class Peer:
    """A socket of a peer that does what it likes."""

    def __init__(self, world: World, sock: socket.socket) -> None:
        self._world = world
        self._socket = sock
        self._socket.settimeout(0.01)
        self._heard = b""

    def send(self, *parts: Any) -> None:
        """Send frames and bytes."""
        for part in parts:
            self._socket.sendall(part if isinstance(part, bytes) else part.encode())

    def hear(self, is_enough: Callable[[bytes], bool]) -> bytes:
        """Receive until there is enough, or the node hangs up."""
        for _ in range(2000):
            if is_enough(self._heard):
                return self._heard
            for node in self._world.nodes:
                node.history += node.endpoint.wait_events(0.005)
            try:
                data = self._socket.recv(65536)
            except TimeoutError:
                continue
            except ConnectionResetError:
                break
            if not data:
                break
            self._heard += data
        else:
            pytest.fail("the node neither answered nor hung up")
        self._heard += b"<end>"
        return self._heard

    def frame(self) -> Any:
        """Receive the next frame."""
        size = struct.unpack_from("<I", self.hear(lambda heard: len(heard) >= 5))[0] + 5
        whole = self.hear(lambda heard: len(heard) >= size)
        self._heard = whole[size:]
        ((kind, body),) = FrameReader(FRAME_LIMITS).feed(whole[:size])
        return decode(kind, body)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def dial(world: World, node: Node) -> Iterator[Callable[[], Peer]]:
    """Connect to the node, as often as it is called."""
    address = Address.parse(node.endpoint.listen(""))
    peers: list[Peer] = []

    def make() -> Peer:
        peers.append(Peer(world, socket.create_connection((address.host, address.port))))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


def assert_serves(world: World, node: Node) -> None:
    """Check that another node can still connect and read."""
    node.transport.guards.set(1, 5)
    link = world.link(node, world.node(POOL_BYTES))
    assert world.read(link, pairs_of((0, 0, 100)), Guard(1, 5)).error is None


STRANGERS: dict[str, bytes] = {
    "silence": b"",
    "garbage": b"GET / HTTP/1.1\r\n\r\n",
    "a TLS client": bytes.fromhex("16030100f1010000ed0303"),
    "a frame too long": struct.pack("<IB", 1 << 31, Kind.MESSAGE),
    "an unknown frame": encode_frame(77, b""),
    "half a hello": HELLO.encode()[:20],
    "a message first": encode_frame(Kind.MESSAGE, b"hi"),
    "a fetch first": Fetch(1, False, Guard(0, 1), np.array([[0, 1]], dtype=np.int64)).encode(),
    "a slice first": Slice(1, 5).encode() + b"12345",
    "an end first": End(1, 0, True).encode(),
    "another magic": HELLO.encode().replace(b"kvferry-tcp", b"kvferry-xyz"),
    "an impossible pool": replace(HELLO, num_bytes=(0,)).encode(),
    "a pool that is too large": replace(HELLO, num_bytes=(1 << 61,)).encode(),
    "no room for a slice": replace(HELLO, max_slice_bytes=0).encode(),
}


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_stranger_is_dropped(world: World, node: Node, dial: Callable[[], Peer], said: bytes) -> None:
    stranger = dial()
    stranger.send(said)
    assert stranger.hear(lambda heard: b"<end>" in heard)
    assert not node.history
    assert_serves(world, node)


def test_a_peer_of_another_version_is_sent_our_version(
    world: World, node: Node, dial: Callable[[], Peer]
) -> None:
    ours = struct.pack("<11sI", b"kvferry-tcp", PROTOCOL_VERSION)
    stranger = dial()
    stranger.send(encode_frame(Kind.HELLO, b"kvferry-tcp\x63\0\0\0"))
    assert ours in stranger.hear(lambda heard: b"<end>" in heard)
    assert_serves(world, node)


def test_a_node_of_another_version_is_refused_by_its_version(world: World, node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        node.endpoint.start_connect("tcp://{}:{}".format(*listener.getsockname()), timeout_s=10)
        sock, _ = listener.accept()
    with sock:
        sock.sendall(encode_frame(Kind.HELLO, b"kvferry-tcp\x01\0\0\0"))
        world.serve(lambda: bool(node.of_type(PeerLost)))
    (lost,) = node.of_type(PeerLost)
    assert isinstance(lost.error, VersionMismatchError)
    assert f"local {PROTOCOL_VERSION}, remote 1; upgrade the peer first" in str(lost.error)


# -- peers -------------------------------------------------------------------------------------------


def rows_of(*rows: tuple[int, int]) -> Any:
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


#: What a connected peer may not send.
CRIMES: dict[str, list[Any]] = {
    "reads outside the pool": [Fetch(1, False, Guard(0, 1), rows_of((POOL_BYTES, 1)))],
    "reads before the pool": [Fetch(1, False, Guard(0, 1), rows_of((-1, 1)))],
    "reads nothing of something": [Fetch(1, False, Guard(0, 1), rows_of((0, 0)))],
    "reads too much at once": [Fetch(1, False, Guard(0, 1), rows_of(*[(0, POOL_BYTES)] * 9))],
    "an impossible guard": [Fetch(1, False, Guard(1 << 40, 1), rows_of((0, 1)))],
    "an answer to nothing": [End(5, 0, True)],
    "a slice of nothing": [Slice(5, 100), bytes(100)],
    "a second hello": [HELLO],
}


@POOLS_OF_BOTH_KINDS
@pytest.mark.parametrize("crime", CRIMES.values(), ids=CRIMES.keys())
def test_a_peer_that_misbehaves_is_dropped(
    world: World, node: Node, dial: Callable[[], Peer], crime: list[Any]
) -> None:
    peer = dial()
    peer.send(HELLO)
    assert isinstance(peer.frame(), Hello)
    peer.send(*crime)
    world.serve(lambda: bool(node.of_type(PeerLost)))
    assert isinstance(node.of_type(PeerLost)[0].error, ProtocolError)
    assert_serves(world, node)


def test_a_peer_that_fetches_and_does_not_receive_is_dropped(
    world: World, node: Node, dial: Callable[[], Peer]
) -> None:
    node.transport.guards.set(0, 1)
    peer = dial()
    peer.send(HELLO)
    peer.frame()
    fetch = Fetch(1, False, Guard(0, 1), rows_of(*[(0, POOL_BYTES)] * 8)).encode()
    with suppress(ConnectionError):  # whichever call notices that the node has hung up
        for _ in range(500):
            peer.send(fetch)
            node.history += node.endpoint.wait_events(0.001)
    world.serve(lambda: bool(node.of_type(PeerLost)))
    assert isinstance(node.of_type(PeerLost)[0].error, ProtocolError)
    assert_serves(world, node)


# -- an owner that lies ------------------------------------------------------------------------------


@pytest.fixture
def owner(world: World, node: Node) -> Iterator[tuple[Peer, int]]:
    """A peer that the node reads from, and its id. It has said hello."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        peer_id = node.endpoint.start_connect(f"tcp://{host}:{port}", timeout_s=10)
        sock, _ = listener.accept()
    peer = Peer(world, sock)
    assert isinstance(peer.frame(), Hello)
    peer.send(HELLO)
    world.serve(lambda: bool(node.history))
    yield peer, peer_id
    peer.close()


def read(node: Node, peer_id: int, num_bytes: int = 1000, timeout_s: float = 10) -> int:
    return node.endpoint.start_read(peer_id, pairs_of((4096, 0, num_bytes)), Guard(0, 1), timeout_s=timeout_s)


def ended(world: World, node: Node) -> TransferEnded:
    world.serve(lambda: bool(node.of_type(TransferEnded)))
    (end,) = node.of_type(TransferEnded)
    return end


#: What an owner may not answer to a fetch of 1,000 bytes with tag 1, and the error of the read.
LIES: dict[str, tuple[list[Any], type[Exception]]] = {
    "too few bytes": ([Slice(1, 999), bytes(999), End(1, 0, True)], PeerLostError),
    "too many bytes": ([Slice(1, 1001), bytes(1001), End(1, 0, True)], PeerLostError),
    "another tag": ([Slice(2, 1000), bytes(1000), End(2, 0, True)], PeerLostError),
    "the slice twice": ([Slice(1, 1000), bytes(1000), Slice(1, 1000), bytes(1000)], PeerLostError),
    "an end without the slice": ([End(1, 0, True)], PeerLostError),
    "a wrong checksum": ([Slice(1, 1000), bytes(1000), End(1, 5, True)], ChecksumError),
    "a guard that does not hold": ([Slice(1, 1000), bytes(1000), End(1, 5, False)], StaleRegionError),
    "no slice": ([End(1, 0, False)], StaleRegionError),
}


@POOLS_OF_BOTH_KINDS
@pytest.mark.parametrize(("lie", "error"), LIES.values(), ids=LIES.keys())
def test_what_an_owner_did_not_vouch_for_is_not_delivered(
    world: World, node: Node, owner: tuple[Peer, int], lie: list[Any], error: type[Exception]
) -> None:
    peer, peer_id = owner
    read(node, peer_id)
    assert peer.frame().tag == 1
    peer.send(*lie)
    assert isinstance(ended(world, node).error, error)
    memory = node.memory()
    assert memory[:4096].all()
    assert memory[5096:].all(), "nothing was written outside the local region"


def test_bytes_that_come_after_a_read_was_stopped_are_thrown_away(
    world: World, node: Node, owner: tuple[Peer, int]
) -> None:
    """The region was given back, and the next read is not disturbed."""
    peer, peer_id = owner
    read(node, peer_id, timeout_s=0.2)
    fetch = peer.frame()
    peer.send(Slice(fetch.tag, 1000), bytes(300))
    world.serve(lambda: not node.memory()[4096:4396].any())
    assert isinstance(ended(world, node).error, TransferTimeoutError)
    node.memory()[4096:5096] = 9
    peer.send(bytes(700), End(fetch.tag, 0, True))
    again = read(node, peer_id)
    fetch = peer.frame()
    world.serve_quietly()
    assert (node.memory()[4096:5096] == 9).all(), "a byte came late"
    peer.send(End(fetch.tag, 0, False))
    world.serve(lambda: bool(node.ends_of(again)))
    assert isinstance(node.ends_of(again)[0].error, StaleRegionError)


@pytest.mark.parametrize("part", ["slice", "frame"])
def test_pings_that_a_damaged_length_swallows_do_not_keep_the_connection(
    world: World, node: Node, owner: tuple[Peer, int], part: str
) -> None:
    peer, peer_id = owner
    if part == "slice":
        read(node, peer_id, num_bytes=100_000)
        peer.send(Slice(peer.frame().tag, 100_000), bytes(1000))
    else:
        peer.send(encode_frame(Kind.MESSAGE, bytes(100_000))[:1000])
    ping = encode_frame(Kind.PING, b"")
    began = time.monotonic()
    while not node.of_type(PeerLost):
        assert time.monotonic() < began + 20, "the connection is kept, although nothing can arrive over it"
        with suppress(OSError):  # the node may have hung up
            peer.send(ping)
        node.history += node.endpoint.wait_events(0.1)
    assert "silent" in str(node.of_type(PeerLost)[0].error)


def test_frames_in_small_pieces_are_understood(world: World, node: Node, owner: tuple[Peer, int]) -> None:
    peer, peer_id = owner
    node.endpoint.disconnect(12345)
    read(node, peer_id)
    tag = peer.frame().tag
    message = encode_frame(Kind.MESSAGE, b"in between")
    data = np.arange(1000, dtype=np.uint8).tobytes()
    for byte in message + Slice(tag, 1000).encode():
        peer.send(bytes([byte]))
        if byte == 7:
            world.serve_quietly()
    peer.send(data[:1])
    world.serve_quietly()
    peer.send(data[1:])
    peer.send(End(tag, 0, False))
    assert isinstance(ended(world, node).error, StaleRegionError)
    assert node.messages(peer_id) == [b"in between"]
    assert node.memory()[4096:5096].tobytes() == data
