"""Copies between the registered pool and buffers that sockets reach, whatever memory the pool is in.

A network transport never touches the bytes of a pool. Its endpoint has one *mover*, made from the pool. The
mover gathers regions of the pool into a buffer, and scatters a buffer into regions of the pool:

    owner    pool ── gather ──▶ buffer ──▶ network            reader    network ──▶ buffer ── scatter ──▶ pool

A copy to or from a GPU ends later than the call that starts it, so each copy returns a *ticket*. The
endpoint's loop watches `Mover.fileno` and calls `Mover.poll`, and the tickets that ended call what was passed
to `Ticket.then`. For main memory a ticket has ended when the call returns, so nothing waits.

Buffers come from two rings, one per direction: if serving and reading shared a ring, two nodes that read from
each other could fill both rings with slices that wait for the other side, and neither could gather.

One thread uses a mover, the one that owns the endpoint. `docs/decisions/0014-movers.md` gives the reasons.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from .copying import copy_regions, gather_regions, scatter_regions
from .errors import KVTransferError
from .regions import AddressArray, Int64Array, MemoryKind

#: How long an endpoint waits at most while tickets are open: an error of a GPU may suppress the signal of a
#: copy's end.
MAX_WAIT_S = 0.005

#: Idle buffers that a ring without a limit keeps.
_MAX_IDLE = 16


class Ticket:
    """The end of one copy. It comes once, now or later; after it the copy reads and writes nothing any more.

    Attributes:
        is_over: Whether it has come.
        error: Why the copy failed; some bytes may have been written. None while it runs, and if it succeeded.
    """

    __slots__ = ("_call", "error", "is_over")

    def __init__(self) -> None:
        self.is_over = False
        self.error: KVTransferError | None = None
        self._call: Callable[[], None] | None = None

    def then(self, call: Callable[[], None]) -> None:
        """Call `call` at the end: now if the copy is over, otherwise from `Mover.poll`.

        Use it once per ticket.
        """
        if self.is_over:
            call()
        else:
            self._call = call

    def end(self, error: KVTransferError | None) -> None:
        """The mover reports the end."""
        self.is_over, self.error = True, error
        if self._call is not None:
            self._call()


class StagingBuffer:
    """Memory that the CPU, sockets, and the device of the pool reach.

    Attributes:
        address: Where it begins.
        num_bytes: Its size.
    """

    __slots__ = ("_memory", "address", "num_bytes")

    def __init__(self, address: int, num_bytes: int, memory: object) -> None:
        """Describe memory that lives as long as `memory` is referred to."""
        self.address = address
        self.num_bytes = num_bytes
        self._memory = memory


class Ring(ABC):
    """Buffers for one direction. All are large enough for one slice."""

    @abstractmethod
    def take(self, num_bytes: int) -> StagingBuffer | None:
        """Take a buffer of at least `num_bytes`, whose content is undefined; None if none is free now.

        Raises:
            ConfigurationError: no buffer of this ring is that large.
        """

    @abstractmethod
    def give_back(self, buffer: StagingBuffer) -> None:
        """Give a buffer to the next user. No copy and no socket uses it any more."""

    @abstractmethod
    def when_free(self, waiter: object, call: Callable[[], None]) -> None:
        """Call `call` once when a buffer was given back.

        Waiters are served in order; one that waits already keeps its place.
        """

    @abstractmethod
    def forget(self, waiter: object) -> None:
        """Do not call a waiter any more. Unknown ones are ignored."""

    @abstractmethod
    def is_awaited(self, besides: object) -> bool:
        """Return whether anything but `besides` waits for a buffer."""


class Mover(ABC):
    """Copies between one pool and buffers.

    Attributes:
        gather_ring, scatter_ring: Where buffers come from, for serving and for reading.
    """

    #: The kind of pool that it serves.
    kind: ClassVar[MemoryKind]

    #: Whether the buffer of a copy must come from a ring. If not, it may be any memory, and a transport may
    #: also send the pool's bytes from where they are.
    needs_staging: ClassVar[bool]

    gather_ring: Ring
    scatter_ring: Ring

    @property
    def suffix(self) -> str:
        """What a mechanism's name ends with if its bytes pass through a staging buffer on our side."""
        return "+staged" if self.needs_staging else ""

    @abstractmethod
    def start_gather(self, buffer_address: int, sources: AddressArray, lengths: Int64Array) -> Ticket:
        """Copy regions of the pool, end to end, to a buffer. `sources` and `lengths`: `(num_regions,)`.

        The copy may start after earlier copies of the same direction. A failure becomes the ticket's error.
        """

    @abstractmethod
    def start_scatter(self, targets: AddressArray, buffer_address: int, lengths: Int64Array) -> Ticket:
        """Copy a buffer, piece by piece, to regions of the pool.

        `targets` and `lengths`: `(num_regions,)`.
        """

    @abstractmethod
    def start_scatter_each(self, targets: AddressArray, sources: AddressArray, lengths: Int64Array) -> Ticket:
        """Copy pieces of buffers, one per region, to regions of the pool. Each array: `(num_regions,)`."""

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when a ticket may have ended; -1 if all end at once."""
        return -1

    def poll(self) -> None:  # noqa: B027 - copies of main memory end at once
        """End the tickets whose copies are over.

        Call it when `fileno` is readable, and every few ms while some are open.
        """

    @property
    def has_open_tickets(self) -> bool:
        """Whether a copy has not ended."""
        return False

    def drain(self) -> None:  # noqa: B027 - see `poll`
        """Wait until no ticket is open, and end them all. A copy that was launched cannot be taken back."""

    def close(self) -> None:  # noqa: B027 - see `poll`
        """Drain, and free the rings. A second call does nothing."""


class HostMover(Mover):
    """Copies of main memory by the compiled loops. Each ticket has ended when the call returns.

    Args:
        buffer_bytes: Size of the buffers that are kept for the next slice. Larger ones can be taken, and are
            not kept.
    """

    kind = "host"
    needs_staging = False

    def __init__(self, buffer_bytes: int) -> None:
        # Nothing waits for a buffer of main memory, so both directions can use the same ones.
        self.gather_ring = self.scatter_ring = _Heap(buffer_bytes)

    def start_gather(self, buffer_address: int, sources: AddressArray, lengths: Int64Array) -> Ticket:
        gather_regions(buffer_address, sources, lengths)
        return _DONE

    def start_scatter(self, targets: AddressArray, buffer_address: int, lengths: Int64Array) -> Ticket:
        scatter_regions(targets, buffer_address, lengths)
        return _DONE

    def start_scatter_each(self, targets: AddressArray, sources: AddressArray, lengths: Int64Array) -> Ticket:
        copy_regions(targets, sources, lengths)
        return _DONE


#: All copies of main memory have the same end, so that none of them pays for a ticket.
_DONE = Ticket()
_DONE.end(None)


class _Heap(Ring):
    """Ordinary memory without a limit.

    Buffers are used again because new memory costs more than the copy into it.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._idle: list[StagingBuffer] = []

    def take(self, num_bytes: int) -> StagingBuffer:
        if num_bytes <= self._buffer_bytes and self._idle:
            return self._idle.pop()
        memory = np.empty(max(num_bytes, self._buffer_bytes), dtype=np.uint8)
        return StagingBuffer(int(memory.ctypes.data), memory.nbytes, memory)

    def give_back(self, buffer: StagingBuffer) -> None:
        if buffer.num_bytes == self._buffer_bytes and len(self._idle) < _MAX_IDLE:
            self._idle.append(buffer)

    def when_free(self, waiter: object, call: Callable[[], None]) -> None:
        raise AssertionError("a ring without a limit always has a buffer")

    def forget(self, waiter: object) -> None:
        pass

    def is_awaited(self, besides: object) -> bool:
        return False
