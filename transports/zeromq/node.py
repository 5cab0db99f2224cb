"""Everything between `register` and `close`: peers, and the loop over what arrives from them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from .._lookups import Found, Lookups
from .._memory import WordTable, require_transfer
from .._network_options import require_room
from .._outside import unexpected
from ..base import Connected, Event, MessageReceived, PeerLost, TransferEnded
from ..errors import (
    BackpressureError,
    KVTransferError,
    PeerLostError,
    PeerRefusedError,
    ProtocolError,
    TransportClosedError,
    VersionMismatchError,
)
from ..regions import Guard, Pool, RegionPairs
from .links import Arrival, Link
from .options import Address, ZeroMQOptions
from .reads import Peer, Reads
from .security import CurveKeys
from .serving import PoolServer
from .sockets import Sockets
from .wire import Fetch, Hello, Incoming, Message, Slice, Stale, decode

#: libzmq does not say when a peer's queue has room again; with something kept back, look again after this time.
_RETRY_S = 0.002

#: Also with nothing to do, look this often for connections that never say who they are.
_IDLE_S = 0.5


@dataclass(frozen=True)
class _Target:
    """Where to connect when the name of the host has been looked up, and with which keys."""

    address: Address
    keys: tuple[CurveKeys, ...]


@dataclass(frozen=True)
class _Pending:
    """A connection that is not a peer yet, or never will be; closed at its deadline."""

    link: Link
    deadline: float
    timeout_s: float


class Node:
    """One process among its peers. One thread calls it.

    Args:
        pool: What peers may read and reads write into.
        guards: The words under which peers may read.
        interrupt: Ends the current `Sockets.wait`; called by any thread.
    """

    def __init__(
        self,
        options: ZeroMQOptions,
        sockets: Sockets,
        pool: Pool,
        guards: WordTable,
        interrupt: Callable[[], None],
    ) -> None:
        self._options = options
        self._sockets = sockets
        self._pool = pool
        self._hello = Hello(guards.num_guards, tuple(segment.num_bytes for segment in pool.segments))
        self._server = PoolServer(pool, guards)
        self._events: list[Event] = []
        self._reads = Reads(options, self._events)
        self._lookups: Lookups[_Target] = Lookups(interrupt)
        self._pending: dict[int, _Pending] = {}
        self._peers: dict[int, Peer] = {}

    def listen(self, host: str, ports: range) -> str:
        """See `Sockets.listen`."""
        return self._sockets.listen(host, ports)

    def connect(self, address: Address, timeout_s: float) -> int:
        """See `Transport.start_connect`."""
        num_connecting = len(self._lookups) + sum(not p.link.incoming for p in self._pending.values())
        require_room(num_connecting, self._options.max_connecting)
        peer_id = self._sockets.next_id()
        try:
            keys = self._sockets.keys_for(address)
        except PeerRefusedError as error:
            self._events.append(PeerLost(peer_id, error))
            return peer_id
        self._lookups.start(peer_id, _Target(address, keys), address.host, address.port, timeout_s)
        self._dial_found()
        return peer_id

    def _dial_found(self) -> None:
        """Connect to the hosts that have been looked up."""
        for peer_id, target, found in self._lookups.take():
            if not isinstance(found, Found):
                self._events.append(PeerLost(peer_id, found))
                continue
            try:
                link = self._sockets.dial(peer_id, target.address, found, target.keys)
            except KVTransferError as error:
                self._events.append(PeerLost(peer_id, error))
                continue
            link.send([self._hello.head(), self._hello.body()])
            self._pending[peer_id] = _Pending(link, found.deadline, found.timeout_s)

    def disconnect(self, peer_id: int) -> None:
        """See `Transport.disconnect`."""
        if peer_id in self._peers:
            peer = self._peers.pop(peer_id)
            self._end_transfers(peer, TransportClosedError("this side dropped the peer"))
            self._sockets.hang_up(peer.link)
        elif peer_id in self._pending:
            self._sockets.hang_up(self._pending.pop(peer_id).link)
        else:
            self._lookups.forget(peer_id)
        self._events[:] = [e for e in self._events if isinstance(e, TransferEnded) or e.peer_id != peer_id]

    def _end_transfers(self, peer: Peer, error: KVTransferError) -> None:
        self._reads.end_all(peer, error)

    def _peer(self, peer_id: int) -> Peer:
        if peer_id not in self._peers:
            raise PeerLostError(f"no peer {peer_id} any more, or not yet")
        return self._peers[peer_id]

    def send(self, peer_id: int, message: bytes) -> None:
        """See `Transport.send`."""
        link = self._peer(peer_id).link
        if link.queued_bytes and link.queued_bytes + len(message) > self._options.max_queued_bytes:
            raise BackpressureError(
                f"the peer does not take its messages: {link.queued_bytes} bytes are queued"
            )
        link.send([Message.head(), message])

    def start_read(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int:
        """See `Transport.start_read`."""
        peer = self._peer(peer_id)
        targets = require_transfer(self._pool, peer.pool, peer.num_guards, pairs, guard)
        return self._reads.start(peer, pairs, targets, guard, timeout_s)

    # -- the loop ------------------------------------------------------------------------------------

    def turn(self, timeout_s: float) -> None:
        """Wait at most `timeout_s`, handle what happened."""
        if self._lookups:
            self._dial_found()
        self._sockets.wait(0.0 if self._events else self._patience(timeout_s))
        for happened in self._sockets.pump():
            if isinstance(happened, Arrival):
                self._on_arrival(happened)
            else:
                self._lose(happened.link, happened.error)
        self._expire()
        for peer in self._peers.values():
            peer.link.flush()

    def take_events(self) -> list[Event]:
        """Take what happened so far."""
        happened = list(self._events)
        self._events.clear()
        return happened

    def _patience(self, timeout_s: float) -> float:
        """How long nothing can become due."""
        if self._sockets.has_broken:
            return 0.0
        deadlines = [pending.deadline for pending in self._pending.values()]
        deadlines.append(self._lookups.due())
        for peer in self._peers.values():
            if peer.link.queued_bytes:
                return min(timeout_s, _RETRY_S)
            deadlines.extend(transfer.deadline for transfer in peer.transfers.values())
        due = min(deadlines, default=float("inf")) - time.monotonic()
        return max(0.0, min(timeout_s, due, _IDLE_S))

    def _expire(self) -> None:
        now = time.monotonic()
        for peer in self._peers.values():
            self._reads.expire(peer, now)
        for pending in [p for p in self._pending.values() if p.deadline <= now]:
            self._lose(pending.link, PeerLostError(f"the peer did not answer within {pending.timeout_s} s"))

    def _on_arrival(self, arrival: Arrival) -> None:
        link = arrival.link
        try:
            incoming = decode(arrival.frames)
            if link.peer_id in self._peers:
                self._on_message(self._peers[link.peer_id], incoming)
            else:
                self._greet(link, incoming)
        except VersionMismatchError as error:
            self._part(link, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is over for this peer alone
            self._drop(link, unexpected(error, f"lost peer {link.peer_id}", self._sockets.log))

    def _greet(self, link: Link, incoming: Incoming) -> None:
        """The first message of a connection."""
        if not isinstance(incoming, Hello) or (link.incoming and link.peer_id in self._pending):
            raise ProtocolError("a connection begins with one hello")
        peer = Peer.of(link, incoming)
        self._pending.pop(link.peer_id, None)
        self._peers[link.peer_id] = peer
        if link.incoming:
            link.send([self._hello.head(), self._hello.body()])
        self._events.append(Connected(link.peer_id, link.incoming))

    def _part(self, link: Link, error: VersionMismatchError) -> None:
        """Let the other side learn of our version before the connection is closed."""
        if not link.incoming or link.peer_id in self._pending or link.peer_id in self._peers:
            self._drop(link, error)
            return
        self._sockets.log.warning("a peer that connected cannot be talked to: %s", error)
        link.send([self._hello.head(), self._hello.body()])
        timeout_s = self._options.handshake_timeout_s
        self._pending[link.peer_id] = _Pending(link, time.monotonic() + timeout_s, timeout_s)

    def _on_message(self, peer: Peer, incoming: Incoming) -> None:
        match incoming:
            case Message():
                self._events.append(MessageReceived(peer.link.peer_id, incoming.body))
            case Fetch():
                self._server.answer(peer.link, incoming)
            case Slice():
                self._reads.on_slice(peer, incoming)
            case Stale():
                self._reads.on_stale(peer, incoming)
            case Hello():
                raise ProtocolError("a connection begins with one hello")

    def _drop(self, link: Link, error: KVTransferError) -> None:
        """Close a connection over which came what must not."""
        self._sockets.log.warning("dropped a peer: %s", error)
        self._sockets.hang_up(link)
        self._lose(link, error)

    def _lose(self, link: Link, error: KVTransferError) -> None:
        """A connection is gone. Of one that was never a peer, only who asked for it hears."""
        self._sockets.hang_up(link)
        self._pending.pop(link.peer_id, None)
        peer = self._peers.pop(link.peer_id, None)
        if peer is not None:
            self._end_transfers(peer, PeerLostError(f"the peer was lost: {error}"))
        if peer is not None or not link.incoming:
            self._events.append(PeerLost(link.peer_id, error))

    def close(self) -> None:
        """Drop every peer and close every socket."""
        for pending in self._pending.values():
            pending.link.forget()
        for peer in self._peers.values():
            peer.link.forget()
        self._lookups.close()
        self._peers.clear()
        self._pending.clear()
        self._events.clear()
        self._sockets.close()
