"""Waiting for sockets, with a way to be woken."""

from __future__ import annotations

import os
import selectors
import threading
from collections.abc import Callable
from typing import Protocol


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Poller:
    """Calls a handler for each socket that is ready. One thread owns it; any may `wake` and `interrupt`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._signal = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._signal, selectors.EVENT_READ, self._clear)
        self._lock = threading.Lock()  # a signal must not go to a closed descriptor's successor
        self._is_woken = False
        self.is_closed = False

    def fileno(self) -> int:
        """A descriptor that is readable while `poll` has something to do."""
        return self._selector.fileno()

    def watch(self, sock: HasFileno, handler: Callable[[], None], *, writes: bool = False) -> None:
        """Call `handler` when there is something to receive; with `writes`, also when there is room to send."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
        watched = self._selector.get_map().get(sock.fileno())
        if watched is None:
            self._selector.register(sock.fileno(), events, handler)
        elif watched.events != events:
            self._selector.modify(sock.fileno(), events, handler)

    def unwatch(self, sock: HasFileno) -> None:
        self._selector.unregister(sock.fileno())

    def poll(self, timeout_s: float) -> bool:
        """Wait until something is ready, a signal came or the time is over; call the handlers.

        Returns:
            Whether there was anything.
        """
        ready = self._selector.select(max(0.0, timeout_s))
        for key, _ in ready:
            if key.fd in self._selector.get_map():  # an earlier handler may have dropped it
                key.data()
        return bool(ready)

    def interrupt(self) -> None:
        """End the current `poll`, or the next."""
        with self._lock:
            if not self.is_closed:
                os.eventfd_write(self._signal, 1)

    def wake(self) -> None:
        """`interrupt`, and remember it for `take_woken`."""
        self._is_woken = True
        self.interrupt()

    def take_woken(self) -> bool:
        """Whether `wake` was called since the last time."""
        woken, self._is_woken = self._is_woken, False
        return woken

    def _clear(self) -> None:
        os.eventfd_read(self._signal)

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            self._selector.close()
            os.close(self._signal)
