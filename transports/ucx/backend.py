"""Everything between `register` and `close`: connections, handshakes, and the loop over what arrives.

The cost of one event does not grow with the number of peers, although each peer has a UCX worker of its own. UCX does
its work only when it is asked to, worker by worker, so this module asks only the *active* ones: those that were just
used, and those whose descriptor was reported. A worker stops being active when `Worker.arm` succeeds: from then on its
descriptor reports whatever happens to it.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from functools import partial

from .._accepting import Acceptor
from .._descriptors import Reserve
from .._lookups import Found, Lookups
from .._memory import require_transfer
from .._outside import survived
from .._poller import Poller
from .._slices import SlicePlan
from ..endpoint import Backend, Peer, PeerTable, Read
from ..errors import (
    KVTransferError,
    PeerLostError,
    PeerRefusedError,
    ProtocolError,
    TransferTimeoutError,
    TransportClosedError,
    VersionMismatchError,
)
from .busy_poll import BusyPoll
from .channel import Channel, Listener, dial
from .library import NUM_HELD, Context, Worker
from .options import Address, UCXOptions
from .peers import Connection, Handshake, Link, Lookup
from .reads import Reader, limits_of
from .serving import PoolServer, Server
from .wire import (
    Answer,
    Fetch,
    Hello,
    Incoming,
    Message,
    Ping,
    Preface,
    Ready,
    Refused,
    decode,
)

logger = logging.getLogger(__name__)

#: How often per `peer_timeout_s` a node pings its quiet peers. Idle peers cost nothing else, so this is what they cost.
_TICKS = 3

_PING = Ping().encode()


class UCXBackend(Backend[Connection]):
    """One process among its peers. One thread calls it, and all its work is done there."""

    def __init__(self, peers: PeerTable[Connection], options: UCXOptions, source: PoolServer) -> None:
        self._peers = peers
        self._options = options
        self._source = source
        self._limits = limits_of(options)
        with ExitStack() as opened:
            self._reserve = Reserve(NUM_HELD)
            opened.callback(self._reserve.close)
            self._context = Context(options, self._reserve)
            opened.callback(self._context.close)
            self._poller = Poller()
            opened.pop_all()
        self._lookups: Lookups[Address] = Lookups(self._poller.interrupt)
        self._acceptors: list[Acceptor[Channel]] = []
        self._links: dict[Peer[Connection], Link] = {}
        self._active: dict[Peer[Connection], Link] = {}
        self._busy: set[Link] = set()  # those with slices in flight
        self._busy_poll = BusyPoll(options.spin_us * 1e-6)
        self._tick_interval_s = options.peer_timeout_s / _TICKS
        self._last_tick = peers.clock()
        peers.call_at(self._last_tick + self._tick_interval_s, self._tick)

    # -- connections -----------------------------------------------------------------------------------

    def listen(self, address: str) -> str:
        if address:
            parsed = Address.parse(address)
            host, ports = parsed.host, range(parsed.port, parsed.port + 1)
        else:
            host, ports = self._options.bind_host, self._options.ports()
        listener = Listener(self._options, host, ports)
        self._acceptors.append(Acceptor(listener, self._poller, self._accept, self._peers.call_at))
        return listener.address

    def _accept(self, channel: Channel) -> None:
        peer = self._peers.add_incoming(Handshake(channel))
        try:
            self._begin(peer, channel)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is over for this peer alone
            self._peers.lose(peer, error)

    def prepare(self, address: str) -> Connection:
        parsed = Address.parse(address)
        self._options.require_reachable_by(parsed.host)
        return Lookup(parsed)

    def connect(self, peer: Peer[Connection]) -> None:
        assert isinstance(peer.connection, Lookup)
        address = peer.connection.address
        self._lookups.start(peer.peer_id, address, address.host, address.port, peer.timeout_s)
        self._dial_found()

    def _dial_found(self) -> None:
        """Connect to the hosts that have been looked up."""
        for peer_id, address, found in self._lookups.take():
            peer = self._peers.peer(peer_id)
            assert peer is not None
            try:
                self._dial(peer, address, found)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is over for this peer alone
                self._peers.lose(peer, error)

    def _dial(self, peer: Peer[Connection], address: Address, found: Found | KVTransferError) -> None:
        if not isinstance(found, Found):
            raise found
        channel = dial(address, found, self._options.max_queued_bytes)
        # UCX learns of the peer only after the peer's preface has come: most addresses that lead nowhere are refused
        # before that, and cost one socket instead of a worker.
        peer.connection = Handshake(channel)
        self._begin(peer, channel)

    def _begin(self, peer: Peer[Connection], channel: Channel) -> None:
        channel.send(Preface().encode())
        channel.awaits_room = channel.num_unsent > 0
        self._poller.watch(channel, partial(self._serve, peer), writes=channel.awaits_room)

    def _watch_room(self, peer: Peer[Connection], channel: Channel) -> None:
        """Have the poller report room to send, for as long as something waits for it."""
        if channel.awaits_room != (channel.num_unsent > 0):
            channel.awaits_room = not channel.awaits_room
            self._poller.watch(channel, partial(self._serve, peer), writes=channel.awaits_room)

    def hang_up(self, peer: Peer[Connection], error: KVTransferError) -> None:
        connection = peer.connection
        if isinstance(connection, Lookup):
            self._lookups.forget(peer.peer_id)
            return
        with survived("cannot stop waiting for a connection", self._peers.log):
            self._poller.unwatch(connection.channel)
        if isinstance(connection, Link):
            self._links.pop(peer, None)
            self._active.pop(peer, None)
            self._busy.discard(connection)
            with survived("cannot stop waiting for a worker", self._peers.log):
                self._poller.unwatch(connection.worker)
        elif not isinstance(error, PeerLostError | VersionMismatchError | TransportClosedError):
            # A peer of another version learns that from our preface.
            connection.channel.send(Refused(str(error)).encode())
        connection.close()

    def handshake_error(self, peer: Peer[Connection]) -> KVTransferError:
        if isinstance(peer.connection, Lookup):
            return PeerLostError(
                f"timed out after {peer.timeout_s:g} s looking up host {peer.connection.address.host!r}: is its name "
                "service up?"
            )
        return super().handshake_error(peer)

    def send(self, peer: Peer[Connection], message: bytes) -> None:
        link = self._links[peer]
        link.channel.send_message(Message(message).encode())
        self._watch_room(peer, link.channel)

    # -- what arrives on a control connection ----------------------------------------------------------

    def _serve(self, peer: Peer[Connection]) -> None:
        """A control connection is ready: handle what came, send what waits."""
        assert not isinstance(peer.connection, Lookup)
        channel = peer.connection.channel
        try:
            for kind, body in channel.receive():
                self._handle(peer, decode(kind, body))
            channel.flush()
            self._watch_room(peer, channel)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is over for this peer alone
            self._peers.lose(peer, error)

    def _handle(self, peer: Peer[Connection], incoming: Incoming) -> None:
        connection = peer.connection
        if isinstance(connection, Link):
            self._on_frame(peer, connection, incoming)
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
                self._options.require_allowed(incoming.mechanism)
                self._link(peer, handshake.channel, handshake.worker, handshake.hello, incoming.mechanism)
            case Refused():
                raise PeerRefusedError(f"the peer refused: {incoming.reason}")
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
            self._options.require_allowed(hello.mechanism)
            handshake.channel.send(Ready(mechanism).encode())
            self._link(peer, handshake.channel, handshake.worker, hello, hello.mechanism)

    def _hello(self, worker: Worker, mechanism: str) -> bytes:
        """Our hello, as a frame."""
        sizes = tuple(segment.num_bytes for segment in self._source.pool.segments)
        return Hello(self._source.guards.num_guards, sizes, worker.address, mechanism).encode()

    def _link(
        self, peer: Peer[Connection], channel: Channel, worker: Worker, hello: Hello, mechanism: str
    ) -> None:
        """The handshake is over: the peer can be used."""
        reader = Reader(self._options, worker, channel, self._source.buffers, self._peers.end_read)
        server = Server(self._source, worker, channel)
        link = Link(channel, worker, hello.num_guards, hello.pool(), mechanism, reader, server)
        self._poller.watch(worker, partial(self._activate, peer))
        peer.connection = self._links[peer] = link
        # The worker has never been armed, so its descriptor reports nothing yet.
        self._active[peer] = link
        logger.info("connected to a peer that sends by %s", mechanism)
        self._peers.connected(peer)

    def _on_frame(self, peer: Peer[Connection], link: Link, incoming: Incoming) -> None:
        match incoming:
            case Message():
                self._peers.message(peer, incoming.body)
            case Fetch():
                link.server.answer(incoming)
                self._touched(peer, link)
                self._busy_poll.extend()
            case Answer():
                link.reader.on_answer(incoming)
                self._touched(peer, link)
            case Ping():
                pass
            case _:
                raise ProtocolError("the handshake is over")

    # -- reads -----------------------------------------------------------------------------------------

    def start_read(self, read: Read[Connection]) -> None:
        peer = read.peer
        link = self._links[peer]
        targets = require_transfer(self._source.pool, link.pool, link.num_guards, read.pairs, read.guard)
        read.mechanism = link.mechanism
        link.reader.start(read, SlicePlan.of(read.pairs, targets, self._limits))
        self._touched(peer, link)
        # Two steps until something is seen here: the fetch arrives, perhaps at a thread that sleeps; then a slice comes.
        # The period starts when the fetch has left: preparing it takes as long as a good part of the period.
        self._busy_poll.extend(num_steps=2)

    def stop_read(self, read: Read[Connection]) -> bool:
        link = self._links.get(read.peer)
        # Without a link its worker is closed, and nothing is written any more.
        if link is None or link.reader.stop(read):
            return True
        # Only closing the worker ends a receive with certainty, and that costs the peer. So give it some time to finish.
        self._peers.call_at(self._peers.clock() + self._options.peer_timeout_s, partial(self._give_up, read))
        return False

    def _give_up(self, read: Read[Connection]) -> None:
        if self._peers.read(read.transfer_id) is read:
            self._peers.lose(
                read.peer, TransferTimeoutError("the peer did not finish what it had begun to send")
            )

    # -- the loop --------------------------------------------------------------------------------------

    def turn(self, timeout_s: float) -> None:
        if self._lookups:
            self._dial_found()
        self._settle()
        # Arming comes last before the wait: what happens to a worker between the two is reported by its descriptor.
        if self._poll_busily(timeout_s) or self._peers.has_events or not self._arm():
            timeout_s = 0.0
        self._poller.poll(timeout_s)
        # At once, not in the next turn: what has arrived by the deadline of a read counts as in time.
        self._settle()

    def _poll_busily(self, timeout_s: float) -> bool:
        """Poll for what comes next, as long as it is near; returns whether anything came.

        With more than one slice in flight the next one is on its way while we sleep, so there is nothing to gain.
        """
        until = time.monotonic() + timeout_s
        while self._busy_poll.is_on(until) and self._has_at_most_one_slice():
            if self._peers.has_events or self._poller.poll(0.0) or self._settle():
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
        """Something was posted to a worker, or an answer came: look at the link until its worker is armed again."""
        self._active[peer] = link
        self._update(peer, link)

    def _update(self, peer: Peer[Connection], link: Link) -> None:
        if link.num_in_flight:
            self._busy.add(link)
        else:
            self._busy.discard(link)
        self._watch_room(peer, link.channel)

    def _settle(self) -> bool:
        """Let UCX work for the active peers; returns whether it had anything to do."""
        has_worked = False
        for peer, link in list(self._active.items()):
            try:
                has_worked |= link.settle()
                self._update(peer, link)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is over for this peer alone
                self._peers.lose(peer, error)
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
            except Exception as error:  # noqa: BLE001 - whatever it is, it is over for this peer alone
                self._peers.lose(peer, error)
                return False
        return True

    def _tick(self) -> None:
        """Ping the peers to which nothing was said for a while, and lose those that were silent for too long.

        One timer for all peers, so that an idle node wakes up once per interval and not once per peer.
        """
        now = self._peers.clock()
        interval_s = self._tick_interval_s
        self._peers.call_at(now + interval_s, self._tick)
        # While this node itself did not look, no peer was silent.
        missed_s = max(0.0, now - self._last_tick - 2 * interval_s)
        self._last_tick = now
        for peer, link in list(self._links.items()):
            channel = link.channel
            channel.last_heard += missed_s
            try:
                if now - channel.last_heard > self._options.peer_timeout_s:
                    raise PeerLostError(f"the peer was silent for {self._options.peer_timeout_s} s")
                # After half an interval, because the next chance is a whole one later: so a peer never hears nothing for
                # longer than half of `peer_timeout_s`.
                if now - channel.last_said >= interval_s / 2 and not channel.num_unsent:
                    channel.send(_PING)
                    self._watch_room(peer, channel)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is over for this peer alone
                self._peers.lose(peer, error)

    def interrupt(self) -> None:
        self._poller.interrupt()

    # -- the end ---------------------------------------------------------------------------------------

    def stop_serving(self) -> None:
        # UCX may still send from the pool until the workers are closed, but the answer that vouches for it would find
        # its guard cleared.
        self._source.guards.clear_all()

    def close(self) -> None:
        with ExitStack() as closing:  # last first, and each of them whatever happens to the others
            closing.callback(self._poller.close)
            closing.callback(self._reserve.close)
            closing.callback(self._context.close)
            for acceptor in self._acceptors:
                closing.callback(acceptor.close)
            closing.callback(self._lookups.close)
