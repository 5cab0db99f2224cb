"""The link between a process and the launcher that started it.

The process inherits one end of a socket pair; the variable KVFERRY_LAUNCHER_FD has its number. It writes one
JSON object per line: `{"listening": PORT}`, then `{"ready": true}` or `{"failed": "why"}`. When the
launcher's end closes, however the launcher ended, the process ends too.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
from typing import Any, Final, Protocol

#: The variable with the number of the inherited socket.
LAUNCHER_VARIABLE: Final = "KVFERRY_LAUNCHER_FD"


class Link(Protocol):
    """A process's link to its launcher."""

    def report(self, **facts: Any) -> None:
        """Send facts to the launcher."""

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` in the running loop when the launcher has ended."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the launcher has ended; -1 if there is none."""

    def close(self) -> None:
        """Close the link."""


class LauncherLink:
    """A link over the socket `fd`.

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
            return  # the launcher has ended, which `watch` will report

    def watch(self, on_gone: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()

        def readable() -> None:
            loop.remove_reader(self._socket)
            on_gone()

        loop.add_reader(self._socket, readable)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


class NoLauncher:
    """The link of a process that was started by hand. It does nothing."""

    def report(self, **facts: Any) -> None:
        return

    def watch(self, on_gone: Callable[[], None]) -> None:
        return

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        return


def open_link() -> Link:
    """Return the link over the socket that the launcher named, or a link that does nothing if there is no
    launcher.
    """
    # Removed, because the socket is not inherited by processes that this one starts.
    fd = os.environ.pop(LAUNCHER_VARIABLE, "")
    return LauncherLink(int(fd)) if fd else NoLauncher()
