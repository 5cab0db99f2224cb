"""Contenders: ways to move regions from the pool of one process, the owner, into the pool of another, the reader."""

from __future__ import annotations

import importlib.metadata
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.transports import RegionPairs

#: A step that takes longer than this many seconds has failed.
TIMEOUT_S = 60.0

#: A pool as 8-byte words. In the owner's pool each word holds its own index, so that the reader can check what it read.
Pool = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Setup:
    """Settings for both processes of a contender."""

    pool_bytes: int
    options: Mapping[str, Any] = field(default_factory=dict)


class Reader(ABC):
    """The reader, in its own process.

    Attributes:
        pool: The memory that it reads into.
    """

    pool: Pool

    @abstractmethod
    def read(self, pairs: RegionPairs) -> str:
        """Move the regions. Return the mechanism as soon as all bytes are in place."""

    def check(self, pairs: RegionPairs) -> None:
        """Check the first and last word of every region that was read, then overwrite them for the next check.

        Raises:
            ValueError: a word is wrong.
        """
        local, remote, lengths = pairs.table.T // 8
        for at in (np.zeros_like(lengths), lengths - 1):
            if not np.array_equal(self.pool[local + at], remote + at):
                raise ValueError("wrong bytes")
            self.pool[local + at] = -1

    @abstractmethod
    def close(self) -> None: ...


#: Runs in the owner's process: fills the pool, sends its address over the connection, serves until something arrives there.
Owner = Callable[[Setup, Connection], None]


@dataclass(frozen=True)
class Contender:
    """A way to move regions.

    Attributes:
        reader: Makes the reader, in its process, from the setup and the address that the owner sent.
        distribution: Name of the distribution that must be installed; empty if none.
        environment: Environment variables of both processes.
        twin: The contender whose speed it is compared with; empty if none.
    """

    name: str
    owner: Owner
    reader: Callable[[Setup, Any], Reader]
    options: Mapping[str, Any] = field(default_factory=dict)
    distribution: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    twin: str = ""

    @property
    def version(self) -> str:
        """Version of the distribution; empty if none is needed.

        Raises:
            PackageNotFoundError: it is not installed.
        """
        return importlib.metadata.version(self.distribution) if self.distribution else ""


def pool_memory(num_bytes: int) -> mmap.mmap:
    """Allocate ordinary memory, on huge pages if the kernel has them, for contenders that do not allocate their own."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, dtype=np.int64)[:] = -1
    return memory
