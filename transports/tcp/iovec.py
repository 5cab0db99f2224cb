"""Pieces of memory that are sent and filled in order, without a copy and without a Python object per piece.

`socket.sendmsg` takes a list of buffers, and making one takes longer than copying a small page. The system
call takes an array of addresses and lengths, which is what a pool's regions are.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import xxhash

from .._copy_python import advance_pieces
from ..copying import receive_pieces, send_pieces
from ..regions import AddressArray, Int64Array

#: All memory, to be sliced by address: a slice of a memoryview takes a quarter of the time of a new ctypes
#: object, which counts where pages are small.
_memory: Final = memoryview((ctypes.c_ubyte * (1 << 47)).from_address(0)).cast("B")


class Wait(NamedTuple):
    """How a call waits for more when a socket is empty.

    Attributes:
        epoll: A set of which the socket is a member. If anything else happens there, the call ends.
        wait_s: How long the call may take, in seconds.
        spin_s: How long it polls each time before it blocks.
    """

    epoll: int
    wait_s: float
    spin_s: float


NO_WAIT: Final = Wait(-1, 0.0, 0.0)


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

    __slots__ = ("_at", "_hashing", "_kept", "_table", "num_left")

    def __init__(
        self, pieces: Pieces, *, before: bytearray | None = None, after: bytearray | None = None
    ) -> None:
        addresses, lengths, num_bytes, digest = pieces
        self._kept = (before, after)
        first = int(before is not None)
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
        self._hashing = (None if digest is None else digest.update, first, end)
        self._at = 0  # the first row that is not done
        self.num_left = num_bytes

    def send(self, sock: socket.socket, flags: int = 0) -> None:
        """Send as much as the socket takes at once. It is non-blocking.

        Raises:
            BlockingIOError: it takes nothing now.
            OSError: the connection is gone.
        """
        num_bytes, self._at = send_pieces(sock.fileno(), self._table, self._at, *self._hashing, flags)
        self.num_left -= num_bytes

    def receive(self, sock: socket.socket, wait: Wait = NO_WAIT) -> int:
        """Fill with what has arrived, and return its size; 0 if the peer closed.

        Raises BlockingIOError, OSError: see `send`.
        """
        num_bytes, self._at = receive_pieces(sock.fileno(), self._table, self._at, *self._hashing, *wait)
        self.num_left -= num_bytes
        return num_bytes

    def advance(self, num_bytes: int) -> None:
        """Note that the first `num_bytes` of what is left were moved by others."""
        self._at = advance_pieces(self._table, self._at, num_bytes, *self._hashing)
        self.num_left -= num_bytes

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
