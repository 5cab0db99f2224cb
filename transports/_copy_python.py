"""What `_native.c` does, in plain Python: copying and locating regions, and reading and writing guard words.

It serves where kvferry was installed without a C compiler, and it says what both do. The compiled functions also let
other threads run while they copy.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64] | npt.NDArray[np.uint64]


class _IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def copy_regions(dst_addresses: Words, src_addresses: Words, lengths: Words, /) -> None:
    """Copy regions within this process's memory. All bytes are visible to other threads when it returns.

    Args:
        dst_addresses: `(num_regions,)` virtual addresses; not checked. Regions do not overlap.
        src_addresses: `(num_regions,)`, likewise.
        lengths: `(num_regions,)` bytes.
    """
    for dst, src, length in zip(
        dst_addresses.tolist(), src_addresses.tolist(), lengths.tolist(), strict=True
    ):
        ctypes.memmove(dst, src, length)


def gather_regions(dst_address: int, src_addresses: Words, lengths: Words, /) -> None:
    """`copy_regions` to one run of bytes that begins at `dst_address`: the regions lie end to end there."""
    copy_regions(_end_to_end(dst_address, lengths), src_addresses, lengths)


def scatter_regions(dst_addresses: Words, src_address: int, lengths: Words, /) -> None:
    """`copy_regions` from one run of bytes that begins at `src_address`: the regions lie end to end there."""
    copy_regions(dst_addresses, _end_to_end(src_address, lengths), lengths)


def _end_to_end(address: int, lengths: Words) -> Words:
    return (np.cumsum(lengths) - lengths).astype(np.uint64) + np.uint64(address)


def read_regions_of(pid: int, dst_addresses: Words, src_addresses: Words, lengths: Words, /) -> None:
    """Read regions of another process's memory into ours.

    Args:
        pid: The other process.
        dst_addresses: `(num_regions,)` virtual addresses in this process.
        src_addresses: `(num_regions,)` virtual addresses in the other process.
        lengths: `(num_regions,)` bytes.

    Raises:
        OSError: `process_vm_readv(2)` failed. Some bytes may have been written.
    """
    read: Any = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.restype = ctypes.c_ssize_t
    for dst, src, length in zip(
        dst_addresses.tolist(), src_addresses.tolist(), lengths.tolist(), strict=True
    ):
        at = 0
        while at < length:
            local, remote = _IoVec(dst + at, length - at), _IoVec(src + at, length - at)
            done = read(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
            if done <= 0:
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error))
            at += done


def locate_regions(addresses: Words, offsets: Words, lengths: Words, ends: Words, shifts: Words, /) -> int:
    """Find the addresses of regions of a pool. Offsets and lengths may have any values: a peer sent them.

    Args:
        addresses: `(num_regions,)` uint64; receives the virtual addresses.
        offsets: `(num_regions,)` int64, in the pool.
        lengths: `(num_regions,)` int64, bytes.
        ends: `(num_segments,)` int64: the pool offsets at which its segments end.
        shifts: `(num_segments,)` uint64: what to add to a pool offset to get an address, modulo 2**64.

    Returns:
        The index of the first region that is empty or not inside one segment; `num_regions` if there is none. Only
        the addresses before it are valid.
    """
    # An offset past the end is compared with the last segment, in which no room is left for it.
    segments = np.minimum(ends.searchsorted(offsets, side="right"), len(ends) - 1)
    # Compared as `length <= room`, never `offset + length <= end`: a sum of hostile numbers can wrap.
    inside = (offsets >= 0) & (lengths > 0) & (lengths <= ends[segments] - offsets)
    addresses[:] = shifts[segments] + offsets.astype(np.uint64)
    return len(inside) if inside.all() else int(np.argmin(inside))


def sum_words(words: Words, /) -> int:
    """Add up words, modulo 2**64, as a signed number. For a few words numpy takes ten times as long."""
    return int(words.view(np.int64).sum())


def load_word(address: int, /) -> int:
    """Load the aligned 64-bit word at `address`, after every load that came before."""
    return ctypes.c_int64.from_address(address).value


def store_word(address: int, value: int, /) -> None:
    """Store the aligned 64-bit word at `address`, before every store that comes after."""
    ctypes.c_int64.from_address(address).value = value


def signal_function() -> int:
    """Return the address of a function that writes to the eventfd that is its argument, from any thread."""
    return ctypes.cast(_signal(), ctypes.c_void_p).value or 0


@functools.cache  # the function lives as long as the process, because a driver may call it late
def _signal() -> Any:
    return ctypes.CFUNCTYPE(None, ctypes.c_size_t)(lambda descriptor: os.eventfd_write(descriptor, 1))
