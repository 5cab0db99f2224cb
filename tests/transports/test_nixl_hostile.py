"""A peer of `nixl` that breaks the protocol is dropped with a reason, and affects no other peer."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import numpy as np
import pytest

from kvferry.transports import Endpoint, PeerLost, Pool
from kvferry.transports.errors import ProtocolError
from kvferry.transports.nixl import NIXLTransport
from kvferry.transports.nixl.options import Address
from kvferry.transports.nixl.wire import (
    PROTOCOL_VERSION,
    Hello,
    Kind,
    Preface,
    Reading,
    Ready,
)
from kvferry.transports.streams import encode_frame
from tests.support import strangers

if find_spec("nixl_cu12") is None and find_spec("nixl_cu13") is None:
    pytest.skip("NIXL is not installed", allow_module_level=True)

PREFACE = Preface().encode()


def hello(
    *,
    num_guards: int = 4,
    table: int = 4096,
    sizes: tuple[int, ...] = (4096, 1),
) -> Hello:
    addresses = np.arange(1, len(sizes) + 1, dtype=np.uint64) << np.uint64(20)
    return Hello(num_guards, table, "host", 0, addresses, sizes, b"metadata")


@pytest.fixture
def node() -> Iterator[Endpoint]:
    transport = NIXLTransport({"handshake_timeout_s": 0.6})
    arena = transport.allocate(4096)
    yield transport.register(Pool([arena.segment]))
    transport.close()


def hangs_up(node: Endpoint, said: bytes) -> bytes:
    return strangers.hangs_up(node, Address.parse(node.listen("")), said)


def assert_serves(node: Endpoint) -> None:
    strangers.assert_serves(node, NIXLTransport)


HELLO = hello().encode()
STRANGERS: dict[str, bytes] = {
    "silence": b"",
    "garbage": b"GET / HTTP/1.1\r\n\r\n",
    "a frame too long": struct.pack("<IB", 1 << 31, Kind.MESSAGE),
    "half a preface": PREFACE[: len(PREFACE) // 2],
    "two prefaces": PREFACE * 2,
    "a hello first": HELLO,
    "half a hello": PREFACE + HELLO[: len(HELLO) // 2],
    "a message first": encode_frame(Kind.MESSAGE, b"hi"),
    "a ready first": PREFACE + Ready().encode(),
    "reading first": PREFACE + Reading().encode(),
    "another magic": PREFACE + HELLO.replace(b"kvferry-nixl", b"kvferry-lixn"),
    "an impossible pool": PREFACE + hello(sizes=(0,)).encode(),
    "no guards": PREFACE + hello(num_guards=0).encode(),
    "a guard table between words": PREFACE + hello(table=4097).encode(),
    "metadata that is not NIXL's": PREFACE + HELLO,
}


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_stranger_is_dropped(node: Endpoint, said: bytes) -> None:
    hangs_up(node, said)
    assert_serves(node)


def test_a_stranger_is_told_why(node: Endpoint) -> None:
    assert b"segment" in hangs_up(node, PREFACE + hello(sizes=(0,)).encode())


def test_a_node_of_another_version_is_dropped_and_can_tell_why(node: Endpoint) -> None:
    body = struct.pack("<12sI", b"kvferry-nixl", PROTOCOL_VERSION + 1)
    heard = hangs_up(node, encode_frame(Kind.HELLO, body))
    assert heard.startswith(PREFACE)


class Impostor:
    """A connected peer of a node, whose later frames a test chooses."""

    def __init__(self, node: Endpoint, make: Callable[[], NIXLTransport]) -> None:
        self.transport = make()
        arena = self.transport.allocate(4096)
        self.endpoint = self.transport.register(Pool([arena.segment]))
        self.peer_id = self.endpoint.start_connect(node.listen(""), timeout_s=20)
        seen: list[object] = []
        while len(seen) < 2:
            seen += [*node.wait_events(0.01), *self.endpoint.wait_events(0.01)]

    def say(self, frame: bytes) -> None:
        backend = self.endpoint._backend  # type: ignore[attr-defined]
        backend.stream(self.endpoint._table.peer(self.peer_id)).send(frame)  # type: ignore[attr-defined]


LATE_FRAMES = {
    "a hello": HELLO,
    "a preface": PREFACE,
    "a ready": Ready().encode(),
    "a refusal": encode_frame(Kind.REFUSED, b"no"),
}


@pytest.mark.parametrize("frame", LATE_FRAMES.values(), ids=LATE_FRAMES.keys())
def test_a_peer_that_repeats_the_handshake_is_lost(node: Endpoint, frame: bytes) -> None:
    impostor = Impostor(node, NIXLTransport)
    try:
        impostor.say(frame)
        seen: list[object] = []
        while not seen:
            seen += node.wait_events(0.01)
        (lost,) = seen
        assert isinstance(lost, PeerLost)
        assert isinstance(lost.error, ProtocolError)
    finally:
        impostor.transport.close()
    assert_serves(node)


def test_a_peer_that_says_it_reads_costs_no_more_than_polling(node: Endpoint) -> None:
    impostor = Impostor(node, NIXLTransport)
    try:
        impostor.say(Reading().encode() * 1000)
        assert node.wait_events(0.2) == []
    finally:
        impostor.transport.close()
