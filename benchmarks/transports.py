"""How fast a transport moves KV blocks between two processes, against memcpy in the same run.

    python benchmarks/transports.py [--transport shm] [--options JSON] [--rounds N] [--json FILE]

Each round picks other blocks, at random at both ends, out of pools much larger than any cache. Each transfer is
timed by itself, from `start_read` to its event, next to one memcpy (a single thread, one call, as many bytes,
uncached); what counts is the ratio of the two, and of the ratios the median.

A transfer needs a second thread to be scheduled, a memcpy does not: on a machine with more to do than cores, the
small transfers measure the scheduler. The load is printed.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvferry.transports import Connected, Guard, PeerLost, Pool, RegionPairs, TransferEnded, Transport
from kvferry.transports._copy import IS_COMPILED
from kvferry.transports.registry import available_transports, create_transport

POOL_BYTES = 512 << 20
HELD = Guard(index=0, value=1)
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Shape:
    """Some blocks of a model in one layout."""

    model: str
    layout: str
    num_layers: int
    page_bytes: int
    num_blocks: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.num_layers * self.page_bytes

    def pairs(self, random: np.random.Generator) -> RegionPairs:
        """Other blocks each time, scattered at both ends."""
        block_bytes = self.num_layers * self.page_bytes
        capacity = POOL_BYTES // block_bytes
        ends = [random.permutation(capacity)[: self.num_blocks] for _ in range(2)]
        if self.layout == "uniform":
            offsets = [end * block_bytes for end in ends]
            lengths = np.full(self.num_blocks, block_bytes)
        else:  # each layer has a pool of its own
            layers = np.arange(self.num_layers)[:, None] * capacity * self.page_bytes
            offsets = [(layers + end[None, :] * self.page_bytes).ravel() for end in ends]
            lengths = np.full(self.num_layers * self.num_blocks, self.page_bytes)
        return RegionPairs(np.stack([*offsets, lengths], axis=1).astype(np.int64))


def shapes_of(model: str, num_layers: int, page_bytes: int) -> list[Shape]:
    return [
        Shape(model, layout, num_layers, page_bytes, num_blocks)
        for num_blocks in (64, 1)
        for layout in ("per-layer", "uniform")
    ]


SHAPES = [*shapes_of("llama-8b", 32, 64 << 10), *shapes_of("smollm2-135m", 30, 12 << 10)]


@dataclass(frozen=True)
class Sample:
    """One transfer and the memcpy beside it."""

    transfer_s: float
    memcpy_s: float
    cpu_s: float
    mechanism: str


@dataclass(frozen=True)
class Result:
    """The medians of one shape."""

    model: str
    layout: str
    num_blocks: int
    num_regions: int
    num_bytes: int
    ratio_to_memcpy: float
    ratio_quartiles: tuple[float, float]
    transfer_gb_per_s: float
    memcpy_gb_per_s: float
    transfer_p50_ms: float
    reader_cpu_s_per_gb: float
    mechanism: str


# -- the two processes -------------------------------------------------------------------------------


def open_transport(scheme: str, options: dict[str, object]) -> tuple[Transport, object]:
    """A transport with a registered pool of `POOL_BYTES`, and what keeps the pool alive."""
    transport = create_transport(scheme, options)
    arena = transport.allocate(POOL_BYTES)
    np.frombuffer(arena.buffer, dtype=np.uint8)[:] = 1
    transport.register(Pool([arena.segment]))
    transport.guards.set(HELD.index, HELD.value)
    return transport, arena


def serve(scheme: str, options: dict[str, object]) -> None:
    """The producer's process: say the address, then serve until the reader is gone."""
    transport, _arena = open_transport(scheme, options)
    print(transport.listen(""), flush=True)
    while not any(isinstance(event, PeerLost) for event in transport.wait_events(DEADLINE_S)):
        pass
    transport.close()


@contextmanager
def producer(scheme: str, options: dict[str, object]) -> Iterator[str]:
    """Start the producer's process; yields its address."""
    command = [sys.executable, __file__, "--serve", "--transport", scheme, "--options", json.dumps(options)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def connect(transport: Transport, address: str) -> int:
    peer_id = transport.start_connect(address, timeout_s=DEADLINE_S)
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for event in transport.wait_events(1.0):
            if isinstance(event, PeerLost):
                raise event.error
            if isinstance(event, Connected):
                return peer_id
    raise TimeoutError(f"no connection to {address}")


# -- measuring ---------------------------------------------------------------------------------------


def memcpy_s(num_bytes: int, buffers: tuple[np.ndarray, np.ndarray], random: np.random.Generator) -> float:
    """Time one memcpy between places that were not touched lately."""
    at = [int(random.integers(0, POOL_BYTES - num_bytes)) & ~4095 for _ in buffers]
    dst, src = (buffer.ctypes.data + offset for buffer, offset in zip(buffers, at, strict=True))
    began = time.perf_counter()
    ctypes.memmove(dst, src, num_bytes)
    return time.perf_counter() - began


def transfer(transport: Transport, peer_id: int, pairs: RegionPairs) -> tuple[float, float, str]:
    """Time one read, from the call to its event; also the processor time of this process."""
    began, cpu_began = time.perf_counter(), time.process_time()
    transport.start_read(peer_id, pairs, HELD, timeout_s=DEADLINE_S)
    while True:
        for event in transport.wait_events(DEADLINE_S):
            if isinstance(event, TransferEnded):
                if event.error is not None:
                    raise event.error
                return time.perf_counter() - began, time.process_time() - cpu_began, event.mechanism


def measure(transport: Transport, peer_id: int, num_rounds: int) -> list[Result]:
    """All shapes, each once a round, so that what disturbs the machine disturbs all of them."""
    random = np.random.default_rng(0)
    buffers = (np.ones(POOL_BYTES, dtype=np.uint8), np.ones(POOL_BYTES, dtype=np.uint8))
    samples: dict[Shape, list[Sample]] = {shape: [] for shape in SHAPES}
    for number in range(num_rounds + 1):
        for shape in SHAPES:
            copied = memcpy_s(shape.num_bytes, buffers, random)
            moved, cpu, mechanism = transfer(transport, peer_id, shape.pairs(random))
            if number:  # the first round only warms up
                samples[shape].append(Sample(moved, copied, cpu, mechanism))
    return [summary(shape, found) for shape, found in samples.items()]


def summary(shape: Shape, samples: list[Sample]) -> Result:
    ratios = [sample.memcpy_s / sample.transfer_s for sample in samples]
    low, middle, high = statistics.quantiles(ratios, n=4)
    transfer_s = statistics.median(sample.transfer_s for sample in samples)
    return Result(
        model=shape.model,
        layout=shape.layout,
        num_blocks=shape.num_blocks,
        num_regions=shape.num_blocks * (1 if shape.layout == "uniform" else shape.num_layers),
        num_bytes=shape.num_bytes,
        ratio_to_memcpy=middle,
        ratio_quartiles=(low, high),
        transfer_gb_per_s=shape.num_bytes / transfer_s / 1e9,
        memcpy_gb_per_s=shape.num_bytes / statistics.median(sample.memcpy_s for sample in samples) / 1e9,
        transfer_p50_ms=transfer_s * 1e3,
        reader_cpu_s_per_gb=statistics.median(sample.cpu_s for sample in samples) / shape.num_bytes * 1e9,
        mechanism=samples[0].mechanism,
    )


# -- saying it ---------------------------------------------------------------------------------------


def machine() -> dict[str, object]:
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    huge = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return {
        "processor": cpu[0].partition(": ")[2] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "kernel": platform.release(),
        "shmem_huge_pages": huge.read_text().strip() if huge.exists() else "unknown",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "kvferry": importlib.metadata.version("kvferry"),
        "copy_loop": "compiled" if IS_COMPILED else "python",
    }


def print_table(results: list[Result]) -> None:
    head = (
        f"{'model':14}{'blocks':>7} {'layout':10}{'regions':>8}{'MiB':>8}{'x memcpy':>10}  {'(quartiles)':14}"
    )
    print(f"{head}{'GB/s':>7}{'memcpy':>8}{'p50 ms':>9}{'CPU s/GB':>10}  mechanism")
    for r in results:
        quartiles = f"({r.ratio_quartiles[0]:.2f}-{r.ratio_quartiles[1]:.2f})"
        print(
            f"{r.model:14}{r.num_blocks:>7} {r.layout:10}{r.num_regions:>8}{r.num_bytes / 2**20:>8.1f}"
            f"{r.ratio_to_memcpy:>10.2f}  {quartiles:14}{r.transfer_gb_per_s:>7.1f}{r.memcpy_gb_per_s:>8.1f}"
            f"{r.transfer_p50_ms:>9.2f}{r.reader_cpu_s_per_gb:>10.2f}  {r.mechanism}"
        )


def parse_arguments() -> argparse.Namespace:
    across_processes = [scheme for scheme in available_transports() if scheme != "inproc"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", choices=across_processes, default="shm")
    parser.add_argument("--options", type=json.loads, default={}, help="the transport's options, as JSON")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds: medians need at least 2")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.serve:
        serve(arguments.transport, arguments.options)
        return
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    print(f"transport {arguments.transport} {arguments.options or ''}, {arguments.rounds} rounds")
    transport, _arena = open_transport(arguments.transport, arguments.options)
    with producer(arguments.transport, arguments.options) as address:
        try:
            results = measure(transport, connect(transport, address), arguments.rounds)
        finally:
            transport.close()
    print_table(results)
    if arguments.json:
        record = {
            "machine": machine(),
            "transport": arguments.transport,
            "options": arguments.options,
            "rounds": arguments.rounds,
            "results": [asdict(result) for result in results],
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
