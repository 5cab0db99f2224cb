"""`inproc`: both sides in one process. The reference for what the others must do, and fast in tests.

Nothing happens behind the owner's back: there is no thread, and a read copies its bytes inside the owner's
`wait_events`. Between `start_read` and that call the remote guard may change, the peer may go, the deadline may pass,
and each shows as it would with a mechanism that works in the background.
"""

from __future__ import annotations

import itertools
import mmap
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ._copy import copy_regions
from ._memory import MappedArena, WordTable, require_available, require_host, require_transfer
from ._options import parse_options, require_int
from .base import (
    MAX_MESSAGE_BYTES,
    Arena,
    Connected,
    Event,
    MessageReceived,
    PeerLost,
    TransferEnded,
    Transport,
)
from .errors import (
    BackpressureError,
    ConfigurationError,
    KVTransferError,
    KVTransferStateError,
    PeerLostError,
    ProtocolError,
    StaleRegionError,
    TransferTimeoutError,
    TransportClosedError,
)
from .regions import Guard, Pool, RegionPairs

_MECHANISM = "memory"

_listeners: dict[str, InProcTransport] = {}
_listeners_lock = threading.Lock()


@dataclass(frozen=True)
class InProcessOptions:
    """Options of the transport.

    Attributes:
        num_guards: Words in the guard table.
        max_queued_bytes: Bytes of messages to one peer that wait to be taken, before `send` refuses more.
    """

    num_guards: int = 65536
    max_queued_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        require_int("num_guards", self.num_guards, 1, 1 << 24)
        require_int("max_queued_bytes", self.max_queued_bytes, MAX_MESSAGE_BYTES, 1 << 30)


@dataclass
class _Link:
    """One side's end of a connection; `remote_id` is how the other side calls it."""

    remote: InProcTransport
    remote_id: int
    is_lost: bool = False
    queued_bytes: int = 0  # sent to us, not yet taken


@dataclass(frozen=True)
class _Read:
    transfer_id: int
    peer_id: int
    pairs: RegionPairs
    guard: Guard
    started: float
    deadline: float


_Arrival = Connected | MessageReceived | PeerLost


@dataclass
class _Inbox:
    """What other threads put down for the owner; `changed` guards it and the transport's links."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    arrived: deque[_Arrival] = field(default_factory=deque)
    is_woken: bool = False


class InProcTransport(Transport):
    """Peers in this process. Any thread may own one side, and another thread the other."""

    scheme: ClassVar[str] = "inproc"
    options_type = InProcessOptions
    guards: WordTable

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        self._options = parse_options(InProcessOptions, options, self.scheme)
        self.guards = WordTable.anonymous(self._options.num_guards)
        self._pools: list[Pool] = []
        self._addresses: list[str] = []
        self._ids = itertools.count(1)
        self._links: dict[int, _Link] = {}
        self._inbox = _Inbox()
        self._reads: deque[_Read] = deque()
        self._ended: list[Event] = []
        self._is_closed = False
        self._memory_in_use = threading.Lock()  # held while a peer copies out of our pool

    def __repr__(self) -> str:
        return f"<InProcTransport {' '.join(self._addresses)}{' closed' if self._is_closed else ''}>"

    # -- memory --------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> Arena:
        self._require_open()
        require_available(num_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        return MappedArena(mmap.mmap(-1, num_bytes, flags=flags), num_bytes)

    def register(self, pool: Pool) -> None:
        self._require_open()
        if self._pools:
            raise KVTransferStateError("a pool is registered already")
        require_host(pool, self.scheme)
        self._pools.append(pool)

    def _pool(self) -> Pool:
        self._require_open()
        if not self._pools:
            raise KVTransferStateError("register a pool first")
        return self._pools[0]

    def _require_open(self) -> None:
        if self._is_closed:
            raise TransportClosedError("the transport is closed")

    # -- peers ---------------------------------------------------------------------------------------

    def listen(self, address: str) -> str:
        self._pool()
        name = _parse(address) if address else f"inproc://{secrets.token_hex(8)}"
        with _listeners_lock:
            if name in _listeners:
                raise ConfigurationError(f"address in use: {name}", key="address", value=name)
            _listeners[name] = self
        self._addresses.append(name)
        return name

    def start_connect(self, address: str, *, timeout_s: float) -> int:
        self._pool()
        name = _parse(address)
        peer_id = next(self._ids)
        with _listeners_lock:
            remote = _listeners.get(name)
            remote_id = None if remote is None else remote._accept(self, peer_id)
        if remote is None or remote_id is None:
            self._links[peer_id] = _Link(self, peer_id, is_lost=True)
            self._put(PeerLost(peer_id, PeerLostError(f"nobody listens at {name}")))
        else:
            self._links[peer_id] = _Link(remote, remote_id)
            self._put(Connected(peer_id, incoming=False))
            remote._put(Connected(remote_id, incoming=True))
        return peer_id

    def _accept(self, remote: InProcTransport, remote_id: int) -> int | None:
        with self._inbox.changed:
            if self._is_closed:
                return None
            peer_id = next(self._ids)
            self._links[peer_id] = _Link(remote, remote_id)
            return peer_id

    def disconnect(self, peer_id: int) -> None:
        with self._inbox.changed:
            link = self._links.pop(peer_id, None)
        if link is not None:
            self._part(peer_id, link, TransportClosedError("this side dropped the peer"))

    def _part(self, peer_id: int, link: _Link, error: KVTransferError) -> None:
        for read in [read for read in self._reads if read.peer_id == peer_id]:
            self._reads.remove(read)
            self._report(self._outcome(read, error))
        if not link.is_lost:
            link.remote._lose(link.remote_id, PeerLostError("the peer closed the connection"))

    def _lose(self, peer_id: int, error: KVTransferError) -> None:
        """The other side is going. From any thread."""
        with self._inbox.changed:
            link = self._links.get(peer_id)
            if link is None or link.is_lost:
                return
            link.is_lost = True
        self._put(PeerLost(peer_id, error))

    def send(self, peer_id: int, message: bytes) -> None:
        self._require_open()
        if len(message) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message has at most {MAX_MESSAGE_BYTES} bytes, not {len(message)}")
        link = self._link(peer_id)
        link.remote._receive(link.remote_id, message)

    def _link(self, peer_id: int) -> _Link:
        link = self._links.get(peer_id)
        if link is None or link.is_lost:
            raise PeerLostError(f"no peer {peer_id} any more")
        return link

    def _receive(self, peer_id: int, message: bytes) -> None:
        """The other side sends. From any thread."""
        with self._inbox.changed:
            link = self._links.get(peer_id)
            if link is None or link.is_lost:
                raise PeerLostError("the peer closed the connection")
            if link.queued_bytes + len(message) > self._options.max_queued_bytes:
                raise BackpressureError(f"the peer has not taken {link.queued_bytes} bytes of messages")
            link.queued_bytes += len(message)
            self._put(MessageReceived(peer_id, bytes(message)))

    # -- transfers -----------------------------------------------------------------------------------

    def start_read(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int:
        self._require_possible(peer_id, pairs, guard)
        now = time.monotonic()
        transfer_id = next(self._ids)
        self._reads.append(_Read(transfer_id, peer_id, pairs, guard, now, now + timeout_s))
        return transfer_id

    def _require_possible(self, peer_id: int, pairs: RegionPairs, guard: Guard) -> None:
        local, remote = self._pool(), self._link(peer_id).remote
        require_transfer(local, remote._pools[0], remote.guards.num_guards, pairs, guard)

    def _outcome(self, read: _Read, error: KVTransferError | None) -> TransferEnded:
        seconds = time.monotonic() - read.started
        return TransferEnded(read.transfer_id, error, read.pairs.num_bytes, seconds, _MECHANISM)

    def _run(self, read: _Read) -> KVTransferError | None:
        link = self._links[read.peer_id]
        remote, pairs = link.remote, read.pairs
        with remote._memory_in_use:
            if link.is_lost or remote._is_closed:
                return PeerLostError("the peer closed the connection")
            if time.monotonic() >= read.deadline:
                return TransferTimeoutError("the read did not end in time")
            lengths = pairs.lengths.copy()
            copy_regions(
                self._pools[0].addresses(pairs.local_offsets, lengths),
                remote._pools[0].addresses(pairs.remote_offsets, lengths),
                lengths,
            )
            if not remote.guards.holds(read.guard):
                return StaleRegionError(f"guard {read.guard.index} no longer holds {read.guard.value}")
        if time.monotonic() >= read.deadline:
            return TransferTimeoutError("the read did not end in time")
        return None

    # -- the owner's loop ----------------------------------------------------------------------------

    def wait_events(self, timeout_s: float) -> list[Event]:
        self._require_open()
        with self._inbox.changed:
            self._inbox.changed.wait_for(self._is_ready, max(0.0, timeout_s))
            self._inbox.is_woken = False
            arrived = [arrival for arrival in self._inbox.arrived if self._take(arrival)]
            self._inbox.arrived.clear()
        events: list[Event] = []
        for arrival in arrived:
            events += self._handle(arrival)
        while self._reads:
            read = self._reads.popleft()
            self._report(self._outcome(read, self._run(read)))
        ended = list(self._ended)
        self._ended.clear()
        return ended + events

    def _handle(self, arrival: _Arrival) -> list[Event]:
        """What the owner hears of an arrival."""
        if arrival.peer_id not in self._links:
            return []
        match arrival:
            case PeerLost(peer_id, error):
                self._part(peer_id, self._links.pop(peer_id), PeerLostError(f"the peer was lost: {error}"))
        return [arrival]

    def _report(self, ended: TransferEnded) -> None:
        self._ended.append(ended)

    def _is_ready(self) -> bool:
        return bool(self._inbox.is_woken or self._inbox.arrived or self._reads or self._ended)

    def _take(self, arrival: _Arrival) -> bool:
        """Whether the owner still knows the peer that an arrival is about."""
        link = self._links.get(arrival.peer_id)
        if link is not None and isinstance(arrival, MessageReceived):
            link.queued_bytes -= len(arrival.message)
        return link is not None

    def _put(self, arrival: _Arrival) -> None:
        with self._inbox.changed:
            self._inbox.arrived.append(arrival)
            self._inbox.changed.notify_all()

    def wake(self) -> None:
        with self._inbox.changed:
            self._inbox.is_woken = True
            self._inbox.changed.notify_all()

    def close(self) -> None:
        with _listeners_lock:
            for name in self._addresses:
                _listeners.pop(name, None)
        with self._memory_in_use, self._inbox.changed:
            self._is_closed = True
            links, self._links = list(self._links.values()), {}
        for link in links:
            if not link.is_lost:
                link.remote._lose(link.remote_id, PeerLostError("the peer closed the connection"))
        self._reads.clear()


def _parse(address: str) -> str:
    scheme, separator, name = address.partition("://")
    if scheme != "inproc" or not separator or not name:
        raise ConfigurationError(f"not an inproc address: {address!r}", key="address", value=address)
    return address
