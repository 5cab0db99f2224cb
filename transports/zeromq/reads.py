"""The reader's side: a read becomes slices, which are fetched a window at a time, checked, and put into place."""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from .._copy import copy_regions, scatter_regions
from .._slices import SliceLimits, SlicePlan
from ..base import Event, TransferEnded
from ..errors import (
    ChecksumError,
    KVTransferError,
    ProtocolError,
    StaleRegionError,
    TransferTimeoutError,
)
from ..regions import AddressArray, Guard, Int64Array, Pool, RegionPairs
from .links import Link
from .options import ZeroMQOptions
from .serving import checksum_of
from .wire import MAX_ROWS, Fetch, Hello, Slice, Stale


@dataclass
class _Transfer:
    transfer_id: int
    plan: SlicePlan
    guard: Guard
    num_bytes: int
    started: float
    deadline: float
    num_fetched: int = 0
    num_arrived: int = 0
    is_settled: bool = True
    failure: list[KVTransferError] = field(default_factory=list)


@dataclass
class Peer:
    """A connection whose other side has said who he is.

    Attributes:
        in_flight: (transfer_id, index) of what was fetched and has not come.
        waiting: Transfers with slices left to fetch; they take turns.
    """

    link: Link
    num_guards: int
    pool: Pool
    in_flight: set[tuple[int, int]] = field(default_factory=set)
    waiting: deque[_Transfer] = field(default_factory=deque)
    transfers: dict[int, _Transfer] = field(default_factory=dict)

    @classmethod
    def of(cls, link: Link, hello: Hello) -> Peer:
        return cls(link, hello.num_guards, hello.pool())


class Reads:
    """Every read of this process. `events`: where to say that one ended."""

    def __init__(self, options: ZeroMQOptions, events: list[Event]) -> None:
        self._options = options
        self._limits = SliceLimits(options.slice_bytes, options.slice_bytes + 1, MAX_ROWS)
        self._ids = itertools.count(1)
        self._events = events

    def start(
        self, peer: Peer, pairs: RegionPairs, targets: AddressArray, guard: Guard, timeout_s: float
    ) -> int:
        """Begin a read whose regions were checked. Returns its id."""
        plan = SlicePlan.of(pairs, targets, self._limits)
        now = time.monotonic()
        transfer = _Transfer(next(self._ids), plan, guard, pairs.num_bytes, now, now + timeout_s)
        peer.transfers[transfer.transfer_id] = transfer
        if len(plan):
            peer.waiting.append(transfer)
            self._fetch(peer)
        else:
            self._send_fetch(peer, transfer, 0)
        return transfer.transfer_id

    def _fetch(self, peer: Peer) -> None:
        """Fill the window once half of it is free, one slice of each transfer in turn.

        What is asked for together is answered together: fewer threads have to wake up for it.
        """
        if len(peer.in_flight) > self._options.window_slices // 2:
            return
        while peer.waiting and len(peer.in_flight) < self._options.window_slices:
            transfer = peer.waiting.popleft()
            if transfer.transfer_id not in peer.transfers or transfer.failure:
                continue
            self._send_fetch(peer, transfer, transfer.num_fetched)
            transfer.num_fetched += 1
            if transfer.num_fetched < len(transfer.plan):
                peer.waiting.append(transfer)

    def _send_fetch(self, peer: Peer, transfer: _Transfer, index: int) -> None:
        """Fetch a slice; the one after the last is empty, and asks for the guard alone."""
        rows = transfer.plan.rows_of(index) if index < len(transfer.plan) else transfer.plan.rows[:0]
        is_whole = len(transfer.plan) == 1
        fetch = Fetch(
            transfer.transfer_id, index, transfer.guard, self._options.checksums, rows, is_whole=is_whole
        )
        peer.in_flight.add((transfer.transfer_id, index))
        peer.link.send([fetch.head(), fetch.body()])

    def on_slice(self, peer: Peer, answer: Slice) -> None:
        """Put bytes into place.

        Raises:
            ProtocolError: nobody asked for them, or they are not as many as asked for. Nothing was written.
        """
        transfer = self._arrived(peer, answer)
        if transfer is not None and answer.index == len(transfer.plan):
            _require_whole(answer, transfer.plan.rows[:0, 1])
            self._end(peer, transfer, *transfer.failure)
        elif transfer is not None and not transfer.failure:
            self._accept(peer, transfer, answer)
        self._fetch(peer)

    def _accept(self, peer: Peer, transfer: _Transfer, answer: Slice) -> None:
        lengths = transfer.plan.rows_of(answer.index)[:, 1]
        _require_whole(answer, lengths)
        transfer.num_arrived += 1
        transfer.is_settled &= answer.is_settled
        if self._options.checksums and checksum_of(frame.view for frame in answer.frames) != answer.checksum:
            transfer.failure.append(
                ChecksumError(f"slice {answer.index} changed on its way: its checksum differs")
            )
        else:
            _place(answer, transfer.plan.targets_of(answer.index), lengths)
        if transfer.num_arrived == len(transfer.plan) and transfer.is_settled and not transfer.failure:
            self._end(peer, transfer)
        elif transfer.num_arrived == len(transfer.plan) or transfer.failure:
            # Also after a failure: bytes that changed because the guard was cleared are stale, not corrupt.
            self._send_fetch(peer, transfer, len(transfer.plan))

    def on_stale(self, peer: Peer, answer: Stale) -> None:
        """End a read whose guard did not hold.

        Raises:
            ProtocolError: nobody asked.
        """
        transfer = self._arrived(peer, answer)
        if transfer is not None:
            guard = transfer.guard
            error = StaleRegionError(f"guard {guard.index} no longer holds {guard.value}")
            self._end(peer, transfer, error)
        self._fetch(peer)

    @staticmethod
    def _arrived(peer: Peer, answer: Slice | Stale) -> _Transfer | None:
        """The transfer of an answer; None when it ended before. Its place in the window is free again."""
        key = (answer.transfer_id, answer.index)
        if key not in peer.in_flight:
            raise ProtocolError(
                f"the peer sent slice {answer.index} of transfer {answer.transfer_id} unasked"
            )
        peer.in_flight.remove(key)
        return peer.transfers.get(answer.transfer_id)

    def expire(self, peer: Peer, now: float) -> None:
        """End the reads whose time is up. What still comes for them is thrown away."""
        for transfer in [t for t in peer.transfers.values() if t.deadline <= now]:
            self._end(peer, transfer)

    def end_all(self, peer: Peer, error: KVTransferError) -> None:
        """End every read from a peer."""
        for transfer in list(peer.transfers.values()):
            self._end(peer, transfer, error)

    def _end(self, peer: Peer, transfer: _Transfer, *errors: KVTransferError) -> None:
        del peer.transfers[transfer.transfer_id]
        now = time.monotonic()
        late = [TransferTimeoutError("the read did not end in time")] if now >= transfer.deadline else []
        error = next(iter([*errors, *late]), None)
        seconds = now - transfer.started
        mechanism = peer.link.mechanism
        self._events.append(
            TransferEnded(transfer.transfer_id, error, transfer.num_bytes, seconds, mechanism)
        )


def _require_whole(answer: Slice, lengths: Int64Array) -> None:
    """Check that a slice has the rows that were asked for, in a frame each or all in one.

    Raises:
        ProtocolError: they are not as many bytes.
    """
    sizes = [frame.num_bytes for frame in answer.frames]
    if sizes != [lengths.sum()] and sizes != lengths.tolist():
        raise ProtocolError(f"slice {answer.index} has {sizes} bytes, {lengths.tolist()} were asked for")


def _place(answer: Slice, targets: AddressArray, lengths: Int64Array) -> None:
    """Copy the rows of a whole slice to `targets`, shape `(num_rows,)`."""
    if len(answer.frames) == 1:
        scatter_regions(targets, answer.frames[0].address, lengths)
    else:
        sources = np.array([frame.address for frame in answer.frames], dtype=np.uint64)
        copy_regions(targets, sources, lengths)
