"""A network between two hosts that somebody hostile holds in his hands."""

from __future__ import annotations

import random
import select
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Literal, Self

#: `truncate`: the end of what came is missing; `duplicate`: it comes twice; `flip`: a bit of it is another.
Mishap = Literal["cut", "delay", "truncate", "duplicate", "flip"]

#: How long a delay holds up everything.
DELAY_S = 0.05
#: A side that takes nothing for so long is cut off.
SEND_TIMEOUT_S = 5.0


class HostileProxy:
    """Forwards TCP connections to a port of this host; on the way things happen, as a seed says.

    A context manager, which hangs up at its end.

    Args:
        port: Of the server.
        mishaps: What may happen.
        rate: To how much of what passes, 0 to 1.

    Attributes:
        port: Where to connect.
        num_mishaps: What happened so far.
    """

    def __init__(self, port: int, mishaps: Sequence[Mishap], *, seed: int, rate: float) -> None:
        self._target = ("127.0.0.1", port)
        self._mishaps = mishaps
        self._dice = random.Random(seed)
        self._rate = rate
        self._other: dict[socket.socket, socket.socket] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._hang_up, self._hung_up = socket.socketpair()
        self.port: int = self._listener.getsockname()[1]
        self.num_mishaps = 0
        self._thread = threading.Thread(target=self._run, name="hostile-proxy")

    def behave(self) -> None:
        """From now on let everything pass."""
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
            elif source in self._other:  # it may have been cut since
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
        if data and self._dice.random() < self._rate:
            self.num_mishaps += 1
            data = self._harmed(data, self._dice.choice(self._mishaps))
        if data:
            self._other[source].sendall(data)
        else:
            self._cut(source)

    def _harmed(self, data: bytes, mishap: Mishap) -> bytes:
        """What is left of it; nothing: the connection ends."""
        at = self._dice.randrange(len(data))
        match mishap:
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
                return data[:at] + bytes([data[at] ^ 1 << self._dice.randrange(8)]) + data[at + 1 :]

    def _cut(self, end: socket.socket) -> None:
        if other := self._other.pop(end, None):
            del self._other[other]
            other.close()
            end.close()
