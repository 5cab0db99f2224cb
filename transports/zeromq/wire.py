"""The messages between two nodes, and a strict decoder for them.

A message has a head and a body, which are one frame each. Only the body of a slice may have several frames.
The last eight bytes of a head are the sum (`sums`) of the bytes before them and of the body. A slice's sum is
of the head alone, because its body has a checksum.

| kind | head without its sum, little-endian | body |
|---|---|---|
| hello | kind, magic, version, num_guards, max_slice_bytes | segment sizes of the pool, int64 |
| message | kind | one control message |
| fetch | kind, transfer_id, index, guard index, guard value, with_checksum, is_whole | (remote offset, num_bytes) int64 rows |
| slice | kind, transfer_id, index, is_settled, checksum | the bytes of the rows, all in one frame or each row in its own |
| stale | kind, transfer_id, index | empty |

The side that connected begins with a hello, and the other side answers with its own. A fetch without rows
asks only whether the guard holds. A slice is *settled* if the guard still held after its bytes had been
copied, so that no later answer has to confirm them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from ..base import MAX_MESSAGE_BYTES
from ..errors import ProtocolError, VersionMismatchError
from ..regions import Guard, Int64Array
from ..serving import decode_max_slice_bytes, decode_rows, decode_sizes, encode_rows, encode_sizes
from ..sums import SUM_BYTES, require_sum, sum_of
from .frames import Frame

PROTOCOL_VERSION = 6

#: Limits of one fetch. A slice has fewer than `slice_bytes` (at most 4 MiB) before its last region, which has
#: at most as many.
MAX_ROWS = 4096
MAX_SLICE_BYTES = 8 << 20

_MAGIC = b"kvferry-zeromq"


class _Kind(IntEnum):
    HELLO = 1
    MESSAGE = 2
    FETCH = 3
    SLICE = 4
    STALE = 5


_GREETING = struct.Struct("<B14sI")
_HELLO = struct.Struct("<B14sIII")
_MESSAGE = struct.Struct("<B")
_FETCH = struct.Struct("<BQIqq??")
_SLICE = struct.Struct("<BQI?Q")
_STALE = struct.Struct("<BQI")


@dataclass(frozen=True)
class Hello:
    """The first message of each side.

    Attributes:
        num_bytes: Sizes of the segments of its pool.
        max_slice_bytes: The most bytes that it sends in one slice.
    """

    num_guards: int
    num_bytes: tuple[int, ...]
    max_slice_bytes: int = MAX_SLICE_BYTES

    def head(self) -> bytes:
        counts = self.num_guards, self.max_slice_bytes
        return _summed(_HELLO.pack(_Kind.HELLO, _MAGIC, PROTOCOL_VERSION, *counts), self.body())

    def body(self) -> bytes:
        return encode_sizes(self.num_bytes)


@dataclass(frozen=True)
class Message:
    """A control message."""

    body: bytes

    def head(self) -> bytes:
        return _summed(_MESSAGE.pack(_Kind.MESSAGE), self.body)


@dataclass(frozen=True)
class Fetch:
    """A request for some regions, to be answered by one slice if the guard holds.

    Attributes:
        rows: Offset and number of bytes per region, shape `(num_rows, 2)`.
        is_whole: The read has only this slice, so a settled answer ends it.
    """

    transfer_id: int
    index: int
    guard: Guard
    with_checksum: bool
    rows: Int64Array
    is_whole: bool = False

    @property
    def num_bytes(self) -> int:
        return int(self.rows[:, 1].sum())

    def head(self) -> bytes:
        place = self.transfer_id, self.index, self.guard.index, self.guard.value
        return _summed(_FETCH.pack(_Kind.FETCH, *place, self.with_checksum, self.is_whole), self.body())

    def body(self) -> bytes:
        return encode_rows(self.rows)


@dataclass(frozen=True)
class Slice:
    """Bytes that were fetched.

    Attributes:
        checksum: Of all frames, end to end; 0 if the fetch did not ask for it.
    """

    transfer_id: int
    index: int
    is_settled: bool
    checksum: int
    frames: tuple[Frame, ...]

    def head(self) -> bytes:
        return _summed(_SLICE.pack(_Kind.SLICE, self.transfer_id, self.index, self.is_settled, self.checksum))


@dataclass(frozen=True)
class Stale:
    """The answer to a fetch whose guard did not hold."""

    transfer_id: int
    index: int

    def head(self) -> bytes:
        return _summed(_STALE.pack(_Kind.STALE, self.transfer_id, self.index))


def _summed(head: bytes, body: bytes = b"") -> bytes:
    """Return a head with its sum."""
    return head + sum_of(head + body)


Incoming = Hello | Message | Fetch | Slice | Stale


def decode(frames: Sequence[Frame]) -> Incoming:
    """Decode one message from a peer.

    Raises:
        ProtocolError, ChecksumError: it is malformed, or was changed on its way. Nothing that the same peer
            sends after it can be trusted.
        VersionMismatchError: it is a hello of another version of the protocol.
    """
    if len(frames) < 2 or not len(frames[0]):
        raise ProtocolError(f"malformed message: it has a head and a body, got {len(frames)} frames")
    summed, kind = bytes(frames[0]), bytes(frames[0])[0]
    head, found = summed[:-SUM_BYTES], summed[-SUM_BYTES:]
    try:
        if kind == _Kind.SLICE:
            require_sum(head, found)
            return _decode_slice(head, frames[1:])
        if len(frames) > 2:
            raise ProtocolError(f"malformed message: kind {kind} has 2 frames, got {len(frames)}")
        decoder, body = _DECODERS[kind], bytes(frames[1])
        require_sum(head + body, found)
        return decoder(head, body)
    except KeyError:
        raise ProtocolError(f"malformed message: unknown kind {kind}") from None
    except struct.error:
        raise ProtocolError(f"malformed message: the head of kind {kind} has {len(summed)} bytes") from None


def _require_version(head: bytes) -> None:
    _, magic, version = _GREETING.unpack_from(head)
    if magic != _MAGIC:
        raise ProtocolError("malformed hello: the peer is not a kvferry node")
    if version != PROTOCOL_VERSION:
        raise VersionMismatchError(local=PROTOCOL_VERSION, remote=version)


def _decode_hello(head: bytes, body: bytes) -> Hello:
    _require_version(head)
    *_, num_guards, max_slice_bytes = _HELLO.unpack(head)
    return Hello(num_guards, decode_sizes(body), decode_max_slice_bytes(max_slice_bytes, MAX_SLICE_BYTES))


def _decode_message(head: bytes, body: bytes) -> Message:
    _MESSAGE.unpack(head)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"malformed message: it has at most {MAX_MESSAGE_BYTES} bytes, got {len(body)}")
    return Message(body)


def _decode_fetch(head: bytes, body: bytes) -> Fetch:
    _, transfer_id, index, guard_index, guard_value, with_checksum, is_whole = _FETCH.unpack(head)
    rows = decode_rows(body, max_rows=MAX_ROWS, max_bytes=MAX_SLICE_BYTES)
    return Fetch(transfer_id, index, Guard(guard_index, guard_value), with_checksum, rows, is_whole)


def _decode_slice(head: bytes, frames: Sequence[Frame]) -> Slice:
    _, transfer_id, index, is_settled, checksum = _SLICE.unpack(head)
    return Slice(transfer_id, index, is_settled, checksum, tuple(frames))


def _decode_stale(head: bytes, body: bytes) -> Stale:
    _, transfer_id, index = _STALE.unpack(head)
    if len(body):
        raise ProtocolError("malformed stale answer: it has no body")
    return Stale(transfer_id, index)


_DECODERS: Mapping[int, Callable[[bytes, bytes], Incoming]] = {
    _Kind.HELLO.value: _decode_hello,
    _Kind.MESSAGE.value: _decode_message,
    _Kind.FETCH.value: _decode_fetch,
    _Kind.STALE.value: _decode_stale,
}
