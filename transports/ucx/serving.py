"""The owner's side of reads: each fetch is answered from the pool, and forgotten when its bytes have left."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from .._movers import StagingBuffer, Ticket
from ..errors import ProtocolError
from ..regions import AddressArray, Guard, Int64Array
from ..serving import SendBuffers, ServedPool, require_slice
from ..streams import FrameSocket
from .library import Operation, Worker
from .wire import Answer, Fetch

#: A peer that has more than this in flight does not receive what it fetches.
_MAX_SERVED_BYTES = 512 << 20

#: What is sent where there is nothing to send: each fetch gets one UCX message, so that the receive for it ends.
_NOTHING: Final = ctypes.c_ubyte()


@dataclass(eq=False)
class _Outgoing:
    """An answer that has not left.

    Attributes:
        operation: UCX's send, as soon as the bytes can be sent.
        buffer: The memory it is sent from, if that is not the pool.
    """

    tag: int
    guard: Guard
    num_bytes: int
    operation: Operation | None = None
    buffer: StagingBuffer | None = None

    @property
    def has_left(self) -> bool:
        return self.operation is not None and self.operation.is_done


class Server:
    """Answers the fetches of one peer.

    Args:
        max_slice_bytes: The most bytes per slice, which our hello states.
        activate: Called when a send was posted to the worker, if that is after `answer` has returned.
        fail: Called with what ended the connection, if something fails after `answer` has returned.
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
        self._served = served
        self._mover = served.mover
        self.buffers = SendBuffers(served.mover.gather_ring)
        self._worker = worker
        self._channel = channel
        self._max_slice_bytes = max_slice_bytes
        self._activate = activate
        self._fail = fail
        self._outgoing: list[_Outgoing] = []
        # Those that wait for a staging buffer; only pools on a GPU have any.
        self._waiting: deque[tuple[_Outgoing, AddressArray, Int64Array]] = deque()
        self._is_closed = False

    @property
    def num_in_flight(self) -> int:
        """Slices that have not left."""
        return len(self._outgoing)

    def answer(self, fetch: Fetch) -> None:
        """Send what the peer fetches; or a single byte if the guard does not hold or the fetch has no rows.

        Raises:
            ProtocolError: a region or the guard is out of bounds, or the peer fetches more than it receives. Nothing
                was sent.
        """
        addresses = self._served.locate(fetch.rows, fetch.guard)
        require_slice(fetch.num_bytes, self._max_slice_bytes)
        if sum(outgoing.num_bytes for outgoing in self._outgoing) > _MAX_SERVED_BYTES:
            raise ProtocolError(
                f"the peer does not receive what it fetches: over {_MAX_SERVED_BYTES} bytes are in flight"
            )
        # Checked before the copy only to save its cost: what counts is the check after it, in `settle`.
        if not len(fetch.rows) or not self._served.guards.holds(fetch.guard):
            outgoing = _Outgoing(fetch.tag, fetch.guard, 1)
            outgoing.operation = self._worker.send(fetch.tag, ctypes.addressof(_NOTHING), 1)
        else:
            outgoing = _Outgoing(fetch.tag, fetch.guard, fetch.num_bytes)
            if len(fetch.rows) == 1 and not self._mover.needs_staging:
                outgoing.operation = self._worker.send(fetch.tag, int(addresses[0]), fetch.num_bytes)
            else:
                self._waiting.append((outgoing, addresses, fetch.rows[:, 1]))
        self._outgoing.append(outgoing)
        self._stage_waiting()

    def _stage_waiting(self) -> None:
        """Start the copies for which there are staging buffers."""
        while self._waiting:
            outgoing, addresses, lengths = self._waiting[0]
            outgoing.buffer = self.buffers.take(outgoing.num_bytes)
            if outgoing.buffer is None:
                self.buffers.when_free(self._resume)
                return
            self._waiting.popleft()
            ticket = self._mover.start_gather(outgoing.buffer.address, addresses, lengths)
            ticket.then(partial(self._on_gathered, outgoing, outgoing.buffer, ticket))

    def _resume(self) -> None:
        # Another peer's buffer came back in the course of that peer's work, so an error of ours must not become its own.
        try:
            self._stage_waiting()
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this peer alone
            self._fail(error)

    def _on_gathered(self, outgoing: _Outgoing, buffer: StagingBuffer, ticket: Ticket) -> None:
        if self._is_closed:
            self.buffers.give_back(buffer)
            return
        try:
            if ticket.error is not None:
                raise ticket.error
            outgoing.operation = self._worker.send(outgoing.tag, buffer.address, outgoing.num_bytes)
            self.buffers.start_sending(buffer)
            self._activate()
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this peer alone
            # No copy writes into the buffer any more, and nothing was sent from it.
            outgoing.buffer = None
            self.buffers.give_back(buffer)
            self._fail(error)

    def settle(self) -> None:
        """Vouch for what has left, if its guard still holds.

        Raises:
            PeerLostError: UCX could not send.
        """
        done = [outgoing for outgoing in self._outgoing if outgoing.has_left]
        if not done:
            return
        self._outgoing = [outgoing for outgoing in self._outgoing if not outgoing.has_left]
        for outgoing in done:
            if outgoing.buffer is not None:
                self.buffers.give_back(outgoing.buffer)
        for outgoing in done:
            assert outgoing.operation is not None, "it has left"
            outgoing.operation.check()
            # Only after UCX has read the last byte: the pool may have been reused while it was sending. If the guard
            # still holds now, every byte that left was one that it promised.
            self._channel.send(Answer(outgoing.tag, self._served.guards.holds(outgoing.guard)).encode())

    def close(self) -> None:
        """Give the buffers back. The worker is closed, so UCX sends nothing more; copies that were launched still end."""
        self._is_closed = True
        self._waiting.clear()
        self.buffers.forget()
        for outgoing in self._outgoing:
            if outgoing.operation is not None and outgoing.buffer is not None:
                self.buffers.give_back(outgoing.buffer)
        self._outgoing.clear()
