"""A program that breaks a transport's protocol is dropped with a reason, and affects no other peer.

Each table has rows per transport: what is sent, and what must happen. What decoders do with bytes of all
kinds is in `tests/fuzz`; here the bytes arrive at a node, which then still serves another one.
"""

from __future__ import annotations

import array
import faulthandler
import fcntl
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvferry.transports import Connected, Guard, PeerLost
from kvferry.transports.base import MAX_MESSAGE_BYTES
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
from kvferry.transports.nixl import wire as nixl
from kvferry.transports.registry import create_transport
from kvferry.transports.shm import hello as shm
from kvferry.transports.shm.sockets import Connection
from kvferry.transports.streams import encode_frame
from kvferry.transports.sums import SUM_BYTES, sum_of
from kvferry.transports.tcp import wire as tcp
from kvferry.transports.testing import Link, Node, World, built_in, pairs_of
from kvferry.transports.ucx import wire as ucx
from kvferry.transports.zeromq import wire as zeromq
from kvferry.transports.zeromq.slices import checksum_of
from tests.support.peers import dial

POOL_BYTES = 1 << 20
HELD = Guard(1, 5)
ROWS = np.array([[0, 1]], dtype=np.int64)

#: One message: a frame or any other bytes of a stream, or the parts of a message of `zeromq`.
Message = bytes | list[bytes]
Table = Mapping[str, Mapping[str, Any]]

MARKS = {param.values[0]: param.marks for param in built_in()}


def each(table: Table, *, gpus: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Run a test for each row of a table; for these transports again with the pools on a GPU."""
    cases = [
        pytest.param(
            scheme, where, row, id=f"{scheme}-{name}{', GPU' * (where == 'GPU')}", marks=MARKS[scheme]
        )
        for scheme, rows in table.items()
        for where in ("main memory", *["GPU"] * (scheme in gpus))
        for name, row in rows.items()
    ]
    return pytest.mark.parametrize(("scheme", "where", "row"), cases)


# -- how each transport is spoken to -----------------------------------------------------------------


def wait_for_a_node(scheme: str) -> tuple[socket.socket, str]:
    """Listen as a stranger does. Returns the socket and its address."""
    if scheme != "shm":
        listener = socket.create_server(("127.0.0.1", 0))
        return listener, "{}://{}:{}".format(scheme, *listener.getsockname())
    listener, name = socket.socket(socket.AF_UNIX), f"kvferry-{os.getpid()}-impostor"
    listener.bind(f"\0{name}")
    listener.listen()
    return listener, f"shm://@{name}"


def hear(world: World, sock: socket.socket) -> tuple[bytes, list[int]]:
    """Serve all nodes until one hangs up. Returns the bytes and the descriptors that it has sent."""
    heard, descriptors, is_over = b"", array.array("i"), False
    sock.setblocking(False)

    def has_hung_up() -> bool:
        nonlocal heard, is_over
        with suppress(BlockingIOError):
            try:
                data, ancillary, _, _ = sock.recvmsg(1 << 16, 1 << 12)
            except ConnectionResetError:
                return True
            heard += data
            for _, _, payload in ancillary:
                descriptors.frombytes(payload)
            is_over = not data
        return is_over

    world.serve(has_hung_up, promise="the node hangs up")
    for descriptor in descriptors:
        os.close(descriptor)
    return heard, list(descriptors)


#: What a peer that speaks ZeroMQ sends before its first message.
ZMTP = (
    b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL".ljust(64, b"\0")
    + b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
)


def zmtp(*messages: list[bytes]) -> bytes:
    """Return what a peer that speaks ZeroMQ sends, up to these messages."""
    frames = ((2 + (at < len(parts) - 1), part) for parts in messages for at, part in enumerate(parts))
    return ZMTP + b"".join(struct.pack(">BQ", flags, len(part)) + part for flags, part in frames)


def say(world: World, sock: socket.socket, said: bytes) -> None:
    if said.startswith(ZMTP):
        sock.sendall(ZMTP)
        said = said.removeprefix(ZMTP)
        # libzmq would take a message that comes earlier for a part of the handshake.
        sock.setblocking(True)
        world.serve(lambda: b"READY" in sock.recv(1024, socket.MSG_PEEK))
    sock.sendall(said)


def put(node: Node, peer_id: int, *messages: Message) -> None:
    """Send what no node sends, over a connection that a node has."""
    table = node.endpoint._inner._table  # type: ignore[attr-defined]
    connection = table.peer(peer_id).connection
    for message in messages:
        if isinstance(message, list):
            connection.channel.send(message)
        else:
            table.backend.stream_of(connection).send(message)


@pytest.fixture
def where() -> str:
    """Where the pools are; a parameter of tests that also run with pools on a GPU."""
    return "main memory"


@pytest.fixture
def world(request: pytest.FixtureRequest, scheme: str, where: str) -> Iterator[World]:
    if where == "GPU":
        request.getfixturevalue("gpu_pools")
    world = World(lambda: create_transport(scheme, {"handshake_timeout_s": 0.5}))
    yield world
    world.close()


@pytest.fixture
def node(world: World) -> Node:
    node = world.node(POOL_BYTES)
    node.memory()[:] = 1
    return node


@pytest.fixture
def address(node: Node) -> str:
    return node.endpoint.listen("")


def still_serves(world: World, node: Node, address: str) -> None:
    """Check that another node can still connect and read."""
    node.transport.guards.set(HELD.index, HELD.value)
    other = world.node(POOL_BYTES)
    link = world.link(node, other, address)
    assert world.read(link, pairs_of((0, 0, POOL_BYTES)), HELD).error is None
    world.forget(other)


# -- strangers that connect --------------------------------------------------------------------------

TCP_HELLO = tcp.Hello(4, (POOL_BYTES,), tcp.MAX_SLICE_BYTES)
UCX_PREFACE, UCX_HELLO = (
    ucx.Preface().encode(),
    ucx.Hello(4, (4096, 1), b"address", "ucx:tcp", 128 << 10).encode(),
)
NIXL_PREFACE = nixl.Preface().encode()
ZEROMQ_HELLO = zeromq.Hello(64, (POOL_BYTES,))
SHM_HELLO = shm.Hello(512, 1, (shm.SharedSegment(0, 0, 4096),))


def nixl_hello(*, num_guards: int = 4, table: int = 4096, sizes: tuple[int, ...] = (4096, 1)) -> bytes:
    addresses = np.arange(1, len(sizes) + 1, dtype=np.uint64) << np.uint64(20)
    return nixl.Hello(num_guards, table, "host", 0, addresses, sizes, b"metadata").encode()


def shm_frame(kind: int, body: bytes) -> bytes:
    return encode_frame(kind, body, has_sum=False)


def parts_of(message: Any) -> list[bytes]:
    """Return a message of `zeromq` as it is sent."""
    return [message.head(), message.body()]


def next_version_of_zeromq() -> list[bytes]:
    head = bytearray(ZEROMQ_HELLO.head()[:-SUM_BYTES])
    head[15] = zeromq.PROTOCOL_VERSION + 1  # after the kind and the magic
    return [bytes(head) + sum_of(bytes(head) + ZEROMQ_HELLO.body()), ZEROMQ_HELLO.body()]


SHM_HELLO_FRAME = shm_frame(shm.FrameKind.HELLO, shm.encode_hello(SHM_HELLO))
SHM_FILES_FRAME = shm_frame(shm.FrameKind.DESCRIPTORS, b"")

OTHER_PROGRAMS: dict[str, bytes] = {
    "silence": b"",
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "TLS": bytes.fromhex("16030100f1010000ed0303"),
}
TOO_LONG = struct.pack("<IB", 1 << 31, 1)

#: What a stranger sends; if it is a pair, then also what it must hear before the node hangs up.
STRANGERS: dict[str, dict[str, bytes | tuple[bytes, bytes]]] = {
    "shm": {
        **OTHER_PROGRAMS,
        "a frame too long": TOO_LONG,
        "half a hello": SHM_HELLO_FRAME[:20],
        "a message first": shm_frame(shm.FrameKind.MESSAGE, b"hi"),
    },
    "tcp": {
        **OTHER_PROGRAMS,
        "a frame too long": TOO_LONG,
        "an unknown frame": encode_frame(77, b""),
        "half a hello": TCP_HELLO.encode()[:20],
        "a message first": encode_frame(tcp.Kind.MESSAGE, b"hi"),
        "a fetch first": tcp.Fetch(1, False, HELD, ROWS).encode(),
        "a slice first": tcp.Slice(1, 5).encode() + b"12345",
        "an end first": tcp.End(1, 0, True).encode(),
        "another magic": TCP_HELLO.encode().replace(b"kvferry-tcp", b"kvferry-xyz"),
        "an impossible pool": replace(TCP_HELLO, num_bytes=(0,)).encode(),
        "a pool that is too large": replace(TCP_HELLO, num_bytes=(1 << 61,)).encode(),
        "no room for a slice": replace(TCP_HELLO, max_slice_bytes=0).encode(),
        "another version": (
            encode_frame(tcp.Kind.HELLO, b"kvferry-tcp\x63\0\0\0"),
            struct.pack("<11sI", b"kvferry-tcp", tcp.PROTOCOL_VERSION),
        ),
    },
    "ucx": {
        **OTHER_PROGRAMS,
        "a frame too long": TOO_LONG,
        "half a preface": UCX_PREFACE[: len(UCX_PREFACE) // 2],
        "two prefaces": UCX_PREFACE * 2,
        "a hello first": UCX_HELLO,
        "half a hello": UCX_PREFACE + UCX_HELLO[: len(UCX_HELLO) // 2],
        "a message first": encode_frame(ucx.Kind.MESSAGE, b"hi"),
        "a fetch first": ucx.Fetch(1, HELD, ROWS).encode(),
        "another magic": UCX_PREFACE + UCX_HELLO.replace(b"kvferry-ucx", b"kvferry-xcu"),
        "an impossible pool": UCX_PREFACE + ucx.Hello(4, (0,), b"address", "").encode(),
        "an address that is not UCX's": UCX_PREFACE + ucx.Hello(4, (1,), b" gibberish", "").encode(),
        "an address of another version": UCX_PREFACE + ucx.Hello(4, (1,), b"\x07" * 188, "").encode(),
        "another version": (encode_frame(ucx.Kind.HELLO, b"kvferry-ucx\x63\0\0\0"), UCX_PREFACE),
    },
    "nixl": {
        **OTHER_PROGRAMS,
        "a frame too long": TOO_LONG,
        "half a preface": NIXL_PREFACE[: len(NIXL_PREFACE) // 2],
        "two prefaces": NIXL_PREFACE * 2,
        "a hello first": nixl_hello(),
        "half a hello": NIXL_PREFACE + nixl_hello()[:40],
        "a message first": encode_frame(nixl.Kind.MESSAGE, b"hi"),
        "a ready first": NIXL_PREFACE + nixl.Ready().encode(),
        "reading first": NIXL_PREFACE + nixl.Reading().encode(),
        "another magic": NIXL_PREFACE + nixl_hello().replace(b"kvferry-nixl", b"kvferry-lixn"),
        "an impossible pool": (NIXL_PREFACE + nixl_hello(sizes=(0,)), b"segment"),
        "no guards": NIXL_PREFACE + nixl_hello(num_guards=0),
        "a guard table between words": NIXL_PREFACE + nixl_hello(table=4097),
        "metadata that is not NIXL's": NIXL_PREFACE + nixl_hello(),
        "another version": (
            encode_frame(nixl.Kind.HELLO, struct.pack("<12sI", b"kvferry-nixl", nixl.PROTOCOL_VERSION + 1)),
            NIXL_PREFACE,
        ),
    },
    "zeromq": {
        **OTHER_PROGRAMS,
        "a version without a handshake": b"\x01\x00" + b"\x05\x01\x01kvf\x02\x00x" * 50,
        "half a ZeroMQ handshake": b"\xff\0\0\0\0\0\0\0\1\x7f\3",
        "no hello": zmtp(),
        "an unknown message": zmtp([b"\x99", b""]),
        "a message first": zmtp([zeromq.Message(b"hi").head(), b"hi"]),
        "a fetch first": zmtp(parts_of(zeromq.Fetch(1, 0, HELD, True, ROWS))),
        "an impossible pool": zmtp(parts_of(zeromq.Hello(64, (0,)))),
        "another version": (
            zmtp(next_version_of_zeromq()),
            struct.pack("<B14sI", 1, b"kvferry-zeromq", zeromq.PROTOCOL_VERSION),
        ),
    },
}  # fmt: skip


@each(STRANGERS)
def test_a_stranger_is_dropped_and_gets_nothing(world: World, node: Node, address: str, row: Any) -> None:
    said, expected = row if isinstance(row, tuple) else (row, b"")
    with dial(address) as stranger:
        say(world, stranger, said)
        heard, descriptors = hear(world, stranger)
    assert expected in heard
    assert descriptors == []
    assert node.history == []
    still_serves(world, node, address)


# -- strangers that listen ---------------------------------------------------------------------------

#: What a stranger at an address says to a node that connects, and the error with which the node gives up.
LISTENERS: dict[str, dict[str, tuple[bytes, type[Exception], str]]] = {
    "shm": {
        "silence": (b"", TransferTimeoutError, ""),
        "another protocol": (b"220 mail.example ESMTP\r\n", ProtocolError, ""),
        "a hello, as a dialer sends it": (SHM_HELLO_FRAME, PeerRefusedError, ""),
        "a node at another address": (
            shm_frame(shm.FrameKind.HELLO, shm.encode_preface("shm://@kvferry-another")),
            PeerRefusedError,
            "",
        ),
        "an older version": (
            shm_frame(
                shm.FrameKind.HELLO,
                shm.encode_preface("").replace(struct.pack("<I", shm.VERSION), struct.pack("<I", shm.VERSION - 1)),
            ),
            VersionMismatchError,
            f"local {shm.VERSION}, remote {shm.VERSION - 1}; upgrade the peer first",
        ),
        "a newer version": (
            shm_frame(
                shm.FrameKind.HELLO,
                shm.encode_preface("").replace(struct.pack("<I", shm.VERSION), struct.pack("<I", shm.VERSION + 1)),
            ),
            VersionMismatchError,
            f"local {shm.VERSION}, remote {shm.VERSION + 1}; upgrade this node",
        ),
    },
    "tcp": {
        "another version": (
            encode_frame(tcp.Kind.HELLO, b"kvferry-tcp\x01\0\0\0"),
            VersionMismatchError,
            f"local {tcp.PROTOCOL_VERSION}, remote 1; upgrade the peer first",
        ),
        "a refusal that would forge a line of the log": (
            encode_frame(tcp.Kind.REFUSED, b"no\nforged\x1b[2J"),
            PeerRefusedError,
            "the peer refused: no\\nforged\\x1b[2J",
        ),
    },
    "zeromq": {
        "silence": (b"", PeerRefusedError, ""),
        "another protocol": (b"220 mail.example ESMTP\r\n", PeerLostError, ""),
        "another version": (
            zmtp(next_version_of_zeromq()),
            VersionMismatchError,
            f"local {zeromq.PROTOCOL_VERSION}, remote {zeromq.PROTOCOL_VERSION + 1}",
        ),
    },
}  # fmt: skip


@each(LISTENERS)
def test_a_node_gives_up_a_listener_that_is_none(
    world: World, node: Node, address: str, scheme: str, row: tuple[bytes, type[Exception], str]
) -> None:
    """Above all, a stranger at an address of `shm` must not get a descriptor of the pool."""
    said, error, words = row
    listener, where = wait_for_a_node(scheme)
    with listener:
        node.endpoint.start_connect(where, timeout_s=1.0)
        accepted, _ = listener.accept()
        with accepted:
            say(world, accepted, said)
            heard, descriptors = hear(world, accepted)
    world.serve(lambda: bool(node.history))
    (lost,) = node.of_type(PeerLost)
    assert isinstance(lost.error, error)
    assert words in str(lost.error)
    assert descriptors == []
    assert scheme != "shm" or heard == b""
    still_serves(world, node, address)


@pytest.mark.parametrize("scheme", ["shm"])
def test_a_listener_of_shm_describes_its_memory_only_after_a_hello(
    world: World, node: Node, address: str
) -> None:
    with dial(address) as stranger:
        heard, descriptors = hear(world, stranger)
    assert (heard, descriptors) == (shm_frame(shm.FrameKind.HELLO, shm.encode_preface(address)), [])


# -- connected peers ---------------------------------------------------------------------------------


def fetch_of_tcp(*rows: tuple[int, int], guard: Guard = HELD) -> bytes:
    return tcp.Fetch(1, False, guard, np.array(rows, dtype=np.int64)).encode()


def fetch_of_zeromq(*rows: tuple[int, int], guard: Guard = HELD) -> list[bytes]:
    return parts_of(zeromq.Fetch(1, 0, guard, True, np.array(rows, dtype=np.int64)))


#: What a connected peer may not send.
CRIMES: dict[str, dict[str, list[Message]]] = {
    "shm": {
        "a second hello": [SHM_HELLO_FRAME],
        "an oversized message": [struct.pack("<IB", MAX_MESSAGE_BYTES + 1, shm.FrameKind.MESSAGE)],
        "an unknown frame": [struct.pack("<IB", 1, 99) + b"x"],
    },
    "tcp": {
        "reads outside the pool": [fetch_of_tcp((POOL_BYTES, 1))],
        "reads before the pool": [fetch_of_tcp((-1, 1))],
        "reads nothing of something": [fetch_of_tcp((0, 0))],
        "reads too much at once": [fetch_of_tcp(*[(0, POOL_BYTES)] * 9)],
        "an impossible guard": [fetch_of_tcp((0, 1), guard=Guard(1 << 40, 1))],
        "fetches and does not receive": [fetch_of_tcp(*[(0, POOL_BYTES)] * 8)] * 200,
        "an answer to nothing": [tcp.End(5, 0, True).encode()],
        "a slice of nothing": [tcp.Slice(5, 100).encode(), bytes(100)],
        "a second hello": [TCP_HELLO.encode()],
    },
    "ucx": {
        "reads outside the pool": [
            ucx.Fetch(1, HELD, np.array([[POOL_BYTES, 1]], dtype=np.int64)).encode()
        ],
        "an answer to nothing": [ucx.Answer(5, True).encode()],
        "a second hello": [UCX_HELLO],
    },
    "nixl": {
        "a second hello": [nixl_hello()],
        "a second preface": [NIXL_PREFACE],
        "a late ready": [nixl.Ready().encode()],
        "a late refusal": [encode_frame(nixl.Kind.REFUSED, b"no")],
    },
    "zeromq": {
        "a second hello": [parts_of(ZEROMQ_HELLO)],
        "reads outside the pool": [fetch_of_zeromq((POOL_BYTES, 1))],
        "reads over the end of the pool": [fetch_of_zeromq((POOL_BYTES - 1, 2))],
        "reads before the pool": [fetch_of_zeromq((-1, 2))],
        "an impossible guard": [fetch_of_zeromq((0, 1), guard=Guard(1 << 30, 1))],
        "a negative guard": [fetch_of_zeromq((0, 1), guard=Guard(0, -1))],
        "a slice of nothing": [[zeromq.Slice(1, 0, True, 0, ()).head(), b"unasked"]],
        "an answer to nothing": [[zeromq.Stale(1, 0).head(), b""]],
        "an unknown message": [[b"\x99", b""]],
        "a head alone": [[zeromq.Message(b"").head()]],
        "an oversized message": [[zeromq.Message(b"").head(), bytes(64 << 20)]],
    },
}  # fmt: skip


@each(CRIMES, gpus=("tcp", "ucx", "zeromq"))
def test_a_peer_that_breaks_the_protocol_is_lost(
    request: pytest.FixtureRequest, world: World, node: Node, address: str, scheme: str, row: list[Message]
) -> None:
    node.transport.guards.set(HELD.index, HELD.value)
    link = world.link(node, world.node(POOL_BYTES), address)
    put(link.consumer, link.producer_id, *row)
    # The peer is not served: it receives nothing.
    world.serve(lambda: bool(node.of_type(PeerLost)), node)
    (lost,) = node.of_type(PeerLost)
    # libzmq itself drops a peer whose message is too long, without a reason.
    is_libzmqs = "an oversized message" in request.node.name and scheme == "zeromq"
    assert isinstance(lost.error, PeerLostError if is_libzmqs else ProtocolError)
    still_serves(world, node, address)


@each({"zeromq": {"fetch": fetch_of_zeromq(*[(0, POOL_BYTES)] * 8)}}, gpus=("zeromq",))
def test_a_peer_of_zeromq_that_fetches_and_does_not_receive_is_dropped(
    world: World, node: Node, address: str, row: list[bytes]
) -> None:
    """No node can do it: libzmq receives for a node that is not served."""
    node.transport.guards.set(HELD.index, HELD.value)
    with dial(address) as stranger:
        say(world, stranger, zmtp(parts_of(ZEROMQ_HELLO), *[row] * 200))
        world.serve(lambda: bool(node.of_type(PeerLost)))
    assert isinstance(node.of_type(PeerLost)[0].error, ProtocolError)
    still_serves(world, node, address)


@each({"nixl": {"reading": [nixl.Reading().encode() * 1000]}})
def test_a_peer_that_says_that_it_reads_costs_no_more_than_polling(
    world: World, node: Node, address: str, row: list[Message]
) -> None:
    link = world.link(node, world.node(POOL_BYTES), address)
    put(link.consumer, link.producer_id, *row)
    assert node.endpoint.wait_events(0.2) == []


@pytest.mark.parametrize("scheme", ["zeromq"])
def test_a_new_connection_never_pays_for_an_old_one(world: World, node: Node, address: str) -> None:
    """Descriptors are reused at once, and each drop closes the connection that it is meant for."""
    good: list[socket.socket] = []
    for number in range(1, 31):
        with dial(address) as bad:
            good.append(dial(address))
            say(world, bad, zmtp(parts_of(ZEROMQ_HELLO), [b"\x99", b""]))
        say(world, good[-1], zmtp(parts_of(ZEROMQ_HELLO)))
        world.serve(lambda: len(node.of_type(Connected)) >= number + len(node.of_type(PeerLost)))  # noqa: B023
    world.serve(lambda: len(node.of_type(Connected)) - len(node.of_type(PeerLost)) == 30)
    world.serve_quietly()
    assert len(node.of_type(Connected)) - len(node.of_type(PeerLost)) == 30
    for sock in good:
        sock.close()


def send_for_ever(node: Node, peer_id: int) -> None:
    while True:
        node.endpoint.send(peer_id, bytes(1 << 20))


@pytest.mark.parametrize("scheme", ["zeromq"])
def test_a_peer_that_takes_no_message_is_dropped_in_time(world: World, address: str, node: Node) -> None:
    """Both the queue for the peer and the time that it may stall are bounded."""
    link = world.link(node, world.node(POOL_BYTES), address)
    with pytest.raises(BackpressureError):
        send_for_ever(node, link.consumer_id)
    world.serve(lambda: bool(node.of_type(PeerLost)), node)


@pytest.mark.parametrize("scheme", [pytest.param("ucx", marks=MARKS["ucx"])])
def test_a_peer_that_freezes_in_a_message_that_was_not_asked_for_is_closed_at_once(
    world: World, node: Node, address: str
) -> None:
    # UCX would wait for the rest inside one call, which only the end of the process interrupts.
    faulthandler.dump_traceback_later(60, exit=True)
    try:
        peer = world.node(64 << 20)  # more than the sockets' buffers hold
        link = world.link(node, peer, address)
        worker: Any = peer.endpoint._inner._table.connected_peer(link.producer_id).connection.worker  # type: ignore[attr-defined]
        segment = peer.arenas[0].segment
        message = worker.send(12345, segment.address, segment.num_bytes)
        worker.progress()
        assert not message.is_done
        for _ in range(5):  # the first part arrives; the peer sends no other
            node.endpoint.wait_events(0.01)
        node.endpoint.close()
    finally:
        faulthandler.cancel_dump_traceback_later()


# -- owners that lie ---------------------------------------------------------------------------------

#: Of the read that is answered below: where its regions go, and how they are fetched.
READ = pairs_of((4096, 0, 600), (4696, 2000, 400))


def slice_of_zeromq(
    *sizes: int, transfer_id: int = 2, is_settled: bool = True, checksum: int | None = None
) -> Any:
    """Return a slice of zeros with frames of these sizes."""
    frames = [bytes(size) for size in sizes]
    head = zeromq.Slice(
        transfer_id, 0, is_settled, checksum_of(frames) if checksum is None else checksum, ()
    ).head()
    return [head, *frames]


def slice_of_tcp(num_bytes: int, tag: int = 1) -> bytes:
    return tcp.Slice(tag, num_bytes).encode() + bytes(num_bytes)


def end_of_tcp(checksum: int, is_valid: bool, tag: int = 1) -> bytes:
    return tcp.End(tag, checksum, is_valid).encode()


#: What an owner may not answer to the fetch of that read, and the error of the read.
LIES: dict[str, dict[str, tuple[list[Message], type[Exception] | None]]] = {
    "tcp": {
        "too few bytes": ([slice_of_tcp(999), end_of_tcp(0, True)], PeerLostError),
        "too many bytes": ([slice_of_tcp(1001), end_of_tcp(0, True)], PeerLostError),
        "another tag": ([slice_of_tcp(1000, tag=2), end_of_tcp(0, True, tag=2)], PeerLostError),
        "the slice twice": ([slice_of_tcp(1000)] * 2, PeerLostError),
        "an end without the slice": ([end_of_tcp(0, True)], PeerLostError),
        "a wrong checksum": ([slice_of_tcp(1000), end_of_tcp(5, True)], ChecksumError),
        "a guard that does not hold": ([slice_of_tcp(1000), end_of_tcp(5, False)], StaleRegionError),
        "no slice": ([end_of_tcp(0, False)], StaleRegionError),
    },
    "zeromq": {
        "too few bytes": ([slice_of_zeromq(999)], PeerLostError),
        "too many bytes": ([slice_of_zeromq(1001)], PeerLostError),
        "an empty frame too many": ([slice_of_zeromq(600, 400, 0)], PeerLostError),
        "frames of other sizes": ([slice_of_zeromq(500, 500)], PeerLostError),
        "one frame of two": ([slice_of_zeromq(600)], PeerLostError),
        "all in one frame, which is right": ([slice_of_zeromq(1000)], None),
        "a frame per region, which is right": ([slice_of_zeromq(600, 400)], None),
        "another transfer": ([slice_of_zeromq(1000, transfer_id=9)], PeerLostError),
        "the slice twice": ([slice_of_zeromq(1000, is_settled=False)] * 2, PeerLostError),
        "a wrong checksum": ([slice_of_zeromq(1000, checksum=1)], ChecksumError),
        "a wrong checksum, then a guard that does not hold": (
            [slice_of_zeromq(1000, is_settled=False, checksum=1), [zeromq.Stale(2, 1).head(), b""]],
            StaleRegionError,
        ),
        "no slice": ([[zeromq.Stale(2, 0).head(), b""]], StaleRegionError),
    },
}  # fmt: skip


@pytest.fixture
def owner(world: World, node: Node) -> Link:
    """A link over which the node reads; what its producer answers is up to the test."""
    link = world.link(world.node(POOL_BYTES), node)
    node.history.clear()
    return link


def start(link: Link, timeout_s: float = 10.0) -> int:
    return link.consumer.endpoint.start_read(link.producer_id, READ, HELD, timeout_s=timeout_s)


@each(LIES, gpus=("tcp", "zeromq"))
def test_what_an_owner_did_not_vouch_for_is_not_delivered(
    world: World, node: Node, owner: Link, row: tuple[list[Message], type[Exception] | None]
) -> None:
    said, error = row
    transfer_id = start(owner)
    put(owner.producer, owner.consumer_id, *said)
    world.serve(lambda: bool(node.ends_of(transfer_id)), node)
    (ended,) = node.ends_of(transfer_id)
    assert isinstance(ended.error, error or type(None))
    memory = node.memory()
    assert memory[:4096].all()
    assert memory[5096:].all(), "nothing was written outside the local regions"
    assert error or not memory[4096:5096].any()


@pytest.mark.parametrize("scheme", ["tcp"])
@pytest.mark.parametrize("part", ["slice", "frame"])
def test_pings_that_a_damaged_length_swallows_do_not_keep_the_connection(
    node: Node, owner: Link, part: str
) -> None:
    if part == "slice":
        start(owner)
        put(owner.producer, owner.consumer_id, tcp.Slice(1, 1000).encode(), bytes(10))
    else:
        put(owner.producer, owner.consumer_id, encode_frame(tcp.Kind.MESSAGE, bytes(100_000))[:1000])
    began = time.monotonic()
    while not node.of_type(PeerLost):
        assert time.monotonic() < began + 20, "the connection is kept, although nothing can arrive over it"
        put(owner.producer, owner.consumer_id, encode_frame(tcp.Kind.PING, b""))
        node.history += node.endpoint.wait_events(0.1)
    assert "silent" in str(node.of_type(PeerLost)[0].error)


@pytest.mark.parametrize("scheme", ["tcp"])
def test_frames_in_small_pieces_are_understood(world: World, node: Node, owner: Link) -> None:
    transfer_id = start(owner)
    data = np.arange(1000, dtype=np.uint8).tobytes()
    head = encode_frame(tcp.Kind.MESSAGE, b"in between") + tcp.Slice(1, 1000).encode()
    for piece in (*struct.unpack(f"{len(head)}c", head), data[:1], data[1:], end_of_tcp(0, False)):
        put(owner.producer, owner.consumer_id, piece)
        world.turn(node, timeout_s=0.001)
    world.serve(lambda: bool(node.ends_of(transfer_id)), node)
    assert isinstance(node.ends_of(transfer_id)[0].error, StaleRegionError)
    assert node.messages(owner.producer_id) == [b"in between"]
    assert node.memory()[4096:5096].tobytes() == data


# -- descriptors -------------------------------------------------------------------------------------

PAGE = 4096


def memory_file(num_bytes: int = PAGE, *, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def pipe_end() -> int:
    read_end, write_end = os.pipe()
    os.close(write_end)
    return read_end


def disk_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(PAGE)
        return os.dup(file.fileno())


def send_with(sock: socket.socket, data: bytes, descriptors: list[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    sock.sendmsg([data], rights if descriptors else [])
    for descriptor in descriptors:
        os.close(descriptor)


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


over_shm = pytest.mark.parametrize("scheme", ["shm"])

FILES: dict[str, Callable[[], list[int]]] = {
    "none": list,
    "too few": lambda: [memory_file()],
    "too many": lambda: [memory_file() for _ in range(3)],
    "far too many": lambda: [os.dup(0) for _ in range(200)],
    "unsealed guards": lambda: [memory_file(seals=0), memory_file()],
    "unsealed pool": lambda: [memory_file(), memory_file(seals=0)],
    "sealed against growing only": lambda: [memory_file(), memory_file(seals=fcntl.F_SEAL_GROW)],
    "small guards": lambda: [memory_file(PAGE - 1), memory_file()],
    "small pool": lambda: [memory_file(), memory_file(PAGE - 1)],
    "empty pool": lambda: [memory_file(), memory_file(0)],
    "a pipe": lambda: [memory_file(), pipe_end()],
    "a file": lambda: [memory_file(), disk_file()],
    "a socket": lambda: [memory_file(), socket.socket(socket.AF_UNIX).detach()],
}


@over_shm
@pytest.mark.parametrize("files", FILES)
def test_dangerous_descriptors_are_refused(world: World, node: Node, address: str, files: str) -> None:
    """The most dangerous one is a file that could shrink while it is mapped, which would kill this
    process.
    """
    before = num_open()
    with dial(address) as stranger:
        stranger.sendall(SHM_HELLO_FRAME)
        send_with(stranger, SHM_FILES_FRAME, FILES[files]())
        hear(world, stranger)
    assert num_open() == before
    still_serves(world, node, address)


#: What comes before the descriptors, and with them.
TOO_EARLY: dict[str, tuple[bytes, bytes]] = {
    "with the hello": (b"", SHM_HELLO_FRAME),
    "with the first byte": (b"", SHM_HELLO_FRAME[:1]),
    "with the last byte of the hello": (SHM_HELLO_FRAME[:-1], SHM_HELLO_FRAME[-1:]),
    "with garbage": (b"", b"\0" * 64),
}


@over_shm
@pytest.mark.parametrize("when", TOO_EARLY)
def test_descriptors_are_accepted_only_after_the_hello(
    world: World, node: Node, address: str, when: str
) -> None:
    """No earlier descriptor is held while the peer sends nothing more, and none counts as one of the
    hello's.
    """
    before = num_open()
    with dial(address) as stranger:
        stranger.sendall(TOO_EARLY[when][0])
        send_with(stranger, TOO_EARLY[when][1], [memory_file() for _ in range(100)])
        for _ in range(5):
            world.turn(timeout_s=0.005)
            assert num_open() <= before + 2  # both ends of the connection
        with suppress(OSError):
            stranger.sendall(SHM_FILES_FRAME)
        hear(world, stranger)
    assert node.history == []
    still_serves(world, node, address)


@over_shm
def test_no_more_descriptors_are_accepted_than_the_hello_names(
    world: World, node: Node, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel closes the others, so they are never open here."""
    before, seen, receive = num_open(), [0], Connection._receive_some

    def counted(self: Connection) -> bytes:
        try:
            return receive(self)
        finally:
            seen.append(num_open())

    monkeypatch.setattr(Connection, "_receive_some", counted)
    with dial(address) as stranger:
        stranger.sendall(SHM_HELLO_FRAME)
        send_with(stranger, SHM_FILES_FRAME, [memory_file() for _ in range(100)])
        hear(world, stranger)
    assert max(seen) <= before + 2 + 2  # both ends of the connection, and the two files of the hello
    still_serves(world, node, address)


@over_shm
def test_a_connected_peer_can_send_no_descriptors(world: World, node: Node, address: str) -> None:
    with dial(address) as stranger:
        stranger.sendall(SHM_HELLO_FRAME)
        send_with(stranger, SHM_FILES_FRAME, [memory_file(), memory_file()])
        world.serve(lambda: bool(node.of_type(Connected)))
        before = num_open()
        message = shm_frame(shm.FrameKind.MESSAGE, b"hi")
        send_with(stranger, message, [memory_file() for _ in range(5)])
        (peer,) = node.of_type(Connected)
        world.serve(lambda: node.messages(peer.peer_id) == [b"hi"])
        assert num_open() == before
