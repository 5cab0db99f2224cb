"""The frames of the control connection, and their strict decoder. Pure.

Frames are those of `streams`; everything is little-endian. NIXL aborts the process if the metadata of an
agent is damaged, and the sum of a frame keeps that from it.

| kind | body |
|---|---|
| hello, as a preface | magic, version: u32 |
| hello | magic, version: u32, num_guards: u32, guard table: u64, memory: u8, device: u32, num_segments: u32; segment addresses: u64 each; segment sizes: i64 each; metadata of the NIXL agent |
| ready | empty |
| refused | the reason, as text |
| message | one control message |
| reading | empty |
| ping | empty |

Each side begins with a preface as soon as the TCP connection is established, so versions are known before
anything is opened. After the listener's preface the connecting side makes an agent and sends a hello. The
listener makes an agent too, loads the metadata, and answers with a hello. Then the connecting side reads one
guard word of the listener. If that works, it sends a ready; the listener does the same in the other direction
and sends a ready as well.

A reader sends *reading* while one of its reads is in flight and not over at once. Over a path that is not
one-sided, such as TCP, the owner's agent moves the bytes only when the owner's process asks it to. The frame
says that now is the time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from ..base import MAX_MESSAGE_BYTES
from ..errors import ProtocolError
from ..regions import AddressArray, MemoryKind
from ..serving import MAX_SIZES_BYTES, decode_sizes, encode_sizes
from ..streams import MAX_REASON_BYTES, decode_frame, encode_frame, encode_preface, require_preface

PROTOCOL_VERSION = 2

_MAGIC = b"kvferry-nixl"
_MAX_METADATA_BYTES = 16 << 20
_KINDS: Final[tuple[MemoryKind, ...]] = ("host", "cuda")


class Kind(IntEnum):
    HELLO = 1
    READY = 2
    REFUSED = 3
    MESSAGE = 4
    READING = 5
    PING = 6


_HELLO = struct.Struct("<12sIIQBII")

#: The most bytes of a frame's body.
FRAME_LIMITS: Mapping[int, int] = {
    Kind.HELLO: _HELLO.size + 2 * MAX_SIZES_BYTES + _MAX_METADATA_BYTES,
    Kind.READY: 0,
    Kind.REFUSED: MAX_REASON_BYTES,
    Kind.MESSAGE: MAX_MESSAGE_BYTES,
    Kind.READING: 0,
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
    """What a process says about its memory and its agent.

    Attributes:
        guard_table: Address of its guard table, in its main memory.
        kind, device: Where its pool is; `device` is the number of the GPU in its process.
        addresses, num_bytes: Of its pool's segments, each `(num_segments,)`.
        metadata: Of its NIXL agent.
    """

    num_guards: int
    guard_table: int
    kind: MemoryKind
    device: int
    addresses: AddressArray
    num_bytes: tuple[int, ...]
    metadata: bytes

    def encode(self) -> bytes:
        head = _HELLO.pack(
            _MAGIC,
            PROTOCOL_VERSION,
            self.num_guards,
            self.guard_table,
            _KINDS.index(self.kind),
            self.device,
            len(self.num_bytes),
        )
        addresses = self.addresses.astype("<u8", copy=False).tobytes()
        return encode_frame(Kind.HELLO, head + addresses + encode_sizes(self.num_bytes) + self.metadata)


@dataclass(frozen=True)
class Ready:
    """The sender has read from the receiver."""

    def encode(self) -> bytes:
        return encode_frame(Kind.READY, b"")


@dataclass(frozen=True)
class Reading:
    """The sender's reads go on."""

    def encode(self) -> bytes:
        return encode_frame(Kind.READING, b"")


Incoming = Preface | Hello | Ready | Reading


def decode(kind: int, body: bytes) -> Incoming:
    """Decode one frame of this protocol alone. Raises: see `decode_frame`."""
    return decode_frame(_DECODERS, kind, body)


def _decode_hello(body: bytes) -> Preface | Hello:
    if len(body) == require_preface(body, _MAGIC, PROTOCOL_VERSION, "nixl"):
        return Preface()
    _, _, num_guards, guard_table, kind, device, num_segments = _HELLO.unpack_from(body)
    middle = _HELLO.size + 8 * num_segments
    end = middle + 8 * num_segments
    if 8 * num_segments > MAX_SIZES_BYTES or not end < len(body) <= end + _MAX_METADATA_BYTES:
        raise ProtocolError(f"malformed hello: {num_segments} segments in {len(body)} bytes")
    if kind >= len(_KINDS) or guard_table % 8 or not num_guards:
        raise ProtocolError(
            f"malformed hello: memory {kind}, {num_guards} guards at {guard_table:#x}; expected memory 0 or 1, and at least "
            "one guard at a multiple of 8"
        )
    sizes = decode_sizes(body[middle:end])
    addresses = np.frombuffer(body[_HELLO.size : middle], dtype="<u8").astype(np.uint64, copy=False)
    if any(
        address + num_bytes > 1 << 64 for address, num_bytes in zip(addresses.tolist(), sizes, strict=True)
    ):
        raise ProtocolError("malformed hello: a segment ends past the last address")
    return Hello(num_guards, guard_table, _KINDS[kind], device, addresses, sizes, body[end:])


_READY, _READING = Ready(), Reading()

_DECODERS: Mapping[int, Callable[[bytes], Incoming]] = {
    Kind.HELLO.value: _decode_hello,
    Kind.READY.value: lambda _: _READY,
    Kind.READING.value: lambda _: _READING,
}
