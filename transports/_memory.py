"""Mapped memory: arenas and guard tables in it, and checks of the words in a peer's table."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Self

import numpy as np
import numpy.typing as npt

from .base import Arena, GuardTable
from .copying import load_word, store_word
from .errors import ConfigurationError, RegionError
from .machine import memory_of_this_process
from .regions import Extents, Guard, Int64Array, Pool, Segment

HUGE_PAGE_BYTES = 2 << 20
WORD_BYTES = 8
MAX_GUARD_VALUE = 2**63 - 1

_MADV_POPULATE_WRITE = 23

#: Bytes per call to the kernel, so that Python handles a signal within milliseconds.
_ADVISE_STEP_BYTES = 256 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_MAP_FAILED = ctypes.c_void_p(-1).value

Memory = mmap.mmap | ctypes.Array[ctypes.c_ubyte]


class FileMapping:
    """A file mapped into this process. Unlike an `mmap.mmap`, it does not keep a descriptor open.

    Attributes:
        memory: The bytes. They stay mapped until `close`, or until nothing refers to them any more.
    """

    def __init__(self, descriptor: int, num_bytes: int, protection: int) -> None:
        """Map the first `num_bytes` bytes, shared.

        Raises:
            OSError: the kernel refuses.
        """
        address = _libc.mmap(None, num_bytes, protection, mmap.MAP_SHARED, descriptor, 0)
        if address == _MAP_FAILED:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self.memory: Memory = (ctypes.c_ubyte * num_bytes).from_address(address)
        self._unmap = weakref.finalize(self.memory, _libc.munmap, address, num_bytes)
        self._unmap.atexit = False  # views may be in use until the very end

    def close(self) -> None:
        """Unmap now. No view of the memory may exist."""
        self._unmap()


def address_of(mapping: Memory) -> int:
    """Return the virtual address of a mapping."""
    return int(_bytes_of(mapping).ctypes.data)


def _bytes_of(mapping: Memory) -> npt.NDArray[np.uint8]:
    return np.frombuffer(memoryview(mapping), dtype=np.uint8)


def advise(mapping: Memory, advice: int) -> None:
    """Advise the kernel about a whole mapping, without holding the GIL (`mmap.madvise` holds it).

    Raises:
        OSError: the kernel does not know the advice, or cannot follow it.
    """
    address, num_bytes = address_of(mapping), len(mapping)
    for at in range(0, num_bytes, _ADVISE_STEP_BYTES):
        if _libc.madvise(address + at, min(_ADVISE_STEP_BYTES, num_bytes - at), advice) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))


def prefault(mapping: Memory) -> None:
    """Back every page of a writable, still zeroed mapping with memory now.

    The first write to a page of shared memory costs tens of times as much as a later one; pay that when the
    node starts.

    Raises:
        OSError: there is not enough memory.
    """
    try:
        advise(mapping, _MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != 22:  # EINVAL: a kernel before 5.14
            raise
        _bytes_of(mapping)[:: mmap.PAGESIZE] = 0


def require_available(num_bytes: int) -> None:
    """Check that memory is free before it is allocated, because the kernel kills a process if it runs out
    later.

    Raises:
        ConfigurationError: `num_bytes` is not positive, or more than this process can allocate now.
    """
    if num_bytes <= 0:
        raise ConfigurationError(
            f"cannot allocate {num_bytes} bytes: the number must be positive",
            key="num_bytes",
            value=num_bytes,
        )
    _, free = memory_of_this_process()
    if num_bytes > free:
        raise ConfigurationError(
            f"cannot allocate {num_bytes} bytes: {free} bytes of memory are free; allocate less or free memory",
            key="num_bytes",
            value=num_bytes,
        )


class MappedArena(Arena):
    """The first `num_bytes` bytes of a mapping. The mapping lives as long as the arena or any view of it."""

    def __init__(self, mapping: Memory, num_bytes: int) -> None:
        self._buffer = _bytes_of(mapping).data[:num_bytes]  # numpy's view has format `B`, unlike ctypes' own
        self._segment = Segment(address_of(mapping), num_bytes)

    @property
    def segment(self) -> Segment:
        return self._segment

    @property
    def buffer(self) -> memoryview:
        return self._buffer


def private_arena(num_bytes: int) -> MappedArena:
    """Allocate private memory, pre-faulted, on huge pages if the kernel has them.

    The kernel copies faster between huge pages and a socket, because it looks up one page instead of 512.

    Raises:
        ConfigurationError: see `require_available`.
    """
    require_available(num_bytes)
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        advise(mapping, mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages
        pass
    prefault(mapping)
    return MappedArena(mapping, num_bytes)


class WordTable(GuardTable):
    """A guard table at the start of a writable mapping of `bytes_for(num_guards)`.

    Args:
        checks_reads: See `GuardTable`; then the owner asks `may_read`.
    """

    def __init__(self, mapping: Memory, num_guards: int, *, checks_reads: bool = False) -> None:
        self.num_guards = num_guards
        self.checks_reads = checks_reads
        self._allowed: dict[int, Callable[[], Extents] | Extents] = {}
        self._mapping = mapping  # keeps the words mapped
        self.address = address_of(mapping)

    @staticmethod
    def bytes_for(num_guards: int) -> int:
        """Return the size of the mapping for a table."""
        return num_guards * WORD_BYTES

    @classmethod
    def anonymous(cls, num_guards: int, *, checks_reads: bool = False) -> Self:
        """Make a table in memory that no other process can map."""
        return cls(mmap.mmap(-1, cls.bytes_for(num_guards)), num_guards, checks_reads=checks_reads)

    def set(self, index: int, value: int) -> None:
        require_guard(Guard(index, value), self.num_guards)
        store_word(self.address + index * WORD_BYTES, value)

    def clear(self, index: int) -> None:
        require_guard(Guard(index, 1), self.num_guards)
        store_word(self.address + index * WORD_BYTES, 0)
        # After the word: while the guard holds, its restriction must stand.
        self._allowed.pop(index, None)

    def allow(self, index: int, extents_of: Callable[[], Extents]) -> None:
        if self.checks_reads:
            self._allowed[index] = extents_of

    def may_read(self, guard: Guard, offsets: Int64Array, lengths: Int64Array) -> bool:
        """Return whether regions of the pool are allowed under a guard, or the guard does not hold, so that
        nothing is sent.

        Any thread may clear the guard meanwhile.
        """
        extents = self._allowed.get(guard.index)
        if extents is None:
            return True
        if not isinstance(extents, Extents):
            extents_of, extents = extents, extents()
            # The guard may have been cleared meanwhile, or set for another offer, whose bytes these are not.
            if self._allowed.get(guard.index) is extents_of:
                self._allowed[guard.index] = extents
        return extents.cover(offsets, lengths) or not self.holds(guard)

    def holds(self, guard: Guard) -> bool:
        """Return whether the guard holds now."""
        return guard_holds(self.address, guard)

    def clear_all(self) -> None:
        """Make every later check of every word fail."""
        ctypes.memset(self.address, 0, self.num_guards * WORD_BYTES)
        store_word(self.address, 0)  # memset has no fence; this store does
        # After the words, as in `clear`: while a guard holds, its restriction must stand.
        self._allowed.clear()


def require_host(pool: Pool, scheme: str) -> None:
    """Check that a pool is in main memory.

    Raises:
        ConfigurationError: it is in a GPU's memory.
    """
    if pool.kind != "host":
        raise ConfigurationError(
            f"transport {scheme!r} serves main memory, not {pool.kind}: use 'shm' between processes of one host, "
            "'zeromq' or 'ucx' between hosts, or 'auto' for both",
            key="device",
            value=pool.kind,
        )


def require_guard(guard: Guard, num_guards: int) -> None:
    """Check that a guard has a valid value and that its word is in a table of `num_guards`.

    Raises:
        RegionError: the value is invalid, or the word is outside the table.
    """
    if not 0 <= guard.index < num_guards:
        raise RegionError(f"guard {guard.index} is outside a table of {num_guards} guards")
    if not 0 < guard.value <= MAX_GUARD_VALUE:
        raise RegionError(f"the value of a guard must be 1 to 2**63 - 1, got {guard.value}")


def guard_holds(table_address: int, guard: Guard) -> bool:
    """Return whether a word of a mapped table still holds the value.

    All earlier copies are over before the word is loaded.
    """
    return load_word(table_address + guard.index * WORD_BYTES) == guard.value
