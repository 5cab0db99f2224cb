"""What writer and target say to each other about a write, inside a frame of the transport's. Pure.

| kind | body, little-endian |
|---|---|
| request | kind: u8, request_id: u64, word: index, value: i64, guard: index, value: i64, timeout_s: f64; rows |
| answer | kind: u8, request_id: u64, outcome: u8, mechanism: 32 bytes; the reason in words |

A row is (offset in the target's pool, offset in the writer's, num_bytes), i64 each.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from .errors import (
    ChecksumError,
    KVTransferError,
    ProtocolError,
    StaleRegionError,
    TransferTimeoutError,
    TransportError,
)
from .regions import Guard, RegionPairs

#: Of one request; a write with more has several.
MAX_ROWS = 65536

_MAX_REASON_BYTES = 512
_MAX_TIMEOUT_S = 86400.0

_REQUEST, _ANSWER = 1, 2
_REQUEST_HEAD = struct.Struct("<BQqqqqd")
_ANSWER_HEAD = struct.Struct("<BQB32s")
_ROW_BYTES = 24

MAX_FRAME_BYTES = _REQUEST_HEAD.size + MAX_ROWS * _ROW_BYTES


class Outcome(enum.IntEnum):
    """How the target's read ended."""

    WRITTEN = 0
    STALE = 1
    LATE = 2
    CORRUPT = 3
    FAILED = 4


_ERRORS: Final[Mapping[Outcome, type[KVTransferError]]] = {
    Outcome.STALE: StaleRegionError,
    Outcome.LATE: TransferTimeoutError,
    Outcome.CORRUPT: ChecksumError,
    Outcome.FAILED: TransportError,
}


@dataclass(frozen=True)
class Request:
    """Read these regions of mine, under `word`, into yours, under `guard`. Local is the target's."""

    request_id: int
    word: Guard
    guard: Guard
    timeout_s: float
    pairs: RegionPairs

    def encode(self) -> bytes:
        head = _REQUEST_HEAD.pack(
            _REQUEST,
            self.request_id,
            self.word.index,
            self.word.value,
            self.guard.index,
            self.guard.value,
            self.timeout_s,
        )
        return head + self.pairs.table.astype("<i8", copy=False).tobytes()


@dataclass(frozen=True)
class Answer:
    """A request is over, and nothing is written for it any more. `mechanism`: what moved the bytes."""

    request_id: int
    outcome: Outcome
    mechanism: str
    reason: str

    @classmethod
    def of(cls, request_id: int, error: KVTransferError | None, mechanism: str) -> Self:
        """The answer of a target whose read ended with `error`."""
        if error is None:
            return cls(request_id, Outcome.WRITTEN, mechanism, "")
        kinds = (outcome for outcome, kind in _ERRORS.items() if isinstance(error, kind))
        return cls(request_id, next(kinds, Outcome.FAILED), mechanism, str(error))

    def error(self) -> KVTransferError:
        """What went wrong, for an outcome other than `WRITTEN`."""
        return _ERRORS[self.outcome](f"the target says: {self.reason}")

    def encode(self) -> bytes:
        head = _ANSWER_HEAD.pack(_ANSWER, self.request_id, self.outcome, self.mechanism.encode()[:32])
        return head + self.reason.encode()[:_MAX_REASON_BYTES]


def decode(frame: bytes) -> Request | Answer:
    """Decode one frame from a peer.

    Raises:
        ProtocolError: it is none. What follows from the same peer means nothing.
    """
    try:
        if frame[:1] == bytes([_REQUEST]):
            return _decode_request(frame)
        if frame[:1] == bytes([_ANSWER]):
            return _decode_answer(frame)
    except (struct.error, ValueError) as error:  # a UnicodeDecodeError is a ValueError
        raise ProtocolError(f"a frame about a write cannot be read: {error}") from None
    raise ProtocolError(f"no frame about a write begins with {frame[:1]!r}")


def _decode_request(frame: bytes) -> Request:
    _, request_id, *words, timeout_s = _REQUEST_HEAD.unpack_from(frame)
    num_bytes = len(frame) - _REQUEST_HEAD.size
    if num_bytes % _ROW_BYTES or len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a write has at most {MAX_ROWS} rows of {_ROW_BYTES} bytes, got {num_bytes} bytes"
        )
    if not (math.isfinite(timeout_s) and timeout_s >= 0):
        raise ProtocolError(f"a write cannot take {timeout_s} s")
    table = np.frombuffer(frame, dtype="<i8", offset=_REQUEST_HEAD.size).reshape(-1, 3).astype(np.int64)
    word, guard = Guard(*words[:2]), Guard(*words[2:])
    return Request(request_id, word, guard, min(timeout_s, _MAX_TIMEOUT_S), RegionPairs(table))


def _decode_answer(frame: bytes) -> Answer:
    _, request_id, outcome, mechanism = _ANSWER_HEAD.unpack_from(frame)
    reason = frame[_ANSWER_HEAD.size :]
    if len(reason) > _MAX_REASON_BYTES:
        raise ProtocolError(f"the reason of a failed write has {len(reason)} bytes")
    return Answer(
        request_id, Outcome(outcome), mechanism.rstrip(b"\0").decode("ascii"), reason.decode(errors="replace")
    )
