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

#: Longer than any piece. One type for all lengths, because ctypes takes longer to make one than to hash a page.
_Memory = ctypes.c_ubyte * (1 << 40)

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
        digest: Takes the bytes in their order; None if no checksum is wanted.
    """

    addresses: AddressArray
    lengths: Int64Array
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
        addresses, lengths, self._digest = pieces
        self._kept = (before, after)
        first = before is not None
        end = len(lengths) + first
        # A row is a `struct iovec`: address, length.
        self._table = table = np.empty((end + (after is not None), 2), dtype=np.uint64)
        table[first:end, 0] = addresses
        table[first:end, 1] = lengths
        if before is not None:
            table[0] = address_of(before), len(before)
        if after is not None:
            table[end] = address_of(after), len(after)
        self._hashed = range(int(first), end)
        self._ends = table[:, 1].cumsum()
        self._at = 0  # the first piece that is not done
        self._done = 0
        self.num_left = int(self._ends[-1])
        self._address = table.__array_interface__["data"][0]
        self._message = _Message(pieces=self._address)

    def send(self, sock: socket.socket, flags: int = 0) -> None:
        """Send as much as the socket takes at once. It is non-blocking.

        Raises:
            BlockingIOError: it takes nothing now.
            OSError: the connection is gone.
        """
        self._call(_libc.sendmsg, sock, flags | socket.MSG_NOSIGNAL)

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
        if self._digest is not None:
            self._hash(self._digest, num_bytes)
        self._done += num_bytes
        self.num_left -= num_bytes
        if not self.num_left:
            return
        at = self._at
        if self._done >= self._ends[at]:
            self._at = at = int(self._ends.searchsorted(np.uint64(self._done), side="right"))
        end = self._table[at, 0] + self._table[at, 1]
        left = self._ends[at] - np.uint64(self._done)
        self._table[at] = end - left, left
        self._message.pieces = self._address + 16 * at

    def _hash(self, digest: xxhash.xxh3_64, num_bytes: int) -> None:
        """Hash the bytes that were moved, at once, because from the processor's cache that takes a third of the time."""
        for index, (address, length) in enumerate(
            self._table[self._at : self._at + self._message.num_pieces].tolist(), self._at
        ):
            if not num_bytes:
                return
            length = min(length, num_bytes)
            if index in self._hashed:
                digest.update(view_of(address, length))
            num_bytes -= length

    def pieces(self) -> Iterator[memoryview]:
        """Return what is left, piece by piece."""
        for address, num_bytes in self._table[self._at :].tolist():
            if num_bytes:
                yield view_of(address, num_bytes)


def view_of(address: int, num_bytes: int) -> memoryview:
    """Return memory as writable bytes. The caller keeps it alive."""
    return memoryview(_Memory.from_address(address)).cast("B")[:num_bytes]


def address_of(data: bytearray) -> int:
    """Return where the bytes of a bytearray lie. They stay there until its size changes."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(data))
