"""If a peer of `shm` breaks the protocol, that peer is lost, and nothing else."""

from __future__ import annotations

import array
import contextlib
import fcntl
import logging
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.transports import Connected, PeerLost, Pool
from kvferry.transports.base import MAX_MESSAGE_BYTES
from kvferry.transports.errors import (
    KVTransferError,
    PeerRefusedError,
    ProtocolError,
    TransferTimeoutError,
    VersionMismatchError,
)
from kvferry.transports.shm import SharedMemoryTransport
from kvferry.transports.shm.hello import (
    FOREIGN,
    FRAME_LIMITS,
    VERSION,
    FrameKind,
    Hello,
    SharedSegment,
    decode_hello,
    encode_hello,
    encode_preface,
    require_preface,
)
from kvferry.transports.shm.sockets import Connection
from kvferry.transports.streams import FrameReader
from kvferry.transports.streams import encode_frame as any_frame
from tests.support.peers import Node

PAGE = 4096
GOOD = Hello(num_guards=512, num_files=1, segments=(SharedSegment(0, 0, PAGE),))


class Victim(Node):
    """A node that listens, and its events."""

    def __init__(self) -> None:
        transport = SharedMemoryTransport({"num_guards": 512, "handshake_timeout_s": 0.3})
        self.arena = transport.allocate(PAGE)
        super().__init__(transport, Pool([self.arena.segment]))
        self.address = self.endpoint.listen("")

    def dial(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect("\0" + self.address.removeprefix("shm://@"))
        return sock

    def until_dropped(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.until(lambda: _is_closed(sock))

    def still_serves(self) -> bool:
        """Whether a good peer can connect."""
        self.seen.clear()
        peer_id = self.endpoint.start_connect(self.address, timeout_s=5)
        self.until(lambda: len(self.seen) >= 2)
        good = Connected(peer_id, incoming=False) in self.seen
        self.endpoint.disconnect(peer_id)
        self.until(lambda: any(isinstance(event, PeerLost) for event in self.seen))
        self.seen.clear()
        return good


def _is_closed(sock: socket.socket) -> bool:
    try:
        while sock.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


@pytest.fixture(scope="module")
def shared_victim() -> Iterator[Victim]:
    victim = Victim()
    yield victim
    victim.transport.close()


@pytest.fixture
def victim() -> Iterator[Victim]:
    victim = Victim()
    yield victim
    victim.transport.close()


def memory_file(num_bytes: int, *, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def send_with(sock: socket.socket, data: bytes, descriptors: list[int]) -> None:
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    sock.sendmsg([data], [rights] if descriptors else [])
    for descriptor in descriptors:
        os.close(descriptor)


def encode_frame(kind: int, body: bytes) -> bytes:
    """Return a frame as shm has it: without a sum."""
    return any_frame(kind, body, has_sum=False)


HELLO_FRAME = encode_frame(FrameKind.HELLO, encode_hello(GOOD))
DESCRIPTORS_FRAME = encode_frame(FrameKind.DESCRIPTORS, b"")


def say_hello(sock: socket.socket, descriptors: list[int]) -> None:
    sock.sendall(HELLO_FRAME)
    send_with(sock, DESCRIPTORS_FRAME, descriptors)


def good_hello(sock: socket.socket) -> None:
    say_hello(sock, [memory_file(PAGE), memory_file(PAGE)])


# -- before the hello --------------------------------------------------------------------------------


@given(garbage=st.binary(min_size=1, max_size=200))
@settings(max_examples=60, deadline=None)
def test_any_garbage_is_dropped(shared_victim: Victim, garbage: bytes) -> None:
    with shared_victim.dial() as sock:
        sock.sendall(garbage)
        sock.shutdown(socket.SHUT_WR)
        shared_victim.until_dropped(sock)
    assert shared_victim.seen == []


@given(body=st.binary(max_size=100))
@settings(max_examples=60, deadline=None)
def test_any_garbage_in_a_hello_is_dropped(shared_victim: Victim, body: bytes) -> None:
    with shared_victim.dial() as sock:
        sock.sendall(encode_frame(FrameKind.HELLO, body))
        shared_victim.until_dropped(sock)
    assert shared_victim.seen == []


@pytest.mark.parametrize("num_bytes", [1, 4, 5, 20, 40])
def test_a_hello_cut_short_is_dropped(victim: Victim, num_bytes: int) -> None:
    with victim.dial() as sock:
        sock.sendall(HELLO_FRAME[:num_bytes])
        sock.shutdown(socket.SHUT_WR)
        victim.until_dropped(sock)
    assert victim.still_serves()


def test_silence_is_dropped_after_a_while(victim: Victim, caplog: pytest.LogCaptureFixture) -> None:
    with victim.dial() as sock, caplog.at_level(logging.WARNING):
        victim.until_dropped(sock)
    assert "timed out waiting for the peer's hello" in caplog.text
    assert victim.still_serves()


FILES: dict[str, Callable[[], list[int]]] = {
    "none": list,
    "too few": lambda: [memory_file(PAGE)],
    "too many": lambda: [memory_file(PAGE) for _ in range(3)],
    "far too many": lambda: [os.dup(0) for _ in range(200)],
    "unsealed guards": lambda: [memory_file(PAGE, seals=0), memory_file(PAGE)],
    "unsealed pool": lambda: [memory_file(PAGE), memory_file(PAGE, seals=0)],
    "sealed against growing only": lambda: [memory_file(PAGE), memory_file(PAGE, seals=fcntl.F_SEAL_GROW)],
    "small guards": lambda: [memory_file(PAGE - 1), memory_file(PAGE)],
    "small pool": lambda: [memory_file(PAGE), memory_file(PAGE - 1)],
    "empty pool": lambda: [memory_file(PAGE), memory_file(0)],
    "a pipe": lambda: [memory_file(PAGE), *_pipe_end()],
    "a file": lambda: [memory_file(PAGE), _disk_file()],
    "a socket": lambda: [memory_file(PAGE), _socket_descriptor()],
}


def _pipe_end() -> list[int]:
    read_end, write_end = os.pipe()
    os.close(write_end)
    return [read_end]


def _disk_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(PAGE)
        return os.dup(file.fileno())


def _socket_descriptor() -> int:
    return socket.socket(socket.AF_UNIX).detach()


@pytest.mark.parametrize("files", FILES)
def test_dangerous_descriptors_are_refused(victim: Victim, files: str) -> None:
    """The most dangerous one is a file that could shrink while it is mapped, which would kill this
    process.
    """
    before = len(os.listdir("/proc/self/fd"))
    with victim.dial() as sock:
        say_hello(sock, FILES[files]())
        victim.until_dropped(sock)
    assert len(os.listdir("/proc/self/fd")) == before
    assert victim.still_serves()


TOO_EARLY: dict[str, Callable[[socket.socket, list[int]], None]] = {
    "with the hello": lambda sock, files: send_with(sock, HELLO_FRAME, files),
    "with the first byte": lambda sock, files: send_with(sock, HELLO_FRAME[:1], files),
    "with the last byte of the hello": lambda sock, files: (
        sock.sendall(HELLO_FRAME[:-1]),
        send_with(sock, HELLO_FRAME[-1:], files),
    )[1],
    "with garbage": lambda sock, files: send_with(sock, b"\0" * 64, files),
}


@pytest.mark.parametrize("when", TOO_EARLY)
def test_descriptors_are_accepted_only_after_the_hello(victim: Victim, when: str) -> None:
    """No earlier descriptor is held while the peer sends nothing more, and none counts as one of the
    hello's.
    """
    before = len(os.listdir("/proc/self/fd"))
    with victim.dial() as sock:
        TOO_EARLY[when](sock, [memory_file(PAGE) for _ in range(100)])
        for _ in range(5):
            victim.seen += victim.endpoint.wait_events(0.005)
            assert len(os.listdir("/proc/self/fd")) <= before + 2  # both ends of the connection
        with contextlib.suppress(OSError):
            sock.sendall(DESCRIPTORS_FRAME)
        victim.until_dropped(sock)
    assert victim.seen == []
    assert victim.still_serves()


def test_no_more_descriptors_are_accepted_than_the_hello_names(victim: Victim) -> None:
    """The kernel closes the others, so they are never open here."""
    before = len(os.listdir("/proc/self/fd"))
    most = before
    received = Connection._receive_some

    def counted(self: Connection) -> bytes:
        nonlocal most
        try:
            return received(self)
        finally:
            most = max(most, len(os.listdir("/proc/self/fd")))

    with victim.dial() as sock, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "_receive_some", counted)
        say_hello(sock, [memory_file(PAGE) for _ in range(100)])
        victim.until_dropped(sock)
    assert most <= before + 2 + 2  # both ends of the connection, and the two files of the hello
    assert victim.still_serves()


def test_a_message_before_the_hello_is_refused(victim: Victim) -> None:
    with victim.dial() as sock:
        sock.sendall(encode_frame(FrameKind.MESSAGE, b"hi"))
        victim.until_dropped(sock)
    assert victim.seen == []


# -- after it ----------------------------------------------------------------------------------------

LATER: dict[str, bytes] = {
    "a second hello": encode_frame(FrameKind.HELLO, encode_hello(GOOD)),
    "an oversized message": struct.pack("<IB", MAX_MESSAGE_BYTES + 1, FrameKind.MESSAGE),
    "an unknown kind": struct.pack("<IB", 1, 99) + b"x",
}


@pytest.mark.parametrize("data", LATER)
def test_a_connected_peer_that_breaks_the_protocol_is_lost(victim: Victim, data: str) -> None:
    with victim.dial() as sock:
        good_hello(sock)
        victim.until(lambda: any(isinstance(event, Connected) for event in victim.seen))
        sock.sendall(LATER[data])
        victim.until_dropped(sock)
    assert isinstance(victim.seen[-1], PeerLost)
    assert isinstance(victim.seen[-1].error, ProtocolError)
    assert victim.still_serves()


def test_later_descriptors_are_not_accepted(victim: Victim) -> None:
    with victim.dial() as sock:
        good_hello(sock)
        victim.until(lambda: bool(victim.seen))
        before = len(os.listdir("/proc/self/fd"))
        send_with(sock, encode_frame(FrameKind.MESSAGE, b"hi"), [memory_file(PAGE) for _ in range(5)])
        victim.until(lambda: len(victim.seen) == 2)
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_message_in_small_pieces_is_one_message(victim: Victim) -> None:
    with victim.dial() as sock:
        good_hello(sock)
        victim.until(lambda: bool(victim.seen))
        for byte in encode_frame(FrameKind.MESSAGE, b"slowly"):
            sock.sendall(bytes([byte]))
            victim.seen += victim.endpoint.wait_events(0)
        victim.until(lambda: len(victim.seen) == 2)
    assert victim.seen[1].message == b"slowly"  # type: ignore[union-attr]


# -- a hostile listener ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "error"), [(b"HTTP/1.1 400 Bad Request\r\n", ProtocolError), (b"", TransferTimeoutError)]
)
def test_a_connection_to_another_program_is_lost(
    victim: Victim, answer: bytes, error: type[Exception]
) -> None:
    name = f"kvferry-{os.getpid()}-hostile"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()
        victim.endpoint.start_connect(f"shm://@{name}", timeout_s=0.2)
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(answer)
            victim.until(lambda: bool(victim.seen))
    (lost,) = victim.seen
    assert isinstance(lost, PeerLost)
    assert isinstance(lost.error, error)


class Impostor:
    """A socket of the same user that belongs to no node."""

    def __init__(self, listener: socket.socket) -> None:
        self.address = f"shm://@kvferry-{os.getpid()}-impostor"
        self._listener = listener
        listener.bind("\0" + self.address.removeprefix("shm://@"))
        listener.listen()

    def told(self, victim: Victim, said: bytes) -> tuple[bytes, list[int]]:
        """Have a node connect, and send it bytes. Returns all bytes and descriptors that it sends."""
        victim.endpoint.start_connect(self.address, timeout_s=0.3)
        accepted, _ = self._listener.accept()
        heard, descriptors = b"", array.array("i")
        with accepted:
            accepted.sendall(said)
            victim.until(lambda: bool(victim.seen))
            accepted.setblocking(False)
            with contextlib.suppress(BlockingIOError, ConnectionResetError):
                while True:
                    data, ancillary, _, _ = accepted.recvmsg(1 << 16, 1 << 12)
                    heard += data
                    for _, _, payload in ancillary:
                        descriptors.frombytes(payload)
                    if not data:
                        break
        for descriptor in descriptors:
            os.close(descriptor)
        return heard, list(descriptors)


@pytest.fixture
def impostor() -> Iterator[Impostor]:
    with socket.socket(socket.AF_UNIX) as listener:
        yield Impostor(listener)


PREFACES: dict[str, tuple[bytes, type[Exception]]] = {
    "silence": (b"", TransferTimeoutError),
    "another protocol": (b"220 mail.example ESMTP\r\n", ProtocolError),
    "a hello, as a dialer sends it": (HELLO_FRAME, PeerRefusedError),
    "a node at another address": (
        encode_frame(FrameKind.HELLO, encode_preface("shm://@kvferry-another")),
        PeerRefusedError,
    ),
    "an older version": (
        encode_frame(
            FrameKind.HELLO,
            encode_preface("").replace(struct.pack("<I", VERSION), struct.pack("<I", VERSION - 1)),
        ),
        VersionMismatchError,
    ),
}


@pytest.mark.parametrize("said", PREFACES)
def test_an_impostor_at_an_address_gets_nothing(victim: Victim, impostor: Impostor, said: str) -> None:
    """Above all, it must not get a descriptor of the pool."""
    preface, error = PREFACES[said]
    assert impostor.told(victim, preface) == (b"", [])
    (lost,) = victim.seen
    assert isinstance(lost, PeerLost)
    assert isinstance(lost.error, error)
    assert victim.still_serves()


def test_a_listener_describes_its_memory_only_after_a_hello(victim: Victim) -> None:
    with victim.dial() as sock:
        victim.seen += victim.endpoint.wait_events(0.05)
        data, ancillary, _, _ = sock.recvmsg(1 << 16, 1 << 12)
        assert data == encode_frame(FrameKind.HELLO, encode_preface(victim.address))
        assert ancillary == []


# -- the frames alone --------------------------------------------------------------------------------

SEGMENT = st.builds(
    SharedSegment,
    file=st.integers(FOREIGN, 3),
    start=st.integers(0, 2**62 - 1),
    num_bytes=st.integers(1, 2**62 - 1),
)
HELLO = st.builds(
    Hello,
    num_guards=st.integers(1, 1 << 24),
    num_files=st.just(4),
    segments=st.lists(SEGMENT, min_size=1, max_size=9).map(tuple),
)


@given(HELLO)
def test_a_hello_survives_encoding(hello: Hello) -> None:
    assert decode_hello(encode_hello(hello)) == hello


@given(HELLO, st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_hello_is_a_typed_error_or_a_valid_hello(hello: Hello, at: int, byte: int) -> None:
    body = bytearray(encode_hello(hello))
    body[at % len(body)] = byte
    try:
        decoded = decode_hello(bytes(body))
    except KVTransferError:
        return
    assert all(FOREIGN <= segment.file < decoded.num_files for segment in decoded.segments)


def test_another_version_is_named() -> None:
    body = bytearray(encode_hello(GOOD))
    struct.pack_into("<I", body, 8, VERSION + 1)
    with pytest.raises(
        VersionMismatchError, match=f"local {VERSION}, remote {VERSION + 1}; upgrade this node"
    ):
        decode_hello(bytes(body))
    with pytest.raises(VersionMismatchError, match="upgrade the peer first"):
        require_preface(PREFACES["an older version"][0][5:], "")


@given(st.lists(st.binary(max_size=50)), st.lists(st.integers(1, 20)))
def test_frames_survive_any_cutting(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(encode_frame(FrameKind.MESSAGE, body) for body in bodies)
    reader, found = FrameReader(FRAME_LIMITS, has_sums=False), []
    for size in [*cuts, len(stream) + 1]:
        found += reader.feed(stream[:size])
        stream = stream[size:]
    assert [body for _, body in found] == bodies
