"""Ends the wait of one transport when another one has something to do."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable


class Waker:
    """A thread that calls `wake` whenever something new becomes readable at `descriptor`. It does nothing else.

    Args:
        descriptor: Of an epoll instance, or of anything else that can be polled; open until `close` has returned.
    """

    # Edge-triggered below: until the owner has come round to it, a ready descriptor would keep this thread spinning.

    def __init__(self, descriptor: int, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._stopped = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(descriptor, select.EPOLLIN | select.EPOLLET)
        self._epoll.register(self._stopped, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="kvferry-auto", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            ready = [descriptor for descriptor, _ in self._epoll.poll()]
            if self._stopped in ready:
                return
            self._wake()

    def close(self) -> None:
        """End the thread."""
        os.eventfd_write(self._stopped, 1)
        self._thread.join()
        self._epoll.close()
        os.close(self._stopped)
