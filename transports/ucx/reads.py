"""The reader's side: a read becomes slices, which are fetched a window at a time."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from .._copy import scatter_regions
from .._slices import SliceLimits, SlicePlan
from ..base import Event, TransferEnded
from ..errors import KVTransferError, ProtocolError, StaleRegionError, TransferTimeoutError
from ..regions import Guard
from .channel import Channel
from .library import Operation, Worker
from .options import UCXOptions
from .stages import Stage, Stages
from .wire import MAX_ROWS, Answer, Fetch


def limits_of(options: UCXOptions) -> SliceLimits:
    """How reads are cut.

    A region of at least 512 KiB goes straight from pool to pool; smaller ones are gathered into a stage, since a UCX
    message costs more than copying them twice does.
    """
    return SliceLimits(options.slice_bytes, min(512 << 10, options.slice_bytes), MAX_ROWS)


@dataclass
class Transfer:
    """One read. `failure`: why it will fail, once that is known; its slices on the way are waited for."""

    transfer_id: int
    plan: SlicePlan
    guard: Guard
    num_bytes: int
    started: float
    deadline: float
    num_fetched: int = 0
    in_flight: int = 0
    failure: list[KVTransferError] = field(default_factory=list)

    @property
    def num_slices(self) -> int:
        """A read of nothing still asks once whether the guard holds."""
        return max(1, len(self.plan))

    @property
    def is_over(self) -> bool:
        return not self.in_flight and (bool(self.failure) or self.num_fetched == self.num_slices)


@dataclass
class _Slice:
    """A slice on its way: its bytes, and the owner's word for them, whichever comes first.

    Attributes:
        stages: Where it arrives, if that is not the pool.
        is_placed: The bytes are in the pool.
        is_answered: The owner's word came.
    """

    transfer: Transfer
    index: int
    operation: Operation
    stages: tuple[Stage, ...]
    is_placed: bool = False
    is_answered: bool = False


class Reader:
    """The reads from one peer.

    Args:
        mechanism: What the peer says that it sends by.
        events: Where to say that a read ended.
    """

    def __init__(
        self,
        options: UCXOptions,
        worker: Worker,
        channel: Channel,
        stages: Stages,
        mechanism: str,
        events: list[Event],
    ) -> None:
        self._window_slices = options.window_slices
        self._grace_s = options.peer_timeout_s
        self._worker = worker
        self._channel = channel
        self._stages = stages
        self._mechanism = mechanism
        self._events = events
        self._transfers: dict[int, Transfer] = {}
        self._waiting: deque[Transfer] = deque()
        self._slices: dict[int, _Slice] = {}

    def start(self, transfer: Transfer) -> None:
        """Begin a read whose regions were checked."""
        self._transfers[transfer.transfer_id] = transfer
        self._waiting.append(transfer)
        self._fetch()

    @property
    def num_under_way(self) -> int:
        """Slices that were fetched and have not arrived."""
        return len(self._slices)

    def deadlines(self) -> Iterator[float]:
        """When `expire` has something to do."""
        for transfer in self._transfers.values():
            yield transfer.deadline + (self._grace_s if transfer.failure else 0.0)

    def _fetch(self) -> None:
        """Fill the window, one slice of each transfer in turn."""
        while self._waiting and len(self._slices) < self._window_slices:
            transfer = self._waiting.popleft()
            if transfer.failure:
                continue
            self._fetch_next(transfer)
            if transfer.num_fetched < transfer.num_slices:
                self._waiting.append(transfer)

    def _fetch_next(self, transfer: Transfer) -> None:
        index = transfer.num_fetched
        rows = transfer.plan.rows_of(index) if len(transfer.plan) else transfer.plan.rows
        # Drawn by lot: nobody else who finds the way to our worker can put bytes into a slice.
        tag = secrets.randbits(64)
        fetch = Fetch(tag, transfer.guard, rows)
        self._channel.send(fetch.encode())
        # What follows is done while the fetch is on its way. UCX hands over nothing before it is asked to.
        if len(rows) == 1:
            stages: tuple[Stage, ...] = ()
            address, num_bytes = int(transfer.plan.targets_of(index)[0]), fetch.num_bytes
        else:
            stages = (self._stages.take(fetch.num_bytes),)
            address, num_bytes = stages[0].address, max(1, fetch.num_bytes)
        operation = self._worker.receive(tag, address, num_bytes)
        self._slices[tag] = _Slice(transfer, index, operation, stages)
        transfer.num_fetched += 1
        transfer.in_flight += 1

    def on_answer(self, answer: Answer) -> None:
        """The peer has sent a slice, or a byte in its place.

        Raises:
            ProtocolError: nobody asked.
        """
        piece = self._slices.get(answer.tag)
        if piece is None or piece.is_answered:
            raise ProtocolError("the peer answered a fetch that nobody made")
        piece.is_answered = True
        if not answer.is_valid:
            guard = piece.transfer.guard
            error = StaleRegionError(f"guard {guard.index} no longer holds {guard.value}")
            piece.transfer.failure.append(error)

    def settle(self) -> None:
        """Put what has arrived into place; accept it once the owner vouches for it.

        Raises:
            PeerLostError: UCX lost the peer.
            ProtocolError: the peer sent more than was asked for.
        """
        for piece in self._slices.values():
            if not piece.is_placed and piece.operation.is_done:
                self._place(piece)
        done = [tag for tag, piece in self._slices.items() if piece.is_placed and piece.is_answered]
        for tag in done:
            self._accept(self._slices.pop(tag).transfer)
        if done:
            self._fetch()

    def _place(self, piece: _Slice) -> None:
        piece.operation.check()
        piece.is_placed = True
        plan = piece.transfer.plan
        for stage in piece.stages:
            if not piece.transfer.failure and len(plan):
                lengths = plan.rows_of(piece.index)[:, 1]
                scatter_regions(plan.targets_of(piece.index), stage.address, lengths)
            self._stages.give_back(stage)

    def _accept(self, transfer: Transfer) -> None:
        transfer.in_flight -= 1
        if transfer.is_over:
            self._end(transfer)

    def expire(self, now: float) -> None:
        """Fail the reads whose time is up; they end when nothing of them is under way any more.

        Raises:
            TransferTimeoutError: something still is, after a grace period. Only closing the worker ends it.
        """
        for transfer in [t for t in self._transfers.values() if t.deadline <= now]:
            if transfer.failure and now >= transfer.deadline + self._grace_s:
                raise TransferTimeoutError("the peer did not finish what it had begun to send")
            if not transfer.failure:
                transfer.failure.append(TransferTimeoutError("the read did not end in time"))
            if transfer.is_over:
                self._end(transfer)

    def end_all(self, error: KVTransferError) -> None:
        """End every read. The worker is closed: nothing is under way any more."""
        for transfer in list(self._transfers.values()):
            transfer.failure.append(error)
            self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        del self._transfers[transfer.transfer_id]
        error = transfer.failure[0] if transfer.failure else None
        seconds = time.monotonic() - transfer.started
        self._events.append(
            TransferEnded(transfer.transfer_id, error, transfer.num_bytes, seconds, self._mechanism)
        )
