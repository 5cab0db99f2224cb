"""A control message in which a bit was flipped on its way is never taken for another one."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvferry.transports import Guard, PeerLost
from kvferry.transports.errors import ChecksumError, KVTransferError
from kvferry.transports.nixl import wire as nixl
from kvferry.transports.streams import FrameSocket, encode_frame
from kvferry.transports.tcp import TcpTransport
from kvferry.transports.tcp import wire as tcp
from kvferry.transports.tcp.stream import TcpStream
from kvferry.transports.testing import World
from kvferry.transports.ucx import wire as ucx

ROWS = np.array([[0, 5], [9, 1]], dtype=np.int64)
ADDRESSES = np.array([1 << 20], dtype=np.uint64)


def tcp_stream(sock: socket.socket) -> FrameSocket:
    return TcpStream(sock, 1 << 20)


def ucx_stream(sock: socket.socket) -> FrameSocket:
    return FrameSocket(sock, ucx.FRAME_LIMITS, 1 << 20)


def nixl_stream(sock: socket.socket) -> FrameSocket:
    return FrameSocket(sock, nixl.FRAME_LIMITS, 1 << 20)


def another(sock: socket.socket) -> FrameSocket:
    return FrameSocket(sock, {1: 100}, 1 << 20)


FRAMES: dict[str, tuple[Callable[[socket.socket], FrameSocket], bytes]] = {
    "a message of a transport from outside": (another, encode_frame(1, b"its message")),
    "tcp: hello": (tcp_stream, tcp.Hello(4, (4096, 1), 128 << 10).encode()),
    "tcp: message": (tcp_stream, encode_frame(tcp.Kind.MESSAGE, b"a control message")),
    "tcp: fetch": (tcp_stream, tcp.Fetch(7, True, Guard(1, 2), ROWS).encode()),
    "tcp: slice": (tcp_stream, tcp.Slice(7, 6).encode()),
    "tcp: end": (tcp_stream, tcp.End(7, 2**63, True).encode()),
    "tcp: ping": (tcp_stream, encode_frame(tcp.Kind.PING, b"")),
    "ucx: preface": (ucx_stream, ucx.Preface().encode()),
    "ucx: hello": (ucx_stream, ucx.Hello(4, (4096, 1), b"address", "").encode()),
    "ucx: ready": (ucx_stream, ucx.Ready("ucx:tcp").encode()),
    "ucx: fetch": (ucx_stream, ucx.Fetch(7, Guard(1, 2), ROWS).encode()),
    "ucx: sent": (ucx_stream, ucx.Answer(7, True).encode()),
    "ucx: stale": (ucx_stream, ucx.Answer(7, False).encode()),
    "nixl: hello": (nixl_stream, nixl.Hello(4, 4096, "host", 0, ADDRESSES, (4096,), b"metadata").encode()),
    "nixl: reading": (nixl_stream, nixl.Reading().encode()),
}


@pytest.mark.parametrize(("stream_of", "frame"), FRAMES.values(), ids=FRAMES.keys())
def test_no_frame_with_a_flipped_bit_is_taken(
    stream_of: Callable[[socket.socket], FrameSocket], frame: bytes
) -> None:
    """Each bit.

    If it was one of the length, the rest may be awaited; the peer is lost when it is silent for too long.
    """
    for at in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[at // 8] ^= 1 << at % 8
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.send(flipped)
            stream = stream_of(ours)
            if isinstance(stream, TcpStream):
                stream.sink = lambda _: pytest.fail("the head of a slice was taken")
            try:
                frames = list(stream.receive())
            except KVTransferError:
                continue
            assert frames == []
            assert at // 8 < 4


@pytest.fixture
def world() -> Any:
    world = World(TcpTransport)
    yield world
    world.close()


def test_the_reason_of_a_refusal_cannot_forge_a_line(world: World) -> None:
    """Any process that listens at a peer's port can send one."""
    node = world.node(4096)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        node.endpoint.start_connect("tcp://{}:{}".format(*listener.getsockname()), timeout_s=10)
        sock, _ = listener.accept()
    with sock:
        sock.sendall(encode_frame(tcp.Kind.REFUSED, b"no\nforged\x1b[2J"))
        world.serve(lambda: bool(node.of_type(PeerLost)))
    (lost,) = node.of_type(PeerLost)
    assert str(lost.error) == "the peer refused: no\\nforged\\x1b[2J"


def test_a_peer_whose_message_was_changed_is_lost(world: World) -> None:
    link = world.pair(4096)
    backend = link.consumer.endpoint._inner._backend  # type: ignore[attr-defined]
    frame = bytearray(encode_frame(tcp.Kind.MESSAGE, b"a message"))
    frame[7] ^= 1
    backend.stream(backend.peers.peer(link.producer_id)).send(bytes(frame))
    world.serve(lambda: bool(link.producer.of_type(PeerLost)))
    (lost,) = link.producer.of_type(PeerLost)
    assert isinstance(lost.error, ChecksumError)
    assert "was changed on its way" in str(lost.error)
