"""Contenders: ways to move regions from the pool of one process, the owner, into the pool of another, the
reader.
"""

from __future__ import annotations

import importlib.metadata
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvferry.transports import RegionPairs
from kvferry.transports.errors import BackendUnavailableError, KVTransferError

#: Longest time in seconds in which a peer connects, or a read ends.
TIMEOUT_S: Final = 10.0

#: A pool as 8-byte words. In the owner's pool each word holds its own index, so that the reader can check
#: what it read.
Pool = npt.NDArray[np.int64]


class FailedError(Exception):
    """A contender could not be started, or failed. The others continue without it.

    Attributes:
        is_missing: It needs something that this machine does not have.
    """

    def __init__(self, reason: str, is_missing: bool = False) -> None:
        super().__init__(reason, is_missing)
        self.is_missing = is_missing

    def __str__(self) -> str:
        return str(self.args[0])

    @classmethod
    def of(cls, error: Exception) -> FailedError:
        """Say what an exception means for the contender.

        Unlike some exceptions, the result can be pickled.
        """
        if isinstance(error, FailedError):
            return error
        text = str(error) if isinstance(error, KVTransferError) else f"{type(error).__name__}: {error}"
        return cls(text, isinstance(error, BackendUnavailableError))


@dataclass(frozen=True)
class Setup:
    """Settings for both processes of a contender."""

    pool_bytes: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Route:
    """How a reader reached its owner.

    Attributes:
        transport: The transport that serves the owner; differs from the path's if that chooses.
        reason: Why that transport.
        connect_s: Time from the call to the end of the handshake.
    """

    transport: str = ""
    reason: str = ""
    connect_s: float = 0.0


class Reader(ABC):
    """The reader, in its own process.

    Attributes:
        pool: The memory that it reads into.
        route: How it reached the owner.
    """

    pool: Pool
    route: Route = Route()

    @abstractmethod
    def read(self, pairs: RegionPairs) -> str:
        """Move the regions. Return the mechanism as soon as all bytes are in place."""

    def check(self, pairs: RegionPairs) -> None:
        """Check the first and last word of every region that was read, then overwrite them for the next
        check.

        Raises:
            ValueError: a word is wrong.
        """
        local, remote, lengths = pairs.table.T // 8
        for at in (np.zeros_like(lengths), lengths - 1):
            if not np.array_equal(self.pool[local + at], remote + at):
                raise ValueError("the bytes that arrived are not those that were sent")
            self.pool[local + at] = -1

    def close(self) -> None:  # noqa: B027 - most need none
        """Close what was opened. By default nothing is, or it ends with the process."""


#: Runs in the owner's process: fills the pool, sends its address over the connection, serves until something
#: arrives there.
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
            FailedError: it is not installed.
        """
        try:
            return importlib.metadata.version(self.distribution) if self.distribution else ""
        except importlib.metadata.PackageNotFoundError:
            raise FailedError(f"{self.distribution} is not installed", is_missing=True) from None


def pool_memory(num_bytes: int) -> mmap.mmap:
    """Allocate ordinary memory, on huge pages if the kernel has them, for contenders that do not allocate
    their own.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, dtype=np.int64)[:] = -1
    return memory
