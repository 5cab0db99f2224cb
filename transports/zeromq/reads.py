"""The reader's side: a read becomes slices, which are fetched a window at a time, checked, and put into place."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .._movers import StagingBuffer, Ticket
from .._slices import SliceLimits, SlicePlan, Turns
from ..endpoint import Read
from ..errors import ChecksumError, KVTransferError, ProtocolError
from ..regions import AddressArray, Int64Array
from ..serving import ServedPool, stale
from .channel import Channel
from .options import ZeroMQOptions
from .serving import checksum_of
from .wire import MAX_ROWS, Fetch, Slice, Stale


def limits_of(options: ZeroMQOptions) -> SliceLimits:
    """Return how reads are cut. No region needs a slice of its own: large ones share a slice, in a frame each."""
    return SliceLimits(options.slice_bytes, MAX_ROWS)


@dataclass(eq=False)
class _Transfer:
    """A read that has not ended, and how far it has come.

    Attributes:
        num_placed: Slices whose bytes are in the pool.
        num_scattering: Slices that a copy to a GPU is writing into the pool.
        is_settled: The guard held after the bytes of every slice so far had been copied, so none is left to be proved.
        failure: A checksum that differed. It is reported only if the guard still holds.
    """

    read: Read[Any]
    plan: SlicePlan
    num_fetched: int = 0
    num_placed: int = 0
    num_scattering: int = 0
    is_settled: bool = True
    failure: ChecksumError | None = None


class Reader:
    """The reads from one peer.

    Args:
        served: Its pool is where the bytes go.
        end_read: Called when a read is over, with what went wrong, unless it was stopped before.
    """

    def __init__(
        self,
        options: ZeroMQOptions,
        served: ServedPool,
        channel: Channel,
        end_read: Callable[[Read[Any], KVTransferError | None], None],
    ) -> None:
        self._mover = served.mover
        self._window_slices = options.window_slices
        self._checksums = options.checksums
        self._channel = channel
        self._end_read = end_read
        self._transfers: dict[int, _Transfer] = {}
        self._turns: Turns[_Transfer] = Turns(self._wants_slice)
        # Slices that wait for a staging buffer; only pools on a GPU have any. The window bounds them.
        self._unplaced: deque[tuple[_Transfer, Slice]] = deque()
        # (transfer_id, index) of what was fetched and has not come, also of reads that were stopped.
        self._in_flight: set[tuple[int, int]] = set()

    def start(self, read: Read[Any], plan: SlicePlan) -> None:
        """Begin a read whose regions were checked."""
        transfer = self._transfers[read.transfer_id] = _Transfer(read, plan)
        if len(plan):
            self._turns.add(transfer)
            self._fetch()
        else:
            self._send_fetch(transfer, 0)

    def stop(self, read: Read[Any]) -> bool:
        """Put nothing more into place for a read. Returns whether it is over; if not, `end_read` follows.

        Its slices in flight keep their places in the window until they come and are thrown away. So whatever ends reads
        early, no more than one window is ever on its way from a peer. A copy to a GPU that was launched cannot be taken
        back, so the read ends with it.
        """
        transfer = self._transfers.get(read.transfer_id)
        if transfer is None:
            return True
        self._unplaced = deque(entry for entry in self._unplaced if entry[0] is not transfer)
        if transfer.num_scattering:
            return False
        del self._transfers[read.transfer_id]
        return True

    def close(self) -> None:
        """Wait for no staging buffer any more. The table stops the reads."""
        self._mover.scatter_ring.forget(self)

    def _fetch(self) -> None:
        """Fill the window once half of it is free.

        Slices that are fetched together are answered together, so fewer threads have to wake up.
        """
        if len(self._in_flight) > self._window_slices // 2:
            return
        for transfer in self._turns:
            if len(self._in_flight) >= self._window_slices:
                return
            self._send_fetch(transfer, transfer.num_fetched)
            transfer.num_fetched += 1

    def _wants_slice(self, transfer: _Transfer) -> bool:
        is_wanted = transfer.read.transfer_id in self._transfers and transfer.read.error is None
        return is_wanted and transfer.failure is None and transfer.num_fetched < len(transfer.plan)

    def _send_fetch(self, transfer: _Transfer, index: int) -> None:
        """Fetch a slice; the one after the last is empty, and asks only whether the guard holds."""
        read, plan = transfer.read, transfer.plan
        rows, is_whole = plan.rows_of(index), len(plan) == 1
        fetch = Fetch(read.transfer_id, index, read.guard, self._checksums, rows, is_whole)
        # Entered before it is sent: an answer to what is not in flight costs the peer its connection.
        self._in_flight.add((read.transfer_id, index))
        self._channel.send([fetch.head(), fetch.body()])

    def on_slice(self, answer: Slice) -> None:
        """Put bytes into place. They lie in libzmq's frames, which live as long as `answer`.

        Raises:
            ProtocolError: they were not asked for, or are not as many as were asked for. Nothing was written.
        """
        transfer = self._take_arrived(answer)
        if transfer is not None and answer.index == len(transfer.plan):
            _require_whole(answer, transfer.plan.rows_of(answer.index)[:, 1])
            self._end(transfer, transfer.failure)
        elif transfer is not None and transfer.failure is None and transfer.read.error is None:
            self._accept(transfer, answer)
        self._fetch()

    def _accept(self, transfer: _Transfer, answer: Slice) -> None:
        lengths = transfer.plan.rows_of(answer.index)[:, 1]
        # Before a byte is written: a slice of another size would write beyond the regions of this read.
        _require_whole(answer, lengths)
        transfer.is_settled &= answer.is_settled
        # Before the copy, so that corrupt bytes never reach the pool.
        if self._checksums and checksum_of(frame.view for frame in answer.frames) != answer.checksum:
            transfer.failure = ChecksumError(
                f"slice {answer.index} was changed on its way: its checksum differs"
            )
            self._ask_again(transfer)
        elif self._mover.needs_staging and len(lengths):
            self._unplaced.append((transfer, answer))
            self._place_staged()
        else:
            self._place(answer, transfer.plan.targets_of(answer.index), lengths)
            self._placed(transfer)

    def _place(self, answer: Slice, targets: AddressArray, lengths: Int64Array) -> None:
        """Copy the rows of a whole slice to `targets`, shape `(num_rows,)`."""
        if len(answer.frames) == 1:
            self._mover.start_scatter(targets, answer.frames[0].address, lengths)
        else:
            sources = np.array([frame.address for frame in answer.frames], dtype=np.uint64)
            self._mover.start_scatter_each(targets, sources, lengths)

    def _place_staged(self) -> None:
        """Copy slices to the GPU, as far as there are staging buffers."""
        ring = self._mover.scatter_ring
        while self._unplaced:
            transfer, answer = self._unplaced[0]
            lengths = transfer.plan.rows_of(answer.index)[:, 1]
            buffer = ring.take(int(lengths.sum()))
            if buffer is None:
                ring.when_free(self, self._place_staged)
                return
            self._unplaced.popleft()
            address = buffer.address
            for frame in answer.frames:
                ctypes.memmove(address, frame.address, frame.num_bytes)
                address += frame.num_bytes
            transfer.num_scattering += 1
            targets = transfer.plan.targets_of(answer.index)
            ticket = self._mover.start_scatter(targets, buffer.address, lengths)
            ticket.then(partial(self._on_scattered, transfer, buffer, ticket))

    def _on_scattered(self, transfer: _Transfer, buffer: StagingBuffer, ticket: Ticket) -> None:
        transfer.num_scattering -= 1
        self._mover.scatter_ring.give_back(buffer)
        if transfer.read.error is None and ticket.error is not None:
            transfer.read.error = ticket.error
        if transfer.read.error is None:
            self._placed(transfer)
            self._fetch()
        elif not transfer.num_scattering and self._transfers.get(transfer.read.transfer_id) is transfer:
            self._end(transfer, None)

    def _placed(self, transfer: _Transfer) -> None:
        """A slice is in place. After the last one the read ends, or asks whether the guard still holds."""
        transfer.num_placed += 1
        if transfer.num_placed < len(transfer.plan) or transfer.failure is not None:
            return
        if transfer.is_settled:
            self._end(transfer, None)
        else:
            self._ask_again(transfer)

    def _ask_again(self, transfer: _Transfer) -> None:
        """Ask once more whether the guard holds.

        The owner sends large regions by reference, so their bytes leave its pool after it has looked at the guard. Only an
        answer that it gives after the last slice has left proves that none of them was reused before. This is asked after
        a failure as well: bytes that changed because the owner cleared the guard are stale, not corrupt.
        """
        self._send_fetch(transfer, len(transfer.plan))

    def on_stale(self, answer: Stale) -> None:
        """End a read whose guard did not hold.

        Raises:
            ProtocolError: it was not asked for.
        """
        transfer = self._take_arrived(answer)
        if transfer is not None:
            self._end(transfer, stale(transfer.read.guard))
        self._fetch()

    def _take_arrived(self, answer: Slice | Stale) -> _Transfer | None:
        """Free an answer's place in the window; return its transfer, or None if that has ended already."""
        key = (answer.transfer_id, answer.index)
        if key not in self._in_flight:
            raise ProtocolError(
                f"the peer sent slice {answer.index} of transfer {answer.transfer_id}, which was not fetched"
            )
        self._in_flight.remove(key)
        return self._transfers.get(answer.transfer_id)

    def _end(self, transfer: _Transfer, error: KVTransferError | None) -> None:
        if transfer.num_scattering:
            # Copies to the GPU still write into the pool: the read ends with them, in `_on_scattered`.
            transfer.read.error = transfer.read.error or error
            self._unplaced = deque(entry for entry in self._unplaced if entry[0] is not transfer)
            return
        del self._transfers[transfer.read.transfer_id]
        self._end_read(transfer.read, error)


def _require_whole(answer: Slice, lengths: Int64Array) -> None:
    """Check that a slice has the rows that were fetched, in one frame per row or all in one.

    Raises:
        ProtocolError: it has another number of bytes or frames.
    """
    sizes = [frame.num_bytes for frame in answer.frames]
    if sizes != [lengths.sum()] and sizes != lengths.tolist():
        raise ProtocolError(f"slice {answer.index} has {sizes} bytes, but {lengths.tolist()} were fetched")
