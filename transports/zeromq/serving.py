"""The owner's side of reads: each fetch is answered from the pool, and forgotten."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from typing import Final

import numpy as np
import xxhash
import zmq

from .._copy import copy_regions
from .._memory import WordTable, guard_holds, require_guard
from ..errors import ProtocolError, RegionError
from ..regions import AddressArray, Int64Array, Pool
from .links import Link
from .wire import Fetch, Slice, Stale

__all__ = ["ZERO_COPY_BYTES", "PoolServer", "checksum_of"]

#: A region at least this large goes out by reference, alone in its slice; smaller ones are gathered first, since a
#: frame costs more than copying them does.
ZERO_COPY_BYTES: Final = 512 << 10

#: A peer for which more is queued does not take what it asks for.
_MAX_QUEUED_BYTES = 128 << 20

_STAGE_BYTES = 4 << 20
_MAX_STAGES = 64


class PoolServer:
    """Answers fetches from `pool`, under `guards`."""

    def __init__(self, pool: Pool, guards: WordTable) -> None:
        self._pool = pool
        self._guards = guards
        self._segments = [_view(segment.address, segment.num_bytes) for segment in pool.segments]
        self._starts = [pool.segment_offset(index) for index in range(len(pool.segments))]
        self._stages = _Stages()

    def answer(self, link: Link, fetch: Fetch) -> None:
        """Send what a peer fetches, or that the guard does not hold.

        Raises:
            ProtocolError: the peer asks for what is not there, or for more than it takes. Nothing was sent.
        """
        try:
            addresses = self._pool.addresses(fetch.rows[:, 0], fetch.rows[:, 1])
            require_guard(fetch.guard, self._guards.num_words)
        except RegionError as error:
            raise ProtocolError(f"a fetch of what is not ours to give: {error}") from error
        if link.queued_bytes > _MAX_QUEUED_BYTES:
            raise ProtocolError(f"the peer fetches, and does not take: {link.queued_bytes} bytes are queued")
        if not self._holds(fetch):
            _send_stale(link, fetch)
        elif not len(fetch.rows):
            _send_slice(link, fetch, b"", is_settled=True)
        elif len(fetch.rows) == 1 and fetch.rows[0, 1] >= ZERO_COPY_BYTES and not fetch.is_whole:
            # By reference: the bytes leave later, so only a later answer can vouch for them. For a single slice
            # to ask again would take longer than copying it.
            frame = zmq.Frame(self._region(*fetch.rows[0].tolist()), copy=False)
            _send_slice(link, fetch, frame, is_settled=False)
        else:
            self._send_gathered(link, fetch, addresses)

    def _send_gathered(self, link: Link, fetch: Fetch, addresses: AddressArray) -> None:
        lengths = np.ascontiguousarray(fetch.rows[:, 1])
        stage = self._stages.take(int(lengths.sum()))
        copy_regions(stage.addresses_of(lengths), addresses, lengths)
        if self._holds(fetch):
            _send_slice(link, fetch, stage.frame(int(lengths.sum())), is_settled=True)
        else:
            _send_stale(link, fetch)

    def _holds(self, fetch: Fetch) -> bool:
        return guard_holds(self._guards.address, fetch.guard)

    def _region(self, offset: int, num_bytes: int) -> memoryview:
        index = bisect_right(self._starts, offset) - 1
        start = offset - self._starts[index]
        return self._segments[index][start : start + num_bytes]


class _Stage:
    """Memory for one gathered slice; free again when libzmq has let go of the last frame."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = np.empty(num_bytes, dtype=np.uint8)
        self._sent = zmq.MessageTracker()
        self.num_bytes = num_bytes

    @property
    def is_free(self) -> bool:
        return self._sent.done

    def addresses_of(self, lengths: Int64Array) -> AddressArray:
        """Where regions go, end to end: shape `(num_regions,)`."""
        return (np.cumsum(lengths) - lengths).astype(np.uint64) + np.uint64(self._memory.ctypes.data)

    def frame(self, num_bytes: int) -> zmq.Frame:
        frame = zmq.Frame(self._memory.data[:num_bytes], copy=False, track=True)
        self._sent = frame.tracker
        return frame


class _Stages:
    """Stages that are used again, since new memory costs more than the copy into it."""

    def __init__(self) -> None:
        self._stages: list[_Stage] = []

    def take(self, num_bytes: int) -> _Stage:
        for stage in self._stages:
            if stage.num_bytes >= num_bytes and stage.is_free:
                return stage
        stage = _Stage(max(num_bytes, _STAGE_BYTES))
        if len(self._stages) < _MAX_STAGES:
            self._stages.append(stage)
        return stage


def checksum_of(data: memoryview | bytes) -> int:
    """xxh3, 64 bits."""
    return xxhash.xxh3_64_intdigest(data)


def _send_slice(link: Link, fetch: Fetch, body: zmq.Frame | bytes, *, is_settled: bool) -> None:
    data = body.buffer if isinstance(body, zmq.Frame) else body
    checksum = checksum_of(data) if fetch.with_checksum else 0
    link.send([Slice(fetch.transfer_id, fetch.index, is_settled, checksum, memoryview(data)).head(), body])


def _send_stale(link: Link, fetch: Fetch) -> None:
    link.send([Stale(fetch.transfer_id, fetch.index).head(), b""])


def _view(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")
