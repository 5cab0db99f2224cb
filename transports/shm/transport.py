"""`SharedMemoryTransport`: joins sockets, memory and copying threads into one transport."""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from .._accepting import Acceptor
from .._adapter import AdaptedEndpoint
from .._copy import IS_ORDERED
from .._descriptors import warn_if_few
from .._frames import encode_frame
from .._limited_log import LimitedLog
from .._memory import require_guard
from .._network_options import require_room
from .._options import parse_options
from .._outside import outside, survived, unexpected
from .._poller import Poller
from ..base import (
    MAX_MESSAGE_BYTES,
    Arena,
    Connected,
    Event,
    MessageReceived,
    PeerLost,
    Transport,
)
from ..errors import (
    BackendUnavailableError,
    BackpressureError,
    ConfigurationError,
    KVTransferError,
    PeerLostError,
    ProtocolError,
    TransferTimeoutError,
    TransportClosedError,
)
from ..regions import Guard, Pool, RegionPairs
from .copier import Copier, Read
from .greeting import Greeting, out_of_order
from .hello import FrameKind
from .options import SharedMemoryOptions
from .pools import LocalMemory, PeerMemory
from .sockets import Connection, Listener, connect, new_address, parse_address

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Peer:
    """A peer that can be talked to, or, in `_leaving`, one whose last pieces are being copied."""

    peer_id: int
    connection: Connection
    memory: PeerMemory
    reads: dict[int, Read] = field(default_factory=dict)


class SharedMemoryTransport(Transport):
    """Peers on this host. See the module."""

    scheme: ClassVar[str] = "shm"
    options_type = SharedMemoryOptions

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        """Start the copying threads; allocate the guard table.

        Raises:
            ConfigurationError: an option is unknown or wrong.
            BackendUnavailableError: this system cannot do it.
        """
        self._options = parse_options(SharedMemoryOptions, options, self.scheme)
        if not IS_ORDERED:
            raise BackendUnavailableError(
                "this processor needs kvferry's compiled part: install a C compiler"
            )
        self._log = LimitedLog(logger)
        warn_if_few(self.scheme, 0, self._options.max_connecting, 1)
        with outside(f"cannot open transport {self.scheme!r}", ConfigurationError), ExitStack() as opened:
            self._poller = Poller()
            opened.callback(self._poller.close)
            self._memory = LocalMemory(self._options.num_guards)
            opened.callback(self._memory.withdraw)
            self._copier = Copier(
                self._options.copy_threads, self._options.inline_bytes, on_ended=self._poller.interrupt
            )
            opened.pop_all()
        self.guards = self._memory.guards
        self._ids = itertools.count(1)
        self._acceptors: dict[str, Acceptor[Connection]] = {}  # by address
        self._greetings: dict[int, Greeting] = {}
        self._peers: dict[int, _Peer] = {}
        self._leaving: list[tuple[_Peer, list[Event]]] = []  # with what is to be said when it has left
        self._events: list[Event] = []

    def __repr__(self) -> str:
        addresses = " ".join(self._acceptors)
        return f"<SharedMemoryTransport {addresses}{' closed' if self._poller.is_closed else ''}>"

    # -- memory --------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> Arena:
        self._require_open()
        with outside(f"cannot allocate {num_bytes} bytes", ConfigurationError):
            return self._memory.allocate(num_bytes)

    def register(self, pool: Pool) -> AdaptedEndpoint:
        self._require_open()
        with outside("cannot register a pool", ConfigurationError):
            self._memory.register(pool)
        return AdaptedEndpoint(self)

    def _require_open(self) -> None:
        if self._poller.is_closed:
            raise TransportClosedError("the transport is closed")

    # -- peers ---------------------------------------------------------------------------------------

    def listen(self, address: str) -> str:
        self._require_open()
        self._memory.require_registered()
        address = address or new_address(self._options.socket_dir)
        options = self._options
        listener = Listener(address, options.max_queued_bytes, is_shared=bool(options.allowed_uids))
        self._acceptors[address] = Acceptor(listener, self._poller, partial(self._accept, address))
        return address

    def start_connect(self, address: str, *, timeout_s: float) -> int:
        self._require_open()
        self._memory.require_registered()
        parse_address(address)
        num_connecting = sum(not greeting.incoming for greeting in self._greetings.values())
        require_room(num_connecting, self._options.max_connecting)
        peer_id = next(self._ids)
        try:
            connection = connect(address, self._options.max_queued_bytes)
            deadline = time.monotonic() + timeout_s
            self._begin(Greeting(peer_id, False, connection, deadline, address))
        except KVTransferError as error:
            self._events.append(PeerLost(peer_id, error))
        return peer_id

    def _accept(self, address: str, connection: Connection) -> None:
        incoming = [greeting for greeting in self._greetings.values() if greeting.incoming]
        max_connecting = self._options.max_connecting
        if len(incoming) >= max_connecting:
            # Peers say hello at once, so it is hardly one of them that has been silent for the longest time.
            error = BackpressureError(f"{max_connecting} others are being greeted (option max_connecting)")
            self._lose(incoming[0].peer_id, error)
        deadline = time.monotonic() + self._options.handshake_timeout_s
        try:
            self._begin(Greeting(next(self._ids), True, connection, deadline, address))
        except KVTransferError as error:
            self._log.warning("refused a connection: %s", error)

    def _begin(self, greeting: Greeting) -> None:
        """Greet who connected; wait for the greeting of a listener.

        Raises:
            KVTransferError: it ends here; the connection is closed.
        """
        connection = greeting.connection
        try:
            greeting.begin(frozenset({os.geteuid(), *self._options.allowed_uids}))
            self._watch(greeting.peer_id, connection)
        except Exception as error:
            connection.close()
            raise unexpected(error, "cannot begin a connection", self._log) from error
        self._greetings[greeting.peer_id] = greeting

    def _watch(self, peer_id: int, connection: Connection) -> None:
        self._poller.watch(connection, partial(self._serve, peer_id), writes=connection.num_unsent > 0)

    def _watch_peer(self, peer_id: int, connection: Connection) -> None:
        """As `_watch`, from where no error may leave: the connection is given up then, which the poller reports."""
        try:
            self._watch(peer_id, connection)
        except Exception as error:  # noqa: BLE001 - see above
            connection.give_up(unexpected(error, f"lost peer {peer_id}", self._log))

    def _serve(self, peer_id: int) -> None:
        """A socket is ready: take what came, send what waits."""
        owner = self._greetings.get(peer_id) or self._peers.get(peer_id)
        if owner is None:
            return
        try:
            for kind, body in owner.connection.receive():
                self._handle(peer_id, FrameKind(kind), body)
            owner.connection.flush()
            self._watch(peer_id, owner.connection)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is over for this peer alone
            self._lose(peer_id, unexpected(error, f"lost peer {peer_id}", self._log))

    def _handle(self, peer_id: int, kind: FrameKind, body: bytes) -> None:
        greeting = self._greetings.get(peer_id)
        if greeting is not None:
            memory = greeting.on_frame(kind, body, self._memory)
            if memory is not None:
                del self._greetings[peer_id]
                self._peers[peer_id] = _Peer(peer_id, greeting.connection, memory)
                self._events.append(Connected(peer_id, greeting.incoming))
        elif kind is FrameKind.MESSAGE:
            self._events.append(MessageReceived(peer_id, body))
        else:
            raise out_of_order(kind)

    def _lose(self, peer_id: int, error: KVTransferError) -> None:
        """The peer is gone, or has to go; the owner hears of it if he ever heard of the peer."""
        greeting = self._greetings.pop(peer_id, None)
        if greeting is None:
            peer = self._peers.pop(peer_id, None)
            if peer is not None:
                self._leave(peer, error, [PeerLost(peer_id, error)])
            return
        self._hang_up(greeting.connection)
        if greeting.incoming:
            self._log.warning("process %d connected but said no hello: %s", greeting.connection.pid, error)
        else:
            self._events.append(PeerLost(peer_id, error))

    def _leave(self, peer: _Peer, error: KVTransferError, farewell: list[Event]) -> None:
        self._hang_up(peer.connection)
        for read in peer.reads.values():
            self._copier.cancel(read, error)
        self._leaving.append((peer, farewell))

    def _hang_up(self, connection: Connection) -> None:
        with survived("cannot stop waiting for a connection", self._log):
            self._poller.unwatch(connection)
        with survived("cannot close a connection", self._log):
            connection.close()

    def disconnect(self, peer_id: int) -> None:
        if peer_id in self._peers:
            self._events[:] = [event for event in self._events if not _is_of_peer(event, peer_id)]
            peer = self._peers.pop(peer_id)
            self._leave(peer, TransportClosedError("this side dropped the peer"), [])
        elif peer_id in self._greetings:
            self._hang_up(self._greetings.pop(peer_id).connection)

    def send(self, peer_id: int, message: bytes) -> None:
        self._require_open()
        if len(message) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message has at most {MAX_MESSAGE_BYTES} bytes, not {len(message)}")
        peer = self._peer(peer_id)
        peer.connection.send_message(encode_frame(FrameKind.MESSAGE, message))
        self._watch_peer(peer_id, peer.connection)

    def _peer(self, peer_id: int) -> _Peer:
        peer = self._peers.get(peer_id)
        if peer is None:
            raise PeerLostError(f"no peer {peer_id} any more")
        return peer

    # -- transfers -----------------------------------------------------------------------------------

    def start_read(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int:
        self._require_open()
        peer = self._peer(peer_id)
        require_guard(guard, peer.memory.num_guards)
        pieces = peer.memory.pieces(self._memory.pool.addresses(pairs.local_offsets, pairs.lengths), pairs)
        read = Read(next(self._ids), peer.memory, pieces, guard, time.monotonic() + timeout_s)
        peer.reads[read.transfer_id] = read
        self._copier.submit(read)
        return read.transfer_id

    def _collect(self) -> None:
        """Report the transfers that ended, then the peers that have left with their last one."""
        for ended in self._copier.take_ended():
            for peer in [*self._peers.values(), *(peer for peer, _ in self._leaving)]:
                peer.reads.pop(ended.transfer_id, None)
            self._events.append(ended)
        for peer, farewell in [entry for entry in self._leaving if not entry[0].reads]:
            with survived("cannot close a peer's memory", self._log):
                peer.memory.close()
            self._events += farewell
        self._leaving = [entry for entry in self._leaving if entry[0].reads]

    # -- the owner's loop ----------------------------------------------------------------------------

    def wait_events(self, timeout_s: float) -> list[Event]:
        self._require_open()
        until = time.monotonic() + timeout_s
        self._collect()
        while True:
            now = time.monotonic()
            self._poller.poll(0.0 if self._events else min(until, self._next_deadline()) - now)
            self._expire(time.monotonic())
            self._collect()
            if self._poller.take_woken() or self._events or time.monotonic() >= until:
                events = list(self._events)
                self._events.clear()
                return events

    def _next_deadline(self) -> float:
        deadlines = [greeting.deadline for greeting in self._greetings.values()]
        deadlines += [read.deadline for peer in self._peers.values() for read in peer.reads.values()]
        deadlines += [acceptor.resumes_at for acceptor in self._acceptors.values()]
        return min(deadlines, default=math.inf)

    def _expire(self, now: float) -> None:
        for acceptor in self._acceptors.values():
            acceptor.resume(now)
        for greeting in [g for g in self._greetings.values() if g.deadline <= now]:
            self._lose(greeting.peer_id, TransferTimeoutError("timed out waiting for the peer's hello"))
        for peer in self._peers.values():
            for read in peer.reads.values():
                if read.deadline <= now:
                    self._copier.cancel(read, TransferTimeoutError("the read did not end in time"))

    def fileno(self) -> int:
        """A descriptor that is readable while `wait_events` has something to do about sockets and copies."""
        return self._poller.fileno()

    def wake(self) -> None:
        self._poller.wake()

    def close(self) -> None:
        if self._poller.is_closed:
            return
        self._copier.close()
        # Before the peers hear of it: what they still copy is not promised any more.
        self._memory.withdraw()
        for acceptor in self._acceptors.values():
            acceptor.close()
        for greeting in self._greetings.values():
            with survived("cannot close a connection", self._log):
                greeting.connection.close()
        for peer in [*self._peers.values(), *(peer for peer, _ in self._leaving)]:
            with survived("cannot close a peer", self._log):
                peer.connection.close()
                peer.memory.close()
        self._log.flush()
        self._greetings.clear()
        self._peers.clear()
        self._memory.close()
        self._poller.close()


def _is_of_peer(event: Event, peer_id: int) -> bool:
    return isinstance(event, Connected | MessageReceived | PeerLost) and event.peer_id == peer_id
