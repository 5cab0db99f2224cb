"""Pieces of memory that are sent and filled in order, without a copy and without a Python object per piece.

`socket.sendmsg` takes a list of buffers, and making one takes longer than copying a small page. The system call takes an
array of addresses and lengths, which is what a pool's regions are.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import xxhash

from ..regions import AddressArray, Int64Array

#: The most pieces per system call (`IOV_MAX`).
_MAX_PIECES: Final = 1024

_MSG_NOSIGNAL: Final = int(socket.MSG_NOSIGNAL)

#: All memory, to be sliced by address: a slice of a memoryview takes a quarter of the time of a new ctypes object, which
#: counts where pages are small.
_memory: Final = memoryview((ctypes.c_ubyte * (1 << 47)).from_address(0)).cast("B")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sendmsg.argtypes = _libc.recvmsg.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_libc.sendmsg.restype = _libc.recvmsg.restype = ctypes.c_ssize_t


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


class Pieces(NamedTuple):
    """Where the bytes of a slice lie, or go.

    Attributes:
        addresses, lengths: `(num_pieces,)`. The caller keeps the memory alive.
        num_bytes: The sum of `lengths`.
        digest: Takes the bytes in their order; None if no checksum is wanted.
    """

    addresses: AddressArray
    lengths: Int64Array
    num_bytes: int
    digest: xxhash.xxh3_64 | None = None


class Iovec:
    """Memory that is sent or filled piece by piece, by as few system calls as possible.

    Args:
        before, after: Another piece at the beginning, and one at the end, which are not part of the digest.

    Attributes:
        num_left: Bytes that are left.
    """

    __slots__ = (
        "_address",
        "_at",
        "_digest",
        "_done",
        "_ends",
        "_hashed",
        "_kept",
        "_message",
        "_table",
        "num_left",
    )

    def __init__(
        self, pieces: Pieces, *, before: bytearray | None = None, after: bytearray | None = None
    ) -> None:
        addresses, lengths, num_bytes, self._digest = pieces
        self._kept = (before, after)
        first = before is not None
        end = len(lengths) + first
        # A row is a `struct iovec`: address, length.
        self._table = table = np.empty((end + (after is not None), 2), dtype=np.uint64)
        table[first:end, 0] = addresses
        table[first:end, 1] = lengths
        if before is not None:
            table[0] = address_of(before), len(before)
            num_bytes += len(before)
        if after is not None:
            table[end] = address_of(after), len(after)
            num_bytes += len(after)
        self._hashed = (int(first), end)
        self._ends: Int64Array | None = (
            None  # made when a call moves only a part, which small slices never see
        )
        self._at = 0  # the first piece that is not done
        self._done = 0
        self.num_left = num_bytes
        self._address = table.ctypes.data
        self._message = _Message(pieces=self._address)

    def send(self, sock: socket.socket, flags: int = 0) -> None:
        """Send as much as the socket takes at once. It is non-blocking.

        Raises:
            BlockingIOError: it takes nothing now.
            OSError: the connection is gone.
        """
        self._call(_libc.sendmsg, sock, flags | _MSG_NOSIGNAL)

    def receive(self, sock: socket.socket) -> int:
        """Fill with what has arrived, and return its size; 0 if the peer closed. Raises BlockingIOError, OSError: see `send`."""
        return self._call(_libc.recvmsg, sock, 0)

    def _call(self, function: ctypes._NamedFuncPointer, sock: socket.socket, flags: int) -> int:
        self._message.num_pieces = min(len(self._table) - self._at, _MAX_PIECES)
        while True:
            num_bytes: int = function(sock.fileno(), ctypes.addressof(self._message), flags)
            if num_bytes >= 0:
                self.advance(num_bytes)
                return num_bytes
            error = ctypes.get_errno()
            if error != errno.EINTR:
                raise OSError(error, os.strerror(error))

    def advance(self, num_bytes: int) -> None:
        """Note that the first `num_bytes` of what is left are done."""
        done = self._done + num_bytes
        last, left = len(self._table) - 1, 0
        if num_bytes < self.num_left:
            if self._ends is None:
                self._ends = self._table[:, 1].view(np.int64).cumsum()
            last = int(self._ends.searchsorted(done, side="right"))
            left = int(self._ends[last]) - done
        if self._digest is not None:
            self._hash(self._digest, last, left)
        self._done = done
        self.num_left -= num_bytes
        if left:
            # The piece that is done in part begins where the rest of it does.
            address, length = self._table[last].tolist()
            self._table[last] = address + length - left, left
            self._at = last
            self._message.pieces = self._address + 16 * last

    def _hash(self, digest: xxhash.xxh3_64, last: int, left: int) -> None:
        """Hash the bytes that were moved, at once, because from the processor's cache that takes a third of the time.

        Args:
            last, left: The piece that was moved last, and how many bytes of it were not.
        """
        first, end = self._hashed
        begin = max(first, self._at)
        pieces = self._table[begin : min(end, last + 1)].tolist()
        for index, (address, length) in enumerate(pieces, begin):
            digest.update(_memory[address : address + length - (left if index == last else 0)])

    def pieces(self) -> Iterator[memoryview]:
        """Return what is left, piece by piece."""
        for address, num_bytes in self._table[self._at :].tolist():
            if num_bytes:
                yield view_of(address, num_bytes)


def view_of(address: int, num_bytes: int) -> memoryview:
    """Return memory as writable bytes. The caller keeps it alive."""
    return _memory[address : address + num_bytes]


def address_of(data: bytearray) -> int:
    """Return where the bytes of a bytearray lie. They stay there until its size changes."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(data))
