"""The owner's side of reads: each fetch is answered from the pool, and forgotten when its bytes have left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
import xxhash

from .._movers import Mover, StagingBuffer
from ..errors import ProtocolError
from ..regions import AddressArray, Int64Array
from ..serving import SendBuffers, ServedPool, encode_rows, require_slice
from .iovec import Pieces
from .stream import Answer, TcpStream
from .wire import End, Fetch, Slice

#: A peer that fetches more than this before it receives does not follow the protocol: its window is smaller.
_MAX_WAITING: Final = 128

#: Over TLS, regions smaller than this are gathered first: each call encrypts at most one region.
SMALL_BYTES: Final = 64 << 10


class Server:
    """Answers the fetches of one peer.

    Args:
        max_slice_bytes: The most bytes per slice, which our hello states.
        resume: Called with a connection to which something was queued outside of its own turn.
        fail: Called with what ended the connection, if a copy fails after `answer` has returned.
    """

    def __init__(
        self,
        served: ServedPool,
        mover: Mover,
        max_slice_bytes: int,
        resume: Callable[[TcpStream], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._served = served
        self._mover = mover
        self.buffers = SendBuffers(mover.gather_ring)
        self._max_slice_bytes = max_slice_bytes
        self._resume = resume
        self._fail = fail
        self._waiting: deque[_Answer] = deque()  # those that need a staging buffer
        self._is_closed = False
        self.num_waiting = 0  # answers that have not ended

    def answer(self, stream: TcpStream, fetch: Fetch) -> None:
        """Queue a slice and its end on a connection; the end alone if the guard does not hold.

        Raises:
            ProtocolError: a region or the guard is out of bounds, or the peer fetches more than it receives. Nothing
                was queued.
        """
        addresses = self._served.locate(fetch.rows, fetch.guard)
        if self.num_waiting >= _MAX_WAITING:
            raise ProtocolError(
                f"the peer does not receive what it fetches: {self.num_waiting} slices wait for it"
            )
        require_slice(fetch.num_bytes, self._max_slice_bytes)
        self.num_waiting += 1
        answer = _Answer(self, stream, fetch, addresses)
        # Looked at before the copy only to save its cost: what counts is the check in `end`.
        if not len(fetch.rows) or not self._served.guards.holds(fetch.guard):
            answer.send_only_end(is_held=not len(fetch.rows))
            stream.answers.append(answer)
        elif self._mover.needs_staging or (stream.is_encrypted and fetch.rows[:, 1].min() < SMALL_BYTES):
            self._waiting.append(answer)
            self._gather()
        else:
            stream.answers.append(answer)

    def _gather(self) -> None:
        """Gather as many of the waiting slices as there are buffers, in the order in which they were fetched."""
        while self._waiting:
            answer = self._waiting[0]
            buffer = self.buffers.take(answer.fetch.num_bytes)
            if buffer is None:
                self.buffers.when_free(self._gather)
                return
            self._waiting.popleft()
            answer.gather(buffer)

    def close(self) -> None:
        """The peer is gone. Buffers come back as soon as nothing is copied into them any more."""
        self._is_closed = True
        self._waiting.clear()
        self.buffers.forget()


class _Answer(Answer):
    """A slice to send, and its end."""

    def __init__(self, server: Server, stream: TcpStream, fetch: Fetch, addresses: AddressArray) -> None:
        self._server = server
        self._stream = stream
        self.fetch = fetch
        self._addresses = addresses
        self._lengths = fetch.rows[:, 1]
        self._buffer: StagingBuffer | None = None
        self._is_held = True
        self._is_empty = False
        self._digest: xxhash.xxh3_64 | None = None

    def send_only_end(self, *, is_held: bool) -> None:
        """Send no bytes. `is_held`: whether the guard held so far."""
        self._is_empty, self._is_held = True, is_held

    def gather(self, buffer: StagingBuffer) -> None:
        """Copy the regions to a buffer. They are sent when the copy has ended."""
        self._buffer = buffer
        ticket = self._server._mover.start_gather(buffer.address, self._addresses, self._lengths)

        def on_end() -> None:
            if self._server._is_closed:
                self._give_back()
                return
            if ticket.error is not None:
                # The guard may hold, so an end that denies it would send the reader after the wrong cause.
                self._give_back()
                self._server._fail(ticket.error)
                return
            self._server.buffers.start_sending(buffer)
            # After the copy: what is sent from here on is the copy, whatever happens to the pool.
            if not self._holds():
                self.send_only_end(is_held=False)
            self._addresses = np.array([buffer.address], dtype=np.uint64)
            self._lengths = np.array([self.fetch.num_bytes], dtype=np.int64)
            self._stream.answers.append(self)
            self._server._resume(self._stream)

        ticket.then(on_end)

    def _holds(self) -> bool:
        return self._server._served.guards.holds(self.fetch.guard)

    def begin(self) -> tuple[bytes, Pieces] | None:
        if self._is_empty:
            return None
        if self.fetch.with_checksum:
            self._digest = digest_of(self.fetch.rows)
        head = Slice(self.fetch.tag, self.fetch.num_bytes).encode()
        return head, Pieces(self._addresses, self._lengths, self.fetch.num_bytes, self._digest)

    def end(self) -> bytes:
        checksum = self._digest.intdigest() if self._digest is not None else 0
        # Straight from the pool the kernel or TLS has read the last byte, but only just now.
        is_held = self._is_held and (self._buffer is not None or self._holds())
        self._give_back()
        self._server.num_waiting -= 1
        return End(self.fetch.tag, checksum, is_held).encode()

    def drop(self) -> None:
        self._server.num_waiting -= 1
        self._give_back()

    def _give_back(self) -> None:
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            self._server.buffers.give_back(buffer)


def digest_of(rows: Int64Array) -> xxhash.xxh3_64:
    """Return the digest of a fetch, which takes the bytes that are fetched next.

    The rows are part of it, because a fetch that was changed on its way gets other bytes than were asked for.
    """
    return xxhash.xxh3_64(encode_rows(rows))
