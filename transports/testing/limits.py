"""The memory of this process: how much it has, and limits, so that a transport with a bug cannot exhaust the
machine's.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

#: What the process may still allocate, and the size of the largest file. More than the other threads need
#: meanwhile.
_SPARE_BYTES = 256 << 20

_LIBC = ctypes.CDLL(None)


@contextmanager
def limited_memory() -> Iterator[None]:
    """Let this process allocate little more memory, and no large file, also none in memory, for the length of
    a `with`.
    """
    mapped, _ = _memory_bytes()
    with ExitStack() as restored:
        for limit, num_bytes in (
            (resource.RLIMIT_AS, mapped + _SPARE_BYTES),
            (resource.RLIMIT_FSIZE, _SPARE_BYTES),
        ):
            soft, hard = resource.getrlimit(limit)
            if soft == resource.RLIM_INFINITY or soft > num_bytes:
                restored.callback(resource.setrlimit, limit, (soft, hard))
                resource.setrlimit(limit, (num_bytes, hard))
        yield


def reached_limit(error: BaseException | None) -> bool:
    """Return whether an exception was raised because the kernel refused memory, or a file of that size."""
    while error is not None:
        if isinstance(error, MemoryError) or (
            isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EFBIG)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def give_back_freed_memory() -> None:
    """Give the kernel what this process has freed, before `resident_bytes` measures what it uses from then
    on.

    The C library keeps freed memory for the next allocations. If it held 200 MiB, then the first 200 MiB of
    growth would not be seen.
    """
    gc.collect()
    if hasattr(_LIBC, "malloc_trim"):  # glibc's
        _LIBC.malloc_trim(0)


def resident_bytes() -> int:
    """Return how much memory this process has in use."""
    return _memory_bytes()[1]


def _memory_bytes() -> tuple[int, int]:
    """Return the size of this process's address space, and how much of it is resident."""
    mapped, resident = Path("/proc/self/statm").read_text().split()[:2]
    return int(mapped) * mmap.PAGESIZE, int(resident) * mmap.PAGESIZE
