"""Whole messages over one end of a socket pair."""

from __future__ import annotations

import socket
import struct
from typing import Any

from .codec import decode, encode

#: A longer message is not sent, and one that is announced longer is not read.
MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")


class Channel:
    """One end. One thread sends, one receives.

    Args:
        end: A connected stream socket; it belongs to the channel from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def fileno(self) -> int:
        """Readable when there is something to receive, or the other end is gone."""
        return self._socket.fileno()

    def set_timeout(self, timeout_s: float) -> None:
        """From now on, neither call waits longer than this without a byte moving."""
        self._socket.settimeout(timeout_s)

    def send(self, message: object) -> None:
        """Send one message.

        Raises:
            TypeError: it cannot be encoded; nothing was sent.
            ValueError: it is longer than `MAX_FRAME_BYTES`; nothing was sent.
            OSError: the other end is gone, or does not read (`TimeoutError`).
        """
        data = encode(message)
        if len(data) > MAX_FRAME_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is longer than {MAX_FRAME_BYTES}")
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        """Wait for one message.

        Raises:
            EOFError: the other end is gone.
            ValueError: what came is no message.
            OSError: the connection broke, or nothing came in time (`TimeoutError`).
        """
        (length,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise ValueError(f"a message of {length} bytes is longer than {MAX_FRAME_BYTES}")
        return decode(self._receive_exactly(length))

    def _receive_exactly(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        rest = memoryview(data)
        while rest:
            count = self._socket.recv_into(rest)
            if count == 0:
                raise EOFError("the other end is gone")
            rest = rest[count:]
        return bytes(data)

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._socket.close()
