"""Threads that copy, so that the owner's loop does not wait for bytes.

A small read is copied by the owner at once: another thread would take longer to wake up. Any other is cut into pieces
of a few MiB. Between two of them it can be cancelled, and several threads can work on one read. The thread that does
the last piece checks the guard.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .._outside import typed
from ..base import TransferEnded
from ..errors import KVTransferError, TransferTimeoutError
from ..regions import Guard

#: The mechanism of a plain copy out of mapped memory.
MAPPED = "mapped"

#: About a millisecond of copying.
PIECE_BYTES = 8 << 20

Int64Array = npt.NDArray[np.int64]
AddressArray = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Piece:
    """Regions to copy in one go, and how: addresses and bytes, each `(num_regions,)` and contiguous."""

    dst_addresses: AddressArray
    src_addresses: AddressArray
    lengths: Int64Array
    mechanism: str


class Source(Protocol):
    """Where pieces are copied from."""

    def copy(self, piece: Piece) -> None: ...

    def check(self, guard: Guard) -> None: ...


def cut(
    dst_addresses: AddressArray,
    src_addresses: AddressArray,
    lengths: Int64Array,
    mechanism: str,
    piece_bytes: int = PIECE_BYTES,
) -> list[Piece]:
    """Cut regions into pieces of at most twice `piece_bytes`, in order; at least one piece."""
    lengths = np.ascontiguousarray(lengths)
    if int(lengths.sum()) <= piece_bytes:
        return [Piece(dst_addresses, src_addresses, lengths, mechanism)]
    num_parts = -(-lengths // piece_bytes)
    region = np.repeat(np.arange(len(lengths)), num_parts)
    first_part = np.cumsum(num_parts) - num_parts
    offset = (np.arange(len(region)) - first_part[region]) * piece_bytes
    part_lengths = np.minimum(lengths[region] - offset, piece_bytes)
    piece_of_part = (np.cumsum(part_lengths) - 1) // piece_bytes
    bounds = np.flatnonzero(np.diff(piece_of_part)) + 1
    arrays = (
        dst_addresses[region] + offset.astype(np.uint64),
        src_addresses[region] + offset.astype(np.uint64),
        part_lengths,
    )
    parts = zip(*(np.split(array, bounds) for array in arrays), strict=True)
    return [Piece(dst, src, num_bytes, mechanism) for dst, src, num_bytes in parts]


@dataclass(eq=False)
class Read:
    """A read under way. The copier's lock guards what changes."""

    transfer_id: int
    source: Source
    pieces: list[Piece]
    guard: Guard
    deadline: float
    started: float = field(default_factory=time.monotonic)
    num_taken: int = 0
    num_in_flight: int = 0
    error: KVTransferError | None = None

    @functools.cached_property
    def mechanism(self) -> str:
        """What moves the bytes; if some come by another way than a plain copy, that one."""
        return next((piece.mechanism for piece in self.pieces if piece.mechanism != MAPPED), MAPPED)

    @functools.cached_property
    def num_bytes(self) -> int:
        return sum(int(piece.lengths.sum()) for piece in self.pieces)


class Copier:
    """Runs reads, the longer ones in the order of `submit`; each comes out of `take_ended` exactly once.

    Args:
        inline_bytes: A read of at most so many mapped bytes is run by `submit`, unless others wait.
        on_ended: Called after a read can be taken, by whichever thread.
    """

    def __init__(self, num_threads: int, inline_bytes: int, on_ended: Callable[[], None]) -> None:
        self._inline_bytes = inline_bytes
        self._on_ended = on_ended
        self._changed = threading.Condition()
        self._waiting: deque[Read] = deque()  # those with pieces that nobody took
        self._ended: queue.SimpleQueue[TransferEnded] = queue.SimpleQueue()
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kvferry-copier-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, read: Read) -> None:
        """Queue a read, or run it."""
        with self._changed:
            is_next = not self._waiting
            self._waiting.append(read)
            if not is_next or read.mechanism != MAPPED or read.num_bytes > self._inline_bytes:
                # A thread that finds a second piece to do calls the next one.
                self._changed.notify()
                return
            taken = self._take_piece()
        self._run(*taken)

    def cancel(self, read: Read, error: KVTransferError) -> None:
        """End a read with `error`: now if nobody copies for it, else after the pieces in flight."""
        with self._changed:
            is_over = self._stop(read, error)
        if is_over:
            self._end(read)

    def _stop(self, read: Read, error: KVTransferError) -> bool:
        """Take no further piece. Returns whether it was waiting and is over with that. The lock is held."""
        read.error = read.error or error
        if read not in self._waiting:
            return False
        self._waiting.remove(read)
        return read.num_in_flight == 0

    def take_ended(self) -> list[TransferEnded]:
        """The reads that ended since the last call."""
        ended = []
        while True:
            try:
                ended.append(self._ended.get_nowait())
            except queue.Empty:
                return ended

    def close(self) -> None:
        """Stop after the pieces in flight; reads that wait are forgotten."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if self._is_closing:
                    return
                taken = self._take_piece()
            self._run(*taken)

    def _take_piece(self) -> tuple[Read, Piece]:
        read = self._waiting[0]
        piece = read.pieces[read.num_taken]
        read.num_taken += 1
        read.num_in_flight += 1
        if read.num_taken == len(read.pieces):
            self._waiting.popleft()
        if self._waiting:
            self._changed.notify()
        return read, piece

    def _run(self, read: Read, piece: Piece) -> None:
        error = self._copy(read, piece)
        with self._changed:
            if error is not None:
                self._stop(read, error)
            read.num_in_flight -= 1
            is_over = read.num_in_flight == 0 and read not in self._waiting
        if is_over:
            self._end(read)

    @staticmethod
    def _copy(read: Read, piece: Piece) -> KVTransferError | None:
        try:
            _require_time(read)
            read.source.copy(piece)
        except Exception as error:  # noqa: BLE001 - a dead thread would leave its reads without an end
            return typed(error, "copying failed")
        return None

    def _end(self, read: Read) -> None:
        error = read.error
        if error is None:
            try:
                _require_time(read)
                read.source.check(read.guard)
            except Exception as found:  # noqa: BLE001 - as in `_copy`
                error = typed(found, "cannot check the guard")
        seconds = time.monotonic() - read.started
        self._ended.put(TransferEnded(read.transfer_id, error, read.num_bytes, seconds, read.mechanism))
        self._on_ended()


def _require_time(read: Read) -> None:
    if time.monotonic() >= read.deadline:
        raise TransferTimeoutError("the read did not end in time")
