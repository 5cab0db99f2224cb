"""The peers of one endpoint, once for all transports: `PeerEndpoint` drives a small `Backend`.

In every transport a peer connects, completes a handshake, sends messages, is read from, and is lost. This
module owns all of that: ids, states, deadlines, the queue of events, and the order in which the owner sees
them. A backend only moves frames and bytes. It knows its sockets and threads, and reports what it sees to a
`PeerTable`:

    owner  ──  PeerEndpoint  ──  PeerTable  ──  Backend  ──  sockets, copiers, libraries
               (`base.Endpoint`)     ▲             │
                                     └── reports ──┘

The states of a peer::

    HANDSHAKING ──connected──▶ CONNECTED ──┐
         │                                 ├─ lose, disconnect ─▶ LEAVING ── no read is left ──▶ forgotten
         └─────────────────────────────────┘

A peer is LEAVING while its connection is gone but some of its reads cannot be interrupted yet, for example
because another thread is copying. Its `PeerLost` waits until they have ended.

The owner of an endpoint can rely on what `base` says about the order of events and about ids, whatever the
backend reports. A backend may report the same thing twice, or late. A report about a peer that is leaving, or
about a read that has ended, changes nothing. The second end of a read is logged, because it means that the
backend may have written into memory that no longer belonged to it.

What must never break: each read that was accepted ends once, before its peer is lost, and nothing follows the
loss.

The cost of one event does not depend on the number of peers: nothing here walks over all of them, except
`close`.

The module has four parts: what is kept per peer and per read; the `Backend` that a transport implements; the
`PeerTable`; and `PeerEndpoint` with `PeerTransport`, from which a transport derives.
`docs/writing-a-transport.md` builds a backend step by step.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .base import (
    MAX_MESSAGE_BYTES,
    Arena,
    Connected,
    Endpoint,
    Event,
    MessageReceived,
    PeerLost,
    Route,
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
    RegionError,
    TransferTimeoutError,
    TransportClosedError,
)
from .limited_log import LimitedLog
from .outside import log_traceback, outside, survived, typed
from .regions import Guard, Pool, RegionPairs

logger = logging.getLogger(__name__)

#: What a backend keeps per peer: its socket or link, and everything that it knows about the other side.
C = TypeVar("C")

#: The heap of deadlines may hold this many dead entries, plus one per live entry.
_MAX_DEAD_DEADLINES = 256


# == peers and reads ===============================================================================


class PeerState(enum.Enum):
    """How far a peer has come. The module shows the transitions."""

    HANDSHAKING = "handshaking"
    CONNECTED = "connected"
    LEAVING = "leaving"


@dataclass(eq=False, slots=True)
class Peer(Generic[C]):
    """One peer. Only the `PeerTable` changes it, except for `connection`.

    Attributes:
        connection: Belongs to the backend, which may replace it, for example at the end of a handshake.
        timeout_s: Seconds that the handshake may take.
        reads: The reads that have not ended, by transfer id.
        loss: The event to report when the last read has ended; None if the owner must not hear of the loss.
    """

    peer_id: int
    incoming: bool
    connection: C
    timeout_s: float
    state: PeerState = PeerState.HANDSHAKING
    reads: dict[int, Read[C]] = field(default_factory=dict)
    loss: PeerLost | None = None

    def __repr__(self) -> str:
        return f"<Peer {self.peer_id} {self.state.value}, {len(self.reads)} reads, {self.connection!r}>"


@dataclass(eq=False, slots=True)
class Read(Generic[C]):
    """One read that has not ended.

    Attributes:
        started, deadline: By the table's clock, in seconds.
        mechanism: What moves the bytes, for `TransferEnded`. The backend sets it in `start_read` or later.
        error: Why the read is being stopped. None while it may still succeed.
    """

    transfer_id: int
    peer: Peer[C]
    pairs: RegionPairs
    guard: Guard
    started: float
    deadline: float
    mechanism: str = ""
    error: KVTransferError | None = None


# == the backend of a transport ====================================================================


class Backend(ABC, Generic[C]):
    """What differs between transports.

    The thread that owns the endpoint calls every method except `interrupt`.

    If a method about a peer raises an exception that it does not document, only that peer is lost.
    """

    # -- required: peers -------------------------------------------------------------------------------

    @abstractmethod
    def listen(self, address: str) -> str:
        """See `Endpoint.listen`. Report each incoming connection by `PeerTable.add_incoming`."""

    @abstractmethod
    def prepare(self, address: str) -> C:
        """Check an address, and return a new connection object for it. Open nothing.

        Raises:
            ConfigurationError: the address is malformed or of another scheme.
        """

    @abstractmethod
    def connect(self, peer: Peer[C]) -> None:
        """Begin to connect.

        Report `PeerTable.connected` or `lose`, now or later; the table watches the deadline.

        Raises:
            BackpressureError: this process lacks something now, such as a file descriptor, that it may have
                later. `start_connect` raises it too, and no event follows. Any other error becomes the peer's
                `PeerLost`.
        """

    @abstractmethod
    def hang_up(self, peer: Peer[C], error: KVTransferError) -> None:
        """Close the connection of a peer, in any state. Called once per peer, also after a failed `connect`.

        Keep what reads in flight need, such as the peer's mapped memory, until `release`.

        Args:
            error: The reason, for a backend that sends it to the other side.
        """

    @abstractmethod
    def send(self, peer: Peer[C], message: bytes) -> None:
        """Send or queue one control message to a connected peer.

        Raises:
            BackpressureError: too many bytes wait for the peer already. Nothing was sent.
        """

    # -- required: reads -------------------------------------------------------------------------------

    @abstractmethod
    def start_read(self, read: Read[C]) -> None:
        """Begin a read from a connected peer. Report its end by `PeerTable.end_read`, now or later.

        Raises:
            RegionError: a region or the guard is out of bounds. Nothing has begun, and no event follows. Any
                other error loses the peer, which ends the read.
        """

    @abstractmethod
    def stop_read(self, read: Read[C]) -> bool:
        """Stop a read because of `read.error`.

        After `hang_up` it may be called a second time for the same read.

        Returns:
            True: nothing writes into the local regions any more, and the table reports the end. False:
            something still does, such as a copy in another thread or on a GPU. Report `end_read` as soon as
            it is over.
        """

    # -- required: the loop ----------------------------------------------------------------------------

    @abstractmethod
    def turn(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds until something happens; deal with it, and report it to the table.

        Return as soon as the table has events (`PeerTable.has_events`) or `interrupt` was called. With 0, do
        what can be done without waiting. Raise nothing because of one peer: report it by `PeerTable.lose`. Do
        not walk over all peers: look only at those that have something to do.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """Make the current `turn` or the next one return. Any thread may call it, also after `close`."""

    # -- required: the end -----------------------------------------------------------------------------

    @abstractmethod
    def stop_serving(self) -> None:
        """Clear all guards, and wait until no read writes into the pool.

        First step of a close, before any `hang_up`.

        Peers hear of the close only after this. A read that ends later finds its guard cleared, so it fails.
        """

    @abstractmethod
    def close(self) -> None:
        """Close listeners, sockets and libraries.

        Last step of a close, after `hang_up` and `release` of all peers.
        """

    # -- optional --------------------------------------------------------------------------------------

    def release(self, peer: Peer[C]) -> None:
        """Free what reads from a peer needed.

        Called once, after `hang_up` and after the peer's last read has ended.
        """

    def mechanism_of(self, peer: Peer[C]) -> str:
        """Return what moves the bytes of a connected peer; empty if that is chosen for each read."""
        return ""

    def sums_of(self, peer: Peer[C]) -> str:
        """Return what verifies the bytes of a connected peer; see `Route`."""
        return ""

    def handshake_error(self, peer: Peer[C]) -> KVTransferError:
        """Make the error of a handshake that took too long."""
        return PeerLostError(
            f"timed out after {peer.timeout_s:g} s waiting for the peer's handshake; is the node running?"
        )

    def describe(self, peer: Peer[C]) -> str:
        """Name an incoming connection in log messages."""
        return "a connection"


# == the table of peers ============================================================================


@dataclass(frozen=True)
class HandshakeLimits:
    """Bounds of handshakes.

    Attributes:
        timeout_s: Seconds that an incoming connection may take for its handshake.
        max_connecting: Handshakes at a time, in each direction. `start_connect` refuses more. If more come
            in, the oldest is dropped.
    """

    timeout_s: float = math.inf
    max_connecting: int = 1 << 30


class PeerTable(Generic[C]):
    """The peers and reads of one endpoint, and the events that its owner has not taken.

    A backend calls the methods of the first two groups; `PeerEndpoint` calls those of the third.

    Args:
        make_backend: Called once, with this table.
        clock: Seconds, like `time.monotonic`.
        log: Takes messages that a stranger can cause; it limits their rate.

    Attributes:
        clock, log: As above, for the backend's own use.
    """

    def __init__(
        self,
        make_backend: Callable[[PeerTable[C]], Backend[C]],
        limits: HandshakeLimits = HandshakeLimits(),
        *,
        clock: Callable[[], float] = time.monotonic,
        log: LimitedLog | None = None,
    ) -> None:
        self._limits = limits
        self.clock = clock
        self.log = log if log is not None else LimitedLog(logger)
        # One sequence for peers, transfers and timers: a deadline names its owner by the id alone.
        self._ids = itertools.count(1)
        self._peers: dict[int, Peer[C]] = {}
        self._reads: dict[int, Read[C]] = {}
        self._timers: dict[int, Callable[[], None]] = {}
        # Handshakes by direction, each in the order in which they began.
        self._handshakes: dict[bool, dict[int, Peer[C]]] = {True: {}, False: {}}
        # (when, id); an entry whose id is no longer waited for is skipped when it comes up.
        self._deadlines: list[tuple[float, int]] = []
        self._events: list[Event] = []
        self.backend = make_backend(self)

    # -- the backend reports ---------------------------------------------------------------------------

    def add_incoming(self, connection: C) -> Peer[C]:
        """Add a peer that connected to us. Its handshake has a deadline from now on.

        If too many handshakes are going on, the oldest incoming one is dropped. A real peer says hello at
        once, so the connection that has been silent for the longest time is most likely not one.
        """
        handshakes = self._handshakes[True]
        if len(handshakes) >= self._limits.max_connecting:
            oldest = next(iter(handshakes.values()))
            self.lose(
                oldest,
                BackpressureError(
                    f"too many handshakes at once: {len(handshakes)} newer connections have begun one, as many as "
                    "max_connecting allows; raise max_connecting if these are peers"
                ),
            )
        return self._add(connection, incoming=True, timeout_s=self._limits.timeout_s)

    def connected(self, peer: Peer[C]) -> None:
        """Report that the handshake is over: the owner may use the peer."""
        if peer.state is not PeerState.HANDSHAKING:
            return
        del self._handshakes[peer.incoming][peer.peer_id]
        peer.state = PeerState.CONNECTED
        self._events.append(Connected(peer.peer_id, peer.incoming))

    def message(self, peer: Peer[C], message: bytes) -> None:
        """Report a control message. A peer that sends one before the end of the handshake is lost."""
        if peer.state is PeerState.CONNECTED:
            self._events.append(MessageReceived(peer.peer_id, message))
        elif peer.state is PeerState.HANDSHAKING:
            self.lose(peer, ProtocolError("the peer sent a control message before the end of the handshake"))

    def lose(self, peer: Peer[C], error: Exception) -> None:
        """Report that the peer is gone, or drop it.

        An error of a type that is not ours is logged with its traceback.
        """
        if peer.state is PeerState.LEAVING:
            return
        if not isinstance(error, KVTransferError):
            log_traceback(error, "lost a peer", self.log)
        reason = typed(error, f"lost peer {peer.peer_id}")
        if peer.state is PeerState.HANDSHAKING and peer.incoming:
            # It was never reported as connected, so its loss is no event either.
            self.log.warning("refused %s: %s", self.backend.describe(peer), reason)
            self._leave(peer, reason, None)
        else:
            self._leave(peer, reason, PeerLost(peer.peer_id, reason))

    def end_read(
        self, read: Read[C], error: KVTransferError | None = None, *, ended_at: float | None = None
    ) -> None:
        """Report that a read is over: nothing writes into its local regions any more.

        Args:
            error: What went wrong, or None. If the read was being stopped, the event has the reason for that
                instead.
            ended_at: When the last byte came, by the table's clock, if that was earlier than now.
        """
        if self._reads.pop(read.transfer_id, None) is None:
            self.log.warning(
                "ignored the second end of transfer %d: the transport has a bug and may have written into memory that "
                "it no longer owned; report it to the transport's authors",
                read.transfer_id,
            )
            return
        peer = read.peer
        del peer.reads[read.transfer_id]
        seconds = (self.clock() if ended_at is None else ended_at) - read.started
        self._events.append(
            TransferEnded(
                read.transfer_id, read.error or error, read.pairs.num_bytes, seconds, read.mechanism
            )
        )
        if peer.state is PeerState.LEAVING:
            self._forget_if_settled(peer)

    # -- the backend asks ------------------------------------------------------------------------------

    def peer(self, peer_id: int) -> Peer[C] | None:
        """Return the peer with this id; None if it is forgotten."""
        return self._peers.get(peer_id)

    def read(self, transfer_id: int) -> Read[C] | None:
        """Return the read with this id; None if it has ended."""
        return self._reads.get(transfer_id)

    @property
    def has_events(self) -> bool:
        """Whether the owner has events to take. If so, `Backend.turn` must not wait."""
        return bool(self._events)

    def call_at(self, when: float, callback: Callable[[], None]) -> int:
        """Call `callback` once, in the owner's thread, at a time.

        Args:
            when: By the table's clock, in seconds.

        Returns:
            The timer's id, for `cancel`.
        """
        timer_id = next(self._ids)
        self._timers[timer_id] = callback
        self._watch(when, timer_id)
        return timer_id

    def cancel(self, timer_id: int) -> None:
        """Cancel a timer. A timer that has fired is ignored."""
        self._timers.pop(timer_id, None)

    # -- the endpoint asks -----------------------------------------------------------------------------

    def connect(self, connection: C, timeout_s: float) -> int:
        """Add a peer and connect to it. See `Endpoint.start_connect`; returns the peer's id."""
        num_connecting = len(self._handshakes[False])
        if num_connecting >= self._limits.max_connecting:
            raise BackpressureError(
                f"cannot connect: {num_connecting} handshakes are going on already, as many as max_connecting allows; "
                "try again when some of them are over, or raise max_connecting"
            )
        peer = self._add(connection, incoming=False, timeout_s=timeout_s)
        try:
            self.backend.connect(peer)
        except BackpressureError as error:
            self._leave(peer, error, None)
            raise
        except Exception as error:  # noqa: BLE001 - any failure ends this peer alone
            self.lose(peer, error)
        return peer.peer_id

    def disconnect(self, peer_id: int) -> None:
        """Drop a peer. See `Endpoint.disconnect`."""
        peer = self._peers.get(peer_id)
        if peer is not None:
            peer.loss = None  # it may be leaving, with a loss that is not reported yet
            if peer.state is not PeerState.LEAVING:
                self._leave(peer, TransportClosedError("this side dropped the peer"), None)
        self._events = [e for e in self._events if isinstance(e, TransferEnded) or e.peer_id != peer_id]

    def connected_peer(self, peer_id: int) -> Peer[C]:
        """Return the peer with this id.

        Raises:
            PeerLostError: it is not connected, or no longer.
        """
        peer = self._peers.get(peer_id)
        if peer is None or peer.state is not PeerState.CONNECTED:
            raise PeerLostError(f"peer {peer_id} is not connected")
        return peer

    def start_read(self, peer: Peer[C], pairs: RegionPairs, guard: Guard, timeout_s: float) -> int:
        """Begin a read. See `Endpoint.start_read`; returns the transfer's id."""
        now = self.clock()
        read = Read(next(self._ids), peer, pairs, guard, now, now + timeout_s)
        # Entered before the backend begins, because a small read may end within the call.
        self._reads[read.transfer_id] = peer.reads[read.transfer_id] = read
        try:
            self.backend.start_read(read)
        except RegionError:
            del self._reads[read.transfer_id], peer.reads[read.transfer_id]
            raise
        except Exception as error:  # noqa: BLE001 - it may have begun, so it must end with an event
            self.lose(peer, error)
        if read.transfer_id in self._reads:
            self._watch(read.deadline, read.transfer_id)
        return read.transfer_id

    def next_deadline(self) -> float:
        """Return when `expire` has something to do, by the table's clock; infinite if nothing has a
        deadline.
        """
        while self._deadlines and not self._is_waited_for(self._deadlines[0][1]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def expire(self, now: float) -> None:
        """Deal with the deadlines that have passed: end handshakes, stop reads, call the backend's timers."""
        due = []
        while self._deadlines and self._deadlines[0][0] <= now:
            due.append(heapq.heappop(self._deadlines)[1])
        # Collected before any is handled, so that a timer that starts itself again cannot keep us here.
        for owner_id in due:
            if not self._is_waited_for(owner_id):
                continue
            if owner_id in self._reads:
                self._stop(
                    self._reads[owner_id],
                    TransferTimeoutError("the read did not end in time"),
                    is_due=True,
                )
            elif owner_id in self._timers:
                with survived("a timer of the transport failed", self.log):
                    self._timers.pop(owner_id)()
            else:
                peer = self._peers[owner_id]
                self.lose(peer, self.backend.handshake_error(peer))

    def take_events(self) -> list[Event]:
        """Return the events since the last call, in order, and forget them."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Close every connection, then the backend. Reads end without an event."""
        with survived("cannot stop serving", self.log):
            self.backend.stop_serving()
        for peer in self._peers.values():
            if peer.state is not PeerState.LEAVING:
                peer.state = PeerState.LEAVING
                with survived("cannot close a connection", self.log):
                    self.backend.hang_up(peer, TransportClosedError("this side closed"))
            with survived("cannot release a peer", self.log):
                self.backend.release(peer)
        with survived("cannot close the transport", self.log):
            self.backend.close()
        self._peers.clear()
        self._reads.clear()
        self._timers.clear()
        self._handshakes = {True: {}, False: {}}
        self._deadlines.clear()
        self._events.clear()
        self.log.flush()

    # -- inside ----------------------------------------------------------------------------------------

    def _add(self, connection: C, *, incoming: bool, timeout_s: float) -> Peer[C]:
        peer = Peer(next(self._ids), incoming, connection, timeout_s)
        self._peers[peer.peer_id] = peer
        self._handshakes[incoming][peer.peer_id] = peer
        if timeout_s < math.inf:
            self._watch(self.clock() + timeout_s, peer.peer_id)
        return peer

    def _leave(self, peer: Peer[C], reason: KVTransferError, loss: PeerLost | None) -> None:
        """Close a peer's connection and stop its reads; report `loss` when the last of them has ended."""
        self._handshakes[peer.incoming].pop(peer.peer_id, None)
        # Set first, so that what the backend reports while it hangs up changes nothing.
        peer.state = PeerState.LEAVING
        peer.loss = loss
        with survived("cannot close a connection", self.log):
            self.backend.hang_up(peer, reason)
        lost = reason
        if not isinstance(reason, PeerLostError | TransportClosedError):
            lost = PeerLostError(f"the peer was lost: {reason}")
        for read in list(peer.reads.values()):
            self._stop(read, lost)
        self._forget_if_settled(peer)

    def _stop(self, read: Read[C], error: KVTransferError, *, is_due: bool = False) -> None:
        """Stop a read. If there are several reasons, the first is reported."""
        if read.error is None:
            read.error = error
        try:
            is_over = self.backend.stop_read(read)
        except Exception as failure:
            if is_due:
                self.lose(read.peer, failure)
                return
            # The connection is closed as well, so nothing is left that could be stopped.
            self.log.warning("cannot stop a read: %r", failure, exc_info=failure)
            is_over = True
        if is_over and read.transfer_id in self._reads:
            self.end_read(read)

    def _forget_if_settled(self, peer: Peer[C]) -> None:
        if peer.reads or self._peers.pop(peer.peer_id, None) is None:
            return
        with survived("cannot release a peer", self.log):
            self.backend.release(peer)
        if peer.loss is not None:
            self._events.append(peer.loss)

    def _watch(self, when: float, owner_id: int) -> None:
        """Let `expire` look at a handshake, a read or a timer at this time, if it still exists."""
        num_live = len(self._reads) + len(self._timers) + sum(map(len, self._handshakes.values()))
        if len(self._deadlines) > 2 * num_live + _MAX_DEAD_DEADLINES:
            # Most reads end long before their deadline. Without this, the heap would grow with the rate of
            # reads.
            self._deadlines = [entry for entry in self._deadlines if self._is_waited_for(entry[1])]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (when, owner_id))

    def _is_waited_for(self, owner_id: int) -> bool:
        return (
            owner_id in self._reads
            or owner_id in self._timers
            or owner_id in self._handshakes[True]
            or owner_id in self._handshakes[False]
        )


# == the endpoint and the transport ================================================================


class PeerEndpoint(Endpoint, Generic[C]):
    """An endpoint whose peers are in a `PeerTable`. A transport returns it from `register`."""

    def __init__(self, scheme: str, table: PeerTable[C]) -> None:
        self.scheme = scheme
        self._table = table
        self._backend = table.backend
        self._is_woken = False
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<PeerEndpoint {self.scheme}{', closed' if self._is_closed else ''}>"

    def _require_open(self) -> None:
        if self._is_closed:
            raise TransportClosedError("the endpoint is closed")

    # -- peers -----------------------------------------------------------------------------------------

    def listen(self, address: str) -> str:
        self._require_open()
        return self._backend.listen(address)

    def start_connect(self, address: str, *, timeout_s: float) -> int:
        self._require_open()
        return self._table.connect(self._backend.prepare(address), timeout_s)

    def disconnect(self, peer_id: int) -> None:
        self._table.disconnect(peer_id)

    def send(self, peer_id: int, message: bytes) -> None:
        self._require_open()
        if len(message) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message has at most {MAX_MESSAGE_BYTES} bytes, not {len(message)}")
        peer = self._table.connected_peer(peer_id)
        try:
            self._backend.send(peer, message)
        except Exception as error:
            if (ours := typed(error, "cannot send a message")) is error:
                raise
            raise ours from error

    # -- reads -----------------------------------------------------------------------------------------

    def start_read(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int:
        self._require_open()
        return self._table.start_read(self._table.connected_peer(peer_id), pairs, guard, timeout_s)

    def route_of(self, peer_id: int) -> Route:
        peer = self._table.peer(peer_id)
        if peer is None or peer.state is not PeerState.CONNECTED:
            return super().route_of(peer_id)
        return Route(self.scheme, "", self._backend.mechanism_of(peer), self._backend.sums_of(peer))

    # -- the owner's loop ------------------------------------------------------------------------------

    def wait_events(self, timeout_s: float) -> list[Event]:
        self._require_open()
        table = self._table
        now = table.clock()
        until = now + timeout_s
        while True:
            wait_s = 0.0 if table.has_events else max(0.0, min(until, table.next_deadline()) - now)
            self._backend.turn(wait_s)
            now = table.clock()
            # After the turn, so that what arrived in time counts even if we look at it late.
            table.expire(now)
            if table.has_events or self._is_woken or now >= until:
                self._is_woken = False
                return table.take_events()

    def next_deadline(self) -> float:
        """Return when `wait_events` has something to do even if nothing arrives, in `time.monotonic`
        seconds.
        """
        return self._table.next_deadline()

    def wake(self) -> None:
        self._is_woken = True
        self._backend.interrupt()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._table.close()


class PeerTransport(Transport):
    """A transport with a `PeerEndpoint`. A subclass only allocates memory and makes the endpoint.

    It sets `guards` in its constructor and overrides `_allocate` and `_open`. If it holds anything else, it
    overrides `_free`.
    """

    def __init__(self) -> None:
        self._endpoint: Endpoint | None = None
        self._is_closed = False
        # Reads write to plain addresses, which keep nothing mapped. A caller that drops an arena early would
        # otherwise crash the process in the middle of a copy.
        self._arenas: list[Arena] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{', closed' if self._is_closed else ''}>"

    @abstractmethod
    def _allocate(self, num_bytes: int) -> Arena:
        """See `Transport.allocate`."""

    @abstractmethod
    def _open(self, pool: Pool) -> Endpoint:
        """Make the endpoint. See `Transport.register`."""

    def _free(self) -> None:
        """Free what the transport itself holds. The endpoint is closed already."""

    def allocate(self, num_bytes: int) -> Arena:
        self._require_open()
        with outside(f"cannot allocate {num_bytes} bytes", ConfigurationError):
            arena = self._allocate(num_bytes)
        self._arenas.append(arena)
        return arena

    def register(self, pool: Pool) -> Endpoint:
        self._require_open()
        if self._endpoint is not None:
            raise KVTransferStateError("cannot register a pool: one is registered already")
        with outside(f"cannot open transport {self.scheme!r}", ConfigurationError):
            self._endpoint = self._open(pool)
        return self._endpoint

    def _require_open(self) -> None:
        if self._is_closed:
            raise TransportClosedError("the transport is closed")

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._endpoint is not None:
            self._endpoint.close()
        self._free()
        self._arenas.clear()
