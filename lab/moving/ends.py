"""kvferry's own transports as contenders."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np

from kvferry.transports import (
    Connected,
    Endpoint,
    Event,
    Guard,
    PeerLost,
    RegionPairs,
    Segment,
    TransferEnded,
)
from kvferry.transports import Pool as TransportPool
from kvferry.transports.errors import TransferTimeoutError
from kvferry.transports.registry import create_transport

from .contender import TIMEOUT_S, Contender, Pool, Reader, Route, Setup, pool_memory
from .gpu_memory import GpuMemory
from .paths import Path

#: What the owner holds for the whole pool.
GUARD = Guard(1, 7)

E = TypeVar("E", bound=Event)


class End:
    """A transport with a registered pool, and its endpoint.

    Attributes:
        pool: The pool; of one on a GPU a copy, which counts only after `store`.
    """

    def __init__(self, path: Path, pool_bytes: int) -> None:
        """Open it.

        Raises:
            KVTransferError: it does not work on this machine; the message says why. Nothing stays open.
        """
        self._gpu: GpuMemory | None = None
        with ExitStack() as opened:
            if path.memory == "gpu":
                self._gpu = GpuMemory(pool_bytes)
                opened.callback(self._gpu.close)
            self.transport = create_transport(path.scheme, path.options)
            opened.callback(self.transport.close)
            if self._gpu is not None:
                segment = self._gpu.segment
                self.pool: Pool = self._gpu.words
            elif path.memory == "arena":
                self._arena = self.transport.allocate(pool_bytes)  # owns the memory that `pool` shows
                segment = self._arena.segment
                words = (ctypes.c_int64 * (pool_bytes // 8)).from_address(segment.address)
                self.pool = np.frombuffer(memoryview(words), dtype=np.int64)
            else:
                self.pool = np.frombuffer(pool_memory(pool_bytes), dtype=np.int64)
                segment = Segment(self.pool.ctypes.data, pool_bytes)
            self.endpoint: Endpoint = self.transport.register(TransportPool([segment]))
            self._opened = opened.pop_all()

    def load(self) -> None:
        """Copy a pool on a GPU into `pool`."""
        if self._gpu is not None:
            self._gpu.load()

    def store(self) -> None:
        """Copy `pool` into a pool on a GPU."""
        if self._gpu is not None:
            self._gpu.store()

    def close(self) -> None:
        """Close the transport, then free the memory."""
        self._opened.close()


class Source(End):
    """An end whose pool holds a pattern: word `i` of the pool is `i`.

    Attributes:
        address: Where readers connect.
    """

    def __init__(self, path: Path, pool_bytes: int) -> None:
        super().__init__(path, pool_bytes)
        try:
            self.pool[:] = np.arange(len(self.pool))
            self.store()
            self.transport.guards.set(GUARD.index, GUARD.value)
            self.address = self.endpoint.listen("")
        except BaseException:
            self.close()
            raise

    def serve_until(self, is_over: Callable[[], bool]) -> None:
        """Serve readers until `is_over` returns True. It is asked several times a second."""
        while not is_over():
            self.endpoint.wait_events(0.05)


def own_path(setup: Setup, reader: Connection) -> None:
    """Serve the path that the setup names."""
    source = Source(setup.options["path"], setup.pool_bytes)
    reader.send(source.address)
    source.serve_until(reader.poll)
    source.close()


class PathReader(Reader):
    """Reads over the path that the setup names."""

    def __init__(self, setup: Setup, address: str) -> None:
        """Open it and connect.

        Raises:
            KVTransferError: the transport does not work here, or does not lead to the source.
        """
        self._end = End(setup.options["path"], setup.pool_bytes)
        self.pool = self._end.pool
        try:
            self.pool[:] = -1  # the first read shall not be the one that touches the pages
            self._end.store()
            began = time.perf_counter()
            self._peer_id = self._end.endpoint.start_connect(address, timeout_s=TIMEOUT_S)
            self._wait(Connected)
            connect_s = time.perf_counter() - began
            route = self._end.endpoint.route_of(self._peer_id)
        except BaseException:
            self.close()
            raise
        self.route = Route(route.scheme, route.reason, connect_s)

    def _wait(self, wanted: type[E]) -> E:
        return wait_for(self._end.endpoint, wanted, TIMEOUT_S + 1)  # the transport's own deadline says more

    def read(self, pairs: RegionPairs) -> str:
        self._end.endpoint.start_read(self._peer_id, pairs, GUARD, timeout_s=TIMEOUT_S)
        ended = self._wait(TransferEnded)
        if ended.error is not None:
            raise ended.error
        return ended.mechanism

    def check(self, pairs: RegionPairs) -> None:
        self._end.load()
        super().check(pairs)
        self._end.store()

    def close(self) -> None:
        self._end.close()


def wait_for(endpoint: Endpoint, wanted: type[E], timeout_s: float) -> E:
    """Wait for an event of some type.

    Raises:
        KVTransferError: the peer was lost, or no such event came in time.
    """
    until = time.monotonic() + timeout_s
    while (left_s := until - time.monotonic()) > 0:
        for event in endpoint.wait_events(left_s):
            if isinstance(event, PeerLost):
                raise event.error
            if isinstance(event, wanted):
                return event
    raise TransferTimeoutError(f"timed out after {timeout_s:g} s waiting for the source; is the network up?")


def contender_of(path: Path) -> Contender:
    """Return the contender that moves bytes over a path."""
    return Contender(path.name, own_path, PathReader, {"path": path})
