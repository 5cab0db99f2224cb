"""The frames of the control connection, and their strict decoder. Pure.

Frames are those of `streams`; everything is little-endian.

| kind | body |
|---|---|
| hello, as a preface | magic, version: u32 |
| hello | magic, version: u32, num_guards: u32, max_slice_bytes: u32, num_segments: u32, mechanism: 32 bytes; segment sizes: i64 each; UCX address |
| ready | mechanism |
| refused | the reason, as text |
| message | one control message |
| fetch | tag: u64, guard index: i64, guard value: i64; (remote offset, num_bytes): i64 rows |
| sent, stale | tag: u64 |
| ping | empty |

Each side begins with a preface as soon as the TCP connection is established, so versions are known before
anything is opened. After the listener's preface the connecting side opens a worker and sends a hello. The
listener opens an endpoint to that UCX address, and answers with a hello that names what UCX chose. The
connecting side also opens an endpoint, and sends a ready. Each fetch is answered by one UCX message under its
tag, and by sent or stale here.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from ..base import MAX_MESSAGE_BYTES
from ..errors import ProtocolError
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
from ..streams import MAX_REASON_BYTES, decode_frame, encode_frame, encode_preface, require_preface

PROTOCOL_VERSION = 6

#: Limits of one fetch.
MAX_ROWS = 4096
MAX_SLICE_BYTES = 128 << 20

_MAGIC = b"kvferry-ucx"
_MAX_ADDRESS_BYTES = 64 << 10


class Kind(IntEnum):
    HELLO = 1
    READY = 2
    REFUSED = 3
    MESSAGE = 4
    FETCH = 5
    SENT = 6
    STALE = 7
    PING = 8


_HELLO = struct.Struct("<11sIIII32s")
_FETCH = struct.Struct("<Qqq")
_TAG = struct.Struct("<Q")

#: The most bytes of a frame's body.
FRAME_LIMITS: Mapping[int, int] = {
    Kind.HELLO: _HELLO.size + MAX_SIZES_BYTES + _MAX_ADDRESS_BYTES,
    Kind.READY: 32,
    Kind.REFUSED: MAX_REASON_BYTES,
    Kind.MESSAGE: MAX_MESSAGE_BYTES,
    Kind.FETCH: _FETCH.size + ROW_BYTES * MAX_ROWS,
    Kind.SENT: _TAG.size,
    Kind.STALE: _TAG.size,
    Kind.PING: 0,
}


@dataclass(frozen=True)
class Preface:
    """Says that this is a node, and its version.

    The kind is that of a hello: every version can read a hello's version.
    """

    def encode(self) -> bytes:
        return encode_frame(Kind.HELLO, encode_preface(_MAGIC, PROTOCOL_VERSION))


@dataclass(frozen=True)
class Hello:
    """What a process says about itself first.

    Attributes:
        num_bytes: Sizes of its pool's segments.
        address: Of its UCX worker.
        mechanism: What it sends to us by; empty in the hello of the side that connected.
        max_slice_bytes: The most bytes that it sends in one slice.
    """

    num_guards: int
    num_bytes: tuple[int, ...]
    address: bytes
    mechanism: str
    max_slice_bytes: int = MAX_SLICE_BYTES

    def encode(self) -> bytes:
        sizes = encode_sizes(self.num_bytes)
        mechanism = self.mechanism.encode()[:32]
        counts = (self.num_guards, self.max_slice_bytes, len(self.num_bytes))
        head = _HELLO.pack(_MAGIC, PROTOCOL_VERSION, *counts, mechanism)
        return encode_frame(Kind.HELLO, head + sizes + self.address)


@dataclass(frozen=True)
class Ready:
    """The sender has opened its endpoint. `mechanism`: what it sends by."""

    mechanism: str

    def encode(self) -> bytes:
        return encode_frame(Kind.READY, self.mechanism.encode()[:32])


@dataclass(frozen=True)
class Fetch:
    """Asks for regions, to be sent under this tag if the guard holds.

    `rows`: `(num_rows, 2)` offset, num_bytes.
    """

    tag: int
    guard: Guard
    rows: Int64Array

    @functools.cached_property
    def num_bytes(self) -> int:
        return int(self.rows[:, 1].sum())

    def encode(self) -> bytes:
        head = _FETCH.pack(self.tag, self.guard.index, self.guard.value)
        return encode_frame(Kind.FETCH, head + encode_rows(self.rows))


@dataclass(frozen=True)
class Answer:
    """A fetch was answered. `is_valid`: the bytes were sent, and the guard held after that."""

    tag: int
    is_valid: bool

    def encode(self) -> bytes:
        return encode_frame(Kind.SENT if self.is_valid else Kind.STALE, _TAG.pack(self.tag))


Incoming = Preface | Hello | Ready | Fetch | Answer


def decode(kind: int, body: bytes) -> Incoming:
    """Decode one frame of this protocol alone. Raises: see `decode_frame`."""
    return decode_frame(_DECODERS, kind, body)


def _decode_hello(body: bytes) -> Preface | Hello:
    if len(body) == require_preface(body, _MAGIC, PROTOCOL_VERSION, "ucx"):
        return Preface()
    _, _, num_guards, max_slice_bytes, num_segments, mechanism = _HELLO.unpack_from(body)
    end = _HELLO.size + 8 * num_segments
    if not 0 < len(body) - end <= _MAX_ADDRESS_BYTES:
        raise ProtocolError(f"malformed hello: {num_segments} segments in {len(body)} bytes")
    sizes = decode_sizes(body[_HELLO.size : end])
    max_slice_bytes = decode_max_slice_bytes(max_slice_bytes, MAX_SLICE_BYTES)
    return Hello(num_guards, sizes, body[end:], mechanism.rstrip(b"\0").decode("ascii"), max_slice_bytes)


def _decode_fetch(body: bytes) -> Fetch:
    tag, index, value = _FETCH.unpack_from(body)
    rows = decode_rows(body[_FETCH.size :], max_rows=MAX_ROWS, max_bytes=MAX_SLICE_BYTES)
    return Fetch(tag, Guard(index, value), rows)


_DECODERS: Mapping[int, Callable[[bytes], Incoming]] = {
    Kind.HELLO.value: _decode_hello,
    Kind.READY.value: lambda body: Ready(body.decode("ascii")),
    Kind.FETCH.value: _decode_fetch,
    Kind.SENT.value: lambda body: Answer(_TAG.unpack(body)[0], True),
    Kind.STALE.value: lambda body: Answer(_TAG.unpack(body)[0], False),
}
