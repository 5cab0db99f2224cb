"""What goes over a connection: messages of a head and a body, one frame each but for slices, and their strict decoder.

| kind | head, little-endian | body |
|---|---|---|
| hello | kind, magic, version, num_guards | segment sizes of the pool, int64 |
| message | kind | one control message |
| fetch | kind, transfer_id, index, guard index, guard value, with_checksum, is_whole | (remote offset, num_bytes) int64 rows |
| slice | kind, transfer_id, index, is_settled, checksum | the rows' bytes, end to end, or each row in a frame of its own |
| stale | kind, transfer_id, index | empty |

Every connection begins with a hello from the side that connected, answered by one from the other. A fetch of no rows
asks only whether the guard holds. A *settled* slice was still guarded after its bytes had been copied.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ..base import MAX_MESSAGE_BYTES
from ..errors import ProtocolError, VersionMismatchError
from ..regions import Guard, Int64Array, Pool, Segment
from .frames import Frame

PROTOCOL_VERSION = 4

#: Limits of one fetch. A slice is at most `slice_bytes` (4 MiB) and one region.
MAX_ROWS = 4096
MAX_SLICE_BYTES = 8 << 20

_MAGIC = b"kvferry-zeromq"
_MAX_SEGMENTS = 65536
_MAX_POOL_BYTES = 1 << 60


class _Kind(IntEnum):
    HELLO = 1
    MESSAGE = 2
    FETCH = 3
    SLICE = 4
    STALE = 5


_GREETING = struct.Struct("<B14sI")
_HELLO = struct.Struct("<B14sII")
_MESSAGE = struct.Struct("<B")
_FETCH = struct.Struct("<BQIqq??")
_SLICE = struct.Struct("<BQI?Q")
_STALE = struct.Struct("<BQI")


@dataclass(frozen=True)
class Hello:
    """What a process says of itself first. `num_bytes`: its pool's segments."""

    num_guards: int
    num_bytes: tuple[int, ...]

    def head(self) -> bytes:
        return _HELLO.pack(_Kind.HELLO, _MAGIC, PROTOCOL_VERSION, self.num_guards)

    def body(self) -> bytes:
        return np.array(self.num_bytes, dtype="<i8").tobytes()

    def pool(self) -> Pool:
        """The peer's run of offsets. Its addresses mean nothing here."""
        return Pool(Segment(0, size) for size in self.num_bytes)


@dataclass(frozen=True)
class Message:
    """A control message."""

    body: bytes

    @staticmethod
    def head() -> bytes:
        return _MESSAGE.pack(_Kind.MESSAGE)


@dataclass(frozen=True)
class Fetch:
    """Send me these regions, as one slice, if the guard holds.

    Attributes:
        rows: `(num_rows, 2)`: offset, num_bytes.
        is_whole: The read has no other slice: a settled answer ends it.
    """

    transfer_id: int
    index: int
    guard: Guard
    with_checksum: bool
    rows: Int64Array
    is_whole: bool = False

    def head(self) -> bytes:
        wanted = (self.with_checksum, self.is_whole)
        return _FETCH.pack(
            _Kind.FETCH, self.transfer_id, self.index, self.guard.index, self.guard.value, *wanted
        )

    def body(self) -> bytes:
        return self.rows.astype("<i8", copy=False).tobytes()


@dataclass(frozen=True)
class Slice:
    """Bytes that were fetched. `checksum`: of all frames, end to end; 0 when none was asked for."""

    transfer_id: int
    index: int
    is_settled: bool
    checksum: int
    frames: tuple[Frame, ...]

    def head(self) -> bytes:
        return _SLICE.pack(_Kind.SLICE, self.transfer_id, self.index, self.is_settled, self.checksum)


@dataclass(frozen=True)
class Stale:
    """The guard did not hold; no bytes."""

    transfer_id: int
    index: int

    def head(self) -> bytes:
        return _STALE.pack(_Kind.STALE, self.transfer_id, self.index)


Incoming = Hello | Message | Fetch | Slice | Stale


def decode(frames: Sequence[Frame]) -> Incoming:
    """Decode one message from a peer.

    Raises:
        ProtocolError: it is none. What follows from the same peer means nothing.
        VersionMismatchError: it is the hello of another version of the protocol.
    """
    if len(frames) < 2 or not len(frames[0]):
        raise ProtocolError(f"a message has a head and a body, got {len(frames)} frames")
    head, kind = bytes(frames[0]), bytes(frames[0])[0]
    try:
        if kind == _Kind.SLICE:
            return _decode_slice(head, frames[1:])
        if len(frames) > 2:
            raise ProtocolError(f"a message of kind {kind} has 2 frames, got {len(frames)}")
        return _DECODERS[kind](head, bytes(frames[1]))
    except KeyError:
        raise ProtocolError(f"no message has kind {kind}") from None
    except struct.error:
        raise ProtocolError(f"the head of a message of kind {kind} has {len(head)} bytes") from None


def _decode_hello(head: bytes, body: bytes) -> Hello:
    _, magic, version = _GREETING.unpack_from(head)
    if magic != _MAGIC:
        raise ProtocolError("the peer does not speak kvferry")
    if version != PROTOCOL_VERSION:
        raise VersionMismatchError(local=PROTOCOL_VERSION, remote=version)
    *_, num_guards = _HELLO.unpack(head)
    if len(body) % 8 or not 8 <= len(body) <= 8 * _MAX_SEGMENTS:
        raise ProtocolError(f"a hello lists 1 to {_MAX_SEGMENTS} segments, got {len(body)} bytes")
    sizes = tuple(np.frombuffer(body, dtype="<i8").tolist())
    if min(sizes) <= 0 or sum(sizes) > _MAX_POOL_BYTES:
        raise ProtocolError("a hello lists segments of at least one byte each, and a pool of at most 2**60")
    return Hello(num_guards, sizes)


def _decode_message(head: bytes, body: bytes) -> Message:
    _MESSAGE.unpack(head)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a control message has at most {MAX_MESSAGE_BYTES} bytes, got {len(body)}")
    return Message(body)


def _decode_fetch(head: bytes, body: bytes) -> Fetch:
    _, transfer_id, index, guard_index, guard_value, with_checksum, is_whole = _FETCH.unpack(head)
    if len(body) % 16 or len(body) > 16 * MAX_ROWS:
        raise ProtocolError(f"a fetch has at most {MAX_ROWS} rows of 16 bytes, got {len(body)} bytes")
    rows = np.frombuffer(body, dtype="<i8").reshape(-1, 2).astype(np.int64)
    lengths = rows[:, 1]
    if ((lengths <= 0) | (lengths > MAX_SLICE_BYTES)).any() or int(lengths.sum()) > MAX_SLICE_BYTES:
        raise ProtocolError(f"a fetch is for 1 to {MAX_SLICE_BYTES} bytes a row and in total")
    return Fetch(transfer_id, index, Guard(guard_index, guard_value), with_checksum, rows, is_whole)


def _decode_slice(head: bytes, frames: Sequence[Frame]) -> Slice:
    _, transfer_id, index, is_settled, checksum = _SLICE.unpack(head)
    return Slice(transfer_id, index, is_settled, checksum, tuple(frames))


def _decode_stale(head: bytes, body: bytes) -> Stale:
    _, transfer_id, index = _STALE.unpack(head)
    if len(body):
        raise ProtocolError("a stale answer has no body")
    return Stale(transfer_id, index)


_DECODERS: Mapping[int, Callable[[bytes, bytes], Incoming]] = {
    _Kind.HELLO.value: _decode_hello,
    _Kind.MESSAGE.value: _decode_message,
    _Kind.FETCH.value: _decode_fetch,
    _Kind.STALE.value: _decode_stale,
}
