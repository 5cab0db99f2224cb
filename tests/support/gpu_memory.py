"""Pools for tests and benchmarks of GPUs, in two processes, and a reader of the other process's pool.

A *place* says where a pool is: `"cuda:0"` and so on; `"cpu"`; or `"stand-in"`, which rehearses a GPU on a
machine that has none. Memory of a GPU comes from CUDA's driver, so that a process need not import PyTorch.
"""

from __future__ import annotations

import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.transports.cuda_driver import Driver
from kvferry.transports.regions import Pool, RegionPairs, Segment
from kvferry.transports.registry import create_transport
from tests.support.cuda_stand_in import BINDINGS, CudaDriverStandIn
from tests.support.peers import HELD, Node

Bytes = npt.NDArray[np.uint8]

#: Seconds for a read.
DEADLINE_S = 60.0

#: The pools of the tests: several segments, as pools of the per-layer layout are.
NUM_SEGMENTS, SEGMENT_BYTES = 4, 8 << 20

#: `(program, *arguments)` → a process that runs a program of `tests/gpu/children`, and the JSON object that
#: it printed.
StartChild = Callable[..., tuple["subprocess.Popen[str]", dict[str, Any]]]


@contextmanager
def stand_in_driver() -> Iterator[CudaDriverStandIn]:
    """Put the stand-in in the place of CUDA's driver. Its violations are errors.

    Raises:
        RuntimeError: the driver was used in a way that the documentation forbids.
    """
    with CudaDriverStandIn(pinned_bytes=1 << 30) as driver, pytest.MonkeyPatch.context() as patch:
        # Not `patch.dict`, which would also forget the modules that are imported meanwhile. They would be
        # imported twice, and a member of an enum would not be itself.
        for name in BINDINGS:
            patch.setitem(sys.modules, name, driver)
        yield driver
    if driver.violations:
        raise RuntimeError(f"CUDA's driver was misused: {driver.violations}")


def pattern(first: int, num_bytes: int, seed: int = 0) -> Bytes:
    """Return bytes `first`, … of a pattern that differs by seed and has no short period that is a power of
    two.
    """
    period = (np.arange(251) * 7 + seed).astype(np.uint8)
    return np.resize(np.roll(period, -(first % 251)), num_bytes)


class Memory(ABC):
    """One allocation.

    Attributes:
        segment: Where it is.
    """

    segment: Segment

    @abstractmethod
    def write(self, values: Bytes, at: int = 0) -> None:
        """Overwrite bytes from offset `at` on."""

    @abstractmethod
    def read(self, at: int, num_bytes: int) -> Bytes:
        """Return a copy of bytes from offset `at` on."""

    @abstractmethod
    def fill(self, value: int) -> None:
        """Overwrite every byte."""

    def free(self) -> None:  # noqa: B027 - other memory is freed when nothing refers to it
        """Free memory of a real GPU."""


class _BufferMemory(Memory):
    """Memory whose bytes a test can see: main memory, or that of a stand-in's GPU."""

    def __init__(self, segment: Segment, seen: Bytes) -> None:
        self.segment = segment
        self._seen = seen

    def write(self, values: Bytes, at: int = 0) -> None:
        self._seen[at : at + len(values)] = values

    def read(self, at: int, num_bytes: int) -> Bytes:
        return self._seen[at : at + num_bytes].copy()

    def fill(self, value: int) -> None:
        self._seen[:] = value


class _CudaMemory(Memory):
    """Memory of a GPU, from the driver."""

    def __init__(self, ordinal: int, num_bytes: int) -> None:
        self._driver = Driver()
        self._device = self._driver.call("cuDeviceGet", ordinal)
        self._context = self._driver.call("cuDevicePrimaryCtxRetain", self._device)
        address = int(self._call("cuMemAlloc", num_bytes))
        self.segment = Segment(address, num_bytes, "cuda")

    def _call(self, name: str, *arguments: object) -> Any:
        self._driver.call("cuCtxPushCurrent", self._context)
        try:
            result = self._driver.call(name, *arguments)
            self._driver.call("cuCtxSynchronize")  # a fill, and a copy of a few bytes, may return early
            return result
        finally:
            self._driver.call("cuCtxPopCurrent")

    def write(self, values: Bytes, at: int = 0) -> None:
        values = np.ascontiguousarray(values)
        self._call("cuMemcpyHtoD", self.segment.address + at, int(values.ctypes.data), len(values))

    def read(self, at: int, num_bytes: int) -> Bytes:
        values = np.empty(num_bytes, dtype=np.uint8)
        self._call("cuMemcpyDtoH", int(values.ctypes.data), self.segment.address + at, num_bytes)
        return values

    def fill(self, value: int) -> None:
        self._call("cuMemsetD8", self.segment.address, value, self.segment.num_bytes)

    def free(self) -> None:
        self._call("cuMemFree", self.segment.address)
        self._driver.call("cuDevicePrimaryCtxRelease", self._device)


def allocate(place: str, num_bytes: int) -> Memory:
    """Allocate memory at a place. For `"stand-in"`, `stand_in_driver` is active."""
    if place == "cpu":
        seen = np.zeros(num_bytes, dtype=np.uint8)
        return _BufferMemory(Segment(int(seen.ctypes.data), num_bytes), seen)
    if place == "stand-in":
        driver: Any = sys.modules[BINDINGS[0]]
        arena = driver.allocate(num_bytes)
        return _BufferMemory(arena.segment, np.frombuffer(arena.buffer, dtype=np.uint8))
    kind, _, ordinal = place.partition(":")
    if kind != "cuda":
        raise ValueError(f"unknown place {place!r}: use 'cuda:0', 'cpu' or 'stand-in'")
    memory = _CudaMemory(int(ordinal or 0), num_bytes)
    memory.fill(0)
    return memory


class PoolNode(Node):
    """A node with a pool of equal segments.

    Args:
        place: Where the pool is.
        scheme: The transport.

    Raises:
        BackendUnavailableError: the transport cannot work here.
    """

    def __init__(
        self, place: str, scheme: str, segment_bytes: int, num_segments: int = 1, **options: object
    ) -> None:
        transport = create_transport(scheme, options)
        try:
            self.memories = [allocate(place, segment_bytes) for _ in range(num_segments)]
            super().__init__(transport, Pool([memory.segment for memory in self.memories]))
        except BaseException:
            transport.close()
            raise
        self.num_bytes = segment_bytes * num_segments
        transport.guards.set(HELD.index, HELD.value)

    def write(self, values: Bytes) -> None:
        """Overwrite the whole pool."""
        for memory, part in zip(self.memories, np.split(values, len(self.memories)), strict=True):
            memory.write(part)

    def read(self) -> Bytes:
        """Return a copy of the whole pool."""
        return np.concatenate([memory.read(0, memory.segment.num_bytes) for memory in self.memories])

    def start_read(self, peer_id: int, pairs: RegionPairs) -> int:
        """Start a read; returns its id."""
        return self.endpoint.start_read(peer_id, pairs, HELD, timeout_s=DEADLINE_S)

    def close(self) -> None:
        """Close the transport, and free the pool."""
        self.transport.close()
        for memory in self.memories:
            memory.free()
