"""The control connection: frames over TCP. Nothing here blocks, except the look-up of a host name to listen on."""

from __future__ import annotations

import contextlib
import socket

from .._frames import FrameSocket
from .._lookups import Found
from .._outside import outside
from .._tcp import bind_first, is_wildcard
from ..errors import ConfigurationError, PeerLostError
from .options import Address, UCXOptions
from .wire import FRAME_LIMITS

_BACKLOG = 128


class Channel(FrameSocket):
    """One TCP connection to a peer.

    Attributes:
        awaits_room: The poller was asked to report room to send.
    """

    def __init__(self, sock: socket.socket, max_queued_bytes: int) -> None:
        super().__init__(sock, FRAME_LIMITS, max_queued_bytes)
        self.awaits_room = False
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def dial(address: Address, found: Found, max_queued_bytes: int) -> Channel:
    """Begin to connect. What is sent meanwhile waits. If nothing listens there, `receive` says so.

    Raises:
        PeerLostError: the host cannot be reached from here.
        BackpressureError: there is no descriptor left.
    """
    with outside(f"cannot connect to {address}", PeerLostError):
        sock = socket.socket(found.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            with contextlib.suppress(BlockingIOError):
                sock.connect(found.sockaddr)
            return Channel(sock, max_queued_bytes)
        except BaseException:
            sock.close()
            raise


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
                f"listening on {bound_host}, every interface: set advertise_host to the host that peers connect to",
                key="advertise_host",
                value="",
            )
        self.address = str(Address(options.advertise_host or bound_host, port))

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> Channel:
        """See `_accepting.Listening`."""
        sock, _ = self._socket.accept()
        try:
            return Channel(sock, self._max_queued_bytes)
        except BaseException:
            sock.close()
            raise

    def close(self) -> None:
        self._socket.close()
