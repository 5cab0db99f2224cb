"""The paths that bytes can take between two processes, and how fast they are here.

A *path* is a transport with options. A *source* owns a pool and serves it; a *reader* reads from it and checks what
arrived. Both run in processes of their own, because a library of the network that fails may abort its process. The source
may also be `kvferry doctor --listen` on another host (`remote`).
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Final, Literal, TypeVar

import numpy as np

from kvferry.transports import (
    Connected,
    Endpoint,
    Event,
    Guard,
    PeerLost,
    Pool,
    RegionPairs,
    Segment,
    TransferEnded,
)
from kvferry.transports.auto.address import AutoAddress
from kvferry.transports.errors import BackendUnavailableError, KVTransferError, TransferTimeoutError
from kvferry.transports.registry import create_transport

from .gpu_memory import GpuMemory, Words
from .path_table import PATHS, Path

#: Longest time in seconds in which a peer connects, or a read ends.
TIMEOUT_S: Final = 10.0

#: Longest time in seconds in which a process imports a transport and opens it.
_OPEN_TIMEOUT_S: Final = 60.0

_GUARD: Final = Guard(1, 7)
_PR_SET_PDEATHSIG: Final = 1

E = TypeVar("E", bound=Event)

_spawning = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Shape:
    """What one read moves: regions of equal length, scattered over both pools."""

    num_regions: int
    region_bytes: int

    @property
    def num_bytes(self) -> int:
        """Size of the read."""
        return self.num_regions * self.region_bytes

    def __str__(self) -> str:
        whole, unit = (
            (self.region_bytes >> 20, "MiB")
            if self.region_bytes >= 1 << 20
            else (self.region_bytes >> 10, "KiB")
        )
        return f"{self.num_regions} x {whole} {unit}"

    def pairs(self, pool_bytes: int, random: np.random.Generator) -> RegionPairs:
        """Choose other regions of two pools of `pool_bytes` bytes each time."""
        capacity = pool_bytes // self.region_bytes
        table = np.empty((self.num_regions, 3), dtype=np.int64)
        for side in (0, 1):
            table[:, side] = random.permutation(capacity)[: self.num_regions] * self.region_bytes
        table[:, 2] = self.region_bytes
        return RegionPairs(table)


@dataclass(frozen=True)
class Speed:
    """How long one shape took: medians in seconds, and that of a memcpy of as many bytes in the pauses between."""

    shape: str
    num_bytes: int
    num_reads: int
    seconds: float
    memcpy_seconds: float

    def to_json(self) -> dict[str, object]:
        """The figures for programs, with units in the names."""
        return {
            "shape": self.shape,
            "num_bytes": self.num_bytes,
            "num_reads": self.num_reads,
            "microseconds": round(self.seconds * 1e6, 1),
            "gb_per_s": round(self.num_bytes / self.seconds / 1e9, 3),
            "memcpy_gb_per_s": round(self.num_bytes / self.memcpy_seconds / 1e9, 3),
            "of_memcpy": round(self.memcpy_seconds / self.seconds, 3),
        }


#: `ok`: bytes arrived, and were right. `missing`: it needs what this machine lacks. `skipped`: it cannot lead to this peer.
Status = Literal["ok", "missing", "failed", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """What came of one path.

    Attributes:
        transport: The transport that served the peer; differs from the path's if that chooses.
        mechanism: What moved the bytes, e.g. `"mapped"`.
        reason: Why that transport, or why it did not work.
        connect_s: From the call to the end of the handshake.
    """

    path: str
    status: Status
    transport: str = ""
    mechanism: str = ""
    reason: str = ""
    connect_s: float = 0.0
    speeds: tuple[Speed, ...] = ()

    def to_json(self) -> dict[str, object]:
        """The figures for programs."""
        return {
            "path": self.path,
            "status": self.status,
            "transport": self.transport,
            "mechanism": self.mechanism,
            "reason": self.reason,
            "connect_ms": round(self.connect_s * 1e3, 3),
            "speeds": [speed.to_json() for speed in self.speeds],
        }


def outcome_of(path: str, error: Exception) -> Outcome:
    """The outcome of a path that does not work."""
    text = str(error) if isinstance(error, KVTransferError) else f"{type(error).__name__}: {error}"
    return Outcome(path, "missing" if isinstance(error, BackendUnavailableError) else "failed", reason=text)


# == which paths there are =========================================================================


def towards(path: Path, address: str) -> Path:
    """Return the path with the network transports of an `auto` address, since both sides must have the same.

    Raises:
        ConfigurationError: the address is of `auto`, and malformed.
    """
    if path.scheme != "auto":
        return path
    names = [network.partition(":")[0] for network in AutoAddress.parse(address).networks]
    options: dict[str, object] = {name: PATHS[name].options for name in names if name in PATHS}
    if len(names) == 1:
        options = {"network_options": options[names[0]]} if options else {}
    else:
        options = {"network_options": options}
    return replace(path, options={"network": ",".join(names), **options})


def at_host(path: Path, host: str, port_range: str = "") -> Path:
    """Return the path with a listener at `host`, an IP address of this machine, and on one of some ports."""
    if path.scheme == "shm":
        return path
    where = {"bind_host": host, **({"port_range": port_range} if port_range else {})}
    if path.scheme == "auto":
        inner = path.options.get("network_options", {})
        if not isinstance(inner, Mapping):
            return path  # the transport refuses it, and says why
        return replace(path, options={**path.options, "network_options": {**where, **inner}})
    return replace(path, options={**where, **path.options})


# == one end =======================================================================================


class HostMemory:
    """A run of main memory as 8-byte words.

    Attributes:
        segment: The memory, for a pool.
    """

    def __init__(self, segment: Segment, owner: object) -> None:
        """Wrap memory that lives as long as `owner`."""
        self.segment = segment
        self._owner = owner
        words = (ctypes.c_int64 * (segment.num_bytes // 8)).from_address(segment.address)
        self._words: Words = np.frombuffer(memoryview(words), dtype=np.int64)

    def load(self) -> Words:
        """Return the words themselves."""
        return self._words

    def store(self, words: Words) -> None:
        """Do nothing: `load` returned the memory itself."""

    def close(self) -> None:
        """Do nothing: the owner frees the memory."""


class End:
    """A transport with a registered pool, and its endpoint."""

    def __init__(self, path: Path, pool_bytes: int) -> None:
        """Open it.

        Raises:
            KVTransferError: it does not work on this machine; the message says why. Nothing stays open.
        """
        with ExitStack() as opened:
            if path.memory == "gpu":
                self.memory: HostMemory | GpuMemory = GpuMemory(pool_bytes)
                opened.callback(self.memory.close)
            self.transport = create_transport(path.scheme, path.options)
            opened.callback(self.transport.close)
            if path.memory == "arena":
                arena = self.transport.allocate(pool_bytes)
                self.memory = HostMemory(arena.segment, arena)
            elif path.memory == "ordinary":
                private = _private_memory(pool_bytes)
                address = np.frombuffer(private, dtype=np.int64).ctypes.data
                self.memory = HostMemory(Segment(address, pool_bytes), private)
            self.endpoint: Endpoint = self.transport.register(Pool([self.memory.segment]))
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Close the transport, then free the memory."""
        self._opened.close()


def _private_memory(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, dtype=np.int64)[:] = 0
    return memory


class Source(End):
    """An end whose pool holds a pattern: word `i` of the pool is `i`.

    Attributes:
        address: Where readers connect.
    """

    def __init__(self, path: Path, pool_bytes: int) -> None:
        super().__init__(path, pool_bytes)
        try:
            words = self.memory.load()
            words[:] = np.arange(len(words))
            self.memory.store(words)
            self.transport.guards.set(_GUARD.index, _GUARD.value)
            self.address = self.endpoint.listen("")
        except BaseException:
            self.close()
            raise

    def serve_until(self, is_over: Callable[[], bool]) -> None:
        """Serve readers until `is_over` returns True. It is asked several times a second."""
        while not is_over():
            self.endpoint.wait_events(0.05)


class Reader(End):
    """An end that is connected to a source."""

    def __init__(self, path: Path, pool_bytes: int, address: str) -> None:
        """Open it and connect.

        Raises:
            KVTransferError: the transport does not work here, or does not lead to the source.
        """
        super().__init__(path, pool_bytes)
        try:
            began = time.perf_counter()
            self._peer_id = self.endpoint.start_connect(address, timeout_s=TIMEOUT_S)
            self._wait(Connected)
            self.connect_s = time.perf_counter() - began
        except BaseException:
            self.close()
            raise
        self.route = self.endpoint.route_of(self._peer_id)

    def _wait(self, wanted: type[E]) -> E:
        """Wait for the next event.

        Raises:
            KVTransferError: the peer was lost, or nothing happened in time.
        """
        until = time.monotonic() + TIMEOUT_S + 1  # the transport's own deadline comes first, and says more
        while (left_s := until - time.monotonic()) > 0:
            for event in self.endpoint.wait_events(left_s):
                if isinstance(event, PeerLost):
                    raise event.error
                if isinstance(event, wanted):
                    return event
        raise TransferTimeoutError(
            f"timed out after {TIMEOUT_S:g} s waiting for the source; is the network up?"
        )

    def read(self, pairs: RegionPairs) -> str:
        """Read regions; return the mechanism. Raises KVTransferError: the read failed."""
        self.endpoint.start_read(self._peer_id, pairs, _GUARD, timeout_s=TIMEOUT_S)
        ended = self._wait(TransferEnded)
        if ended.error is not None:
            raise ended.error
        return ended.mechanism

    def check(self, pairs: RegionPairs) -> None:
        """Check the first and last word of each region that was read, then overwrite them.

        Raises:
            ValueError: a word is wrong.
        """
        local, remote, lengths = pairs.table.T // 8
        words = self.memory.load()
        for at in (np.zeros_like(lengths), lengths - 1):
            if not np.array_equal(words[local + at], remote + at):
                raise ValueError("the bytes that arrived are not those that were sent")
            words[local + at] = -1
        self.memory.store(words)

    def measure(self, shape: Shape, pool_bytes: int, seconds: float) -> tuple[Speed, str]:
        """Read the shape again and again for some seconds, with a memcpy in main memory after each; return the mechanism too."""
        random = np.random.default_rng(0)
        source, target = _private_memory(pool_bytes), self.memory.load()
        source_address = np.frombuffer(source, dtype=np.int64).ctypes.data
        reads: list[float] = []
        copies: list[float] = []
        until = time.perf_counter() + seconds
        while len(reads) < 3 or time.perf_counter() < until:
            pairs = shape.pairs(pool_bytes, random)
            began = time.perf_counter()
            mechanism = self.read(pairs)
            reads.append(time.perf_counter() - began)
            self.check(pairs)
            to, of = (random.integers(0, pool_bytes - shape.num_bytes + 1, 2) & ~4095).tolist()
            began = time.perf_counter()
            ctypes.memmove(target.ctypes.data + to, source_address + of, shape.num_bytes)
            copies.append(time.perf_counter() - began)
        # The first ones touch pages and open connections for the first time.
        speed = Speed(
            str(shape),
            shape.num_bytes,
            len(reads),
            statistics.median(reads[1:]),
            statistics.median(copies[1:]),
        )
        return speed, mechanism


@dataclass(frozen=True)
class Job:
    """What a reader is asked to do."""

    path: Path
    address: str
    pool_bytes: int
    shapes: tuple[Shape, ...]
    seconds: float


def do(job: Job) -> Outcome:
    """Connect to a source and measure; every failure becomes an outcome."""
    try:
        reader = Reader(job.path, job.pool_bytes, job.address)
        try:
            speeds, mechanism = [], ""
            for shape in job.shapes:
                speed, mechanism = reader.measure(
                    shape, job.pool_bytes, job.seconds / max(1, len(job.shapes))
                )
                speeds.append(speed)
            route = reader.route
            return Outcome(
                job.path.name, "ok", route.scheme, mechanism, route.reason, reader.connect_s, tuple(speeds)
            )
        finally:
            reader.close()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome of this path
        return outcome_of(job.path.name, error)


# == the processes =================================================================================


class ProcessEndedError(Exception):
    """A process of ours ended, or did not answer; the message says how."""


class Child:
    """A process that answers one question at a time."""

    def __init__(self, work: Callable[[Connection], None]) -> None:
        self._connection, theirs = _spawning.Pipe()
        self._process: SpawnProcess = _spawning.Process(target=_run, args=(work, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, question: object, timeout_s: float) -> Any:
        """Send a question and return the answer.

        Raises:
            ProcessEndedError: there was none in time, or the process ended. It does not run any more.
        """
        try:
            self._connection.send(question)
            if self._connection.poll(timeout_s):
                return self._connection.recv()
            reason = f"no answer within {timeout_s:g} s"
        except (OSError, EOFError):
            self._process.join(5)
            code = self._process.exitcode or 0
            reason = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        self.close()
        raise ProcessEndedError(f"the process that tried it failed: {reason}")

    def close(self) -> None:
        """End the process. A second call does nothing."""
        if self._connection.closed:
            return
        with suppress(OSError):
            self._connection.send(None)
        self._process.join(2)
        self._process.kill()
        self._process.join()
        self._process.close()
        self._connection.close()


def _run(work: Callable[[Connection], None], parent: Connection) -> None:
    """Be a child: end with the parent, and print nothing, since libraries write to our terminal."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable()
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(silence, stream.fileno())
    with suppress(EOFError, OSError):
        work(parent)


def _be_source(parent: Connection) -> None:
    question = parent.recv()
    while question is not None:
        try:
            source = Source(*question)
        except Exception as error:  # noqa: BLE001 - the parent reports it
            parent.send(outcome_of(question[0].name, error))
            question = parent.recv()
            continue
        parent.send(source.address)
        source.serve_until(parent.poll)
        source.close()
        question = parent.recv()


def _be_reader(parent: Connection) -> None:
    while (job := parent.recv()) is not None:
        parent.send(do(job))


class Readers:
    """A process that reads, started again if a path has ended it."""

    def __init__(self) -> None:
        self._child = Child(_be_reader)

    def do(self, job: Job) -> Outcome:
        """Do a job; every failure becomes an outcome."""
        try:
            outcome: Outcome = self._child.ask(job, _OPEN_TIMEOUT_S + job.seconds)
            return outcome
        except ProcessEndedError as error:
            self._child = Child(_be_reader)
            return Outcome(job.path.name, "failed", reason=str(error))

    def close(self) -> None:
        """End the process."""
        self._child.close()


class LocalPaths:
    """Measures paths between two processes of this machine."""

    def __init__(self) -> None:
        self._source = Child(_be_source)
        self._readers = Readers()

    def measure(self, path: Path, shapes: Sequence[Shape], pool_bytes: int, seconds: float) -> Outcome:
        """Measure one path; every failure becomes an outcome."""
        try:
            answer = self._source.ask((path, pool_bytes), _OPEN_TIMEOUT_S)
        except ProcessEndedError as error:
            self._source = Child(_be_source)
            return Outcome(path.name, "failed", reason=str(error))
        if isinstance(answer, Outcome):
            return answer
        return self._readers.do(Job(path, answer, pool_bytes, tuple(shapes), seconds))

    def close(self) -> None:
        """End both processes."""
        self._readers.close()
        self._source.close()
