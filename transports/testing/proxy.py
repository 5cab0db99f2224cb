"""A TCP proxy that flips one bit."""

from __future__ import annotations

import select
import socket
import threading
from types import TracebackType
from typing import Self


class FlippingProxy:
    """Forward one TCP connection to a port of this host, and flip one bit of what the server sends.

    A context manager. It closes the connection at its end.

    Args:
        port: The server's port.
        at: Index of the byte in the server's stream.

    Attributes:
        port: The port to connect to.
    """

    def __init__(self, port: int, *, at: int) -> None:
        self._target = ("127.0.0.1", port)
        self._at = at
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._hang_up, self._hung_up = socket.socketpair()
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="flipping-proxy")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hang_up.close()
        self._thread.join()

    def _run(self) -> None:
        with self._listener, self._hung_up:
            if self._listener in self._ready(self._listener):
                with self._listener.accept()[0] as client, socket.create_connection(self._target) as server:
                    self._forward(client, server)

    def _ready(self, *sockets: socket.socket) -> list[socket.socket]:
        return select.select([self._hung_up, *sockets], [], [])[0]

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        """Forward until either side closes, or the test leaves the context."""
        other = {client: server, server: client}
        while True:
            for source in self._ready(client, server):
                data = bytearray(source.recv(1 << 16))
                if source is server:
                    self._flip(data)
                if not data:
                    return
                other[source].sendall(data)

    def _flip(self, data: bytearray) -> None:
        if 0 <= self._at < len(data):
            data[self._at] ^= 1
        self._at -= len(data)
