"""Send and receive whole messages over one end of a socket pair."""

from __future__ import annotations

import socket
import struct
from typing import Any

from .codec import decode, encode

#: Longest message that is sent or accepted. The limit bounds the memory that a corrupt length could make us
#: allocate.
MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")


class Channel:
    """One end of a connection between two processes.

    One thread may send while another one receives, but no two threads may do the same.

    Args:
        end: A connected stream socket. The channel owns it and closes it.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def fileno(self) -> int:
        """Return a descriptor that is readable when a message arrives or the other end closes."""
        return self._socket.fileno()

    def set_timeout(self, timeout_s: float) -> None:
        """Limit how long `send` and `receive` wait without any byte being transferred."""
        self._socket.settimeout(timeout_s)

    def send(self, message: object) -> None:
        """Send one message.

        Raises:
            TypeError: the message cannot be encoded; nothing was sent.
            ValueError: it is longer than `MAX_FRAME_BYTES`; nothing was sent.
            OSError: the other end is closed, or does not read (`TimeoutError`).
        """
        data = encode(message)
        if len(data) > MAX_FRAME_BYTES:
            raise ValueError(f"cannot send a message of {len(data)} bytes: the limit is {MAX_FRAME_BYTES}")
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        """Wait for one message.

        Raises:
            EOFError: the other end is closed.
            ValueError: the bytes received are not a message.
            OSError: the connection broke, or nothing arrived in time (`TimeoutError`).
        """
        (length,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise ValueError(f"cannot receive a message of {length} bytes: the limit is {MAX_FRAME_BYTES}")
        return decode(self._receive_exactly(length))

    def _receive_exactly(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        rest = memoryview(data)
        while rest:
            count = self._socket.recv_into(rest)
            if count == 0:
                raise EOFError("the other end closed the connection")
            rest = rest[count:]
        return bytes(data)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()
