"""Everything between `register` and `close`: handshakes, peers, and the loop over what arrives from them."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from functools import partial

from .._accepting import Acceptor
from .._limited_log import LimitedLog
from .._lookups import Found, Lookups
from .._memory import require_transfer
from .._network_options import require_room
from .._outside import survived, unexpected
from .._poller import Poller
from .._slices import SlicePlan
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
from ..regions import Guard, RegionPairs
from .channel import Channel, Listener, dial
from .library import Worker
from .options import Address
from .peers import Greeting, Local, Peer
from .reads import Transfer, limits_of
from .vigil import Vigil
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


class Node:
    """One process among its peers. One thread calls it, and all its work is done there."""

    def __init__(self, local: Local, poller: Poller) -> None:
        self._local = local
        self._poller = poller
        self._ids = itertools.count(1)
        self._log = LimitedLog(logger)
        self._lookups: Lookups[Address] = Lookups(poller.interrupt)
        self._doomed: dict[int, KVTransferError] = {}  # peers to lose in the next turn, and why
        self._acceptors: list[Acceptor[Channel]] = []
        self._greetings: dict[int, Greeting] = {}
        self._peers: dict[int, Peer] = {}
        self._vigil = Vigil(local.options.spin_us * 1e-6)
        self._last_turn = time.monotonic()

    def listen(self, host: str, ports: range) -> str:
        """See `Transport.listen`."""
        listener = Listener(self._local.options, host, ports)
        self._acceptors.append(Acceptor(listener, self._poller, self._accept))
        return listener.address

    def connect(self, address: Address, timeout_s: float) -> int:
        """See `Transport.start_connect`."""
        self._local.options.require_reachable_by(address.host)
        num_connecting = len(self._lookups) + sum(not g.incoming for g in self._greetings.values())
        require_room(num_connecting, self._local.options.max_connecting)
        peer_id = next(self._ids)
        self._lookups.start(peer_id, address, address.host, address.port, timeout_s)
        self._dial_found()
        return peer_id

    def _dial_found(self) -> None:
        """Connect to the hosts that have been looked up."""
        for peer_id, address, found in self._lookups.take():
            if not isinstance(found, Found):
                self._local.events.append(PeerLost(peer_id, found))
                continue
            try:
                channel = dial(address, found, self._local.options.max_queued_bytes)
            except KVTransferError as error:
                self._local.events.append(PeerLost(peer_id, error))
                continue
            # UCX hears of the peer when its preface has come: most addresses that lead nowhere are refused before that.
            self._begin(Greeting(peer_id, channel, False, found.timeout_s, found.deadline))

    def _accept(self, channel: Channel) -> None:
        incoming = [greeting for greeting in self._greetings.values() if greeting.incoming]
        max_connecting = self._local.options.max_connecting
        if len(incoming) >= max_connecting:
            # Peers say hello at once, so it is hardly one of them that has been silent for the longest time.
            error = BackpressureError(f"{max_connecting} others are being greeted (option max_connecting)")
            self._lose(incoming[0].peer_id, error)
        timeout_s = self._local.options.handshake_timeout_s
        self._begin(Greeting(next(self._ids), channel, True, timeout_s, time.monotonic() + timeout_s))

    def _begin(self, greeting: Greeting) -> None:
        self._greetings[greeting.peer_id] = greeting
        try:
            greeting.channel.send(Preface().encode())
            self._watch(greeting.peer_id, greeting.channel)
        except Exception as error:  # noqa: BLE001 - it is over for this connection alone
            self._lose_unexpectedly(greeting.peer_id, error)

    def _lose_unexpectedly(self, peer_id: int, error: Exception) -> None:
        """As `_lose`, for an error of any type."""
        self._lose(peer_id, unexpected(error, f"lost peer {peer_id}", self._log))

    def _watch(self, peer_id: int, channel: Channel) -> None:
        self._poller.watch(channel, partial(self._serve, peer_id), writes=channel.num_unsent > 0)

    def disconnect(self, peer_id: int) -> None:
        """See `Transport.disconnect`."""
        if peer_id in self._peers:
            self._part(self._peers.pop(peer_id), TransportClosedError("this side dropped the peer"))
        elif peer_id in self._greetings:
            greeting = self._greetings.pop(peer_id)
            self._let_go(greeting.close, greeting.channel)
        else:
            self._lookups.forget(peer_id)
        events = self._local.events
        events[:] = [e for e in events if isinstance(e, TransferEnded) or e.peer_id != peer_id]

    def _part(self, peer: Peer, error: KVTransferError) -> None:
        self._let_go(partial(peer.close, error), peer.channel, peer.worker)

    def _let_go(self, close: Callable[[], None], *watched: Channel | Worker) -> None:
        for source in watched:
            with survived("cannot stop waiting for a connection", self._log):
                self._poller.unwatch(source)
        with survived("cannot close a connection", self._log):
            close()

    def _peer(self, peer_id: int) -> Peer:
        if peer_id not in self._peers:
            raise PeerLostError(f"no peer {peer_id} any more, or not yet")
        return self._peers[peer_id]

    def send(self, peer_id: int, message: bytes) -> None:
        """See `Transport.send`."""
        self._peer(peer_id).channel.send_message(Message(message).encode())

    def start_read(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int:
        """See `Transport.start_read`."""
        peer = self._peer(peer_id)
        targets = require_transfer(self._local.source.pool, peer.pool, peer.num_guards, pairs, guard)
        plan = SlicePlan.of(pairs, targets, limits_of(self._local.options))
        now = time.monotonic()
        transfer = Transfer(next(self._ids), plan, guard, pairs.num_bytes, now, now + timeout_s)
        try:
            peer.reader.start(transfer)
        except Exception as error:  # noqa: BLE001 - the read has begun, so its end has to be an event
            self._doomed[peer_id] = unexpected(error, f"lost peer {peer_id}", self._log)
        # The fetch gets there, perhaps to one who sleeps; then a slice comes.
        self._vigil.begin(num_steps=2)
        return transfer.transfer_id

    # -- the loop ------------------------------------------------------------------------------------

    def turn(self, timeout_s: float) -> None:
        """Wait at most `timeout_s`, handle what happened."""
        if self._lookups:
            self._dial_found()
        while self._doomed:
            self._lose(*self._doomed.popitem())
        self._settle()
        self._poller.poll(0.0 if self._look(timeout_s) or not self._is_idle() else self._patience(timeout_s))
        self._settle()
        self._expire(time.monotonic())
        for peer in list(self._peers.values()):
            try:
                self._watch(peer.peer_id, peer.channel)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is over for this peer alone
                self._lose_unexpectedly(peer.peer_id, error)

    def _look(self, timeout_s: float) -> bool:
        """Look for what comes next, as long as it is near; returns whether anything came."""
        until = time.monotonic() + timeout_s
        while self._vigil.lasts(until) and sum(peer.num_under_way for peer in self._peers.values()) <= 1:
            if self._local.events or self._poller.poll(0.0) or self._settle():
                return True
            self._vigil.give_way()
        return False

    def _is_idle(self) -> bool:
        """Whether nothing has happened, and the poller tells of all that will."""
        if self._local.events or self._doomed:
            return False
        for peer in self._peers.values():
            try:
                if not peer.worker.arm():
                    return False
            except Exception as error:  # noqa: BLE001 - whatever it is, it is over for this peer alone
                self._lose_unexpectedly(peer.peer_id, error)
                return False
        return True

    def take_events(self) -> list[Event]:
        """Take what happened so far."""
        happened = list(self._local.events)
        self._local.events.clear()
        return happened

    def _patience(self, timeout_s: float) -> float:
        """How long nothing can become due."""
        interval_s = self._local.ping_interval_s
        deadlines = [greeting.deadline for greeting in self._greetings.values()]
        deadlines.append(self._lookups.due())
        deadlines += [acceptor.resumes_at for acceptor in self._acceptors]
        for peer in self._peers.values():
            deadlines += peer.deadlines(interval_s)
        due = min(deadlines, default=float("inf")) - time.monotonic()
        return max(0.0, min(timeout_s, due, interval_s))

    def _settle(self) -> bool:
        """Let UCX work for every peer; returns whether it had anything to do."""
        has_worked = False
        for peer in list(self._peers.values()):
            try:
                has_worked |= peer.settle()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is over for this peer alone
                self._lose_unexpectedly(peer.peer_id, error)
        if has_worked:
            self._vigil.begin()
        return has_worked

    def _expire(self, now: float) -> None:
        interval_s = self._local.ping_interval_s
        # While this node itself did not look, nobody was silent.
        missed_s = max(0.0, now - self._last_turn - 2 * interval_s)
        self._last_turn = now
        for peer in list(self._peers.values()):
            peer.channel.last_heard += missed_s
            try:
                self._require_alive(peer, now)
                peer.reader.expire(now)
                peer.keep_alive(now, interval_s)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is over for this peer alone
                self._lose_unexpectedly(peer.peer_id, error)
        for acceptor in self._acceptors:
            acceptor.resume(now)
        for greeting in [g for g in self._greetings.values() if g.deadline <= now]:
            self._lose(
                greeting.peer_id, PeerLostError(f"the peer did not answer within {greeting.timeout_s} s")
            )

    def _require_alive(self, peer: Peer, now: float) -> None:
        timeout_s = self._local.options.peer_timeout_s
        if now - peer.channel.last_heard > timeout_s:
            raise PeerLostError(f"the peer was silent for {timeout_s} s")

    def _serve(self, peer_id: int) -> None:
        """A connection is ready: take what came, send what waits."""
        greeting_or_peer = self._greetings.get(peer_id) or self._peers.get(peer_id)
        if greeting_or_peer is None:
            return
        channel = greeting_or_peer.channel
        try:
            for kind, body in channel.receive():
                self._handle(peer_id, decode(kind, body))
            if peer_id in self._peers or peer_id in self._greetings:
                channel.flush()
                self._watch(peer_id, channel)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is over for this peer alone
            self._lose_unexpectedly(peer_id, error)

    def _handle(self, peer_id: int, incoming: Incoming) -> None:
        if peer_id in self._peers:
            self._on_frame(self._peers[peer_id], incoming)
        elif peer_id in self._greetings:
            self._greet(self._greetings[peer_id], incoming)

    def _greet(self, greeting: Greeting, incoming: Incoming) -> None:
        match incoming:
            case Preface() if not greeting.is_prefaced:
                greeting.is_prefaced = True
                if not greeting.incoming:
                    greeting.workers.append(Worker(self._local.context))
                    greeting.channel.send(self._local.hello(greeting.workers[0], ""))
            case Hello() if greeting.is_prefaced and not greeting.hellos:
                self._on_hello(greeting, incoming)
            case Ready() if greeting.incoming and greeting.hellos:
                self._local.options.require_allowed(incoming.mechanism)
                self._welcome(greeting, greeting.hellos[0], incoming.mechanism)
            case Refused():
                raise PeerRefusedError(f"the peer refused: {incoming.reason}")
            case _:
                raise ProtocolError("a connection begins with a preface and a hello each way, and a ready")

    def _on_hello(self, greeting: Greeting, hello: Hello) -> None:
        """Open our way to the peer, and tell."""
        greeting.hellos.append(hello)
        if greeting.incoming:
            greeting.workers.append(Worker(self._local.context))
        worker = greeting.workers[0]
        mechanism = worker.connect(hello.address)
        if greeting.incoming:
            greeting.channel.send(self._local.hello(worker, mechanism))
        else:
            self._local.options.require_allowed(hello.mechanism)
            greeting.channel.send(Ready(mechanism).encode())
            self._welcome(greeting, hello, hello.mechanism)

    def _welcome(self, greeting: Greeting, hello: Hello, mechanism: str) -> None:
        peer = Peer(self._local, greeting, hello, mechanism)
        # That it is ready ends the wait; `_settle` does the rest.
        self._poller.watch(peer.worker, lambda: None)
        del self._greetings[greeting.peer_id]
        self._peers[peer.peer_id] = peer
        logger.info("connected to a peer that sends by %s", mechanism)
        self._local.events.append(Connected(peer.peer_id, peer.incoming))

    def _on_frame(self, peer: Peer, incoming: Incoming) -> None:
        match incoming:
            case Message():
                self._local.events.append(MessageReceived(peer.peer_id, incoming.body))
            case Fetch():
                peer.server.answer(incoming)
                self._vigil.begin()
            case Answer():
                peer.reader.on_answer(incoming)
            case Ping():
                pass
            case _:
                raise ProtocolError("the handshake is over")

    def _lose(self, peer_id: int, error: KVTransferError) -> None:
        """The peer is gone, or has to go; the owner hears of it if he ever heard of the peer."""
        greeting = self._greetings.pop(peer_id, None)
        if greeting is None:
            peer = self._peers.pop(peer_id, None)
            if peer is not None:
                self._part(peer, PeerLostError(f"the peer was lost: {error}"))
                self._local.events.append(PeerLost(peer_id, error))
            return
        if not isinstance(error, PeerLostError | VersionMismatchError):
            # Of another version the peer knows by our preface.
            greeting.channel.send(Refused(str(error)).encode())
        self._let_go(greeting.close, greeting.channel)
        if greeting.incoming:
            self._log.warning("turned a connection away: %s", error)
        else:
            self._local.events.append(PeerLost(peer_id, error))

    def close(self) -> None:
        """Drop every peer and close every socket."""
        self._lookups.close()
        for acceptor in self._acceptors:
            acceptor.close()
        for greeting in self._greetings.values():
            self._let_go(greeting.close)
        for peer in self._peers.values():
            self._let_go(partial(peer.close, TransportClosedError("this side closed")))
        self._let_go(self._local.context.close)
        self._local.context.reserve.close()
        self._log.flush()
        self._greetings.clear()
        self._peers.clear()
        self._local.events.clear()
