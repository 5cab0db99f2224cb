"""The staging path over pools in main memory, which shows what it costs without a GPU.

A pool on a GPU is moved through two rings of pinned buffers: the owner gathers each slice into a buffer and sends that, and
the reader receives into a buffer and scatters that. Here the same code of the transports does the same with pools in main
memory, and the rings have the size that they have for a GPU, in locked memory. Only the copies differ: the compiled loop
makes them in the endpoint's thread, while a GPU's copy engine works beside it and is reached over PCIe. So the figures show
what the path costs (one more copy at each end, and the wait for a buffer), and not how fast a GPU is.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from kvferry.transports.movers import HostMover, Ring, StagingBuffer
from kvferry.transports.regions import Pool

from .contender import pool_memory


class LockedRing(Ring):
    """Buffers of equal size in locked memory, or in ordinary memory if this process may not lock so much."""

    def __init__(self, num_buffers: int, buffer_bytes: int) -> None:
        memory = pool_memory(num_buffers * buffer_bytes)
        base = int(np.frombuffer(memory, dtype=np.int64).ctypes.data)
        ctypes.CDLL(None).mlock(ctypes.c_void_p(base), ctypes.c_size_t(len(memory)))
        self._free = deque(
            StagingBuffer(base + at * buffer_bytes, buffer_bytes, memory) for at in range(num_buffers)
        )
        self._waiters: dict[object, Callable[[], None]] = {}

    def take(self, num_bytes: int) -> StagingBuffer | None:
        return self._free.pop() if self._free else None

    def give_back(self, buffer: StagingBuffer) -> None:
        self._free.append(buffer)
        while self._free and self._waiters:
            self._waiters.pop(next(iter(self._waiters)))()

    def when_free(self, waiter: object, call: Callable[[], None]) -> None:
        self._waiters.setdefault(waiter, call)

    def forget(self, waiter: object) -> None:
        self._waiters.pop(waiter, None)

    def is_awaited(self, besides: object) -> bool:
        """Return whether anything but `besides` waits for a buffer."""
        return any(waiter is not besides for waiter in self._waiters)


class StagingMover(HostMover):
    """Copies of main memory whose buffers come from rings, as those of a GPU do."""

    needs_staging = True

    def __init__(self, buffer_bytes: int, staging_bytes: int) -> None:
        super().__init__(buffer_bytes)
        num_buffers = staging_bytes // buffer_bytes
        self.gather_ring = LockedRing(num_buffers, buffer_bytes)
        self.scatter_ring = LockedRing(num_buffers, buffer_bytes)


def stage(transport: Any) -> None:
    """Make a network transport move the pool that it registers next through staging buffers."""
    by_reference = transport.make_mover

    def make_mover(pool: Pool) -> StagingMover:
        buffer_bytes = by_reference(pool).gather_ring.take(1).num_bytes
        return StagingMover(buffer_bytes, transport.options.staging_bytes)

    transport.make_mover = make_mover
