"""Looking up host names in threads, because the system's resolver may take many seconds to answer."""

from __future__ import annotations

import encodings.idna  # noqa: F401 - `getaddrinfo` would import it at its first call, which needs a descriptor
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ._outside import typed
from ._tcp import authority
from .errors import BackpressureError, KVTransferError, PeerLostError

Target = TypeVar("Target")

#: Lookups that run at a time. Python cannot end one, so a resolver that does not answer blocks up to this many threads.
_MAX_THREADS = 4


@dataclass(frozen=True)
class Found:
    """A socket address.

    Attributes:
        host: IP address, with a scope if it has one.
        deadline: When the connection to it must be made, in `time.monotonic` seconds.
    """

    family: int
    sockaddr: tuple[Any, ...]
    timeout_s: float
    deadline: float

    @property
    def host(self) -> str:
        return str(self.sockaddr[0])


@dataclass(frozen=True)
class _Lookup:
    host: str
    port: int
    timeout_s: float
    deadline: float


@dataclass
class _Shared:
    """What the owner and the threads share, guarded by `lock`."""

    notify: Callable[[], None]
    lock: threading.Lock = field(default_factory=threading.Lock)
    waiting: deque[tuple[int, _Lookup]] = field(default_factory=deque)
    ended: dict[int, Found | KVTransferError] = field(default_factory=dict)
    num_threads: int = 0


class Lookups(Generic[Target]):
    """Lookups of one endpoint, each for one peer. Only one thread may use it.

    Args:
        notify: Called by any thread after a lookup has ended, even after `close`.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self._shared = _Shared(notify)
        self._lookups: dict[int, tuple[_Lookup, Target]] = {}

    def __len__(self) -> int:
        return len(self._lookups)

    def start(self, peer_id: int, target: Target, host: str, port: int, timeout_s: float) -> None:
        """Start to look a host up; `take` returns the result within `timeout_s`, and at once for an IP address.

        Args:
            target: Returned by `take` with the result.

        Raises:
            BackpressureError: no thread can be started. Nothing was started.
        """
        lookup = _Lookup(host, port, timeout_s, time.monotonic() + timeout_s)
        shared = self._shared
        found = _resolved(lookup, socket.AI_NUMERICHOST)
        with shared.lock:
            if isinstance(found, Found):
                shared.ended[peer_id] = found
            else:
                shared.waiting.append((peer_id, lookup))
        self._lookups[peer_id] = lookup, target
        if not isinstance(found, Found):
            try:
                _start_thread(shared)
            except RuntimeError as error:
                self.forget(peer_id)
                raise BackpressureError(f"cannot look up {host!r}: {error}; raise `ulimit -u`") from error

    def forget(self, peer_id: int) -> None:
        """Drop the lookup for this peer: `take` will not return it."""
        self._lookups.pop(peer_id, None)
        with self._shared.lock:
            self._shared.ended.pop(peer_id, None)
            waiting = [entry for entry in self._shared.waiting if entry[0] != peer_id]
            self._shared.waiting = deque(waiting)

    def due(self) -> float:
        """When `take` will have something to return, in `time.monotonic` seconds; infinity if never."""
        if not self._lookups:
            return math.inf
        with self._shared.lock:
            if self._shared.ended:
                return 0.0
        return min((lookup.deadline for lookup, _ in self._lookups.values()), default=math.inf)

    def take(self) -> Iterator[tuple[int, Target, Found | KVTransferError]]:
        """Take the lookups that have ended: peer id, target, and the address found or the error."""
        with self._shared.lock:
            ended, self._shared.ended = self._shared.ended, {}
        now = time.monotonic()
        for peer_id, (lookup, _) in self._lookups.items():
            if peer_id not in ended and lookup.deadline <= now:
                ended[peer_id] = PeerLostError(
                    f"timed out after {lookup.timeout_s:g} s looking up host {lookup.host!r}: is its name service up?"
                )
        for peer_id, found in ended.items():
            if peer_id in self._lookups:  # otherwise its deadline passed before
                _, target = self._lookups[peer_id]
                self.forget(peer_id)
                yield peer_id, target, found

    def close(self) -> None:
        """Drop all lookups. Threads that are looking a name up end when the system answers."""
        for peer_id in list(self._lookups):
            self.forget(peer_id)


def _start_thread(shared: _Shared) -> None:
    with shared.lock:
        if shared.num_threads == _MAX_THREADS:
            return
        shared.num_threads += 1
    try:
        threading.Thread(target=_work, args=(shared,), name="kvferry-lookup", daemon=True).start()
    except RuntimeError:
        with shared.lock:
            shared.num_threads -= 1
            if shared.num_threads:  # the other threads will do it
                return
        raise


def _work(shared: _Shared) -> None:
    while True:
        with shared.lock:
            if not shared.waiting:
                shared.num_threads -= 1
                return
            peer_id, lookup = shared.waiting.popleft()
        found = _resolved(lookup)
        with shared.lock:
            shared.ended[peer_id] = found
        shared.notify()


def _resolved(lookup: _Lookup, flags: int = 0) -> Found | KVTransferError:
    try:
        found = socket.getaddrinfo(lookup.host, lookup.port, type=socket.SOCK_STREAM, flags=flags)
    except Exception as error:  # noqa: BLE001 - e.g. a name that cannot be encoded; a thread that dies would report nothing
        where = authority(lookup.host, lookup.port)
        return typed(error, f"cannot connect to {where}: cannot look up {lookup.host!r}", PeerLostError)
    family, _, _, _, sockaddr = found[0]
    return Found(family, sockaddr, lookup.timeout_s, lookup.deadline)
