"""The owner's side of reads: it answers each fetch from its pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import xxhash

from .._movers import StagingBuffer, Ticket
from ..errors import ProtocolError
from ..regions import AddressArray
from ..serving import ServedPool, require_slice
from .channel import Channel
from .frames import Frame
from .wire import Fetch, Slice, Stale

#: Regions of at least this size are sent by reference, in one frame each. Smaller ones are gathered into one frame
#: first, because a frame costs more than the copy.
_ZERO_COPY_BYTES: Final = 256 << 10

#: If more is queued for a peer, it does not receive what it fetches, and is dropped.
_MAX_QUEUED_BYTES = 128 << 20


class Server:
    """Answers the fetches of one peer.

    Args:
        max_slice_bytes: The most bytes per slice, which our hello states.
        fail: Called with what ended the connection, if a copy fails after `answer` has returned.
    """

    def __init__(
        self, served: ServedPool, channel: Channel, max_slice_bytes: int, fail: Callable[[Exception], None]
    ) -> None:
        self._served = served
        self._max_slice_bytes = max_slice_bytes
        self._mover = served.mover
        self._channel = channel
        self._fail = fail
        # Fetches that wait for a staging buffer, or whose copy has not ended; only pools on a GPU have any.
        self._waiting: deque[tuple[Fetch, AddressArray]] = deque()
        self._staged_bytes = 0
        self._is_closed = False

    def answer(self, fetch: Fetch) -> None:
        """Answer with a slice, or with `Stale` if the guard does not hold; later, if the pool is on a GPU.

        Raises:
            ProtocolError: the peer asks for regions or a guard that do not exist, or fetches more than it receives.
                Nothing was sent.
        """
        addresses, lengths = self._served.locate(fetch.rows, fetch.guard), fetch.rows[:, 1]
        require_slice(fetch.num_bytes, self._max_slice_bytes)
        queued_bytes = self._channel.queued_bytes + self._staged_bytes
        if queued_bytes > _MAX_QUEUED_BYTES:
            raise ProtocolError(
                f"the peer fetches slices but does not receive them: {queued_bytes} bytes are queued"
            )
        if not self._served.guards.holds(fetch.guard):
            self._send_stale(fetch)
        elif self._mover.needs_staging and len(lengths):
            self._staged_bytes += fetch.num_bytes
            self._waiting.append((fetch, addresses))
            self._stage_waiting()
        elif fetch.is_whole or not len(lengths) or lengths.min() < _ZERO_COPY_BYTES:
            frame = Frame.allocated(fetch.num_bytes)
            self._mover.start_gather(frame.address, addresses, lengths)
            self._send_gathered(fetch, frame)
        else:
            # By reference: libzmq reads the bytes after we looked at the guard, so only a later answer can confirm them.
            # A read of a single slice is copied instead, because another round trip would take longer than the copy.
            rows = zip(addresses.tolist(), lengths.tolist(), strict=True)
            self._send_slice(fetch, [Frame.borrowed(*row) for row in rows], is_settled=False)

    def _send_gathered(self, fetch: Fetch, frame: Frame) -> None:
        # Look at the guard again after the copy: blocks that were reused in the meantime must not pass for the promised
        # ones.
        if self._served.guards.holds(fetch.guard):
            self._send_slice(fetch, [frame], is_settled=True)
        else:
            self._send_stale(fetch)

    def _stage_waiting(self) -> None:
        """Start the copies for which there are staging buffers."""
        ring = self._mover.gather_ring
        while self._waiting:
            fetch, addresses = self._waiting[0]
            buffer = ring.take(fetch.num_bytes)
            if buffer is None:
                ring.when_free(self, self._resume)
                return
            self._waiting.popleft()
            ticket = self._mover.start_gather(buffer.address, addresses, fetch.rows[:, 1])
            ticket.then(partial(self._on_staged, fetch, buffer, ticket))

    def _resume(self) -> None:
        # Another peer's buffer came back in the course of that peer's work, so an error of ours must not become its own.
        try:
            self._stage_waiting()
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this peer alone
            self._fail(error)

    def _on_staged(self, fetch: Fetch, buffer: StagingBuffer, ticket: Ticket) -> None:
        self._staged_bytes -= fetch.num_bytes
        try:
            # libzmq frees its frames at a time of its own, so it gets a copy, and the buffer comes back now.
            frame = Frame.copy_from(buffer.address, fetch.num_bytes)
        except MemoryError as error:
            self._fail(error)
            return
        finally:
            self._mover.gather_ring.give_back(buffer)
        if ticket.error is not None:
            self._fail(ticket.error)
        elif not self._is_closed:
            self._send_gathered(fetch, frame)

    def close(self) -> None:
        """Answer nothing more. Copies that were launched still end, and give their buffers back."""
        self._is_closed = True
        self._waiting.clear()
        self._mover.gather_ring.forget(self)

    def _send_slice(self, fetch: Fetch, frames: list[Frame], *, is_settled: bool) -> None:
        checksum = checksum_of(frame.view for frame in frames) if fetch.with_checksum else 0
        head = Slice(fetch.transfer_id, fetch.index, is_settled, checksum, ()).head()
        self._channel.send([head, *frames])

    def _send_stale(self, fetch: Fetch) -> None:
        self._channel.send([Stale(fetch.transfer_id, fetch.index).head(), b""])


def checksum_of(frames: Iterable[memoryview | bytes]) -> int:
    """Return the 64-bit xxh3 of all frames, end to end."""
    digest = xxhash.xxh3_64()
    for frame in frames:
        digest.update(frame)
    return digest.intdigest()
