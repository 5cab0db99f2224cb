"""The frames of each transport are decoded as they were encoded, and a changed bit is never taken.

`tests/fuzz` shows that any other bytes are decoded or refused with a typed error.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transports import Guard, PeerLost
from kvferry.transports.errors import (
    ChecksumError,
    KVTransferError,
    ProtocolError,
    VersionMismatchError,
)
from kvferry.transports.nixl import wire as nixl
from kvferry.transports.shm import hello as shm
from kvferry.transports.streams import FrameReader, FrameSocket, encode_frame
from kvferry.transports.tcp import TcpTransport
from kvferry.transports.tcp import wire as tcp
from kvferry.transports.tcp.stream import TcpStream
from kvferry.transports.testing import World
from kvferry.transports.ucx import wire as ucx
from kvferry.transports.zeromq import wire as zeromq
from kvferry.transports.zeromq.frames import Frame

ROWS = np.array([[0, 5], [9, 1]], dtype=np.int64)
POOL = np.array([(0, 4 << 20)], dtype=np.int64)
HELD = Guard(5, 77)
PAGE = 4096

FRAMES: dict[str, Any] = {
    "tcp: hello": tcp.Hello(4, (4096, 1), 128 << 10),
    "tcp: fetch": tcp.Fetch(7, True, Guard(1, 2), ROWS),
    "tcp: slice": tcp.Slice(2**64 - 1, 2**40),
    "tcp: end": tcp.End(7, 2**64 - 1, True),
    "tcp: invalid end": tcp.End(7, 0, False),
    "ucx: preface": ucx.Preface(),
    "ucx: hello": ucx.Hello(4, (4096, 1), b"address", "ucx:tcp", 128 << 10),
    "ucx: ready": ucx.Ready("ucx:tcp"),
    "ucx: fetch": ucx.Fetch(7, Guard(1, 2), ROWS),
    "ucx: sent": ucx.Answer(2**64 - 1, True),
    "ucx: stale": ucx.Answer(1, False),
    "nixl: preface": nixl.Preface(),
    "nixl: hello": nixl.Hello(
        4, 4096, "host", 0, np.array([1, 2], dtype=np.uint64) << np.uint64(20), (4096, 1), b"metadata"
    ),
    "nixl: ready": nixl.Ready(),
    "nixl: reading": nixl.Reading(),
}
MESSAGES: dict[str, Any] = {
    "hello": zeromq.Hello(64, (4 << 20,)),
    "message": zeromq.Message(b"a message"),
    "fetch": zeromq.Fetch(2**64 - 1, 2**32 - 1, HELD, True, POOL),
    "empty fetch": zeromq.Fetch(1, 0, HELD, False, POOL[:0]),
    "slice": zeromq.Slice(1, 2, True, 2**64 - 1, (Frame.copy_of(b"abc"),)),
    "slice of two frames": zeromq.Slice(1, 2, False, 0, (Frame.copy_of(b"abc"), Frame.copy_of(b""))),
    "stale": zeromq.Stale(7, 8),
}

each_frame = pytest.mark.parametrize(
    ("scheme", "frame"), [(name.partition(":")[0], one) for name, one in FRAMES.items()], ids=FRAMES
)
each_message = pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)


def same(decoded: Any, message: Any) -> None:
    assert type(decoded) is type(message)
    for name, value in vars(message).items():
        assert np.array_equal(getattr(decoded, name), value)


def limits_and_decoder(scheme: str) -> tuple[Any, Callable[[int, bytes], Any]]:
    wire: Any = {"tcp": tcp, "ucx": ucx, "nixl": nixl}[scheme]
    return wire.FRAME_LIMITS, wire.decode


@each_frame
def test_a_frame_survives_the_wire(scheme: str, frame: Any) -> None:
    limits, decode = limits_and_decoder(scheme)
    ((kind, body),) = FrameReader(limits).feed(frame.encode())
    same(decode(kind, body), frame)


def body_of(message: Any) -> list[Frame]:
    match message:
        case zeromq.Slice():
            return list(message.frames)
        case zeromq.Stale():
            return [Frame.copy_of(b"")]
        case zeromq.Message():
            return [Frame.copy_of(message.body)]
        case _:
            return [Frame.copy_of(message.body())]


@each_message
def test_a_message_of_zeromq_survives_the_wire(message: Any) -> None:
    same(zeromq.decode([Frame.copy_of(message.head()), *body_of(message)]), message)


SEGMENT = st.builds(
    shm.SharedSegment,
    file=st.integers(shm.FOREIGN, 3),
    start=st.integers(0, 2**62 - 1),
    num_bytes=st.integers(1, 2**62 - 1),
)


@given(
    st.builds(
        shm.Hello,
        num_guards=st.integers(1, 1 << 24),
        num_files=st.just(4),
        segments=st.lists(SEGMENT, min_size=1, max_size=9).map(tuple),
    )
)
def test_a_hello_of_shm_survives_the_wire(hello: shm.Hello) -> None:
    assert shm.decode_hello(shm.encode_hello(hello)) == hello


def test_a_hello_of_shm_with_a_pool_on_a_gpu_survives_the_wire() -> None:
    segments = (shm.SharedSegment(1, 512, PAGE), shm.SharedSegment(0, 0, PAGE))
    allocations = (
        shm.Allocation(bytes(16), bytes(range(64))),
        shm.Allocation(bytes(range(16)), bytes(64)),
    )
    hello = shm.Hello(512, 0, segments, allocations)
    assert shm.decode_hello(shm.encode_hello(hello)) == hello
    for file in (-1, 2):
        body = shm.encode_hello(shm.Hello(512, 4, (shm.SharedSegment(file, 0, PAGE),), allocations))
        with pytest.raises(ProtocolError, match="impossible"):
            shm.decode_hello(body)


@pytest.mark.parametrize("has_sums", [True, False])
@given(st.lists(st.binary(max_size=50)), st.lists(st.integers(1, 20)))
def test_frames_survive_any_cutting(has_sums: bool, bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(encode_frame(1, body, has_sum=has_sums) for body in bodies)
    reader, found = FrameReader({1: 50}, has_sums=has_sums), []
    for size in [*cuts, len(stream) + 1]:
        found += reader.feed(stream[:size])
        stream = stream[size:]
    assert [body for _, body in found] == bodies


# -- bounds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows",
    [[(0, 0)], [(0, -1)], [(0, 2**62)], [(0, 8 << 20), (0, 1)], [(0, 2**63 - 1)] * 2, [(0, 1)] * 4097],
)
def test_a_fetch_is_bounded(rows: list[tuple[int, int]]) -> None:
    fetch = zeromq.Fetch(1, 0, HELD, True, np.array(rows, dtype=np.int64))
    with pytest.raises(ProtocolError):
        zeromq.decode([Frame.copy_of(fetch.head()), Frame.copy_of(fetch.body())])


@pytest.mark.parametrize(
    "hello",
    [
        *(zeromq.Hello(1, sizes) for sizes in [(), (0,), (-1, 5), (2**62,), (1,) * 65537]),
        *(zeromq.Hello(1, (4096,), max_slice_bytes) for max_slice_bytes in (0, 1000, (8 << 20) + 1)),
    ],
)
def test_a_hello_is_bounded(hello: zeromq.Hello) -> None:
    with pytest.raises(ProtocolError):
        zeromq.decode([Frame.copy_of(hello.head()), Frame.copy_of(hello.body())])


# -- bits that change on their way -------------------------------------------------------------------


def stream_of(scheme: str, sock: socket.socket) -> FrameSocket:
    if scheme == "tcp":
        return TcpStream(sock, 1 << 20)
    return FrameSocket(sock, {1: 100} if scheme == "another" else limits_and_decoder(scheme)[0], 1 << 20)


CHANGED = [
    pytest.param("another", encode_frame(1, b"its message"), id="a message of a transport from outside"),
    pytest.param("tcp", encode_frame(tcp.Kind.MESSAGE, b"a control message"), id="tcp: message"),
    pytest.param("tcp", encode_frame(tcp.Kind.PING, b""), id="tcp: ping"),
    *(pytest.param(name.partition(":")[0], one.encode(), id=name) for name, one in FRAMES.items()),
]


@pytest.mark.parametrize(("scheme", "frame"), CHANGED)
def test_no_frame_with_a_flipped_bit_is_taken(scheme: str, frame: bytes) -> None:
    """Each bit.

    If it was one of the length, the rest may be awaited; the peer is lost when it is silent for too long.
    """
    for at in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[at // 8] ^= 1 << at % 8
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.send(flipped)
            stream = stream_of(scheme, ours)
            if isinstance(stream, TcpStream):
                stream.sink = lambda _: pytest.fail("the head of a slice was taken")
            try:
                frames = list(stream.receive())
            except KVTransferError:
                continue
            assert frames == []
            assert at // 8 < 4


@each_message
def test_no_message_of_zeromq_with_a_flipped_bit_is_taken(message: Any) -> None:
    """In a slice this is about the head: its bytes have a checksum."""
    head, body = message.head(), b""
    if not isinstance(message, zeromq.Slice):
        body = bytes(body_of(message)[0])
    whole = bytearray(head + body)
    for at in range(8 * len(whole)):
        whole[at // 8] ^= 1 << at % 8
        parts = bytes(whole[: len(head)]), bytes(whole[len(head) :])
        with pytest.raises((ProtocolError, ChecksumError, VersionMismatchError)):
            zeromq.decode([Frame.copy_of(part) for part in parts])
        whole[at // 8] ^= 1 << at % 8


def test_a_peer_whose_message_was_changed_is_lost() -> None:
    world = World(TcpTransport)
    try:
        link = world.pair(PAGE)
        backend = link.consumer.endpoint._inner._backend  # type: ignore[attr-defined]
        frame = bytearray(encode_frame(tcp.Kind.MESSAGE, b"a message"))
        frame[7] ^= 1
        backend.stream(backend.peers.peer(link.producer_id)).send(bytes(frame))
        world.serve(lambda: bool(link.producer.of_type(PeerLost)))
        (lost,) = link.producer.of_type(PeerLost)
        assert isinstance(lost.error, ChecksumError)
        assert "was changed on its way" in str(lost.error)
    finally:
        world.close()
