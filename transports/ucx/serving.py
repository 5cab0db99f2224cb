"""The owner's side of reads: each fetch is answered from the pool, and forgotten when its bytes have left."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

from ..errors import ProtocolError
from ..regions import AddressArray, Guard
from ..serving import ServedPool
from ..streams import FrameSocket
from .library import Operation, Worker
from .staging import StagingBuffer, StagingBuffers
from .wire import Answer, Fetch

#: A peer that has more than this in flight does not receive what it fetches.
_MAX_SERVED_BYTES = 512 << 20

#: What is sent where there is nothing to send: each fetch gets one UCX message, so that the receive for it ends.
_NOTHING: Final = ctypes.c_ubyte()


@dataclass(frozen=True)
class _Outgoing:
    """An answer in flight. `buffer`: the memory it is sent from, if that is not the pool."""

    tag: int
    guard: Guard
    num_bytes: int
    operation: Operation
    buffer: StagingBuffer | None = None


class Server:
    """Answers the fetches of one peer."""

    def __init__(
        self, served: ServedPool, buffers: StagingBuffers, worker: Worker, channel: FrameSocket
    ) -> None:
        self._served = served
        self._buffers = buffers
        self._worker = worker
        self._channel = channel
        self._outgoing: list[_Outgoing] = []

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
        if sum(outgoing.num_bytes for outgoing in self._outgoing) > _MAX_SERVED_BYTES:
            raise ProtocolError(
                f"the peer does not receive what it fetches: over {_MAX_SERVED_BYTES} bytes are in flight"
            )
        # Checked before the copy only to save its cost: what counts is the check after it, in `settle`.
        if len(fetch.rows) and self._served.guards.holds(fetch.guard):
            self._send(fetch, addresses)
        else:
            operation = self._worker.send(fetch.tag, ctypes.addressof(_NOTHING), 1)
            self._outgoing.append(_Outgoing(fetch.tag, fetch.guard, 1, operation))

    def _send(self, fetch: Fetch, addresses: AddressArray) -> None:
        if len(fetch.rows) == 1:
            operation = self._worker.send(fetch.tag, int(addresses[0]), fetch.num_bytes)
            self._outgoing.append(_Outgoing(fetch.tag, fetch.guard, fetch.num_bytes, operation))
            return
        buffer = self._buffers.take(fetch.num_bytes)
        self._served.gather(buffer.address, addresses, fetch.rows[:, 1])
        operation = self._worker.send(fetch.tag, buffer.address, fetch.num_bytes)
        self._outgoing.append(_Outgoing(fetch.tag, fetch.guard, fetch.num_bytes, operation, buffer))

    def settle(self) -> None:
        """Vouch for what has left, if its guard still holds.

        Raises:
            PeerLostError: UCX could not send.
        """
        done = [outgoing for outgoing in self._outgoing if outgoing.operation.is_done]
        if not done:
            return
        self._outgoing = [outgoing for outgoing in self._outgoing if not outgoing.operation.is_done]
        for outgoing in done:
            outgoing.operation.check()
            if outgoing.buffer is not None:
                self._buffers.give_back(outgoing.buffer)
            # Only after UCX has read the last byte: the pool may have been reused while it was sending. If the guard
            # still holds now, every byte that left was one that it promised.
            self._channel.send(Answer(outgoing.tag, self._served.guards.holds(outgoing.guard)).encode())
