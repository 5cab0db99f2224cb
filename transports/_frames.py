"""A non-blocking socket that carries frames.

A frame is `length: u32, kind: u8`, then `length` bytes; little-endian.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Mapping

from .errors import BackpressureError, PeerLostError, ProtocolError

#: What one call of `recv` takes. Python allocates it in full before each call, even for a frame of five bytes, and the C
#: library maps anything larger than 128 KiB anew each time, which takes longer than the call itself.
RECEIVE_BYTES = 64 << 10

#: System calls per `receive`, so that one peer cannot keep the loop to itself.
_MAX_RECEIVES = 64

_HEAD = struct.Struct("<IB")


def encode_frame(kind: int, body: bytes) -> bytes:
    """Return one frame. The caller has checked the length."""
    return _HEAD.pack(len(body), kind) + body


class FrameReader:
    """Cuts a stream of bytes into frames, and buffers at most one incomplete frame.

    Args:
        limits: Largest body in bytes, by kind of frame. Other kinds are refused.
    """

    def __init__(self, limits: Mapping[int, int]) -> None:
        self._limits = limits
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Add bytes and return the frames that they complete, as (kind, body).

        Raises:
            ProtocolError: a frame of an unknown kind, or longer than its kind allows. The stream cannot be used any more.
        """
        self._buffer += data
        frames = []
        at = 0
        while len(self._buffer) - at >= _HEAD.size:
            num_bytes, kind = _HEAD.unpack_from(self._buffer, at)
            # Checked before the body is awaited: a peer must not be able to make us buffer any number of bytes.
            if num_bytes > self._limits.get(kind, -1):
                raise ProtocolError(f"malformed frame from the peer: kind {kind} with {num_bytes} bytes")
            end = at + _HEAD.size + num_bytes
            if len(self._buffer) < end:
                break
            frames.append((kind, bytes(self._buffer[at + _HEAD.size : end])))
            at = end
        del self._buffer[:at]
        return frames

    @property
    def num_missing(self) -> int:
        """Bytes until the next frame is complete, or until its length is known."""
        if len(self._buffer) < _HEAD.size:
            return _HEAD.size - len(self._buffer)
        num_bytes, _ = _HEAD.unpack_from(self._buffer)
        return int(_HEAD.size + num_bytes - len(self._buffer))


class FrameSocket:
    """One connection to a peer, over which frames go both ways.

    Args:
        limits: See `FrameReader`.
        max_queued_bytes: Unsent bytes above which messages are refused.

    Attributes:
        last_heard, last_said: When bytes last arrived, and when some were last sent, in `time.monotonic` seconds.
    """

    def __init__(self, sock: socket.socket, limits: Mapping[int, int], max_queued_bytes: int) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._max_queued_bytes = max_queued_bytes
        self._reader = FrameReader(limits)
        self._unsent = bytearray()
        self._is_writable = True
        self._reason = "the peer closed the connection"
        self.last_heard = self.last_said = time.monotonic()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def num_unsent(self) -> int:
        """Bytes that `flush` will send when the socket is writable."""
        return len(self._unsent)

    def send_message(self, frame: bytes) -> None:
        """Send or queue a frame that holds a control message.

        Raises:
            PeerLostError: the peer is gone.
            BackpressureError: too many bytes are unsent. Nothing was sent.
        """
        self._require_writable()
        if self._unsent and len(self._unsent) + len(frame) > self._max_queued_bytes:
            raise BackpressureError(f"the peer does not read: {len(self._unsent)} bytes to it are unsent")
        self.send(frame)
        self._require_writable()

    def _require_writable(self) -> None:
        if not self._is_writable:
            raise PeerLostError(self._reason)

    def send(self, frame: bytes) -> None:
        """Send or queue a frame; drop it if the peer is lost."""
        self._unsent += frame
        self.flush()

    def flush(self) -> None:
        """Send as many unsent bytes as the socket takes. If the peer is lost, drop them."""
        while self._unsent:
            try:
                with memoryview(self._unsent) as waiting:
                    sent = self._socket.send(waiting)
            except BlockingIOError:
                return
            except OSError:
                # What the peer sent before can still be received. `receive` reports the loss after that.
                self._is_writable = False
                sent = len(self._unsent)
            except Exception as error:  # noqa: BLE001 - only this peer is lost
                self.give_up(error)
                return
            self.last_said = time.monotonic()
            del self._unsent[:sent]

    def give_up(self, error: Exception) -> None:
        """Make the next `receive` report that the peer is lost; at this point the caller cannot handle that."""
        self._is_writable = False
        self._reason = f"cannot send to the peer: {error!r}"
        self._unsent.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # so that the poller reports it

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the frames that arrived, as (kind, body).

        Raises:
            PeerLostError: the peer closed, and every complete frame was returned before.
            ProtocolError: the peer sent a malformed frame.
        """
        frames: list[tuple[int, bytes]] = []
        for _ in range(_MAX_RECEIVES):
            try:
                data = self._receive_some()
            except BlockingIOError:
                break
            except OSError as error:
                if frames:
                    break
                raise PeerLostError(f"the connection broke: {error}") from error
            if not data:
                if frames:
                    break
                raise PeerLostError(self._reason)
            self.last_heard = time.monotonic()
            frames += self._reader.feed(data)
            if len(data) < RECEIVE_BYTES:
                break  # the socket is empty; the poller reports what comes later
        return frames

    def _receive_some(self) -> bytes:
        return self._socket.recv(RECEIVE_BYTES)

    def close(self) -> None:
        self._socket.close()
