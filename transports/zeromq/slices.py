"""How slices travel through libzmq: each answer is one message, with the bytes in its frames."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import xxhash

from .. import sliced
from .._slices import SliceLimits
from ..endpoint import Read
from ..errors import ChecksumError, KVTransferError, ProtocolError
from ..movers import Ring, StagingBuffer, Ticket
from ..regions import AddressArray, Int64Array
from ..serving import ServedPool
from ..sliced import Transfer, Verdict
from .channel import Channel
from .frames import Frame
from .options import ZeroMQOptions
from .wire import MAX_ROWS, Fetch, Slice, Stale

#: Regions of at least this size are sent by reference, in one frame each. Smaller ones are gathered into one
#: frame first, because a frame costs more than the copy.
_ZERO_COPY_BYTES: Final = 256 << 10

#: If more is queued for a peer, it does not receive what it fetches, and is dropped.
_MAX_QUEUED_BYTES = 128 << 20


def limits_of(options: ZeroMQOptions) -> SliceLimits:
    """Return how reads are cut.

    No region needs a slice of its own: large ones share a slice, in a frame each.
    """
    return SliceLimits(options.slice_bytes, MAX_ROWS)


def checksum_of(frames: Iterable[memoryview | bytes]) -> int:
    """Return the 64-bit xxh3 of all frames, end to end."""
    digest = xxhash.xxh3_64()
    for frame in frames:
        digest.update(frame)
    return digest.intdigest()


@dataclass(eq=False, slots=True)
class _Slice(sliced.Slice):
    """A slice that was fetched.

    Attributes:
        frames: Its bytes in libzmq's memory, once they are here.
    """

    frames: tuple[Frame, ...] = field(default=(), init=False)


class Reader(sliced.Reader[_Slice]):
    """The reads from one peer."""

    arrives_apart = True

    def __init__(
        self,
        options: ZeroMQOptions,
        served: ServedPool,
        channel: Channel,
        end_read: Callable[[Read[Any], KVTransferError | None], None],
        fail: Callable[[Exception], None],
    ) -> None:
        # Slices that are fetched together are answered together, so fewer threads have to wake up.
        refill_at = options.window_slices // 2
        super().__init__(served.mover, options.window_slices, end_read, fail, refill_at=refill_at)
        self._checksums = options.checksums
        self._channel = channel

    def needs_buffer(self, rows: Int64Array, num_bytes: int) -> bool:
        return False

    def make_slice(
        self, transfer: Transfer, index: int, rows: Int64Array, num_bytes: int, buffer: StagingBuffer | None
    ) -> _Slice:
        return _Slice(transfer, index, (transfer.read.transfer_id, index), rows, num_bytes, buffer)

    def send_fetch(self, piece: _Slice) -> None:
        transfer_id, index = piece.tag
        guard, is_whole = piece.transfer.read.guard, len(piece.transfer.plan) == 1
        fetch = Fetch(transfer_id, index, guard, self._checksums, piece.rows, is_whole)
        self._channel.send([fetch.head(), fetch.body()])

    def on_slice(self, answer: Slice) -> None:
        """Bytes are here, in libzmq's frames.

        Raises:
            ProtocolError: they were not asked for, or are not as many as were asked for. Nothing was written.
        """
        piece = self.find((answer.transfer_id, answer.index))
        # Before a byte is written: a slice of another size would write beyond the regions of this read.
        _require_whole(answer, piece.lengths)
        error = None
        if not piece.transfer.is_stopped:
            piece.frames = answer.frames
            # Before the copy, so that corrupt bytes never reach the pool.
            if self._checksums and checksum_of(frame.view for frame in answer.frames) != answer.checksum:
                error = ChecksumError(f"slice {answer.index} was changed on its way: its checksum differs")
        # The owner sends large regions by reference, so they leave its pool after it has looked at the guard.
        is_settled = answer.is_settled or not piece.num_bytes
        self.answered(piece, Verdict.HELD if is_settled else Verdict.LATER)
        self.arrived(piece, error)

    def on_stale(self, answer: Stale) -> None:
        """The guard of a fetch did not hold.

        Raises:
            ProtocolError: it was not asked for.
        """
        piece = self.find((answer.transfer_id, answer.index))
        self.answered(piece, Verdict.STALE)
        self.arrived(piece)

    def start_scatter(self, piece: _Slice) -> Ticket:
        frames, piece.frames = piece.frames, ()
        if piece.buffer is not None:
            address = piece.buffer.address
            for frame in frames:
                ctypes.memmove(address, frame.address, frame.num_bytes)
                address += frame.num_bytes
            return super().start_scatter(piece)
        if len(frames) == 1:
            return self._mover.start_scatter(piece.targets, frames[0].address, piece.lengths)
        sources = np.array([frame.address for frame in frames], dtype=np.uint64)
        return self._mover.start_scatter_each(piece.targets, sources, piece.lengths)


def _require_whole(answer: Slice, lengths: Int64Array) -> None:
    """Check that a slice has the rows that were fetched, in one frame per row or all in one.

    Raises:
        ProtocolError: it has another number of bytes or frames.
    """
    sizes = [frame.num_bytes for frame in answer.frames]
    if sizes != [lengths.sum()] and sizes != lengths.tolist():
        raise ProtocolError(f"slice {answer.index} has {sizes} bytes, but {lengths.tolist()} were fetched")


class _FrameBuffer(StagingBuffer):
    """The memory of a frame, which libzmq frees when it has sent it."""

    __slots__ = ("frame",)

    def __init__(self, num_bytes: int) -> None:
        self.frame = Frame.allocated(num_bytes)
        super().__init__(self.frame.address, num_bytes, self.frame)


class _Frames(Ring):
    """New frames, for pools in main memory: what is gathered there is sent without another copy."""

    def take(self, num_bytes: int) -> StagingBuffer:
        return _FrameBuffer(num_bytes)

    def give_back(self, buffer: StagingBuffer) -> None:
        pass

    def when_free(self, waiter: object, call: Callable[[], None]) -> None:
        raise AssertionError("there is always a new frame")

    def forget(self, waiter: object) -> None:
        pass

    def is_awaited(self, besides: object) -> bool:
        return False


_Answer = sliced.Answer[Fetch]


class Server(sliced.Server[Fetch, _Answer]):
    """Answers the fetches of one peer."""

    def __init__(
        self, served: ServedPool, channel: Channel, max_slice_bytes: int, fail: Callable[[Exception], None]
    ) -> None:
        super().__init__(served, max_slice_bytes, fail, None if served.mover.needs_staging else _Frames())
        self._channel = channel

    def make_answer(self, fetch: Fetch, addresses: AddressArray) -> _Answer:
        queued_bytes = self._channel.queued_bytes
        if queued_bytes > _MAX_QUEUED_BYTES:
            raise ProtocolError(
                f"the peer fetches slices but does not receive them: {queued_bytes} bytes are queued"
            )
        return _Answer(fetch, addresses)

    def is_gathered(self, fetch: Fetch) -> bool:
        # A read of a single slice is copied, because another round trip would take longer than the copy.
        return self._mover.needs_staging or fetch.is_whole or fetch.rows[:, 1].min() < _ZERO_COPY_BYTES

    def send(self, answer: _Answer) -> None:
        fetch, buffer = answer.fetch, answer.buffer
        if not answer.has_bytes:
            frames = [Frame.allocated(0)]
        elif buffer is None:
            # By reference: libzmq reads the bytes at a time of its own, so only a later answer can confirm
            # them.
            rows = zip(answer.addresses.tolist(), fetch.rows[:, 1].tolist(), strict=True)
            frames = [Frame.borrowed(*row) for row in rows]
        elif isinstance(buffer, _FrameBuffer):
            frames = [buffer.frame]
        else:
            # libzmq frees its frames at a time of its own, so it gets a copy, and the buffer comes back now.
            frames = [Frame.copy_from(buffer.address, fetch.num_bytes)]
        is_settled = buffer is not None or not answer.has_bytes
        if not self.left(answer):
            self._channel.send([Stale(fetch.transfer_id, fetch.index).head(), b""])
            return
        checksum = checksum_of(frame.view for frame in frames) if fetch.with_checksum else 0
        head = Slice(fetch.transfer_id, fetch.index, is_settled, checksum, ()).head()
        self._channel.send([head, *frames])
