"""The control connection: frames over TCP. Nothing here blocks, but looking up the name of a host."""

from __future__ import annotations

import socket
import time

from .._tcp import bind_first, is_wildcard
from ..errors import BackpressureError, ConfigurationError, PeerLostError
from .options import Address, UCXOptions
from .wire import FrameReader, Message

__all__ = ["Channel", "Listener", "dial"]

_RECEIVE_BYTES = 256 << 10

#: How often one call of `receive` asks the kernel, so that one peer cannot keep the loop to itself.
_MAX_RECEIVES = 16

_BACKLOG = 128


class Channel:
    """One TCP connection to a peer.

    Attributes:
        last_heard, last_said: When bytes came, and when some were last sent; by `time.monotonic`.
    """

    def __init__(self, sock: socket.socket, max_queued_bytes: int) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._max_queued_bytes = max_queued_bytes
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._is_writable = True
        self.last_heard = self.last_said = time.monotonic()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def num_unsent(self) -> int:
        """Bytes that `flush` sends once the socket can be written."""
        return len(self._unsent)

    def send_message(self, message: bytes) -> None:
        """Send or queue a control message.

        Raises:
            PeerLostError: the peer is gone.
            BackpressureError: too much waits already. Nothing was sent.
        """
        if not self._is_writable:
            raise PeerLostError("the peer closed the connection")
        if self._unsent and len(self._unsent) + len(message) > self._max_queued_bytes:
            raise BackpressureError(f"{len(self._unsent)} bytes wait for the peer to take them")
        self.send(Message(message).encode())

    def send(self, frame: bytes) -> None:
        """Send or queue a frame."""
        self._unsent += frame
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it. What a lost peer did not take is dropped."""
        while self._unsent:
            try:
                with memoryview(self._unsent) as waiting:
                    sent = self._socket.send(waiting)
            except BlockingIOError:
                return
            except OSError:
                # What it sent before can still be received; the end of that says that the peer is lost.
                self._is_writable = False
                sent = len(self._unsent)
            self.last_said = time.monotonic()
            del self._unsent[:sent]

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the frames that arrived, as (kind, body).

        Raises:
            PeerLostError: the peer closed, and every whole frame was returned before.
            ProtocolError: the peer sent what is no frame.
        """
        frames: list[tuple[int, bytes]] = []
        for _ in range(_MAX_RECEIVES):
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if frames:
                    break
                raise PeerLostError(f"the connection broke: {error}") from error
            if not data:
                if frames:
                    break
                raise PeerLostError("the peer closed the connection")
            self.last_heard = time.monotonic()
            frames += self._reader.feed(data)
        return frames

    def close(self) -> None:
        self._socket.close()


def dial(address: Address, max_queued_bytes: int) -> Channel:
    """Begin to connect. What is sent meanwhile waits; that nobody is there is heard when receiving.

    Raises:
        PeerLostError: the host is not known, or cannot be reached from here.
    """
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        sock = socket.socket(found[0][0], socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise PeerLostError(f"cannot connect to {address}: {error}") from error
    try:
        sock.connect(found[0][4])
    except BlockingIOError:
        pass
    except OSError as error:
        sock.close()
        raise PeerLostError(f"cannot connect to {address}: {error}") from error
    return Channel(sock, max_queued_bytes)


class Listener:
    """A bound socket.

    Attributes:
        address: What peers connect to.
    """

    def __init__(self, options: UCXOptions, host: str, ports: range) -> None:
        """Bind and listen.

        Raises:
            ConfigurationError: the host is not ours, no port is free, the host is beyond this machine without
                `allow_plaintext`, or a wildcard without `advertise_host`.
        """
        options.require_reachable_by(host)
        self._max_queued_bytes = options.max_queued_bytes
        self._socket = bind_first(host, ports, _BACKLOG)
        self._socket.setblocking(False)
        bound_host, port = self._socket.getsockname()[:2]
        if is_wildcard(bound_host) and not options.advertise_host:
            self._socket.close()
            raise ConfigurationError(
                f"listening on {bound_host}, every interface: set advertise_host to the one that peers connect to",
                key="advertise_host",
                value="",
            )
        self.address = str(Address(options.advertise_host or bound_host, port))

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> list[Channel]:
        """Everyone who connected since the last call."""
        channels: list[Channel] = []
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:  # nobody waits; or no descriptor is free, and he waits on
                return channels
            channels.append(Channel(sock, self._max_queued_bytes))

    def close(self) -> None:
        self._socket.close()
