"""How slices travel by UCX: each is one message under a random tag, from pool to pool or from buffer to
buffer.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from .. import sliced
from .._slices import SliceLimits
from ..endpoint import Read
from ..errors import KVTransferError
from ..movers import StagingBuffer
from ..regions import AddressArray, Int64Array
from ..serving import ServedPool
from ..sliced import SliceState, Transfer, Verdict
from ..streams import FrameSocket
from .library import Operation, Worker
from .options import UCXOptions
from .wire import MAX_ROWS, Answer, Fetch

#: What is sent where there is nothing to send: each fetch gets one UCX message, so that the receive for it
#: ends.
_NOTHING: Final = ctypes.c_ubyte()

# In Python 3.11, access to a member of an enum takes as long as a whole step here.
_HELD, _STALE, _FETCHED = Verdict.HELD, Verdict.STALE, SliceState.FETCHED


def limits_of(options: UCXOptions) -> SliceLimits:
    """Return how reads are cut.

    A region of at least 512 KiB goes straight from pool to pool. Smaller ones are gathered into a staging
    buffer, because a UCX message costs more than copying them twice.
    """
    return SliceLimits(options.slice_bytes, MAX_ROWS, alone_bytes=min(512 << 10, options.slice_bytes))


@dataclass(eq=False, slots=True)
class _Slice(sliced.Slice):
    """A slice that was fetched, and UCX's receive for it."""

    operation: Operation | None = field(default=None, init=False)


class Reader(sliced.Reader[_Slice]):
    """The reads from one peer.

    Args:
        served: Its pool is where the bytes go.
        activate: Called when a receive was posted to the worker outside of the calls of `Reader`.
    """

    def __init__(
        self,
        options: UCXOptions,
        served: ServedPool,
        worker: Worker,
        channel: FrameSocket,
        end_read: Callable[[Read[Any], KVTransferError | None], None],
        activate: Callable[[], None],
        fail: Callable[[Exception], None],
    ) -> None:
        super().__init__(served.mover, options.window_slices, end_read, fail)
        self._worker = worker
        self._channel = channel
        self._activate = activate

    def needs_buffer(self, rows: Int64Array, num_bytes: int) -> bool:
        return self._mover.needs_staging or len(rows) != 1

    def make_slice(
        self, transfer: Transfer, index: int, rows: Int64Array, num_bytes: int, buffer: StagingBuffer | None
    ) -> _Slice:
        # A random tag, so that no other process that reaches our worker can put bytes into a slice.
        return _Slice(transfer, index, secrets.randbits(64), rows, num_bytes, buffer)

    def send_fetch(self, piece: _Slice) -> None:
        self._channel.send(Fetch(piece.tag, piece.transfer.read.guard, piece.rows).encode())
        # What follows overlaps with the fetch's way to the owner. The answer cannot overtake the receive: UCX
        # hands nothing over before `progress` is called, which happens later in this thread.
        address = int(piece.targets[0]) if piece.buffer is None else piece.buffer.address
        piece.operation = self._worker.receive(piece.tag, address, max(1, piece.num_bytes))

    def divert(self, piece: _Slice) -> bool:
        # A receive that was posted cannot be taken back with certainty, unless the worker is closed.
        return False

    def resumed(self) -> None:
        self._activate()

    def on_answer(self, answer: Answer) -> None:
        """The owner has sent a slice, or a byte in its place.

        Raises:
            ProtocolError: no fetch with this tag is in flight.
        """
        self.answered(self.find(answer.tag), _HELD if answer.is_valid else _STALE)

    def settle(self) -> None:
        """Look at what has arrived.

        Raises:
            PeerLostError: UCX lost the peer.
            ProtocolError: the peer sent more than was asked for.
        """
        for piece in list(self._slices.values()):
            operation = piece.operation
            if piece.state is _FETCHED and operation is not None and operation.is_done:
                operation.check()
                self.arrived(piece)


@dataclass(eq=False, slots=True)
class _Answer(sliced.Answer[Fetch]):
    """What is sent for a fetch, and UCX's send of it."""

    operation: Operation | None = field(default=None, init=False)


class Server(sliced.Server[Fetch, _Answer]):
    """Answers the fetches of one peer.

    Args:
        activate: Called when a send was posted to the worker, if that is after `answer` has returned.
    """

    def __init__(
        self,
        served: ServedPool,
        worker: Worker,
        channel: FrameSocket,
        max_slice_bytes: int,
        activate: Callable[[], None],
        fail: Callable[[Exception], None],
    ) -> None:
        super().__init__(served, max_slice_bytes, fail)
        self._worker = worker
        self._channel = channel
        self._activate = activate
        self._outgoing: list[_Answer] = []

    def make_answer(self, fetch: Fetch, addresses: AddressArray) -> _Answer:
        return _Answer(fetch, addresses)

    def is_gathered(self, fetch: Fetch) -> bool:
        return self._mover.needs_staging or len(fetch.rows) != 1

    def send(self, answer: _Answer) -> None:
        tag, num_bytes = answer.fetch.tag, answer.fetch.num_bytes
        if not answer.has_bytes:
            answer.operation = self._worker.send(tag, ctypes.addressof(_NOTHING), 1)
        else:
            address = int(answer.addresses[0]) if answer.buffer is None else answer.buffer.address
            answer.operation = self._worker.send(tag, address, num_bytes)
        self._outgoing.append(answer)

    def resumed(self) -> None:
        self._activate()

    def settle(self) -> None:
        """Send the verdict about what has left.

        Raises:
            PeerLostError: UCX could not send.
        """
        done = [
            answer for answer in self._outgoing if answer.operation is not None and answer.operation.is_done
        ]
        for answer in done:
            self._outgoing.remove(answer)
        for answer in done:
            assert answer.operation is not None, "it was sent"
            answer.operation.check()
            # Only after UCX has read the last byte: the pool may have been reused while it was sending.
            self._channel.send(Answer(answer.fetch.tag, self.left(answer)).encode())
