"""Ways to move many small pages between a GPU and pinned memory: one copy per page, one batch, or one copy of a buffer
on the GPU into which a kernel gathers the pages first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvferry.transports.cuda_mover import CudaMover
from kvferry.transports.regions import Pool
from tests.support.gpu_memory import allocate, stand_in_driver

from .gpu import wait_for

#: Bytes of one slice: what a staging buffer holds.
SLICE_BYTES = 2 << 20
PAGE_SIZES = (16 << 10, 32 << 10, 64 << 10)
_NUM_WARM_UPS = 3


@dataclass(frozen=True)
class Row:
    """The time of one slice: until its bytes have arrived, and of that the part that the CPU spent launching."""

    direction: str
    page_bytes: int
    way: str
    is_busy: bool
    seconds: float
    launch_seconds: float


#: Launches copies and returns what waits for their end.
Launch = Callable[[], Callable[[], None]]


def measure_gathers(place: str, pool_bytes: int, num_repeats: int) -> Iterator[Row]:
    """Measure all ways, on a GPU that is idle and on one that computes."""
    device = torch.device(place if place.startswith("cuda") else "cpu")
    with stand_in_driver() if place == "stand-in" else nullcontext():
        for is_busy in (False, True) if device.type == "cuda" else (False,):
            for page_bytes in PAGE_SIZES:
                for direction in ("from the GPU", "to the GPU"):
                    for way, launch, close in _ways(place, device, pool_bytes, page_bytes, direction):
                        work = _Kernels(device) if is_busy else None
                        try:
                            yield _measure(direction, page_bytes, way, launch, work, num_repeats)
                        finally:
                            close()


def _measure(
    direction: str, page_bytes: int, way: str, launch: Launch, work: _Kernels | None, num_repeats: int
) -> Row:
    times, launches = [], []
    for index in range(_NUM_WARM_UPS + num_repeats):
        if work is not None:
            work.launch()
        began = time.perf_counter()
        wait = launch()
        launched = time.perf_counter()
        wait()
        if index >= _NUM_WARM_UPS:
            times.append(time.perf_counter() - began)
            launches.append(launched - began)
        if work is not None:
            work.wait()
    return Row(
        direction, page_bytes, way, work is not None, statistics.median(times), statistics.median(launches)
    )


class _Kernels:
    """Matrix products on a stream of their own, for longer than a slice takes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._matrix = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def launch(self) -> None:
        with torch.cuda.stream(self._stream):
            for _ in range(4):
                torch.matmul(self._matrix, self._matrix)

    def wait(self) -> None:
        self._stream.synchronize()


def _ways(
    place: str, device: torch.device, pool_bytes: int, page_bytes: int, direction: str
) -> Iterator[tuple[str, Launch, Callable[[], None]]]:
    """Yield each way: its name, what launches it, and what closes it."""
    random = np.random.default_rng(1)
    pages = random.permutation(pool_bytes // page_bytes)[: SLICE_BYTES // page_bytes]
    lengths = np.full(len(pages), page_bytes, dtype=np.int64)
    for way in ("one copy per page", "one batch of copies", "one run (no gather)"):
        memory = allocate(place, pool_bytes)
        mover = CudaMover(Pool([memory.segment]), SLICE_BYTES, SLICE_BYTES)
        if way == "one copy per page":
            for lane in (mover._gathers, mover._scatters):
                lane._copy = _copy_each(lane._driver)
        at = np.arange(len(pages)) if way.startswith("one run") else pages
        addresses = (at * page_bytes + memory.segment.address).astype(np.uint64)
        yield way, _by_mover(mover, addresses, lengths, direction), _closer(mover, memory)
    pool = torch.zeros(pool_bytes // page_bytes, page_bytes, dtype=torch.uint8, device=device)
    index = torch.from_numpy(pages).to(device)
    yield "gathered by a kernel, one copy", _by_kernel(pool, index, direction), lambda: None


def _closer(mover: CudaMover, memory: Any) -> Callable[[], None]:
    def close() -> None:
        mover.close()
        memory.free()

    return close


def _copy_each(driver: Any) -> Any:
    def copy(stream: Any, targets: Any, sources: Any, lengths: Any) -> None:
        rows = zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True)
        for target, source, num_bytes in rows:
            driver.call("cuMemcpyAsync", target, source, num_bytes, stream)

    return copy


def _by_mover(mover: CudaMover, addresses: Any, lengths: Any, direction: str) -> Launch:
    ring = mover.gather_ring if direction.startswith("from") else mover.scatter_ring
    buffer = ring.take(SLICE_BYTES)
    assert buffer is not None

    def launch() -> Callable[[], None]:
        if direction.startswith("from"):
            ticket = mover.start_gather(buffer.address, addresses, lengths)
        else:
            ticket = mover.start_scatter(addresses, buffer.address, lengths)
        return lambda: wait_for(mover, ticket)

    return launch


def _by_kernel(pool: torch.Tensor, index: torch.Tensor, direction: str) -> Launch:
    is_cuda = pool.device.type == "cuda"
    shape = (len(index), pool.shape[1])
    staging = torch.zeros(shape, dtype=torch.uint8, device=pool.device)
    pinned = torch.zeros(shape, dtype=torch.uint8, pin_memory=is_cuda)
    stream = torch.cuda.Stream(pool.device) if is_cuda else None

    def copy() -> None:
        if direction.startswith("from"):
            torch.index_select(pool, 0, index, out=staging)
            pinned.copy_(staging, non_blocking=True)
        else:
            staging.copy_(pinned, non_blocking=True)
            pool.index_copy_(0, index, staging)

    if stream is not None:
        torch.cuda.synchronize(pool.device)  # the tensors were filled on another stream

    def launch() -> Callable[[], None]:
        if stream is None:
            copy()
            return lambda: None
        with torch.cuda.stream(stream):
            copy()
        return stream.synchronize

    return launch


def table_of_gathers(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| direction | page | GPU | way | µs per slice | GB/s | µs of CPU to launch |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        yield (
            f"| {row.direction} | {row.page_bytes >> 10} KiB | {'computes' if row.is_busy else 'idle'} | {row.way} "
            f"| {row.seconds * 1e6:.0f} | {SLICE_BYTES / row.seconds / 1e9:.1f} | {row.launch_seconds * 1e6:.0f} |"
        )
