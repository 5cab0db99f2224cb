"""Frames that are sent and received without a copy.

pyzmq sends Python's memory without a copy as well, but then needs a message per frame, and a thread, to learn
when it may free the memory. A frame here needs neither: its bytes lie either in a pool, which outlives every
connection, or in memory of libzmq, which frees it.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Self

import zmq
from zmq.backend.cython import _zmq

# None of these calls blocks or calls back, so keep the GIL: releasing and taking it takes longer than the
# calls.
_libzmq = ctypes.PyDLL(_zmq.__file__, use_errno=True)
_libzmq.zmq_msg_init.argtypes = (ctypes.c_void_p,)
_libzmq.zmq_msg_init_size.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libzmq.zmq_msg_init_data.argtypes = (
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    *[ctypes.c_void_p] * 2,
)
_libzmq.zmq_msg_send.argtypes = _libzmq.zmq_msg_recv.argtypes = (
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int,
)
_libzmq.zmq_msg_data.argtypes = (ctypes.c_void_p,)
_libzmq.zmq_msg_data.restype = ctypes.c_void_p
_libzmq.zmq_msg_more.argtypes = (ctypes.c_void_p,)
_libzmq.zmq_msg_get.argtypes = (ctypes.c_void_p, ctypes.c_int)
_libzmq.zmq_msg_close.argtypes = (ctypes.c_void_p,)

#: A `zmq_msg_t`: 64 bytes.
_Message = ctypes.c_uint64 * 8

_DONTWAIT, _SNDMORE, _SRCFD = int(zmq.DONTWAIT), int(zmq.SNDMORE), int(zmq.SRCFD)


class Frame:
    """One frame of a message, either to be sent once or received.

    Attributes:
        address: Where the bytes are. Valid until the frame is sent or garbage-collected.
        num_bytes: Number of bytes.
    """

    def __init__(self, message: ctypes.Array[ctypes.c_uint64], address: int, num_bytes: int) -> None:
        self._message = message
        self.address = address
        self.num_bytes = num_bytes

    @classmethod
    def borrowed(cls, address: int, num_bytes: int) -> Self:
        """Make a frame of bytes elsewhere, without a copy.

        The memory must stay mapped until the context is terminated. Its contents may change before they are
        sent.
        """
        message = _Message()
        _libzmq.zmq_msg_init_data(message, address, num_bytes, None, None)
        return cls(message, address, num_bytes)

    @classmethod
    def allocated(cls, num_bytes: int) -> Self:
        """Make a frame whose bytes the caller writes at `address`.

        Raises:
            MemoryError: there is not enough memory.
        """
        message = _Message()
        if _libzmq.zmq_msg_init_size(message, num_bytes) != 0:
            raise MemoryError(f"cannot allocate a frame of {num_bytes} bytes: out of memory")
        return cls(message, _libzmq.zmq_msg_data(message), num_bytes)

    @classmethod
    def copy_of(cls, data: bytes) -> Self:
        """Make a frame with a copy of `data`. Raises MemoryError: see `allocated`."""
        frame = cls.allocated(len(data))
        ctypes.memmove(frame.address, data, len(data))
        return frame

    @classmethod
    def copy_from(cls, address: int, num_bytes: int) -> Self:
        """Make a frame with a copy of the bytes at `address`. Raises MemoryError: see `allocated`."""
        frame = cls.allocated(num_bytes)
        ctypes.memmove(frame.address, address, num_bytes)
        return frame

    @classmethod
    def received(cls, socket: zmq.Socket[bytes]) -> Self | None:
        """Take the next frame from a socket; None if there is none.

        Raises:
            zmq.ZMQError: the socket cannot receive.
        """
        message = _Message()
        _libzmq.zmq_msg_init(message)
        num_bytes = _libzmq.zmq_msg_recv(message, socket.underlying, _DONTWAIT)
        if num_bytes >= 0:
            return cls(message, _libzmq.zmq_msg_data(message), num_bytes)
        if ctypes.get_errno() == errno.EAGAIN:
            return None
        raise _error()

    def send(self, socket: zmq.Socket[bytes], *, is_last: bool) -> bool:
        """Give the frame to libzmq. Returns False if its queue is full.

        Raises:
            zmq.ZMQError: it was not taken.
        """
        flags = _DONTWAIT if is_last else _DONTWAIT | _SNDMORE
        if _libzmq.zmq_msg_send(self._message, socket.underlying, flags) >= 0:
            return True
        if ctypes.get_errno() == errno.EAGAIN:
            return False
        raise _error()

    @property
    def is_last(self) -> bool:
        """Whether a received frame is the last one of its message."""
        return not _libzmq.zmq_msg_more(self._message)

    @property
    def descriptor(self) -> int:
        """The file descriptor of the connection that a received frame came over; -1 if libzmq does not know
        it.
        """
        return int(_libzmq.zmq_msg_get(self._message, _SRCFD))

    @property
    def view(self) -> memoryview:
        """The bytes, valid as long as `address`."""
        return memoryview((ctypes.c_ubyte * self.num_bytes).from_address(self.address)).cast("B")

    def __bytes__(self) -> bytes:
        return ctypes.string_at(self.address, self.num_bytes)

    def __len__(self) -> int:
        return self.num_bytes

    def __del__(self) -> None:
        _libzmq.zmq_msg_close(self._message)


def _error() -> zmq.ZMQError:
    number = ctypes.get_errno()
    return zmq.ZMQError(number, os.strerror(number))
