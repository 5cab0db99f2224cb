"""Movers: what they copy, when a ticket ends, and what becomes of buffers.

GPUs are a stand-in that poisons its memory.
"""

from __future__ import annotations

import ctypes
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.transports import Pool
from kvferry.transports._memory import private_arena
from kvferry.transports.base import Arena
from kvferry.transports.cuda_mover import CudaMover, PinnedRing
from kvferry.transports.errors import ConfigurationError, TransportError
from kvferry.transports.movers import HostMover, Mover, Ticket
from tests.support.cuda_stand_in import BINDINGS, CudaDriverStandIn, CUresult

POOL_BYTES = 1 << 20
BUFFER_BYTES = 64 << 10
DEADLINE_MS = 10_000


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDriverStandIn]:
    """A stand-in for the driver of a machine with GPUs.

    Everything that a test acquires from it must be released.
    """
    with CudaDriverStandIn(pinned_bytes=8 * BUFFER_BYTES) as stand_in:
        for name in BINDINGS:
            monkeypatch.setitem(sys.modules, name, stand_in)
        yield stand_in
    assert not +stand_in.held
    assert not stand_in.violations


@dataclass
class Rig:
    mover: Any
    arena: Arena

    @property
    def pool(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self.arena.buffer, dtype=np.uint8)

    def addresses(self, offsets: Sequence[int]) -> npt.NDArray[np.uint64]:
        return np.array([self.arena.segment.address + offset for offset in offsets], dtype=np.uint64)

    def gather(self, offsets: Sequence[int], lengths: Sequence[int]) -> tuple[Ticket, Any]:
        buffer = self.mover.gather_ring.take(sum(lengths))
        assert buffer is not None
        return self.mover.start_gather(buffer.address, self.addresses(offsets), np.array(lengths)), buffer

    def scatter(self, data: bytes, offsets: Sequence[int], lengths: Sequence[int]) -> tuple[Ticket, Any]:
        buffer = self.mover.scatter_ring.take(len(data))
        assert buffer is not None
        ctypes.memmove(buffer.address, data, len(data))
        return self.mover.start_scatter(self.addresses(offsets), buffer.address, np.array(lengths)), buffer

    def wait(self, done: Callable[[], bool]) -> None:
        """Poll whenever the descriptor says so, as an endpoint does."""
        ready = select.poll()
        ready.register(self.mover.fileno(), select.POLLIN)
        while not done():
            assert ready.poll(DEADLINE_MS), "the descriptor did not become readable"
            self.mover.poll()


@pytest.fixture
def rig(driver: CudaDriverStandIn) -> Iterator[Rig]:
    """A mover of a pool on a GPU, with two buffers per direction."""
    arena = driver.allocate(POOL_BYTES)
    np.frombuffer(arena.buffer, dtype=np.uint8)[:] = np.arange(POOL_BYTES) % 251
    mover: Any = CudaMover(Pool([arena.segment]), BUFFER_BYTES, 2 * BUFFER_BYTES)
    yield Rig(mover, arena)
    mover.close()
    assert mover.gather_ring.num_free == mover.scatter_ring.num_free == 2, "a buffer was not given back"


def content(buffer: Any, num_bytes: int) -> bytes:
    return ctypes.string_at(buffer.address, num_bytes)


# -- copies ------------------------------------------------------------------------------------------


def test_a_gather_ends_later_and_then_the_bytes_are_there(rig: Rig) -> None:
    ticket, buffer = rig.gather([5000, 100], [3000, 10])
    ended: list[bytes] = []
    ticket.then(lambda: ended.append(content(buffer, 3010)))
    assert not ticket.is_over
    rig.wait(lambda: bool(ended))
    assert ticket.error is None
    assert ended == [rig.pool[5000:8000].tobytes() + rig.pool[100:110].tobytes()]
    rig.mover.gather_ring.give_back(buffer)


def test_a_scatter_ends_after_its_bytes_are_in_the_pool(rig: Rig) -> None:
    ticket, buffer = rig.scatter(b"ab" * 50, [700, 20], [60, 40])
    rig.wait(lambda: ticket.is_over)
    assert rig.pool[700:760].tobytes() + rig.pool[20:60].tobytes() == b"ab" * 50
    rig.mover.scatter_ring.give_back(buffer)


def test_directions_do_not_wait_for_each_other_and_each_keeps_its_order(rig: Rig) -> None:
    order: list[str] = []
    buffers = []
    for index in range(2):
        gather, out = rig.gather([index], [100])
        scatter, back = rig.scatter(b"x" * 100, [500_000 + index], [100])
        gather.then(lambda index=index: order.append(f"gather {index}"))  # type: ignore[misc]
        scatter.then(lambda index=index: order.append(f"scatter {index}"))  # type: ignore[misc]
        buffers.append((out, back))
    rig.wait(lambda: len(order) == 4)
    for kind in ("gather", "scatter"):
        assert [entry for entry in order if entry.startswith(kind)] == [f"{kind} 0", f"{kind} 1"]
    for out, back in buffers:
        rig.mover.gather_ring.give_back(out)
        rig.mover.scatter_ring.give_back(back)


def test_neighbours_are_merged_and_the_rest_is_launched_in_one_call(
    rig: Rig, driver: CudaDriverStandIn
) -> None:
    mover = CudaMover(Pool([rig.arena.segment]), BUFFER_BYTES, BUFFER_BYTES)
    driver.calls.clear()
    other = Rig(mover, rig.arena)
    ticket, buffer = other.gather([0, 100, 200, 4000, 4100, 9000], [100] * 6)
    other.wait(lambda: ticket.is_over)
    assert (driver.calls["cuLaunchKernel"], driver.calls["cuMemcpyAsync"]) == (1, 0)
    assert content(buffer, 300) == rig.pool[:300].tobytes()
    assert content(buffer, 600)[300:] == rig.pool[4000:4200].tobytes() + rig.pool[9000:9100].tobytes()
    mover.gather_ring.give_back(buffer)
    mover.close()


def test_host_memory_is_copied_at_once() -> None:
    arena = private_arena(POOL_BYTES)
    rig = Rig(HostMover(BUFFER_BYTES), arena)
    rig.pool[:] = np.arange(POOL_BYTES) % 251
    ended: list[bytes] = []
    ticket, buffer = rig.gather([10, 5000], [5, 7])
    ticket.then(lambda: ended.append(content(buffer, 12)))
    assert ended == [rig.pool[10:15].tobytes() + rig.pool[5000:5007].tobytes()]
    rig.mover.gather_ring.give_back(buffer)
    ticket, _ = rig.scatter(b"abc", [1, 9], [2, 1])
    assert ticket.is_over
    assert (rig.pool[1:3].tobytes(), rig.pool[9:10].tobytes()) == (b"ab", b"c")
    assert rig.mover.fileno() == -1
    rig.mover.close()


# -- failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["cuCtxPushCurrent", "cuEventCreate", "cuMemcpyAsync", "cuEventRecord", "cuLaunchHostFunc"]
)
def test_a_launch_that_fails_ends_its_ticket_with_the_reason(
    rig: Rig, driver: CudaDriverStandIn, name: str
) -> None:
    driver.failures[name] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    ticket, buffer = rig.gather([0], [100])
    rig.mover.drain()
    assert isinstance(ticket.error, TransportError)
    assert str(ticket.error) == f"{name}: CUDA_ERROR_ILLEGAL_ADDRESS"
    rig.mover.gather_ring.give_back(buffer)
    ticket, buffer = rig.gather([0], [100])
    rig.mover.drain()
    assert ticket.error is None, "the next copy must not be harmed"
    rig.mover.gather_ring.give_back(buffer)


def test_a_launch_that_fails_after_its_copies_were_launched_waits_for_them(
    rig: Rig, driver: CudaDriverStandIn
) -> None:
    driver.failures["cuCtxPopCurrent"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    ticket, buffer = rig.gather([0], [100])
    assert not ticket.is_over, "a copy still writes into the buffer"
    rig.mover.drain()
    assert "cuCtxPopCurrent" in str(ticket.error)
    rig.mover.gather_ring.give_back(buffer)


def test_a_gpu_that_fails_later_ends_its_tickets(rig: Rig, driver: CudaDriverStandIn) -> None:
    ticket, buffer = rig.gather([0], [100])
    driver.failures["cuEventQuery"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    rig.mover.drain()
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(ticket.error)
    rig.mover.gather_ring.give_back(buffer)


def test_closing_waits_for_copies_that_were_launched(rig: Rig, driver: CudaDriverStandIn) -> None:
    mover: Mover = CudaMover(Pool([rig.arena.segment]), BUFFER_BYTES, BUFFER_BYTES)
    ticket, _ = Rig(mover, rig.arena).scatter(b"y" * 100, [0], [100])
    mover.close()  # a violation if memory or streams were given back before
    assert ticket.is_over
    assert rig.pool[:100].tobytes() == b"y" * 100


# -- rings -------------------------------------------------------------------------------------------


def test_a_full_ring_lets_waiters_take_turns(rig: Rig) -> None:
    ring: PinnedRing = rig.mover.gather_ring
    first, second = ring.take(1), ring.take(BUFFER_BYTES)
    assert first is not None
    assert second is not None
    assert ring.take(1) is None
    turns: list[str] = []

    def wait(name: str) -> None:
        def call() -> None:
            buffer = ring.take(1)
            assert buffer is not None
            turns.append(name)
            taken.append(buffer)

        ring.when_free(name, call)

    taken: list[Any] = []
    for name in ("a", "b", "gone", "c", "a"):
        wait(name)
    ring.forget("gone")
    ring.give_back(first)
    assert turns == ["a"]
    ring.give_back(second)
    ring.give_back(taken.pop())
    assert turns == ["a", "b", "c"]
    for buffer in taken:
        ring.give_back(buffer)


def test_a_ring_must_hold_a_slice(rig: Rig) -> None:
    with pytest.raises(ConfigurationError, match="raise staging_bytes or lower slice_bytes") as caught:
        CudaMover(Pool([rig.arena.segment]), BUFFER_BYTES, BUFFER_BYTES - 1)
    assert (caught.value.key, caught.value.value) == ("staging_bytes", BUFFER_BYTES - 1)
    with pytest.raises(ConfigurationError, match="does not fit into a staging buffer"):
        rig.mover.gather_ring.take(BUFFER_BYTES + 1)


def test_memory_that_cannot_be_pinned_is_an_error_with_a_remedy(rig: Rig) -> None:
    with pytest.raises(ConfigurationError, match="CUDA_ERROR_OUT_OF_MEMORY; lower staging_bytes"):
        CudaMover(Pool([rig.arena.segment]), BUFFER_BYTES, 5 * BUFFER_BYTES)
