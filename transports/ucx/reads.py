"""The reader's side: a read becomes slices, which are fetched a window at a time."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from .._movers import StagingBuffer, Ticket
from .._slices import SliceLimits, SlicePlan, Turns
from ..endpoint import Read
from ..errors import ProtocolError
from ..serving import ServedPool, stale
from ..streams import FrameSocket
from .library import Operation, Worker
from .options import UCXOptions
from .wire import MAX_ROWS, Answer, Fetch


def limits_of(options: UCXOptions) -> SliceLimits:
    """Return how reads are cut.

    A region of at least 512 KiB goes straight from pool to pool. Smaller ones are gathered into a staging buffer, because
    a UCX message costs more than copying them twice.
    """
    return SliceLimits(options.slice_bytes, MAX_ROWS, alone_bytes=min(512 << 10, options.slice_bytes))


@dataclass(eq=False)
class _Transfer:
    """A read that has not ended, and how far it has come. If `read.error` is set, only the slices in flight are waited for.

    Attributes:
        num_scattering: Slices that a copy is writing into the pool.
    """

    read: Read[Any]
    plan: SlicePlan
    num_fetched: int = 0
    num_in_flight: int = 0
    num_scattering: int = 0

    @property
    def num_slices(self) -> int:
        """A read of nothing still asks once whether the guard holds."""
        return max(1, len(self.plan))

    @property
    def wants_slice(self) -> bool:
        return self.read.error is None and self.num_fetched < self.num_slices

    @property
    def is_over(self) -> bool:
        is_complete = self.read.error is not None or self.num_fetched == self.num_slices
        return is_complete and not self.num_in_flight


@dataclass(eq=False)
class _Slice:
    """A slice in flight: its bytes and the owner's answer, which come in any order.

    Attributes:
        buffer: Where it arrives, if that is not the pool.
        has_arrived: UCX has written the last byte.
        is_placed: The bytes are in the pool.
        is_answered: The owner's answer came.
    """

    transfer: _Transfer
    index: int
    operation: Operation
    buffer: StagingBuffer | None
    has_arrived: bool = False
    is_placed: bool = False
    is_answered: bool = False


class Reader:
    """The reads from one peer.

    Args:
        served: Its pool is where the bytes go.
        end_read: Called when a read is over, once per read.
        activate: Called when a receive was posted to the worker outside of the calls below.
        fail: Called with what ended the connection, likewise.
    """

    def __init__(
        self,
        options: UCXOptions,
        served: ServedPool,
        worker: Worker,
        channel: FrameSocket,
        end_read: Callable[[Read[Any]], None],
        activate: Callable[[], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._window_slices = options.window_slices
        self._mover = served.mover
        self._worker = worker
        self._channel = channel
        self._end_read = end_read
        self._activate = activate
        self._fail = fail
        self._transfers: dict[int, _Transfer] = {}
        self._turns: Turns[_Transfer] = Turns(lambda transfer: transfer.wants_slice)
        self._slices: dict[int, _Slice] = {}  # by tag
        self._is_closed = False

    def start(self, read: Read[Any], plan: SlicePlan) -> None:
        """Begin a read whose regions were checked."""
        transfer = self._transfers[read.transfer_id] = _Transfer(read, plan)
        self._turns.add(transfer)
        self._fetch()

    def stop(self, read: Read[Any]) -> bool:
        """Fetch nothing more for a read. Returns whether it is over; if not, `end_read` follows.

        A receive that was posted cannot be taken back with certainty, so the slices in flight still arrive; unless the
        worker is closed: then only copies into the pool are waited for.
        """
        transfer = self._transfers[read.transfer_id]
        if transfer.num_scattering if self._is_closed else transfer.num_in_flight:
            return False
        del self._transfers[read.transfer_id]
        return True

    def close(self) -> None:
        """Give the buffers back. The worker is closed, so UCX writes nothing more; copies that were launched still end."""
        self._is_closed = True
        self._turns.clear()
        self._mover.scatter_ring.forget(self)
        for piece in self._slices.values():
            if piece.buffer is not None and not piece.has_arrived:
                self._mover.scatter_ring.give_back(piece.buffer)
        self._slices.clear()

    @property
    def num_in_flight(self) -> int:
        """Slices that were fetched and have not arrived."""
        return len(self._slices)

    def _fetch(self) -> None:
        """Fill the window."""
        for transfer in self._turns:
            if len(self._slices) >= self._window_slices:
                return
            if not self._fetch_next(transfer):
                self._mover.scatter_ring.when_free(self, self._resume)
                return

    def _resume(self) -> None:
        # Another peer's buffer came back in the course of that peer's work, so an error of ours must not become its own.
        try:
            self._fetch()
            self._activate()
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this peer alone
            self._fail(error)

    def _fetch_next(self, transfer: _Transfer) -> bool:
        """Fetch the next slice of a read. Returns False if there is no buffer for it now."""
        index = transfer.num_fetched
        rows = transfer.plan.rows_of(index)
        buffer = None
        if self._mover.needs_staging or len(rows) != 1:
            # Before the fetch: what it brings needs a place at once.
            buffer = self._mover.scatter_ring.take(int(rows[:, 1].sum()))
            if buffer is None:
                return False
        try:
            self._post(transfer, index, buffer)
        except BaseException:
            if buffer is not None:
                self._mover.scatter_ring.give_back(buffer)
            raise
        return True

    def _post(self, transfer: _Transfer, index: int, buffer: StagingBuffer | None) -> None:
        # Random, so that no other process that reaches our worker can put bytes into a slice.
        tag = secrets.randbits(64)
        fetch = Fetch(tag, transfer.read.guard, transfer.plan.rows_of(index))
        self._channel.send(fetch.encode())
        # What follows overlaps with the fetch's way to the owner. The answer cannot overtake the receive: UCX hands
        # nothing over before `progress` is called, which happens later in this thread.
        address = int(transfer.plan.targets_of(index)[0]) if buffer is None else buffer.address
        operation = self._worker.receive(tag, address, max(1, fetch.num_bytes))
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
        for piece in list(self._slices.values()):
            if not piece.has_arrived and piece.operation.is_done:
                self._place(piece)
        self._accept_all()

    def _place(self, piece: _Slice) -> None:
        piece.operation.check()
        piece.has_arrived = True
        rows = piece.transfer.plan.rows_of(piece.index)
        if piece.buffer is None or piece.transfer.read.error is not None or not len(rows):
            self._placed(piece)
            return
        piece.transfer.num_scattering += 1
        targets = piece.transfer.plan.targets_of(piece.index)
        ticket = self._mover.start_scatter(targets, piece.buffer.address, rows[:, 1])
        if ticket.is_over:
            self._on_scattered(piece, ticket)
        else:
            ticket.then(partial(self._on_scattered_later, piece, ticket))

    def _on_scattered(self, piece: _Slice, ticket: Ticket) -> None:
        piece.transfer.num_scattering -= 1
        piece.transfer.read.error = piece.transfer.read.error or ticket.error
        self._placed(piece)

    def _on_scattered_later(self, piece: _Slice, ticket: Ticket) -> None:
        self._on_scattered(piece, ticket)
        if self._is_closed:
            # The table has stopped the read, and only copies were waited for.
            read = piece.transfer.read
            if not piece.transfer.num_scattering and read.transfer_id in self._transfers:
                del self._transfers[read.transfer_id]
                self._end_read(read)
            return
        try:
            self._accept_all()
            self._activate()
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this peer alone
            self._fail(error)

    def _placed(self, piece: _Slice) -> None:
        piece.is_placed = True
        if piece.buffer is not None:
            self._mover.scatter_ring.give_back(piece.buffer)

    def _accept_all(self) -> None:
        # Both are needed: bytes without an answer may be of a block that was reused, and an answer may overtake its bytes.
        done = [tag for tag, piece in self._slices.items() if piece.is_placed and piece.is_answered]
        for tag in done:
            self._accept(self._slices.pop(tag).transfer)
        if done:
            self._fetch()

    def _accept(self, transfer: _Transfer) -> None:
        transfer.num_in_flight -= 1
        if transfer.is_over:
            del self._transfers[transfer.read.transfer_id]
            self._end_read(transfer.read)
