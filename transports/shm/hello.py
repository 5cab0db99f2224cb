"""The wire format of shm: frames, and the messages of the handshake. Pure.

Frames are those of `streams`, little-endian. The listener sends the first one, a *preface* in a frame of a
hello's kind:

    magic: 8 bytes, version: u32, 16 zero bytes; the address at which it listens

The side that connected sends nothing until it has received a preface with the very address that it was asked
to connect to. So an address that leads to another program's socket, or through one to another node, makes no
process give anything away. Then the side that connected sends its hello and its descriptors, and the listener
does the same. A hello is

    magic: 8 bytes, version: u32, num_guards: u32, num_files: u32, num_allocations: u32, num_segments: u32
    num_allocations times: gpu: 16 bytes, handle: 64 bytes
    num_segments times: file: i32, start: u64, num_bytes: u64

The next frame has no body. With it come `1 + num_files` read-only descriptors: the guard table, then the
files. No other frame may bring any. A segment lies at offset `start` of its file; with file -1 it is ordinary
memory of the sender, at address `start`. If there are allocations on a GPU, all segments lie there: `file` is
the number of an allocation, `start` the offset in it. Every later frame is one control message.
"""

from __future__ import annotations

import enum
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from ..base import MAX_MESSAGE_BYTES
from ..errors import PeerRefusedError, ProtocolError, VersionMismatchError

VERSION = 5

#: `SharedSegment.file` of a segment that is in no file.
FOREIGN = -1

MAX_FILES = 128
MAX_ALLOCATIONS = 1024
MAX_SEGMENTS = 8192
MAX_GUARDS = 1 << 24

_MAGIC = b"kvferry\0"
_HEAD = struct.Struct("<8sIIIII")
_PREFACE = struct.Struct("<8sI16x")  # as long as a hello's head, so that any version finds the version in it
_ALLOCATION = struct.Struct("<16s64s")
_SEGMENT = struct.Struct("<iQQ")


class FrameKind(enum.IntEnum):
    HELLO = 1
    MESSAGE = 2
    DESCRIPTORS = 3


#: Maximum bytes of a frame's body.
FRAME_LIMITS: Mapping[int, int] = {
    FrameKind.HELLO: _HEAD.size + MAX_ALLOCATIONS * _ALLOCATION.size + MAX_SEGMENTS * _SEGMENT.size,
    FrameKind.MESSAGE: MAX_MESSAGE_BYTES,
    FrameKind.DESCRIPTORS: 0,
}


@dataclass(frozen=True)
class Allocation:
    """Memory of a GPU, which the driver maps for another process: the GPU's UUID, and the driver's handle."""

    gpu: bytes
    handle: bytes


@dataclass(frozen=True)
class SharedSegment:
    """A segment of a pool, as its owner describes it to peers. See the module."""

    file: int
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Hello:
    """What one side shows to the other.

    Attributes:
        num_guards: Words in the guard table.
        num_files: Descriptors that follow the one of the guard table.
        segments: Of the pool, in its order.
        allocations: What holds the segments, if they are on a GPU.
    """

    num_guards: int
    num_files: int
    segments: tuple[SharedSegment, ...]
    allocations: tuple[Allocation, ...] = ()


def encode_preface(address: str) -> bytes:
    """Encode the body of a listener's first frame."""
    return _PREFACE.pack(_MAGIC, VERSION) + os.fsencode(address)


def require_preface(body: bytes, address: str) -> None:
    """Check that a preface is that of a shm listener at `address`.

    Raises:
        ProtocolError: it is another program's.
        VersionMismatchError: the listener speaks another version.
        PeerRefusedError: it listens at another address, so something between us forwards what we send.
    """
    if len(body) < _PREFACE.size:
        raise ProtocolError(f"malformed preface: it has {len(body)} bytes")
    _require_version(*_PREFACE.unpack_from(body))
    if body[_PREFACE.size :] != os.fsencode(address):
        raise PeerRefusedError(
            f"the listener at {address!r} says that it listens at {os.fsdecode(body[_PREFACE.size :][:120])!r}: "
            "nothing was sent to it; connect to that address if it is the one that is meant"
        )


def _require_version(magic: bytes, version: int) -> None:
    if magic != _MAGIC:
        raise ProtocolError(f"the peer does not speak kvferry: it began with {magic!r}")
    if version != VERSION:
        raise VersionMismatchError(local=VERSION, remote=version)


def encode_hello(hello: Hello) -> bytes:
    """Encode the body of a hello frame."""
    counts = hello.num_guards, hello.num_files, len(hello.allocations), len(hello.segments)
    return b"".join(
        [
            _HEAD.pack(_MAGIC, VERSION, *counts),
            *(_ALLOCATION.pack(a.gpu, a.handle) for a in hello.allocations),
            *(_SEGMENT.pack(s.file, s.start, s.num_bytes) for s in hello.segments),
        ]
    )


def decode_hello(body: bytes) -> Hello:
    """Decode the body of a hello frame.

    Raises:
        ProtocolError: it is malformed, or describes an impossible pool.
        VersionMismatchError: the peer speaks another version.
    """
    if len(body) < _HEAD.size:
        raise ProtocolError(f"malformed hello: it has {len(body)} bytes")
    magic, version, num_guards, num_files, num_allocations, num_segments = _HEAD.unpack_from(body)
    _require_version(magic, version)
    at = _HEAD.size + num_allocations * _ALLOCATION.size
    if len(body) != at + num_segments * _SEGMENT.size:
        raise ProtocolError(
            f"malformed hello: {len(body)} bytes do not hold {num_allocations} allocations and {num_segments} segments"
        )
    if not (0 < num_guards <= MAX_GUARDS and num_files <= MAX_FILES and 0 < num_segments <= MAX_SEGMENTS):
        raise ProtocolError(
            f"impossible hello: {num_guards} guards, {num_files} files, {num_segments} segments"
        )
    allocations = tuple(Allocation(*fields) for fields in _ALLOCATION.iter_unpack(body[_HEAD.size : at]))
    segments = tuple(SharedSegment(*fields) for fields in _SEGMENT.iter_unpack(body[at:]))
    places = range(num_allocations) if allocations else range(FOREIGN, num_files)
    for segment in segments:
        _require_possible(segment, places)
    return Hello(num_guards, num_files, segments, allocations)


def _require_possible(segment: SharedSegment, places: range) -> None:
    # Offsets are signed 64-bit numbers further on; 2**62 leaves room for their sums.
    if segment.file not in places or not 0 < segment.num_bytes < 2**62 or segment.start >= 2**62:
        raise ProtocolError(f"the peer describes an impossible {segment}")
