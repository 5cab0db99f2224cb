"""The reader's side of sliced reads; see the package."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from .._slices import RoundRobin, SlicePlan
from ..copying import sum_words
from ..endpoint import Read
from ..errors import ChecksumError, KVTransferError, ProtocolError
from ..movers import Mover, StagingBuffer, Ticket
from ..regions import AddressArray, Int64Array
from ..serving import stale


class SliceState(enum.Enum):
    """Where the bytes of a slice are. The table in `docs/design.md` has the transitions."""

    FETCHED = "fetched"
    DIVERTED = "diverted"
    ARRIVED = "arrived"
    SCATTERING = "scattering"
    PLACED = "placed"
    DROPPED = "dropped"


# In Python 3.11, access to a member of an enum takes as long as a whole step here.
_FETCHED, _DIVERTED, _ARRIVED, _SCATTERING, _PLACED, _DROPPED = SliceState


class Verdict(enum.Enum):
    """What the owner says about a slice: whether the guard held after the last byte had left its pool.

    `LATER`: it cannot say when the bytes leave. So they prove nothing until it is asked again, when all of
    them are here.
    """

    HELD = "held"
    STALE = "stale"
    LATER = "later"


_HELD, _STALE = Verdict.HELD, Verdict.STALE


@dataclass(eq=False, slots=True)
class Transfer:
    """A read that has not ended, and how far it has come.

    Attributes:
        num_slices: How many slices end it. A read of nothing has one as well, which asks whether the guard
            holds.
        num_done: Slices that are placed and answered.
        num_scattering: Slices that a copy is writing into the pool.
        is_settled: The owner has vouched for every slice that it has answered.
        is_stopped: Nothing more is fetched or put into place. The read ends when nothing writes into its
            regions.
        is_doubtful: It was stopped because of a checksum, and the owner is asked whether the guard still
            holds.
        error: Why it was stopped, if the reason was found here.
    """

    read: Read[Any]
    plan: SlicePlan
    num_slices: int
    num_fetched: int = 0
    num_done: int = 0
    num_scattering: int = 0
    is_settled: bool = True
    is_stopped: bool = False
    is_doubtful: bool = False
    error: KVTransferError | None = None

    def wants_slice(self) -> bool:
        return not self.is_stopped and self.num_fetched < self.num_slices


@dataclass(eq=False, slots=True)
class Slice:
    """A slice that was fetched. A transport may derive from it.

    Attributes:
        tag: Names it between the two nodes.
        rows: `(num_rows, 2)`: remote offset, num_bytes. None if it only asks whether the guard holds.
        buffer: Where its bytes are before they are in the pool, if they pass through a staging buffer.
        is_answered: The owner's verdict is here.
    """

    transfer: Transfer
    index: int
    tag: Any
    rows: Int64Array
    num_bytes: int
    buffer: StagingBuffer | None
    state: SliceState = field(default=_FETCHED, init=False)
    is_answered: bool = field(default=False, init=False)

    @property
    def targets(self) -> AddressArray:
        return self.transfer.plan.targets_of(self.index)

    @property
    def lengths(self) -> Int64Array:
        return self.rows[:, 1]


S = TypeVar("S", bound=Slice)


class Reader(ABC, Generic[S]):
    """The reads from one peer.

    Args:
        mover: What copies bytes into the pool.
        window_slices: Slices that may be in flight.
        end_read: Called when a read is over, with what went wrong, unless `stop` has returned True for it.
        fail: Called with what ended the connection, if something fails outside of the calls below.
        refill_at: Slices in flight above which no more are fetched.
    """

    #: Bytes arrive in memory of the transport's own. If not, they arrive in the slice's buffer, or in the
    #: pool.
    arrives_apart = False

    def __init__(
        self,
        mover: Mover,
        window_slices: int,
        end_read: Callable[[Read[Any], KVTransferError | None], None],
        fail: Callable[[Exception], None],
        *,
        refill_at: int = 1 << 30,
    ) -> None:
        self._mover = mover
        self._ring = mover.scatter_ring
        self._window_slices = window_slices
        self._refill_at = refill_at
        self._end_read = end_read
        self._fail_peer = fail
        self._transfers: dict[int, Transfer] = {}
        self._fetching: RoundRobin[Transfer] = RoundRobin(Transfer.wants_slice)
        self._slices: dict[Hashable, S] = {}  # in flight, by tag; also of reads that were stopped
        self._arrived: deque[S] = deque()  # those that wait for a buffer

    # -- how slices travel -----------------------------------------------------------------------------

    @abstractmethod
    def make_slice(
        self, transfer: Transfer, index: int, rows: Int64Array, num_bytes: int, buffer: StagingBuffer | None
    ) -> S:
        """Return a slice with a new tag."""

    @abstractmethod
    def send_fetch(self, piece: S) -> None:
        """Send the fetch of a slice, and have its bytes arrive at their target.

        Whatever it raises ends the peer.
        """

    @abstractmethod
    def needs_buffer(self, rows: Int64Array, num_bytes: int) -> bool:
        """Return whether bytes that are to be fetched arrive in a staging buffer."""

    def divert(self, piece: S) -> bool:
        """Write nothing more to the target of a slice that was fetched.

        Returns False if that cannot be prevented.
        """
        return True

    def start_scatter(self, piece: S) -> Ticket:
        """Copy a slice that has arrived into the pool."""
        assert piece.buffer is not None
        return self._mover.start_scatter(piece.targets, piece.buffer.address, piece.lengths)

    def resumed(self) -> None:
        """Something was done outside of the calls below, because a copy ended or a buffer came back."""

    # -- the owner of the memory asks ------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Slices that were fetched and are not both answered and here."""
        return len(self._slices)

    def start(self, read: Read[Any], plan: SlicePlan) -> None:
        """Begin a read whose regions were checked."""
        transfer = self._transfers[read.transfer_id] = Transfer(read, plan, len(plan) or 1)
        self._fetching.add(transfer)
        self._fetch()

    def stop(self, read: Read[Any]) -> bool:
        """Put nothing more into place for a read. Returns whether it is over; if not, `end_read` follows.

        Its slices in flight keep their places in the window until they come and are thrown away. So whatever
        ends reads early, no more than one window is ever on its way from a peer. A copy to a GPU that was
        launched cannot be taken back. After `close` it may be called again.
        """
        transfer = self._transfers.get(read.transfer_id)
        if transfer is None:
            return True
        transfer.is_doubtful = False
        self._abandon(transfer)
        if self._is_written_to(transfer):
            return False
        self._transfers.pop(read.transfer_id, None)
        return True

    def close(self) -> None:
        """The connection is closed: nothing arrives any more. Copies that were launched still end."""
        self._ring.forget(self)
        self._fetching.clear()
        self._arrived.clear()
        while self._slices:
            _, piece = self._slices.popitem()
            if piece.state is _FETCHED or piece.state is _DIVERTED:
                piece.state = _DROPPED
                self._give_back(piece)

    # -- fetching --------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        """Fill the window."""
        if len(self._slices) > self._refill_at:
            return
        for transfer in self._fetching:
            if len(self._slices) >= self._window_slices:
                return
            if not self._fetch_next(transfer):
                self._ring.when_free(self, partial(self._later, self._resume))
                return

    def _fetch_next(self, transfer: Transfer) -> bool:
        """Fetch the next slice of a read. Returns False if there is no buffer for it now."""
        index = transfer.num_fetched
        rows = transfer.plan.rows_of(index)
        num_bytes = sum_words(rows[:, 1])
        buffer = None
        if self.needs_buffer(rows, num_bytes):
            # Before the fetch: what it brings needs a place at once.
            buffer = self._ring.take(num_bytes)
            if buffer is None:
                return False
        transfer.num_fetched += 1
        piece = self.make_slice(transfer, index, rows, num_bytes, buffer)
        # Entered before it is sent: an answer to what is not in flight costs the peer its connection.
        self._slices[piece.tag] = piece
        self.send_fetch(piece)
        return True

    def _ask_again(self, transfer: Transfer) -> None:
        """Ask whether the guard still holds, by a fetch of the slice after the last, which has no rows.

        An answer that the owner gives after every byte has come proves that all of them were valid when they
        left.
        """
        transfer.is_settled = True
        transfer.num_slices += 1
        transfer.num_fetched = len(transfer.plan)
        self._fetch_next(transfer)

    # -- what arrives ----------------------------------------------------------------------------------

    def find(self, tag: Hashable) -> S:
        """Return the slice in flight with this tag.

        Raises:
            ProtocolError: there is none.
        """
        piece = self._slices.get(tag)
        if piece is None or piece.is_answered:
            raise ProtocolError("the peer answered a fetch that we did not make")
        return piece

    def answered(self, piece: S, verdict: Verdict) -> None:
        """The owner has said whether the guard held after the last byte of a slice.

        The bytes may come before or after.
        """
        piece.is_answered = True
        transfer = piece.transfer
        if verdict is _STALE:
            self._fail(transfer, stale(transfer.read.guard))
        elif verdict is not _HELD:
            transfer.is_settled = False
        elif transfer.is_doubtful and piece.index == len(transfer.plan):
            self._fail(transfer, transfer.error)
        if piece.state is not _FETCHED and piece.state is not _DIVERTED:
            if piece.state is _PLACED:
                self._done(transfer)
            self._leave(piece)

    def arrived(self, piece: S, error: ChecksumError | None = None) -> None:
        """The last byte of a slice is here, or the answer that takes its place.

        Nothing writes to its target any more.

        Args:
            error: The bytes are not those that were sent.
        """
        transfer = piece.transfer
        if transfer.is_stopped:
            self._drop(piece)
        elif error is not None:
            self._drop(piece)
            self._on_corrupt(transfer, error)
        elif not piece.num_bytes or (piece.buffer is None and not self.arrives_apart):
            self._placed(piece)
        elif piece.buffer is None and self._mover.needs_staging:
            piece.state = _ARRIVED
            self._arrived.append(piece)
            self._stage_arrived()
        else:
            self._scatter(piece)
        if piece.is_answered:
            self._leave(piece)

    def _leave(self, piece: S) -> None:
        """A slice is answered and here: another one may take its place in the window."""
        self._slices.pop(piece.tag, None)
        self._fetch()

    def _on_corrupt(self, transfer: Transfer, error: ChecksumError) -> None:
        if transfer.is_settled:
            self._fail(transfer, error)
            return
        # Bytes that changed because the owner cleared the guard are stale, not corrupt.
        transfer.error, transfer.is_doubtful = error, True
        self._abandon(transfer)
        self._ask_again(transfer)

    # -- into the pool ---------------------------------------------------------------------------------

    def _stage_arrived(self) -> None:
        """Copy slices that have arrived to the GPU, as far as there are staging buffers."""
        while self._arrived:
            piece = self._arrived[0]
            if piece.state is _ARRIVED:
                piece.buffer = self._ring.take(piece.num_bytes)
                if piece.buffer is None:
                    self._ring.when_free(self, partial(self._later, self._resume))
                    return
            self._arrived.popleft()
            if piece.state is _ARRIVED:
                self._scatter(piece)

    def _scatter(self, piece: S) -> None:
        piece.state = _SCATTERING
        ticket = self.start_scatter(piece)
        piece.transfer.num_scattering += 1
        if ticket.is_over:
            self._on_scattered(piece, ticket)
        else:
            ticket.then(partial(self._later, self._on_scattered, piece, ticket))

    def _on_scattered(self, piece: S, ticket: Ticket) -> None:
        transfer = piece.transfer
        transfer.num_scattering -= 1
        if ticket.error is not None and not transfer.is_stopped:
            transfer.error = ticket.error
            self._abandon(transfer)
        if transfer.is_stopped:
            self._drop(piece)
        else:
            self._give_back(piece)
            self._placed(piece)

    def _resume(self) -> None:
        self._stage_arrived()
        self._fetch()

    def _later(self, step: Callable[..., None], *args: object) -> None:
        # A copy ended, or another peer's buffer came back, in the course of other work, which an error must
        # not end.
        try:
            step(*args)
            self.resumed()
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this peer alone
            self._fail_peer(error)

    def _placed(self, piece: S) -> None:
        piece.state = _PLACED
        if piece.is_answered:
            self._done(piece.transfer)

    # -- the end of a read -----------------------------------------------------------------------------

    def _done(self, transfer: Transfer) -> None:
        """A slice is in the pool and answered. This is the only place where a read succeeds.

        Both are needed: bytes without a verdict may be of a block that was reused, and a verdict may overtake
        its bytes.
        """
        transfer.num_done += 1
        if transfer.is_stopped or transfer.num_done < transfer.num_slices:
            return
        if transfer.is_settled:
            del self._transfers[transfer.read.transfer_id]
            self._end_read(transfer.read, None)
        else:
            self._ask_again(transfer)

    def _fail(self, transfer: Transfer, error: KVTransferError | None) -> None:
        if transfer.is_stopped and not transfer.is_doubtful:
            return
        transfer.error, transfer.is_doubtful = error, False
        self._abandon(transfer)
        self._end_if_over(transfer)

    def _abandon(self, transfer: Transfer) -> None:
        transfer.is_stopped = True
        for piece in self._arrived:
            if piece.transfer is transfer:
                piece.state = _DROPPED
        for piece in list(self._slices.values()):  # a buffer that comes back may have the next slice fetched
            if piece.transfer is transfer and piece.state is _FETCHED and self.divert(piece):
                piece.state = _DIVERTED
                # The owner may never answer, and other reads may wait for a buffer.
                self._give_back(piece)

    def _is_written_to(self, transfer: Transfer) -> bool:
        return transfer.num_scattering > 0 or any(
            piece.transfer is transfer and piece.state is _FETCHED for piece in self._slices.values()
        )

    def _drop(self, piece: S) -> None:
        piece.state = _DROPPED
        self._give_back(piece)
        self._end_if_over(piece.transfer)

    def _end_if_over(self, transfer: Transfer) -> None:
        """End a read that was stopped, once nothing writes into its regions any more."""
        if not transfer.is_stopped or transfer.is_doubtful or self._is_written_to(transfer):
            return
        if self._transfers.pop(transfer.read.transfer_id, None) is not None:
            self._end_read(transfer.read, transfer.error)

    def _give_back(self, piece: S) -> None:
        if piece.buffer is not None:
            buffer, piece.buffer = piece.buffer, None
            self._ring.give_back(buffer)
