"""`inproc`: both sides in one process. The reference for what the others must do, and fast in tests.

There is no thread in the background: a read copies its bytes within the owner's `wait_events`. Between
`start_read` and that call the remote guard may change, the peer may go, or the deadline may pass, and each
shows as it would with a mechanism that works in the background.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from .copying import copy_regions
from .endpoint import Backend, Peer, PeerTable, Read
from .errors import (
    BackpressureError,
    ConfigurationError,
    KVTransferError,
    PeerLostError,
    TransferTimeoutError,
)
from .serving import EndpointOptions, HostTransport, PeerPool, ServedPool, stale

_listeners: dict[str, _Side] = {}
_listeners_lock = threading.Lock()


@dataclass(eq=False)
class _Side:
    """What one endpoint shares with the threads that own the others.

    Attributes:
        changed: Guards everything below, and the queued bytes of this side's connections.
        arrived: What the others put here: `None` when they connect, messages, and the error when they hang
            up.
        memory_in_use: Held while a peer copies out of the pool.
    """

    served: ServedPool
    max_queued_bytes: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    arrived: deque[tuple[_Connection, bytes | KVTransferError | None]] = field(default_factory=deque)
    is_woken: bool = False
    is_closed: bool = False
    memory_in_use: threading.Lock = field(default_factory=threading.Lock)

    def put(self, connection: _Connection, what: bytes | KVTransferError | None) -> None:
        """Add to what the owner's next turn deals with."""
        with self.changed:
            self.arrived.append((connection, what))
            self.changed.notify_all()


@dataclass(eq=False)
class _Connection:
    """One side's end of a connection.

    Attributes:
        side: Of this end.
        far: The other end; this one itself until it is connected.
        is_cut: One of the two sides has hung up.
        queued_bytes: Of messages that were sent to this end and not taken.
    """

    side: _Side
    address: str
    far: _Connection = field(init=False)
    is_cut: bool = False
    queued_bytes: int = 0

    def __post_init__(self) -> None:
        self.far = self


class _Backend(Backend[_Connection]):
    def __init__(self, peers: PeerTable[_Connection], side: _Side) -> None:
        self._peers = peers
        self._side = side
        self._addresses: list[str] = []
        self._known: dict[_Connection, Peer[_Connection]] = {}
        self._reads: dict[int, Read[_Connection]] = {}  # in the order in which they were started

    # -- peers -----------------------------------------------------------------------------------------

    def listen(self, address: str) -> str:
        name = _parse(address) if address else f"inproc://{secrets.token_hex(8)}"
        with _listeners_lock:
            if name in _listeners:
                raise ConfigurationError(f"address in use: {name}", key="address", value=name)
            _listeners[name] = self._side
        self._addresses.append(name)
        return name

    def prepare(self, address: str) -> _Connection:
        return _Connection(self._side, _parse(address))

    def connect(self, peer: Peer[_Connection]) -> None:
        near = peer.connection
        with _listeners_lock:
            there = _listeners.get(near.address)
        if there is None:
            raise PeerLostError(f"no endpoint listens at {near.address}")
        far = _Connection(there, near.address)
        near.far, far.far = far, near
        with there.changed:
            if there.is_closed:
                raise PeerLostError(f"no endpoint listens at {near.address}")
            there.put(far, None)
        self._known[near] = peer
        self._peers.connected(peer)

    def hang_up(self, peer: Peer[_Connection], error: KVTransferError) -> None:
        near = peer.connection
        far = near.far
        if near is far or near.is_cut:
            return
        # At once, also for the other side's thread: no read between the two may succeed from here on.
        near.is_cut = far.is_cut = True
        far.side.put(far, PeerLostError("the peer closed the connection"))

    def release(self, peer: Peer[_Connection]) -> None:
        self._known.pop(peer.connection, None)

    def send(self, peer: Peer[_Connection], message: bytes) -> None:
        far = peer.connection.far
        with far.side.changed:
            if far.is_cut:
                raise PeerLostError("the peer closed the connection")
            if far.queued_bytes + len(message) > far.side.max_queued_bytes:
                raise BackpressureError(f"the peer has not taken {far.queued_bytes} bytes of messages")
            far.queued_bytes += len(message)
            far.side.put(far, bytes(message))

    # -- reads -----------------------------------------------------------------------------------------

    def start_read(self, read: Read[_Connection]) -> None:
        remote = read.peer.connection.far.side.served
        self._side.served.require_read(PeerPool(remote.pool, remote.guards.num_guards), read)
        read.mechanism = "memory"
        self._reads[read.transfer_id] = read

    def stop_read(self, read: Read[_Connection]) -> bool:
        # Reads are copied in this thread, so none is half done.
        self._reads.pop(read.transfer_id, None)
        return True

    def _run(self, read: Read[_Connection]) -> KVTransferError | None:
        connection, pairs = read.peer.connection, read.pairs
        remote = connection.far.side
        with remote.memory_in_use:
            if connection.is_cut or remote.is_closed:
                return PeerLostError("the peer closed the connection")
            if time.monotonic() >= read.deadline:
                return TransferTimeoutError("the read did not end in time")
            lengths = pairs.lengths.copy()
            copy_regions(
                self._side.served.pool.addresses(pairs.local_offsets, lengths),
                remote.served.pool.addresses(pairs.remote_offsets, lengths),
                lengths,
            )
            # After the copy: what was reused meanwhile must not be taken for what was promised.
            if not remote.served.guards.holds(read.guard):
                return stale(read.guard)
        if time.monotonic() >= read.deadline:
            return TransferTimeoutError("the read did not end in time")
        return None

    # -- the loop --------------------------------------------------------------------------------------

    def turn(self, timeout_s: float) -> None:
        side = self._side
        with side.changed:
            side.changed.wait_for(lambda: side.is_woken or side.arrived or self._reads, timeout_s)
            side.is_woken = False
            arrived = list(side.arrived)
            side.arrived.clear()
            for connection, what in arrived:
                if isinstance(what, bytes):
                    connection.queued_bytes -= len(what)
        for connection, what in arrived:
            self._handle(connection, what)
        while self._reads:
            read = self._reads.pop(next(iter(self._reads)))
            self._peers.end_read(read, self._run(read))

    def _handle(self, connection: _Connection, what: bytes | KVTransferError | None) -> None:
        if what is None:
            peer = self._known[connection] = self._peers.add_incoming(connection)
            self._peers.connected(peer)
        elif connection in self._known:
            if isinstance(what, bytes):
                self._peers.message(self._known[connection], what)
            else:
                self._peers.lose(self._known[connection], what)

    def interrupt(self) -> None:
        with self._side.changed:
            self._side.is_woken = True
            self._side.changed.notify_all()

    # -- the end ---------------------------------------------------------------------------------------

    def stop_serving(self) -> None:
        with _listeners_lock:
            for name in self._addresses:
                del _listeners[name]
        with self._side.memory_in_use, self._side.changed:
            self._side.is_closed = True
            waiting = [connection for connection, what in self._side.arrived if what is None]
        for connection in waiting:
            # That side reported `Connected`, and we will never add it as a peer.
            connection.is_cut = connection.far.is_cut = True
            connection.far.side.put(connection.far, PeerLostError("the peer closed the connection"))

    def close(self) -> None:
        self._known.clear()
        self._reads.clear()


class InProcTransport(HostTransport):
    """Peers in this process. Each endpoint may belong to a thread of its own."""

    scheme = "inproc"
    options_type = EndpointOptions

    def make_backend(self, peers: PeerTable[_Connection], served: ServedPool) -> _Backend:
        return _Backend(peers, _Side(served, self.options.max_queued_bytes))


def _parse(address: str) -> str:
    scheme, separator, name = address.partition("://")
    if scheme != "inproc" or not separator or not name:
        raise ConfigurationError(f"not an inproc address: {address!r}", key="address", value=address)
    return address
