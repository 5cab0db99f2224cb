"""What `_native.c` does, in plain Python: copying and locating regions, moving them through sockets, and
guard words.

It serves where kvferry was installed without a C compiler, and it says what both do. The compiled functions
also let other threads run while they copy.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64] | npt.NDArray[np.uint64]
#: Hashes bytes; None if nothing is hashed.
Update = Callable[[Any], None] | None

#: The most pieces per system call (`IOV_MAX`).
_MAX_PIECES = 1024


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
        The index of the first region that is empty or not inside one segment; `num_regions` if there is none.
        Only the addresses before it are valid.
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


def sum_lengths(lengths: Words, most: int, /) -> int:
    """Add up lengths that a peer sent; -1 if one of them is not positive, or if all together are more than
    `most`.
    """
    # Each length is checked before the sum, which could overflow.
    if len(lengths) and (lengths.min() <= 0 or lengths.max() > most or lengths.sum() > most):
        return -1
    return int(lengths.sum())


class _Message(ctypes.Structure):
    """`struct msghdr`."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("pieces", ctypes.c_void_p),
        ("num_pieces", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


def send_pieces(
    fd: int, pieces: Words, at: int, update: Update, first: int, end: int, flags: int, /
) -> tuple[int, int]:
    """Send as many bytes as a socket takes without blocking.

    Args:
        fd: The socket.
        pieces: `(num_pieces, 2)` uint64: address and number of bytes. Rows that are done are left alone; if
            the first row that is left is done in part, it is made to begin where its rest does.
        at: The first row that is left.
        update: Takes the bytes of the rows `[first, end)`, portion by portion, while they are in the
            processor's cache; None if they are not to be hashed. It raises nothing.
        flags: Of `sendmsg(2)`.

    Returns:
        How many bytes were sent, and the first row that is left now.

    Raises:
        OSError: nothing was sent. BlockingIOError: the socket takes nothing now.
    """
    return _move_pieces("sendmsg", fd, pieces, at, (update, first, end), flags | socket.MSG_NOSIGNAL)


def receive_pieces(
    fd: int,
    pieces: Words,
    at: int,
    update: Update,
    first: int,
    end: int,
    epoll: int,
    wait_s: float,
    spin_s: float,
    /,
) -> tuple[int, int]:
    """Fill pieces from a socket.

    Arguments and errors are like those of `send_pieces`; 0 bytes mean that the peer closed.

    The compiled function goes on when the socket is empty: it waits for more as long as `wait_s` allows and
    as nothing else happens that `epoll` reports. This one receives once.

    Args:
        epoll: The epoll set of which the socket is a member.
        wait_s: How long it may take, in seconds; 0 if it must not wait.
        spin_s: How long it polls each time before it blocks.
    """
    return _move_pieces("recvmsg", fd, pieces, at, (update, first, end), 0)


def _move_pieces(
    name: str, fd: int, pieces: Words, at: int, hashing: tuple[Update, int, int], flags: int
) -> tuple[int, int]:
    move: Any = getattr(ctypes.CDLL(None, use_errno=True), name)
    move.argtypes, move.restype = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int), ctypes.c_ssize_t
    rest = pieces[at : at + _MAX_PIECES]
    message = _Message(pieces=rest.ctypes.data, num_pieces=len(rest))
    num_bytes: int = move(fd, ctypes.addressof(message), flags | socket.MSG_DONTWAIT)
    if num_bytes < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return num_bytes, advance_pieces(pieces, at, num_bytes, *hashing)


def advance_pieces(pieces: Words, at: int, num_bytes: int, update: Update, first: int, end: int, /) -> int:
    """Note that `num_bytes` bytes were moved; return the first row that is left. See `send_pieces`."""
    for address, length in pieces[at:].tolist():
        moved = min(num_bytes, length)
        if update is not None and first <= at < end:
            update((ctypes.c_char * moved).from_address(address))
        num_bytes -= moved
        if moved < length:
            pieces[at] = address + moved, length - moved
            break
        at += 1
    return at


def busy_poll(epoll: int, seconds: float, longest_s: float, /) -> int:
    """Poll an epoll set again and again without blocking, and let other processes have the core in between.

    Args:
        epoll: The set.
        seconds: How long.
        longest_s: Stop if the core did not come back for longer than this.

    Returns:
        1 as soon as the set is ready; 0 if the time is over; -1 if the core was away for too long.
    """
    poll = select.poll()
    poll.register(epoll, select.POLLIN)
    until = time.monotonic() + seconds
    while True:
        if poll.poll(0):
            return 1
        began = time.monotonic()
        os.sched_yield()
        now = time.monotonic()
        if now - began > longest_s:
            return -1
        if now >= until:
            return 0


def load_word(address: int, /) -> int:
    """Load the aligned 64-bit word at `address`, after every load that came before."""
    return ctypes.c_int64.from_address(address).value


def store_word(address: int, value: int, /) -> None:
    """Store the aligned 64-bit word at `address`, before every store that comes after."""
    ctypes.c_int64.from_address(address).value = value


def copy_on_stream(
    function: int, stream: int, dst_addresses: Words, src_addresses: Words, lengths: Words
) -> int:
    """Launch copies of regions on a CUDA stream, by the address of the driver's `cuMemcpyAsync`.

    Returns:
        The code of the first call that failed; no further copy is launched. 0 if none failed.
    """
    copy = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)(
        function
    )
    rows = zip(dst_addresses.tolist(), src_addresses.tolist(), lengths.tolist(), strict=True)
    return next((status for row in rows if (status := copy(*row, stream))), 0)


def signal_function() -> int:
    """Return the address of a function that writes to the eventfd that is its argument, from any thread."""
    return ctypes.cast(_signal(), ctypes.c_void_p).value or 0


@functools.cache  # the function lives as long as the process, because a driver may call it late
def _signal() -> Any:
    return ctypes.CFUNCTYPE(None, ctypes.c_size_t)(lambda descriptor: os.eventfd_write(descriptor, 1))
