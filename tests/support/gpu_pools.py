"""Nodes whose pools are on a GPU, for tests that run without one.

The GPU is a stand-in that poisons its memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvferry.connector.p2p import registration, worker
from kvferry.transports.auto import AutoTransport
from kvferry.transports.base import Arena
from kvferry.transports.cuda_mover import CudaMover, PinnedRing
from kvferry.transports.regions import Pool, Segment
from kvferry.transports.serving import HostTransport
from kvferry.transports.shm import SharedMemoryTransport
from tests.support.cuda_stand_in import BINDINGS, CudaDriverStandIn


@contextmanager
def recorded_movers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CudaMover]]:
    """Yield a list of all movers that are made.

    At the end every ticket has ended and every buffer is back.
    """
    made: list[CudaMover] = []
    create = CudaMover.__init__

    def recorded(self: CudaMover, *args: Any) -> None:
        create(self, *args)
        made.append(self)

    monkeypatch.setattr(CudaMover, "__init__", recorded)
    yield made
    for mover in made:
        assert not mover.has_open_tickets
        assert has_all_buffers(mover), "a staging buffer was not given back"


def has_all_buffers(mover: CudaMover) -> bool:
    """Return whether no staging buffer of a mover is in use."""
    rings = (mover.gather_ring, mover.scatter_ring)
    return all(isinstance(ring, PinnedRing) and ring.num_free == ring.num_buffers for ring in rings)


class GpuPools:
    """Has transports allocate memory of a stand-in's GPU, and connectors describe it as such.

    To PyTorch the memory is main memory: an engine of the test computes in it as a GPU would.

    Attributes:
        is_on: Whether the next pools are on the GPU.
        movers: All movers that were made.
    """

    def __init__(
        self, driver: CudaDriverStandIn, movers: list[CudaMover], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.driver = driver
        self.movers = movers
        self.is_on = True
        self._segments: dict[int, Segment] = {}  # by where the CPU of the test sees their bytes
        for transport in (HostTransport, SharedMemoryTransport, AutoTransport):
            monkeypatch.setattr(transport, "_allocate", self._allocate_instead_of(transport._allocate))
        monkeypatch.setattr(worker, "describe_caches", self._describe_caches)

    def are_idle(self) -> bool:
        """Return whether no copy is under way and every staging buffer is back."""
        return all(not mover.has_open_tickets and has_all_buffers(mover) for mover in self.movers)

    def _allocate_instead_of(self, allocate: Any) -> Any:
        def allocate_here(transport: Any, num_bytes: int) -> Arena:
            if not self.is_on:
                arena: Arena = allocate(transport, num_bytes)
                return arena
            arena = self.driver.allocate(num_bytes)
            self._segments[np.frombuffer(arena.buffer, dtype=np.uint8).ctypes.data] = arena.segment
            return arena

        return allocate_here

    def _describe_caches(self, *args: Any, **options: Any) -> registration.Registration:
        described = registration.describe_caches(*args, **options)
        segments = described.pool.segments
        return replace(described, pool=Pool(self._segments.get(each.address, each) for each in segments))


@contextmanager
def pools_on_a_gpu(monkeypatch: pytest.MonkeyPatch, **stand_in: Any) -> Iterator[GpuPools]:
    """Have all pools that are made in the body be on a GPU.

    At the end every copy has ended, every staging buffer is back, all that was acquired from the driver is
    released, and nothing was done to the GPU that has no defined result.
    """
    with CudaDriverStandIn(pinned_bytes=2 << 30, **stand_in) as driver:
        for name in BINDINGS:
            monkeypatch.setitem(sys.modules, name, driver)
        with recorded_movers(monkeypatch) as movers:
            yield GpuPools(driver, movers, monkeypatch)
    assert not +driver.held
    assert not driver.violations
