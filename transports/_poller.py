"""Waiting for several sockets, with a way to interrupt the wait."""

from __future__ import annotations

import os
import selectors
import threading
from collections.abc import Callable
from typing import Protocol


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Poller:
    """Calls a handler for each socket that is ready. One thread owns it; any thread may call `interrupt`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._signal = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._signal, selectors.EVENT_READ, self._clear)
        self._lock = threading.Lock()  # the signal must not go to a file that reuses the closed descriptor
        self.is_closed = False

    def fileno(self) -> int:
        """Return a descriptor that is readable while `poll` has something to do."""
        return self._selector.fileno()

    def watch(self, sock: HasFileno, handler: Callable[[], None], *, writes: bool = False) -> None:
        """Call `handler` when the socket is readable and, with `writes`, when it is writable."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
        watched = self._selector.get_map().get(sock.fileno())
        if watched is None:
            self._selector.register(sock.fileno(), events, handler)
        elif watched.events != events:
            self._selector.modify(sock.fileno(), events, handler)

    def unwatch(self, sock: HasFileno) -> None:
        self._selector.unregister(sock.fileno())

    def poll(self, timeout_s: float) -> bool:
        """Wait until a socket is ready, `interrupt` is called, or the timeout has passed; call the handlers.

        Returns:
            False if the timeout passed.
        """
        ready = self._selector.select(max(0.0, timeout_s))
        for key, _ in ready:
            if key.fd in self._selector.get_map():  # an earlier handler may have dropped it
                key.data()
        return bool(ready)

    def interrupt(self) -> None:
        """End the current call of `poll`, or the next one."""
        with self._lock:
            if not self.is_closed:
                os.eventfd_write(self._signal, 1)

    def _clear(self) -> None:
        os.eventfd_read(self._signal)

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            self._selector.close()
            os.close(self._signal)
