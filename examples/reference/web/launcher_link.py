"""The line between a process and the launcher that started it.

A launcher hands the process one end of a socket pair (`--launcher-fd N`). The process writes one JSON object a
line on it, `{"listening": PORT}` and then `{"ready": true}` or `{"failed": "why"}`. When the launcher's end closes,
however the launcher ended, the process ends too.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any, Protocol


class Link(Protocol):
    """What a process may do with its launcher."""

    def report(self, **facts: Any) -> None:
        """Tell the launcher something."""

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` in the running loop when the launcher is gone."""

    def close(self) -> None:
        """Hang up."""


class LauncherLink:
    """A launcher listens at the other end of `fd`.

    Raises:
        OSError: `fd` is not an open socket.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._socket.set_inheritable(False)

    def report(self, **facts: Any) -> None:
        try:
            self._socket.send(json.dumps(facts).encode() + b"\n")
        except OSError:
            return  # the launcher is gone; `watch` notices

    def watch(self, on_gone: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()

        def readable() -> None:
            loop.remove_reader(self._socket)
            on_gone()

        loop.add_reader(self._socket, readable)

    def close(self) -> None:
        self._socket.close()


class NoLauncher:
    """Started by hand: nobody to tell, nobody to outlive."""

    def report(self, **facts: Any) -> None:
        return

    def watch(self, on_gone: Callable[[], None]) -> None:
        return

    def close(self) -> None:
        return


def open_link(fd: int) -> Link:
    """The link over `fd`, or none when `fd` is negative."""
    return LauncherLink(fd) if fd >= 0 else NoLauncher()
