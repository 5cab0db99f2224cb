"""The baseline: one `memcpy` of the same number of bytes, by one thread, between places that no CPU cache holds."""

from __future__ import annotations

import ctypes
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvferry.transports import RegionPairs

from .contender import Reader, Setup, pool_memory


def own_nothing(setup: Setup, reader: Connection) -> None:
    """Do nothing until the end, because a memcpy needs no owner."""
    reader.send(None)
    reader.recv()


class MemcpyReader(Reader):
    """Copies the bytes of all regions in one run, within its own process."""

    def __init__(self, setup: Setup, address: Any) -> None:
        self.pool = np.frombuffer(pool_memory(setup.pool_bytes), dtype=np.int64)
        self._source = np.frombuffer(pool_memory(setup.pool_bytes), dtype=np.int64)
        self._random = np.random.default_rng(0)

    def read(self, pairs: RegionPairs) -> str:
        num_bytes = pairs.num_bytes
        to, of = self._random.integers(0, self.pool.nbytes - num_bytes + 1, 2).tolist()
        ctypes.memmove(
            self.pool.ctypes.data + (to & ~4095), self._source.ctypes.data + (of & ~4095), num_bytes
        )
        return "memcpy"

    def check(self, pairs: RegionPairs) -> None:
        """Do nothing: no region was read."""

    def close(self) -> None:
        """Do nothing: nothing is open."""
