"""What a contender is: a way to move regions from the pool of one process, the owner, into another's, the reader's."""

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

#: What takes longer has failed.
TIMEOUT_S = 60.0

#: A pool as 8-byte words. In the owner's each word holds its own index, so that the reader can tell what it read.
Pool = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Setup:
    """What both processes of a contender are started with."""

    pool_bytes: int
    options: Mapping[str, Any] = field(default_factory=dict)


class Reader(ABC):
    """The reading end, in its own process.

    Attributes:
        pool: Where it reads into.
    """

    pool: Pool

    @abstractmethod
    def read(self, pairs: RegionPairs) -> str:
        """Move the regions; returns when they are in place, with what moved them."""

    def check(self, pairs: RegionPairs) -> None:
        """Look at both ends of every region that was read; then forget them, so that the next read is seen as well.

        Raises:
            ValueError: other bytes are there.
        """
        local, remote, lengths = pairs.table.T // 8
        for at in (np.zeros_like(lengths), lengths - 1):
            if not np.array_equal(self.pool[local + at], remote + at):
                raise ValueError("wrong bytes")
            self.pool[local + at] = -1

    @abstractmethod
    def close(self) -> None: ...


#: Runs in the owner's process: fill the pool, say the address over the connection, serve until something comes over it.
Owner = Callable[[Setup, Connection], None]


@dataclass(frozen=True)
class Contender:
    """One of those that are compared.

    Attributes:
        reader: Made in the reader's process, of the setup and of the address that the owner said.
        distribution: What has to be installed, by its name in the registry; empty if nothing.
        environment: Variables that both processes are started with.
    """

    name: str
    owner: Owner
    reader: Callable[[Setup, Any], Reader]
    options: Mapping[str, Any] = field(default_factory=dict)
    distribution: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """Of the distribution; empty if it needs none.

        Raises:
            PackageNotFoundError: it is not installed.
        """
        return importlib.metadata.version(self.distribution) if self.distribution else ""


def pool_memory(num_bytes: int) -> mmap.mmap:
    """Ordinary memory on huge pages where the kernel gives them: what every contender has that brings none."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, dtype=np.int64)[:] = -1
    return memory
