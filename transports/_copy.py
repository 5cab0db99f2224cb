"""Finding and copying regions, and ordered access to guard words: compiled if it can be, in plain Python if not."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

Words = npt.NDArray[np.int64] | npt.NDArray[np.uint64]

try:
    from . import _native
except ImportError:
    IS_COMPILED = False
else:
    IS_COMPILED = True

#: Whether a guard word that another *process* stores is seen in order with the bytes around it. Plain
#: Python has no fences; x86 does not need them.
IS_ORDERED = IS_COMPILED or platform.machine() in ("x86_64", "AMD64")

if not IS_COMPILED:
    # Without `kvferry/__init__.py`, Python took a folder called kvferry on its path, such as a clone in the current folder.
    _is_installed = getattr(sys.modules["kvferry"], "__file__", None) is not None
    logger.warning(
        "copying regions one by one in Python, at about two thirds of the speed: no compiled part next to %r; %s",
        __file__,
        "install a C compiler and reinstall kvferry"
        if _is_installed
        else "this is a folder of sources and not an installed kvferry: run `pip install .` in the clone",
    )


class _IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def _python_copy_regions(dst_addresses: Words, src_addresses: Words, lengths: Words) -> None:
    for dst, src, length in zip(
        dst_addresses.tolist(), src_addresses.tolist(), lengths.tolist(), strict=True
    ):
        ctypes.memmove(dst, src, length)


def _python_gather_regions(dst_address: int, src_addresses: Words, lengths: Words) -> None:
    _python_copy_regions(_end_to_end(dst_address, lengths), src_addresses, lengths)


def _python_scatter_regions(dst_addresses: Words, src_address: int, lengths: Words) -> None:
    _python_copy_regions(dst_addresses, _end_to_end(src_address, lengths), lengths)


def _end_to_end(address: int, lengths: Words) -> Words:
    return (np.cumsum(lengths) - lengths).astype(np.uint64) + np.uint64(address)


def _python_read_regions_of(pid: int, dst_addresses: Words, src_addresses: Words, lengths: Words) -> None:
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


def _python_locate_regions(
    addresses: Words, offsets: Words, lengths: Words, ends: Words, shifts: Words
) -> int:
    # Past the end there is no room, whichever segment is asked.
    segments = np.minimum(ends.searchsorted(offsets, side="right"), len(ends) - 1)
    # Compared as `length <= room`, never `offset + length <= end`: a sum of hostile numbers can wrap.
    inside = (offsets >= 0) & (lengths > 0) & (lengths <= ends[segments] - offsets)
    addresses[:] = shifts[segments] + offsets.astype(np.uint64)
    return len(inside) if inside.all() else int(np.argmin(inside))


def _python_load_word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


def _python_store_word(address: int, value: int) -> None:
    ctypes.c_int64.from_address(address).value = value


def copy_regions(dst_addresses: Words, src_addresses: Words, lengths: Words) -> None:
    """Copy regions within this process's memory, without the GIL; all bytes are visible when it returns.

    Args:
        dst_addresses: `(num_regions,)` virtual addresses; not checked. Regions do not overlap.
        src_addresses: `(num_regions,)`, likewise.
        lengths: `(num_regions,)` bytes.
    """
    _copy_regions(dst_addresses, src_addresses, lengths)


def gather_regions(dst_address: int, src_addresses: Words, lengths: Words) -> None:
    """`copy_regions` to where they lie end to end, from `dst_address` on."""
    _gather_regions(dst_address, src_addresses, lengths)


def scatter_regions(dst_addresses: Words, src_address: int, lengths: Words) -> None:
    """`copy_regions` from where they lie end to end, from `src_address` on."""
    _scatter_regions(dst_addresses, src_address, lengths)


def read_regions_of(pid: int, dst_addresses: Words, src_addresses: Words, lengths: Words) -> None:
    """Read regions of another process's memory into ours, without the GIL.

    Args:
        pid: The other process.
        dst_addresses: `(num_regions,)` virtual addresses here.
        src_addresses: `(num_regions,)` virtual addresses there.
        lengths: `(num_regions,)` bytes.

    Raises:
        OSError: As `process_vm_readv(2)` fails. Some bytes may have been written.
    """
    _read_regions_of(pid, dst_addresses, src_addresses, lengths)


def locate_regions(addresses: Words, offsets: Words, lengths: Words, ends: Words, shifts: Words) -> int:
    """Find where regions of a pool lie. Any offsets and lengths will do: they are a stranger's.

    Args:
        addresses: `(num_regions,)` uint64; the virtual addresses are written here.
        offsets: `(num_regions,)` int64, in the pool.
        lengths: `(num_regions,)` int64, bytes.
        ends: `(num_segments,)` int64: the pool offsets at which its segments end.
        shifts: `(num_segments,)` uint64: from pool offsets to addresses, modulo 2**64.

    Returns:
        How many regions come before the first that is empty, or not inside one segment. The addresses from there on
        mean nothing.
    """
    return _locate_regions(addresses, offsets, lengths, ends, shifts)


def load_word(address: int) -> int:
    """Load the aligned 64-bit word at `address`, after every load that came before."""
    return _load_word(address)


def store_word(address: int, value: int) -> None:
    """Store the aligned 64-bit word at `address`, before every store that comes after."""
    _store_word(address, value)


_copy_regions = _native.copy_regions if IS_COMPILED else _python_copy_regions
_gather_regions = _native.gather_regions if IS_COMPILED else _python_gather_regions
_scatter_regions = _native.scatter_regions if IS_COMPILED else _python_scatter_regions
_read_regions_of = _native.read_regions_of if IS_COMPILED else _python_read_regions_of
_locate_regions = _native.locate_regions if IS_COMPILED else _python_locate_regions
_load_word = _native.load_word if IS_COMPILED else _python_load_word
_store_word = _native.store_word if IS_COMPILED else _python_store_word
