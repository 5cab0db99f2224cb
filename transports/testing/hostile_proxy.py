"""A TCP proxy that cuts, delays, truncates, duplicates and corrupts what passes."""

from __future__ import annotations

import random
import select
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Literal, Self

#: What the proxy can do to received bytes. `cut`: close the connection. `delay`: hold everything up for
#: `DELAY_S`. `truncate`: drop the end. `duplicate`: send the end twice. `flip`: change one bit.
NetworkFault = Literal["cut", "delay", "truncate", "duplicate", "flip"]

#: Seconds for which a delay holds everything up.
DELAY_S = 0.05
#: A side that takes nothing for this many seconds is disconnected.
SEND_TIMEOUT_S = 5.0


class HostileProxy:
    """Forward TCP connections to a port of this host, with faults that a seed decides.

    A context manager. It closes all connections at its end.

    Args:
        port: The server's port.
        faults: The faults that may happen.
        seed: Seed of the random choices.
        rate: The share of received pieces that a fault happens to, 0 to 1.
        marker: Faults happen only to pieces that contain these bytes, for example the name of a message, and
            after them.

    Attributes:
        port: The port to connect to.
        num_faults: Faults so far.
    """

    def __init__(
        self, port: int, faults: Sequence[NetworkFault], *, seed: int, rate: float, marker: bytes = b""
    ) -> None:
        self._target = ("127.0.0.1", port)
        self._faults = faults
        self._random = random.Random(seed)
        self._rate = rate
        self._marker = marker
        self._other: dict[socket.socket, socket.socket] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._hang_up, self._hung_up = socket.socketpair()
        self.port: int = self._listener.getsockname()[1]
        self.num_faults = 0
        self._thread = threading.Thread(target=self._run, name="hostile-proxy")

    def stop_faults(self) -> None:
        """Let everything pass unchanged from now on."""
        self._rate = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hang_up.close()
        self._thread.join()

    def _run(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._hung_up)
            stack.enter_context(self._listener)
            while self._hung_up not in (ready := self._ready()):
                for source in ready:
                    self._serve(source)
            for end in list(self._other):
                end.close()

    def _ready(self) -> list[socket.socket]:
        return select.select([self._hung_up, self._listener, *self._other], [], [])[0]

    def _serve(self, source: socket.socket) -> None:
        try:
            if source is self._listener:
                self._accept()
            elif source in self._other:  # an earlier one may have closed it
                self._forward(source)
        except OSError:
            self._cut(source)

    def _accept(self) -> None:
        client = self._listener.accept()[0]
        try:
            server = socket.create_connection(self._target)
        except OSError:
            return client.close()
        for end, other in ((client, server), (server, client)):
            end.settimeout(SEND_TIMEOUT_S)
            self._other[end] = other

    def _forward(self, source: socket.socket) -> None:
        data = source.recv(1 << 16)
        if data and self._marker in data and self._random.random() < self._rate:
            self.num_faults += 1
            data = self._harmed(data, self._random.choice(self._faults))
        if data:
            self._other[source].sendall(data)
        else:
            self._cut(source)

    def _harmed(self, data: bytes, fault: NetworkFault) -> bytes:
        """Return what remains of `data` after a fault; empty bytes close the connection."""
        at = self._random.randrange(data.index(self._marker), len(data))
        match fault:
            case "cut":
                return b""
            case "delay":
                select.select([self._hung_up], [], [], DELAY_S)
                return data
            case "truncate":
                return data[:at]
            case "duplicate":
                return data + data[at:]
            case "flip":
                return data[:at] + bytes([data[at] ^ 1 << self._random.randrange(8)]) + data[at + 1 :]

    def _cut(self, end: socket.socket) -> None:
        if other := self._other.pop(end, None):
            del self._other[other]
            other.close()
            end.close()
