"""`UCXTransport`, and its backend: connections, handshakes, and the loop over what arrives.

The cost of one event does not grow with the number of peers, although each peer has a UCX worker of its own.
UCX does its work only when it is asked to, worker by worker, so this module asks only the *active* ones:
those that were just used, and those whose descriptor was reported. A worker stops being active when
`Worker.arm` succeeds: from then on its descriptor reports whatever happens to it.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from .._busy_poll import BusyPoll
from .._descriptors import Reserve, warn_if_few
from .._slices import SliceLimits, SlicePlan
from ..endpoint import Peer, PeerTable, Read
from ..errors import (
    KVTransferError,
    ProtocolError,
    TransferTimeoutError,
)
from ..movers import MAX_WAIT_S, Mover
from ..network import PlainStreamBackend
from ..outside import survived
from ..regions import Pool
from ..serving import HostTransport, PeerPool, ServedPool, mover_for
from ..streams import FrameSocket, KeepAlive
from .library import NUM_HELD, PER_CONNECTION, Context, Worker, require_network
from .options import SCHEME, Address, UCXOptions
from .slices import Reader, Server, limits_of
from .wire import (
    FRAME_LIMITS,
    MAX_SLICE_BYTES,
    Answer,
    Fetch,
    Hello,
    Incoming,
    Kind,
    Preface,
    Ready,
    decode,
)

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Handshake:
    """A connection that is not a peer yet, and may never be one.

    Attributes:
        is_prefaced: The other side's preface came: it is a node, of our version.
        worker: Ours for this peer, as soon as the peer needs to know its address.
        hello: The other side's, as soon as it came: then only its ready is missing.
    """

    channel: FrameSocket
    is_prefaced: bool = False
    worker: Worker | None = None
    hello: Hello | None = None


@dataclass(frozen=True, eq=False)
class Link:
    """The connection to a peer whose handshake is over.

    Attributes:
        channel: The control connection.
        limits: How reads from the peer are cut.
        mechanism: What the peer says that it sends by.
    """

    channel: FrameSocket
    worker: Worker
    remote: PeerPool
    limits: SliceLimits
    mechanism: str
    reader: Reader
    server: Server

    def settle(self) -> bool:
        """Let UCX work, and deal with what it has finished. Returns whether UCX had anything to do.

        Raises:
            PeerLostError: UCX lost the peer.
            ProtocolError: the peer sent more than was asked for.
        """
        has_worked = self.worker.progress()
        self.server.settle()
        self.reader.settle()
        return has_worked

    @property
    def num_in_flight(self) -> int:
        """Slices, of either side's reads."""
        return self.server.num_unsent + self.reader.num_in_flight


#: What is kept per peer: first the `Address` to connect to, then a `Handshake`, then a `Link`.
Connection = Address | Handshake | Link


class UCXBackend(PlainStreamBackend[Connection]):
    """One process among its peers. One thread calls it, and all its work is done there."""

    message_kind, ping_kind, refused_kind = Kind.MESSAGE, Kind.PING, Kind.REFUSED
    address_type = Address
    preface = Preface().encode()

    def __init__(self, peers: PeerTable[Connection], options: UCXOptions, served: ServedPool) -> None:
        self._options = options
        self._served = served
        self._mover = served.mover
        self._limits = limits_of(options)
        self._max_slice_bytes = served.max_slice_bytes(self._limits, MAX_SLICE_BYTES)
        with ExitStack() as opened:
            self._reserve = Reserve(NUM_HELD)
            opened.callback(self._reserve.close)
            self._context = Context(options, self._reserve)
            opened.callback(self._context.close)
            super().__init__(peers, options)
            opened.pop_all()
        if self._mover.fileno() >= 0:
            self.poller.watch(self._mover, self._mover.poll)
        self._links: dict[Peer[Connection], Link] = {}
        self._active: dict[Peer[Connection], Link] = {}
        self._busy: set[Link] = set()  # those with slices in flight
        self._busy_poll = BusyPoll(options.spin_us * 1e-6)
        self._keep_alive = KeepAlive(self, self._links, options.peer_timeout_s)

    # -- connections -----------------------------------------------------------------------------------

    def wrap(self, sock: socket.socket) -> Handshake:
        # UCX learns of the peer only after the peer's preface has come: most addresses that lead nowhere are
        # refused before that, and cost one socket instead of a worker.
        return Handshake(FrameSocket(sock, FRAME_LIMITS, self._options.max_queued_bytes))

    def hang_up(self, peer: Peer[Connection], error: KVTransferError) -> None:
        connection = peer.connection
        if isinstance(connection, Address):
            super().hang_up(peer, error)
            return
        if isinstance(connection, Link):
            self._links.pop(peer, None)
            self._active.pop(peer, None)
            self._busy.discard(connection)
            with survived("cannot stop polling a worker", self.peers.log):
                self.poller.unwatch(connection.worker)
        else:
            self.refuse(connection.channel, error)
        try:
            super().hang_up(peer, error)
        finally:
            # Cuts everything: afterwards nothing is written into our memory any more.
            if connection.worker is not None:
                connection.worker.close()
            if isinstance(connection, Link):
                connection.reader.close()
                connection.server.close()

    # -- what arrives on a control connection ----------------------------------------------------------

    def on_frame(self, peer: Peer[Connection], kind: int, body: bytes) -> None:
        connection, incoming = peer.connection, decode(kind, body)
        if isinstance(connection, Link):
            self._on_link_frame(peer, connection, incoming)
        elif isinstance(connection, Handshake):
            self._on_handshake(peer, connection, incoming)

    def _on_handshake(self, peer: Peer[Connection], handshake: Handshake, incoming: Incoming) -> None:
        match incoming:
            case Preface() if not handshake.is_prefaced:
                handshake.is_prefaced = True
                if not peer.incoming:
                    handshake.worker = Worker(self._context)
                    handshake.channel.send(self._hello(handshake.worker, ""))
            case Hello() if handshake.is_prefaced and handshake.hello is None:
                self._on_hello(peer, handshake, incoming)
            case Ready() if peer.incoming and handshake.worker is not None and handshake.hello is not None:
                self._link(peer, handshake.channel, handshake.worker, handshake.hello, incoming.mechanism)
            case _:
                raise ProtocolError("a connection begins with a preface and a hello each way, and a ready")

    def _on_hello(self, peer: Peer[Connection], handshake: Handshake, hello: Hello) -> None:
        """Open a UCX endpoint to the peer, and say so."""
        handshake.hello = hello
        if handshake.worker is None:
            handshake.worker = Worker(self._context)
        mechanism = handshake.worker.connect(hello.address)
        if peer.incoming:
            handshake.channel.send(self._hello(handshake.worker, mechanism))
        else:
            handshake.channel.send(Ready(mechanism).encode())
            self._link(peer, handshake.channel, handshake.worker, hello, hello.mechanism)

    def _hello(self, worker: Worker, mechanism: str) -> bytes:
        """Return our hello, as a frame."""
        served = self._served
        hello = Hello(
            served.guards.num_guards, served.sizes, worker.address, mechanism, self._max_slice_bytes
        )
        return hello.encode()

    def _link(
        self, peer: Peer[Connection], channel: FrameSocket, worker: Worker, hello: Hello, mechanism: str
    ) -> None:
        """The handshake is over: the peer can be used."""
        served, activate, fail = self._served, partial(self._activate, peer), partial(self.peers.lose, peer)
        reader = Reader(self._options, served, worker, channel, self.peers.end_read, activate, fail)
        server = Server(served, worker, channel, self._max_slice_bytes, activate, fail)
        remote = PeerPool.of(hello.num_guards, hello.num_bytes)
        limits = self._limits.within(hello.max_slice_bytes)
        link = Link(channel, worker, remote, limits, mechanism, reader, server)
        self.poller.watch(worker, partial(self._activate, peer))
        peer.connection = self._links[peer] = link
        # The worker has never been armed, so its descriptor reports nothing yet.
        self._active[peer] = link
        logger.info("connected to a peer that sends by %s", mechanism)
        self.peers.connected(peer)

    def _on_link_frame(self, peer: Peer[Connection], link: Link, incoming: Incoming) -> None:
        match incoming:
            case Fetch():
                link.server.answer(incoming)
                self._touched(peer, link)
                self._busy_poll.extend()
            case Answer():
                link.reader.on_answer(incoming)
                self._touched(peer, link)
            case _:
                raise ProtocolError("the handshake is over")

    # -- reads -----------------------------------------------------------------------------------------

    def mechanism_of(self, peer: Peer[Connection]) -> str:
        return self._links[peer].mechanism

    def start_read(self, read: Read[Connection]) -> None:
        peer = read.peer
        link = self._links[peer]
        targets = self._served.require_read(link.remote, read)
        read.mechanism = link.mechanism + self._mover.suffix
        link.reader.start(read, SlicePlan.of(read.pairs, targets, link.limits))
        self._touched(peer, link)
        # Two steps until something is seen here: the fetch arrives, perhaps at a thread that sleeps; then a
        # slice comes. The period starts when the fetch has left: preparing it takes as long as a good part of
        # the period.
        self._busy_poll.extend(num_steps=2)

    def stop_read(self, read: Read[Connection]) -> bool:
        link = read.peer.connection
        assert isinstance(link, Link), "only a connected peer is read from"
        if link.reader.stop(read):
            return True
        if read.peer not in self._links:
            return False  # its worker is closed, and a copy to the GPU ends soon
        # Only closing the worker ends a receive with certainty, and that costs the peer. So give it some time
        # to finish.
        self.peers.call_at(self.peers.clock() + self._options.peer_timeout_s, partial(self._give_up, read))
        return False

    def _give_up(self, read: Read[Connection]) -> None:
        if self.peers.read(read.transfer_id) is read:
            self.peers.lose(
                read.peer, TransferTimeoutError("the peer did not finish what it had begun to send")
            )

    # -- the loop --------------------------------------------------------------------------------------

    def turn(self, timeout_s: float) -> None:
        self._settle()
        # Arming comes last before the wait: what happens to a worker between the two is reported by its
        # descriptor.
        if self._poll_busily(timeout_s) or self.peers.has_events or not self._arm():
            timeout_s = 0.0
        if self._mover.has_open_tickets:
            timeout_s = min(timeout_s, MAX_WAIT_S)
        self.poller.poll(timeout_s)
        self._mover.poll()
        # At once, not in the next turn: what has arrived by the deadline of a read counts as in time.
        self._settle()

    def _poll_busily(self, timeout_s: float) -> bool:
        """Poll for what comes next, as long as it is near; returns whether anything came.

        With more than one slice in flight the next one is on its way while we sleep, so there is nothing to
        gain.
        """
        until = time.monotonic() + timeout_s
        while self._busy_poll.is_on(until) and self._has_at_most_one_slice():
            if self.peers.has_events or self.poller.poll(0.0) or self._settle():
                return True
            self._busy_poll.yield_core()
        return False

    def _has_at_most_one_slice(self) -> bool:
        return not self._busy or (len(self._busy) == 1 and next(iter(self._busy)).num_in_flight <= 1)

    def _activate(self, peer: Peer[Connection]) -> None:
        """A worker's descriptor was reported. `_settle` does the work."""
        link = self._links.get(peer)
        if link is not None:  # it may have been lost earlier in the same round of the poller
            self._active[peer] = link

    def _touched(self, peer: Peer[Connection], link: Link) -> None:
        """Something was posted to a worker, or an answer came: look at the link until its worker is armed
        again.
        """
        self._active[peer] = link
        self._update(peer, link)

    def _update(self, peer: Peer[Connection], link: Link) -> None:
        if link.num_in_flight:
            self._busy.add(link)
        else:
            self._busy.discard(link)
        self.watch_room(peer, link.channel)

    def _settle(self) -> bool:
        """Let UCX work for the active peers; returns whether it had anything to do."""
        has_worked = False
        for peer, link in list(self._active.items()):
            try:
                has_worked |= link.settle()
                self._update(peer, link)
            except Exception as error:  # noqa: BLE001 - whatever it is, it ends this peer alone
                self.peers.lose(peer, error)
        if has_worked:
            self._busy_poll.extend()
        return has_worked

    def _arm(self) -> bool:
        """Have the poller report all that happens from now on; False if something has happened already."""
        for peer, link in list(self._active.items()):
            try:
                if not link.worker.arm():
                    return False
                del self._active[peer]
            except Exception as error:  # noqa: BLE001 - whatever it is, it ends this peer alone
                self.peers.lose(peer, error)
                return False
        return True

    def on_tick(self, peer: Peer[Connection], missed_s: float) -> None:
        server = self._links[peer].server
        server.require_progress(self.peers.clock(), missed_s, self._options.peer_timeout_s)

    # -- the end ---------------------------------------------------------------------------------------

    def stop_serving(self) -> None:
        # UCX may still send from the pool until the workers are closed, but the answer that vouches for it
        # would find its guard cleared.
        self._served.guards.clear_all()
        self._mover.drain()

    def close(self) -> None:
        with ExitStack() as closing:  # last first, and each of them whatever happens to the others
            closing.callback(self._mover.close)
            closing.callback(self._reserve.close)
            closing.callback(self._context.close)
            closing.callback(super().close)


class UCXTransport(HostTransport):
    """Peers over what UCX finds: RDMA or TCP. See the package for how a read works.

    The owner's thread does all work, also that of UCX. If the owner does not call `wait_events` for
    `peer_timeout_s`, its peers lose it.

    Args:
        options: See `UCXOptions`.

    Raises:
        ConfigurationError: an option is unknown or wrong, or UCX has nothing here that fits them.
        BackendUnavailableError: `ucxx` cannot be imported; the message says how to install it.
    """

    scheme = SCHEME
    options_type = UCXOptions
    options: UCXOptions

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        super().__init__(options)
        self.options = self.options.tuned_for(require_network(self.options))

    def make_mover(self, pool: Pool) -> Mover:
        return mover_for(pool, limits_of(self.options).max_bytes, self.options.staging_bytes)

    def make_backend(self, peers: PeerTable[Connection], served: ServedPool) -> UCXBackend:
        warn_if_few(SCHEME, NUM_HELD, self.options.max_connecting, PER_CONNECTION)
        return UCXBackend(peers, self.options, served)
