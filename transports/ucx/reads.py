"""The reader's side: a read becomes slices, which are fetched a window at a time."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._slices import SliceLimits, SlicePlan
from ..endpoint import Read
from ..errors import ProtocolError
from ..serving import ServedPool, stale
from ..streams import FrameSocket
from .library import Operation, Worker
from .options import UCXOptions
from .staging import StagingBuffer, StagingBuffers
from .wire import MAX_ROWS, Answer, Fetch


def limits_of(options: UCXOptions) -> SliceLimits:
    """Return how reads are cut.

    A region of at least 512 KiB goes straight from pool to pool. Smaller ones are gathered into a staging buffer, because
    a UCX message costs more than copying them twice.
    """
    return SliceLimits(options.slice_bytes, MAX_ROWS, alone_bytes=min(512 << 10, options.slice_bytes))


@dataclass(eq=False)
class _Transfer:
    """A read that has not ended, and how far it has come. If `read.error` is set, only the slices in flight are waited for."""

    read: Read[Any]
    plan: SlicePlan
    num_fetched: int = 0
    num_in_flight: int = 0

    @property
    def num_slices(self) -> int:
        """A read of nothing still asks once whether the guard holds."""
        return max(1, len(self.plan))

    @property
    def is_over(self) -> bool:
        is_complete = self.read.error is not None or self.num_fetched == self.num_slices
        return is_complete and not self.num_in_flight


@dataclass(eq=False)
class _Slice:
    """A slice in flight: its bytes and the owner's answer, which come in any order.

    Attributes:
        buffer: Where it arrives, if that is not the pool.
        is_placed: The bytes are in the pool.
        is_answered: The owner's answer came.
    """

    transfer: _Transfer
    index: int
    operation: Operation
    buffer: StagingBuffer | None
    is_placed: bool = False
    is_answered: bool = False


class Reader:
    """The reads from one peer.

    Args:
        served: Its pool is where the bytes go.
        end_read: Called when a read is over, once per read.
    """

    def __init__(
        self,
        options: UCXOptions,
        served: ServedPool,
        worker: Worker,
        channel: FrameSocket,
        buffers: StagingBuffers,
        end_read: Callable[[Read[Any]], None],
    ) -> None:
        self._window_slices = options.window_slices
        self._served = served
        self._worker = worker
        self._channel = channel
        self._buffers = buffers
        self._end_read = end_read
        self._transfers: dict[int, _Transfer] = {}
        self._waiting: deque[_Transfer] = deque()  # those with slices that were not fetched yet
        self._slices: dict[int, _Slice] = {}  # by tag

    def start(self, read: Read[Any], plan: SlicePlan) -> None:
        """Begin a read whose regions were checked."""
        transfer = self._transfers[read.transfer_id] = _Transfer(read, plan)
        self._waiting.append(transfer)
        self._fetch()

    def stop(self, read: Read[Any]) -> bool:
        """Fetch nothing more for a read. Returns whether it is over; if not, `end_read` follows.

        A receive that was posted cannot be taken back with certainty, so the slices in flight still arrive.
        """
        if self._transfers[read.transfer_id].num_in_flight:
            return False
        del self._transfers[read.transfer_id]
        return True

    @property
    def num_in_flight(self) -> int:
        """Slices that were fetched and have not arrived."""
        return len(self._slices)

    def _fetch(self) -> None:
        """Fill the window, one slice of each read in turn, so that a small read does not wait for a large one."""
        while self._waiting and len(self._slices) < self._window_slices:
            transfer = self._waiting.popleft()
            if transfer.read.error is not None:
                continue
            self._fetch_next(transfer)
            if transfer.num_fetched < transfer.num_slices:
                self._waiting.append(transfer)

    def _fetch_next(self, transfer: _Transfer) -> None:
        index = transfer.num_fetched
        rows = transfer.plan.rows_of(index)
        # Random, so that no other process that reaches our worker can put bytes into a slice.
        tag = secrets.randbits(64)
        fetch = Fetch(tag, transfer.read.guard, rows)
        self._channel.send(fetch.encode())
        # What follows overlaps with the fetch's way to the owner. The answer cannot overtake the receive: UCX hands
        # nothing over before `progress` is called, which happens later in this thread.
        buffer = None
        if len(rows) == 1:
            address, num_bytes = int(transfer.plan.targets_of(index)[0]), fetch.num_bytes
        else:
            buffer = self._buffers.take(fetch.num_bytes)
            address, num_bytes = buffer.address, max(1, fetch.num_bytes)
        operation = self._worker.receive(tag, address, num_bytes)
        self._slices[tag] = _Slice(transfer, index, operation, buffer)
        transfer.num_fetched += 1
        transfer.num_in_flight += 1

    def on_answer(self, answer: Answer) -> None:
        """The owner has sent a slice, or a byte in its place.

        Raises:
            ProtocolError: no fetch with this tag is in flight.
        """
        piece = self._slices.get(answer.tag)
        if piece is None or piece.is_answered:
            raise ProtocolError("the peer answered a fetch that we did not make")
        piece.is_answered = True
        read = piece.transfer.read
        if not answer.is_valid and read.error is None:
            read.error = stale(read.guard)

    def settle(self) -> None:
        """Put what has arrived into place; accept it as soon as the owner has vouched for it.

        Raises:
            PeerLostError: UCX lost the peer.
            ProtocolError: the peer sent more than was asked for.
        """
        for piece in self._slices.values():
            if not piece.is_placed and piece.operation.is_done:
                self._place(piece)
        # Both are needed: bytes without an answer may be of a block that was reused, and an answer may overtake its bytes.
        done = [tag for tag, piece in self._slices.items() if piece.is_placed and piece.is_answered]
        for tag in done:
            self._accept(self._slices.pop(tag).transfer)
        if done:
            self._fetch()

    def _place(self, piece: _Slice) -> None:
        piece.operation.check()
        piece.is_placed = True
        if piece.buffer is not None:
            plan = piece.transfer.plan
            if piece.transfer.read.error is None and len(plan):
                lengths = plan.rows_of(piece.index)[:, 1]
                self._served.scatter(plan.targets_of(piece.index), piece.buffer.address, lengths)
            self._buffers.give_back(piece.buffer)

    def _accept(self, transfer: _Transfer) -> None:
        transfer.num_in_flight -= 1
        if transfer.is_over:
            del self._transfers[transfer.read.transfer_id]
            self._end_read(transfer.read)
