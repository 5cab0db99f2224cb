"""Accepting connections, even while this process is out of file descriptors."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from ._limited_log import LimitedLog
from ._outside import typed
from ._poller import Poller

logger = logging.getLogger(__name__)

#: How long no connection is accepted after descriptors, or memory for sockets, ran out.
_REST_S = 0.25

#: Connections accepted in one go, so that a flood of them cannot keep the loop from its other sockets.
_MAX_ACCEPTED = 64

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Connection_co = TypeVar("Connection_co", covariant=True)
Connection = TypeVar("Connection")


class Listening(Protocol[Connection_co]):
    """A bound, non-blocking socket."""

    def fileno(self) -> int: ...

    def accept(self) -> Connection_co:
        """Accept one connection. Raises OSError: none is pending, or it cannot be accepted."""

    def close(self) -> None: ...


class Acceptor(Generic[Connection]):
    """Passes every connection to a listener to `take`.

    When we are out of file descriptors the kernel keeps reporting the pending connection. Stop polling the listener for
    a while; the peer stays in the backlog.

    Args:
        call_at: `PeerTable.call_at`, which ends such a pause.
    """

    def __init__(
        self,
        listener: Listening[Connection],
        poller: Poller,
        take: Callable[[Connection], None],
        call_at: Callable[[float, Callable[[], None]], int],
    ) -> None:
        self._listener = listener
        self._poller = poller
        self._take = take
        self._call_at = call_at
        self._log = LimitedLog(logger)
        self._resume()

    def _accept_all(self) -> None:
        for _ in range(_MAX_ACCEPTED):
            try:
                connection = self._listener.accept()
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._rest(error)
                return  # no connection waits; or one hung up, and the next one is reported again
            except Exception as error:  # noqa: BLE001 - only this connection is lost
                self._log.warning("cannot accept a connection: %r", error, exc_info=error)
                continue
            self._take(connection)

    def _rest(self, error: OSError) -> None:
        self._log.warning("%s", typed(error, f"cannot accept a peer (next try in {_REST_S} s)"))
        self._poller.unwatch(self._listener)
        self._call_at(time.monotonic() + _REST_S, self._resume)

    def _resume(self) -> None:
        self._poller.watch(self._listener, self._accept_all)

    def close(self) -> None:
        """Stop listening."""
        self._log.flush()
        self._listener.close()
