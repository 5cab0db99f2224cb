"""The frames between two nodes, and their strict decoder. Pure.

Frames are those of `streams`; everything is little-endian.

| kind | body |
|---|---|
| hello | magic, version: u32, num_guards: u32, max_slice_bytes: u32; segment sizes: i64 each |
| refused | the reason, as text |
| message | one control message |
| fetch | tag: u64, with_checksum: bool, guard index: i64, guard value: i64; (remote offset, num_bytes): i64 rows |
| slice | tag: u64, num_bytes: u64, a zero. Then that many bytes of the pool follow, and then an end |
| end | tag: u64, checksum: u64, is_valid: bool |
| ping | empty |

The side that connected begins with a hello, and the other side answers with its own. Each fetch is answered
by a slice and an end, or by an end alone if the guard did not hold or the fetch has no rows. The owner sends
an end after the last byte of the slice has left its pool; `is_valid` says whether the guard still held then.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from ..base import MAX_MESSAGE_BYTES
from ..copying import sum_words
from ..regions import Guard, Int64Array
from ..serving import (
    MAX_SIZES_BYTES,
    ROW_BYTES,
    decode_max_slice_bytes,
    decode_rows,
    decode_sizes,
    encode_rows,
    encode_sizes,
)
from ..streams import MAX_REASON_BYTES, decode_frame, encode_frame, require_preface
from ..sums import SUM_BYTES

PROTOCOL_VERSION = 3

#: Limits of one fetch.
MAX_ROWS = 4096
MAX_SLICE_BYTES = 8 << 20

_MAGIC = b"kvferry-tcp"


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    REFUSED = 2
    MESSAGE = 3
    FETCH = 4
    SLICE = 5
    END = 6
    PING = 7


_HELLO = struct.Struct("<11sIII")
_FETCH = struct.Struct("<Q?qq")
_SLICE = struct.Struct("<QQB")
_END = struct.Struct("<QQ?")
_FRAME_HEAD_BYTES = 5

#: Size of a whole slice frame, and of a whole end frame.
ANSWER_BYTES = _FRAME_HEAD_BYTES + _SLICE.size + SUM_BYTES
assert _SLICE.size == _END.size

#: The most bytes of a frame's body.
FRAME_LIMITS: Mapping[int, int] = {
    Kind.HELLO: _HELLO.size + MAX_SIZES_BYTES,
    Kind.REFUSED: MAX_REASON_BYTES,
    Kind.MESSAGE: MAX_MESSAGE_BYTES,
    Kind.FETCH: _FETCH.size + ROW_BYTES * MAX_ROWS,
    Kind.SLICE: _SLICE.size,
    Kind.END: _END.size,
    Kind.PING: 0,
}


@dataclass(frozen=True)
class Hello:
    """What a node says about itself.

    Attributes:
        num_bytes: Sizes of the segments of its pool.
        max_slice_bytes: The most bytes that it sends in one slice.
    """

    num_guards: int
    num_bytes: tuple[int, ...]
    max_slice_bytes: int

    def encode(self) -> bytes:
        head = _HELLO.pack(_MAGIC, PROTOCOL_VERSION, self.num_guards, self.max_slice_bytes)
        return encode_frame(Kind.HELLO, head + encode_sizes(self.num_bytes))


@dataclass(frozen=True)
class Fetch:
    """Asks for regions, to be sent under this tag if the guard holds.

    `rows`: `(num_rows, 2)` offset, num_bytes.
    """

    tag: int
    with_checksum: bool
    guard: Guard
    rows: Int64Array

    @functools.cached_property
    def num_bytes(self) -> int:
        return sum_words(self.rows[:, 1])

    def encode(self) -> bytes:
        head = _FETCH.pack(self.tag, self.with_checksum, self.guard.index, self.guard.value)
        return encode_frame(Kind.FETCH, head + encode_rows(self.rows))


@dataclass(frozen=True)
class Slice:
    """`num_bytes` bytes of the pool follow."""

    tag: int
    num_bytes: int

    def encode(self) -> bytes:
        return encode_frame(Kind.SLICE, _SLICE.pack(self.tag, self.num_bytes, 0))


@dataclass(frozen=True)
class End:
    """A fetch was answered.

    Attributes:
        checksum: Of the rows of the fetch and the bytes, end to end; 0 if the fetch did not ask for it.
        is_valid: All bytes were sent, and the guard held after that.
    """

    tag: int
    checksum: int
    is_valid: bool

    def encode(self) -> bytes:
        return encode_frame(Kind.END, _END.pack(self.tag, self.checksum, self.is_valid))


Incoming = Hello | Fetch | Slice | End


def decode(kind: int, body: bytes) -> Incoming:
    """Decode one frame of this protocol alone. Raises: see `decode_frame`."""
    return decode_frame(_DECODERS, kind, body)


def _decode_hello(body: bytes) -> Hello:
    require_preface(body, _MAGIC, PROTOCOL_VERSION, "tcp")
    _, _, num_guards, max_slice_bytes = _HELLO.unpack_from(body)
    max_slice_bytes = decode_max_slice_bytes(max_slice_bytes, MAX_SLICE_BYTES)
    return Hello(num_guards, decode_sizes(body[_HELLO.size :]), max_slice_bytes)


def _decode_fetch(body: bytes) -> Fetch:
    tag, with_checksum, index, value = _FETCH.unpack_from(body)
    rows = decode_rows(body[_FETCH.size :], max_rows=MAX_ROWS, max_bytes=MAX_SLICE_BYTES)
    return Fetch(tag, with_checksum, Guard(index, value), rows)


def _decode_slice(body: bytes) -> Slice:
    tag, num_bytes, _ = _SLICE.unpack(body)
    return Slice(tag, num_bytes)


_DECODERS: Mapping[int, Callable[[bytes], Incoming]] = {
    Kind.HELLO.value: _decode_hello,
    Kind.FETCH.value: _decode_fetch,
    Kind.SLICE.value: _decode_slice,
    Kind.END.value: lambda body: End(*_END.unpack(body)),
}
