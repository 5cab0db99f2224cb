"""A peer of `ucx` that breaks the protocol is dropped with a reason, and affects no other peer."""

from __future__ import annotations

import faulthandler
import struct
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transports import Connected, Endpoint, Guard, PeerLost, Pool
from kvferry.transports.endpoint import PeerEndpoint
from kvferry.transports.errors import ProtocolError, VersionMismatchError
from kvferry.transports.streams import FrameReader, encode_frame
from kvferry.transports.ucx import UCXTransport
from kvferry.transports.ucx.options import Address
from kvferry.transports.ucx.wire import (
    FRAME_LIMITS,
    PROTOCOL_VERSION,
    Answer,
    Fetch,
    Hello,
    Kind,
    Preface,
    Ready,
    decode,
)
from tests.support import strangers

needs_ucxx = pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")

PREFACE = Preface().encode()

FRAMES = [
    Hello(4, (4096, 1), b"address", "ucx:tcp", 128 << 10),
    Ready("ucx:tcp"),
    Answer(2**64 - 1, True),
    Answer(1, False),
    Preface(),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_frames_survive_the_wire(frame: Hello) -> None:
    ((kind, body),) = FrameReader(FRAME_LIMITS).feed(frame.encode())
    assert decode(kind, body) == frame


def test_a_fetch_survives_the_wire() -> None:
    fetch = Fetch(7, Guard(1, 2), np.array([[0, 5], [9, 1]], dtype=np.int64))
    ((kind, body),) = FrameReader(FRAME_LIMITS).feed(fetch.encode())
    again = decode(kind, body)
    assert isinstance(again, Fetch)
    assert (again.tag, again.guard, again.num_bytes) == (7, Guard(1, 2), 6)


@given(st.integers(0, 255), st.binary(max_size=200))
def test_garbage_is_a_typed_error(kind: int, body: bytes) -> None:
    try:
        for found, content in FrameReader(FRAME_LIMITS).feed(encode_frame(kind, body)):
            decode(found, content)
    except (ProtocolError, VersionMismatchError):
        pass


@given(st.lists(st.sampled_from(FRAMES), max_size=6), st.integers(1, 40))
def test_frames_may_come_in_pieces(frames: list[Hello], piece: int) -> None:
    stream = b"".join(frame.encode() for frame in frames)
    reader = FrameReader(FRAME_LIMITS)
    found = [f for at in range(0, len(stream), piece) for f in reader.feed(stream[at : at + piece])]
    assert [decode(kind, body) for kind, body in found] == frames


@pytest.fixture
def node(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    """Its parameter, if it has one, says where its pool is: `"main memory"` or `"GPU"`."""
    if getattr(request, "param", "") == "GPU":
        request.getfixturevalue("gpu_pools")
    transport = UCXTransport({"handshake_timeout_s": 0.3})
    arena = transport.allocate(4096)
    yield transport.register(Pool([arena.segment]))
    transport.close()


def hangs_up(node: Endpoint, said: bytes) -> bytes:
    return strangers.hangs_up(node, Address.parse(node.listen("")), said)


def assert_serves(node: Endpoint) -> None:
    strangers.assert_serves(node, UCXTransport)


HELLO = FRAMES[0].encode()
STRANGERS: dict[str, bytes] = {
    "silence": b"",
    "garbage": b"GET / HTTP/1.1\r\n\r\n",
    "a frame too long": struct.pack("<IB", 1 << 31, 4),
    "half a preface": PREFACE[: len(PREFACE) // 2],
    "two prefaces": PREFACE * 2,
    "a hello first": HELLO,
    "half a hello": PREFACE + HELLO[: len(HELLO) // 2],
    "a message first": encode_frame(Kind.MESSAGE, b"hi"),
    "a fetch first": Fetch(1, Guard(0, 1), np.array([[0, 1]], dtype=np.int64)).encode(),
    "another magic": PREFACE + HELLO.replace(b"kvferry-ucx", b"kvferry-xcu"),
    "an impossible pool": PREFACE + Hello(4, (0,), b"address", "").encode(),
    "an address that is not UCX's": PREFACE + Hello(4, (1,), b" gibberish", "").encode(),
    "an address of another version": PREFACE + Hello(4, (1,), b"\x07" * 188, "").encode(),
}


@needs_ucxx
@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_stranger_is_dropped(node: Endpoint, said: bytes) -> None:
    hangs_up(node, said)
    assert_serves(node)


@needs_ucxx
def test_a_peer_of_another_version_is_sent_our_version(node: Endpoint) -> None:
    ours = struct.pack("<11sI", b"kvferry-ucx", PROTOCOL_VERSION)
    heard = hangs_up(node, encode_frame(Kind.HELLO, b"kvferry-ucx\x63\0\0\0"))
    ((kind, body),) = FrameReader(FRAME_LIMITS).feed(heard)
    assert isinstance(decode(kind, body), Preface)
    assert ours in body
    assert_serves(node)


def asked_for_too_much(send: Callable[[bytes], None]) -> None:
    send(Fetch(1, Guard(0, 1), np.array([[4096, 1]], dtype=np.int64)).encode())


def answered_unasked(send: Callable[[bytes], None]) -> None:
    send(Answer(5, True).encode())


def said_hello_again(send: Callable[[bytes], None]) -> None:
    send(HELLO)


@needs_ucxx
@pytest.mark.parametrize("node", ["main memory", "GPU"], indirect=True)
@pytest.mark.parametrize("misbehave", [asked_for_too_much, answered_unasked, said_hello_again])
def test_a_peer_that_misbehaves_is_dropped(
    node: Endpoint, misbehave: Callable[[Callable[[bytes], None]], None]
) -> None:
    transport = UCXTransport()
    try:
        arena = transport.allocate(4096)
        peer = transport.register(Pool([arena.segment]))
        assert isinstance(peer, PeerEndpoint)
        peer_id = peer.start_connect(node.listen(""), timeout_s=20)
        seen: list[object] = []
        while not any(isinstance(event, Connected) for event in seen):
            seen += [*node.wait_events(0.01), *peer.wait_events(0.01)]
        # No public call sends such messages.
        misbehave(peer._table.connected_peer(peer_id).connection.channel.send)
        while not isinstance(seen[-1], PeerLost):
            seen += node.wait_events(0.01)
        lost = seen[-1]
        assert isinstance(lost.error, ProtocolError)
    finally:
        transport.close()
    assert_serves(node)


@needs_ucxx
def test_a_peer_that_freezes_in_the_middle_of_a_message_that_was_not_asked_for_is_closed_at_once(
    node: Endpoint,
) -> None:
    transport = UCXTransport()
    # UCX would wait for the rest inside one call, which only the end of the process interrupts.
    faulthandler.dump_traceback_later(60, exit=True)
    try:
        arena = transport.allocate(64 << 20)  # more than the sockets' buffers hold
        peer = transport.register(Pool([arena.segment]))
        assert isinstance(peer, PeerEndpoint)
        peer_id = peer.start_connect(node.listen(""), timeout_s=20)
        seen: list[object] = []
        while not any(isinstance(event, Connected) for event in seen):
            seen += [*node.wait_events(0.01), *peer.wait_events(0.01)]
        worker = peer._table.connected_peer(peer_id).connection.worker
        message = worker.send(12345, arena.segment.address, arena.segment.num_bytes)
        worker.progress()
        assert not message.is_done
        for _ in range(5):  # the first part arrives; the peer sends no other
            node.wait_events(0.01)
        node.close()
    finally:
        faulthandler.cancel_dump_traceback_later()
        transport.close()
