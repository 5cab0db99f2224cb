"""The reader's side: a read becomes slices, which are fetched a window at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from .._copy import sum_words
from .._movers import Mover, StagingBuffer, Ticket
from .._slices import SliceLimits, SlicePlan, Turns
from ..endpoint import Read
from ..errors import ChecksumError, KVTransferError, ProtocolError
from ..regions import AddressArray, Int64Array
from ..serving import stale
from .iovec import Iovec, Pieces
from .options import TcpOptions
from .serving import SMALL_BYTES, digest_of
from .stream import TcpStream, discarded
from .wire import MAX_ROWS, End, Fetch, Slice


def limits_of(options: TcpOptions) -> SliceLimits:
    """Return how reads are cut, from a peer that serves slices of any size."""
    return SliceLimits(options.slice_bytes, MAX_ROWS)


@dataclass(eq=False)
class _Transfer:
    """A read that has not ended, and how far it has come.

    Attributes:
        num_scatters: Copies into the pool that have not ended.
        is_stopped: Nothing more is fetched or put into place; the read ends when no copy runs.
        error: Why it was stopped, if the reason was found here.
    """

    read: Read[Any]
    plan: SlicePlan
    num_fetched: int = 0
    num_placed: int = 0
    num_scatters: int = 0
    is_stopped: bool = False
    error: KVTransferError | None = None

    @property
    def num_slices(self) -> int:
        """A read of nothing still asks once whether the guard holds."""
        return max(1, len(self.plan))

    @property
    def wants_slice(self) -> bool:
        return not self.is_stopped and self.num_fetched < self.num_slices


@dataclass(eq=False)
class _Slice:
    """A slice that was fetched and has not ended.

    Attributes:
        buffer: Where it arrives, if that is not the pool.
        target: Where its bytes are received. It is made while the owner is busy with the fetch.
        is_arriving: Its first bytes have come.
        digest: Of what came so far; None if no checksum is wanted.
    """

    transfer: _Transfer
    index: int
    lane: int
    num_bytes: int
    buffer: StagingBuffer | None
    digest: xxhash.xxh3_64 | None
    target: Iovec | None = None
    is_arriving: bool = False

    @property
    def targets(self) -> AddressArray:
        return self.transfer.plan.targets_of(self.index)

    @property
    def rows(self) -> Int64Array:
        return self.transfer.plan.rows_of(self.index)

    @property
    def lengths(self) -> Int64Array:
        return self.rows[:, 1]

    def pieces(self) -> Pieces:
        """Return where its bytes are received, in memory."""
        if self.buffer is None:
            return Pieces(self.targets, self.lengths, self.num_bytes, self.digest)
        address = np.array([self.buffer.address], dtype=np.uint64)
        return Pieces(address, np.array([self.num_bytes], dtype=np.int64), self.num_bytes, self.digest)


class Reader:
    """The reads from one peer.

    Args:
        lanes: The connections to the peer, by number; more may be added.
        post: Sends a fetch.
        end_read: Called when a read is over, with what went wrong, unless `stop` has returned True for it.
    """

    def __init__(
        self,
        options: TcpOptions,
        mover: Mover,
        lanes: Mapping[int, TcpStream],
        post: Callable[[bytes], None],
        end_read: Callable[[Read[Any], KVTransferError | None], None],
    ) -> None:
        self._window_slices = options.window_slices
        self._mover = mover
        self._lanes = lanes
        self._post = post
        self._end_read = end_read
        # TLS verifies every record, so a second sum would find nothing.
        self._checksums = options.checksums and not lanes[0].is_encrypted
        self._transfers: dict[int, _Transfer] = {}
        self._turns: Turns[_Transfer] = Turns(lambda transfer: transfer.wants_slice)
        self._slices: dict[int, _Slice] = {}  # by tag; also of reads that were stopped
        self._tags = itertools.count(1)

    @property
    def num_in_flight(self) -> int:
        """Slices that were fetched and have not ended."""
        return len(self._slices)

    def start(self, read: Read[Any], plan: SlicePlan) -> None:
        """Begin a read whose regions were checked."""
        transfer = self._transfers[read.transfer_id] = _Transfer(read, plan)
        self._turns.add(transfer)
        self._fetch()

    def stop(self, read: Read[Any]) -> bool:
        """Put nothing more into place for a read. Returns whether it is over; if not, `end_read` follows.

        Its slices in flight keep their places in the window until they come and are thrown away. So whatever ends reads
        early, no more than one window is ever on its way from a peer. A copy to a GPU that was launched cannot be taken
        back.
        """
        transfer = self._transfers.pop(read.transfer_id, None)
        if transfer is None:
            return False  # it failed or was stopped before, and a copy still runs
        self._abandon(transfer)
        return not transfer.num_scatters

    def _abandon(self, transfer: _Transfer) -> None:
        transfer.is_stopped = True
        for piece in list(self._slices.values()):  # a buffer that comes back may have the next slice fetched
            if piece.transfer is transfer:
                if piece.is_arriving:
                    self._lanes[piece.lane].discard()
                # The owner may never answer, and other reads may wait for a buffer.
                self._give_back(piece)

    # -- fetching --------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        """Fill the window."""
        for transfer in self._turns:
            if len(self._slices) >= self._window_slices:
                return
            if not self._fetch_next(transfer):
                self._mover.scatter_ring.when_free(self, self._fetch)
                return

    def _fetch_next(self, transfer: _Transfer) -> bool:
        """Fetch a slice; returns False if there is no buffer for it now."""
        index, rows = transfer.num_fetched, transfer.plan.rows_of(transfer.num_fetched)
        num_bytes = sum_words(rows[:, 1])
        buffer = None
        if num_bytes and self._is_staged(rows):
            buffer = self._mover.scatter_ring.take(num_bytes)
            if buffer is None:
                return False
        tag, lane = next(self._tags), self._choose_lane()
        digest = digest_of(rows) if self._checksums else None
        piece = self._slices[tag] = _Slice(transfer, index, lane, num_bytes, buffer, digest)
        transfer.num_fetched += 1
        self._post(Fetch(tag, lane, self._checksums, transfer.read.guard, rows).encode())
        # After the fetch has left, so that the owner need not wait for this.
        piece.target = self._lanes[lane].target(piece.pieces())
        return True

    def _is_staged(self, rows: Int64Array) -> bool:
        # Over TLS each call decrypts at most one region, so small regions arrive together and are copied.
        is_small = self._lanes[0].is_encrypted and rows[:, 1].min() < SMALL_BYTES
        return self._mover.needs_staging or bool(is_small)

    def _choose_lane(self) -> int:
        """Return the connection with the fewest bytes on their way."""
        if len(self._lanes) == 1:
            return 0
        loads = dict.fromkeys(self._lanes, 0)
        for piece in self._slices.values():
            loads[piece.lane] += piece.num_bytes
        return min(loads, key=loads.__getitem__)

    # -- what arrives ----------------------------------------------------------------------------------

    def sink(self, lane: int, found: Slice) -> Iovec:
        """Return where the bytes of a slice go.

        Raises:
            ProtocolError: it was not fetched on this connection, has begun before, or has another size.
        """
        piece = self._slices.get(found.tag)
        if piece is None or piece.is_arriving or piece.lane != lane:
            raise ProtocolError("the peer sent a slice that was not fetched")
        if found.num_bytes != piece.num_bytes:
            raise ProtocolError(f"the peer sent {found.num_bytes} bytes, but {piece.num_bytes} were fetched")
        piece.is_arriving = True
        if piece.transfer.is_stopped:  # its regions are no longer ours
            return self._lanes[lane].target(discarded(piece.num_bytes))
        assert piece.target is not None
        return piece.target

    def on_end(self, end: End) -> None:
        """A slice is here, and the owner has vouched for it; or its guard did not hold.

        Raises:
            ProtocolError: it was not fetched, or not sent.
        """
        piece = self._slices.pop(end.tag, None)
        if piece is None:
            raise ProtocolError("the peer answered a fetch that we did not make")
        transfer = piece.transfer
        if transfer.is_stopped:
            self._give_back(piece)
        elif not end.is_valid:
            self._give_back(piece)
            self._fail(transfer, stale(transfer.read.guard))
        elif piece.num_bytes and not piece.is_arriving:
            self._give_back(piece)
            raise ProtocolError("the peer vouched for a slice that it did not send")
        elif piece.is_arriving and piece.digest is not None and piece.digest.intdigest() != end.checksum:
            self._give_back(piece)
            self._fail(
                transfer,
                ChecksumError(f"slice {piece.index} was changed on its way: its checksum differs"),
            )
        elif piece.buffer is not None:
            self._scatter(piece, piece.buffer)
        else:
            self._placed(transfer)
        self._fetch()

    def _scatter(self, piece: _Slice, buffer: StagingBuffer) -> None:
        transfer = piece.transfer
        transfer.num_scatters += 1
        ticket = self._mover.start_scatter(piece.targets, buffer.address, piece.lengths)
        ticket.then(lambda: self._on_scattered(piece, ticket))

    def _on_scattered(self, piece: _Slice, ticket: Ticket) -> None:
        transfer = piece.transfer
        transfer.num_scatters -= 1
        self._give_back(piece)
        if transfer.is_stopped:
            if not transfer.num_scatters:
                self._end_read(transfer.read, transfer.error)
        elif ticket.error is not None:
            self._fail(transfer, ticket.error)
        else:
            self._placed(transfer)

    def _placed(self, transfer: _Transfer) -> None:
        """A slice is in the pool."""
        transfer.num_placed += 1
        if transfer.num_placed == transfer.num_slices:
            del self._transfers[transfer.read.transfer_id]
            self._end_read(transfer.read, None)

    def _fail(self, transfer: _Transfer, error: KVTransferError) -> None:
        del self._transfers[transfer.read.transfer_id]
        transfer.error = error
        self._abandon(transfer)
        if not transfer.num_scatters:
            self._end_read(transfer.read, error)

    def _give_back(self, piece: _Slice) -> None:
        if piece.buffer is not None:
            buffer, piece.buffer = piece.buffer, None
            self._mover.scatter_ring.give_back(buffer)

    def close(self) -> None:
        """The connections are closed: nothing is received any more."""
        self._mover.scatter_ring.forget(self)
        self._turns.clear()
        while self._slices:
            self._give_back(self._slices.popitem()[1])
