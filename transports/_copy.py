"""Copying of regions and ordered access to guard words: compiled if it can be, in plain Python if not."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["IS_COMPILED", "IS_ORDERED", "copy_regions", "load_word", "read_regions_of", "store_word"]

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
    logger.warning(
        "kvferry.transports._native is not there: regions are copied one by one from Python, at about two thirds "
        "of the speed. Install a C compiler and reinstall kvferry."
    )


class _IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def _python_copy_regions(dst_addresses: Words, src_addresses: Words, lengths: Words) -> None:
    for dst, src, length in zip(
        dst_addresses.tolist(), src_addresses.tolist(), lengths.tolist(), strict=True
    ):
        ctypes.memmove(dst, src, length)


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


def _python_load_word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


def _python_store_word(address: int, value: int) -> None:
    ctypes.c_int64.from_address(address).value = value


def copy_regions(dst_addresses: Words, src_addresses: Words, lengths: Words) -> None:
    """Copy regions within this process's memory, without the GIL; all bytes are visible when it returns.

    Args:
        dst_addresses: `(num_regions,)` virtual addresses, contiguous; not checked. Regions do not overlap.
        src_addresses: `(num_regions,)`, likewise.
        lengths: `(num_regions,)` bytes.
    """
    _copy_regions(dst_addresses, src_addresses, lengths)


def read_regions_of(pid: int, dst_addresses: Words, src_addresses: Words, lengths: Words) -> None:
    """Read regions of another process's memory into ours, without the GIL.

    Args:
        pid: The other process.
        dst_addresses: `(num_regions,)` virtual addresses here, contiguous.
        src_addresses: `(num_regions,)` virtual addresses there.
        lengths: `(num_regions,)` bytes.

    Raises:
        OSError: As `process_vm_readv(2)` fails. Some bytes may have been written.
    """
    _read_regions_of(pid, dst_addresses, src_addresses, lengths)


def load_word(address: int) -> int:
    """Load the aligned 64-bit word at `address`, after every load that came before."""
    return _load_word(address)


def store_word(address: int, value: int) -> None:
    """Store the aligned 64-bit word at `address`, before every store that comes after."""
    _store_word(address, value)


_copy_regions = _native.copy_regions if IS_COMPILED else _python_copy_regions
_read_regions_of = _native.read_regions_of if IS_COMPILED else _python_read_regions_of
_load_word = _native.load_word if IS_COMPILED else _python_load_word
_store_word = _native.store_word if IS_COMPILED else _python_store_word
