"""Threads that copy, so that the owner's loop does not wait for bytes.

In come reads whose regions were checked, as addresses in the peer's mapped pool and in ours; out come their
ends.

A small read is copied by the owner at once: another thread would take longer to wake up. Any other is cut
into pieces of a few MiB. Between two pieces it can be cancelled, and several threads can work on one read.
The thread that copies the last piece checks the guard.

What must never break: the guard is looked at after the last byte of all pieces was copied, and nothing is
written for a read whose end was reported.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..copying import sum_words
from ..errors import KVTransferError, TransferTimeoutError
from ..outside import typed
from ..regions import Guard

#: The mechanism of a plain copy out of mapped memory.
MAPPED = "mapped"

#: About a millisecond of copying. A cancelled read, and `close`, wait for at most one piece per thread.
PIECE_BYTES = 8 << 20

Int64Array = npt.NDArray[np.int64]
AddressArray = npt.NDArray[np.uint64]


class Piece(NamedTuple):
    """Regions to copy in one go, and how: addresses and bytes, each `(num_regions,)`."""

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
    # A copy, because another thread reads it later: the lengths were checked, and the caller's table may
    # change.
    lengths = lengths.copy()
    if sum_words(lengths) <= piece_bytes:
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
class CopyJob:
    """What one read copies. The copier's lock guards what changes.

    Attributes:
        pieces: At least one. Those that need another mechanism than a plain copy come last.
        deadline: In `time.monotonic` seconds.
        num_taken: Pieces that a thread has begun; always the first ones.
        num_in_flight: Pieces that are being copied now.
        error: Why it stops early.
    """

    transfer_id: int
    source: Source
    pieces: list[Piece]
    guard: Guard
    deadline: float
    num_taken: int = 0
    num_in_flight: int = 0
    error: KVTransferError | None = None

    @property
    def mechanism(self) -> str:
        """What moves the bytes. If some of them need another mechanism than a plain copy, that one."""
        return self.pieces[-1].mechanism


class Ended(NamedTuple):
    """The end of a job. Nothing writes into its destination any more.

    Attributes:
        error: What went wrong. None: all bytes are in place, and the guard held after the last of them was
            copied.
        ended_at: In `time.monotonic` seconds.
    """

    transfer_id: int
    error: KVTransferError | None
    ended_at: float


class Copier:
    """Runs jobs, the longer ones in the order of `submit`; the end of each comes out of `take_ended` exactly
    once.

    Args:
        inline_bytes: A job of at most this many mapped bytes is run by `submit`, unless others wait.
        on_ended: Called when an end can be taken, by the thread that copied, or that cancelled.
    """

    def __init__(self, num_threads: int, inline_bytes: int, on_ended: Callable[[], None]) -> None:
        self._inline_bytes = inline_bytes
        self._on_ended = on_ended
        self._changed = threading.Condition()
        self._waiting: deque[CopyJob] = deque()  # those with pieces that no thread has taken
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kvferry-copier-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: CopyJob) -> bool:
        """Queue a job, or run it.

        Returns:
            Whether it has ended: then it can be taken, and `on_ended` is not called.
        """
        # A small job does not overtake a longer one: its owner would wait for the same memory bus all the
        # same.
        if not self._waiting and self._is_small(job):
            # Without the lock, which costs as much as a small copy: only this thread adds jobs and cancels
            # them, so until the end is queued no other thread sees this one.
            job.error = self._copy(job, job.pieces[0])
            self._end(job)
            return True
        with self._changed:
            self._waiting.append(job)
            # One thread is enough: if it finds a second piece to copy, it wakes the next thread.
            self._changed.notify()
        return False

    def _is_small(self, job: CopyJob) -> bool:
        piece = job.pieces[0]
        return (
            len(job.pieces) == 1
            and piece.mechanism == MAPPED
            and sum_words(piece.lengths) <= self._inline_bytes
        )

    def cancel(self, job: CopyJob, error: KVTransferError) -> None:
        """End a job with `error`: now if no piece is being copied, otherwise after the pieces in flight.

        A job that has ended already is not changed.
        """
        with self._changed:
            is_over = self._stop(job, error)
        if is_over:
            self._end(job)
            self._on_ended()

    def _stop(self, job: CopyJob, error: KVTransferError) -> bool:
        """Take no further piece.

        Returns whether the job was waiting and has ended with that. The lock is held.
        """
        job.error = job.error or error
        if job not in self._waiting:
            return False  # all pieces are taken: the thread that copies the last one ends it
        self._waiting.remove(job)
        # A copy cannot be interrupted, so with pieces in flight the destination is still being written.
        return job.num_in_flight == 0

    def take_ended(self) -> list[Ended]:
        """Return the ends since the last call."""
        ended = []
        while not self._ended.empty():  # only this thread takes
            ended.append(self._ended.get_nowait())
        return ended

    def close(self) -> None:
        """Stop after the pieces in flight. Jobs that wait are forgotten; afterwards nothing is written."""
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
            if self._run(*taken):
                # After the end is queued: the owner that this wakes must find it.
                self._on_ended()

    def _take_piece(self) -> tuple[CopyJob, Piece]:
        job = self._waiting[0]
        piece = job.pieces[job.num_taken]
        job.num_taken += 1
        job.num_in_flight += 1
        if job.num_taken == len(job.pieces):
            self._waiting.popleft()
        if self._waiting:
            self._changed.notify()
        return job, piece

    def _run(self, job: CopyJob, piece: Piece) -> bool:
        """Copy a piece. Returns whether the job has ended with it."""
        # Without the lock: others take pieces, submit and cancel meanwhile.
        error = self._copy(job, piece)
        with self._changed:
            if error is not None:
                self._stop(job, error)
            job.num_in_flight -= 1
            # Decided under the lock, so that of the threads that finish a job's last pieces exactly one ends
            # it.
            is_over = job.num_in_flight == 0 and job not in self._waiting
        if is_over:
            self._end(job)
        return is_over

    @staticmethod
    def _copy(job: CopyJob, piece: Piece) -> KVTransferError | None:
        try:
            _require_time(job)
            job.source.copy(piece)
        except Exception as error:  # noqa: BLE001 - a dead thread would leave its jobs without an end
            return typed(error, "copying failed")
        return None

    def _end(self, job: CopyJob) -> None:
        error = job.error
        if error is None:
            try:
                _require_time(job)
                # After the last byte of the last piece: the owner clears the guard before it reuses its
                # memory, so a guard that holds now proves that no byte was overwritten while it was copied.
                job.source.check(job.guard)
            except Exception as found:  # noqa: BLE001 - as in `copying`
                error = typed(found, "cannot check the guard")
        self._ended.put(Ended(job.transfer_id, error, time.monotonic()))


def _require_time(job: CopyJob) -> None:
    if time.monotonic() >= job.deadline:
        raise TransferTimeoutError("the read did not end in time")
