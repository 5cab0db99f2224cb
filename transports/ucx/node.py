"""Everything between `register` and `close`: handshakes, peers, and the loop over what arrives from them."""

from __future__ import annotations

import itertools
import logging
import time
from functools import partial

from .._accepting import Acceptor
from .._memory import require_transfer
from .._poller import Poller
from .._slices import SlicePlan
from .._writes import Writes
from ..base import Connected, Event, MessageReceived, PeerLost, TransferEnded
from ..errors import (
    KVTransferError,
    PeerLostError,
    PeerRefusedError,
    ProtocolError,
    TransportClosedError,
    VersionMismatchError,
)
from ..regions import Guard, RegionPairs, Regions
from .channel import Channel, Listener, dial
from .library import Worker
from .options import Address
from .peers import Greeting, Local, Peer
from .reads import Transfer, limits_of
from .vigil import Vigil
from .wire import Answer, Fetch, Hello, Incoming, Message, Ping, Ready, Refused, WriteFrame, decode

__all__ = ["Node"]

logger = logging.getLogger(__name__)


class Node:
    """One process among its peers. One thread calls it, and all its work is done there."""

    def __init__(self, local: Local, poller: Poller) -> None:
        self._local = local
        self._poller = poller
        self._writes = Writes(self, local.source.guards, local.events)
        self._ids = itertools.count(1)
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
        peer_id = next(self._ids)
        try:
            channel = dial(address, self._local.options.max_queued_bytes)
        except PeerLostError as error:
            self._local.events.append(PeerLost(peer_id, error))
            return peer_id
        greeting = Greeting(peer_id, channel, incoming=False, timeout_s=timeout_s)
        try:
            greeting.workers.append(Worker(self._local.options))
        except KVTransferError:
            greeting.close()
            raise
        channel.send(self._local.hello(greeting.workers[0], ""))
        self._greetings[peer_id] = greeting
        self._watch(peer_id, channel)
        return peer_id

    def _accept(self, channel: Channel) -> None:
        timeout_s = self._local.options.handshake_timeout_s
        greeting = Greeting(next(self._ids), channel, incoming=True, timeout_s=timeout_s)
        self._greetings[greeting.peer_id] = greeting
        self._watch(greeting.peer_id, channel)

    def _watch(self, peer_id: int, channel: Channel) -> None:
        self._poller.watch(channel, partial(self._serve, peer_id), writes=channel.num_unsent > 0)

    def disconnect(self, peer_id: int) -> None:
        """See `Transport.disconnect`."""
        if peer_id in self._peers:
            self._part(self._peers.pop(peer_id), TransportClosedError("this side dropped the peer"))
        elif peer_id in self._greetings:
            self._turn_away(self._greetings.pop(peer_id))
        events = self._local.events
        events[:] = [e for e in events if isinstance(e, TransferEnded) or e.peer_id != peer_id]

    def _part(self, peer: Peer, error: KVTransferError) -> None:
        self._poller.unwatch(peer.channel)
        self._poller.unwatch(peer.worker)
        peer.close(error)
        self._writes.end_all(peer.peer_id, error)

    def _turn_away(self, greeting: Greeting) -> None:
        self._poller.unwatch(greeting.channel)
        greeting.close()

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
        peer.reader.start(transfer)
        # The fetch gets there, perhaps to one who sleeps; then a slice comes.
        self._vigil.begin(num_steps=2)
        return transfer.transfer_id

    def can_write(self, peer_id: int) -> bool:
        """See `Transport.can_write`."""
        return peer_id in self._peers

    def accept_writes(self, peer_id: int, guard: Guard, regions: Regions) -> None:
        """See `Transport.accept_writes`."""
        self._peer(peer_id)
        self._writes.accept(peer_id, guard, regions, self._local.source.pool)

    def start_write(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int:
        """See `Transport.start_write`."""
        peer = self._peer(peer_id)
        require_transfer(self._local.source.pool, peer.pool, peer.num_guards, pairs, guard)
        transfer_id = next(self._ids)
        self._writes.start(transfer_id, peer_id, pairs, guard, timeout_s)
        return transfer_id

    def stop_read(self, peer_id: int, read_id: int, error: KVTransferError) -> None:
        """See `_writes.Host`."""
        if peer_id in self._peers:
            self._peers[peer_id].reader.stop(read_id, error)

    def send_write_frame(self, peer_id: int, frame: bytes) -> None:
        """See `_writes.Host`."""
        if peer_id in self._peers:
            self._peers[peer_id].channel.send(WriteFrame(frame).encode())

    # -- the loop ------------------------------------------------------------------------------------

    def turn(self, timeout_s: float) -> None:
        """Wait at most `timeout_s`, handle what happened."""
        self._settle()
        self._poller.poll(0.0 if self._look(timeout_s) or not self._is_idle() else self._patience(timeout_s))
        self._settle()
        self._expire(time.monotonic())
        for peer in self._peers.values():
            self._watch(peer.peer_id, peer.channel)

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
        return not self._local.events and all(peer.worker.arm() for peer in self._peers.values())

    def take_events(self) -> list[Event]:
        """Take what happened so far."""
        happened = list(self._local.events)
        self._local.events.clear()
        return [e for e in happened if not (isinstance(e, TransferEnded) and self._writes.take_read(e))]

    def _patience(self, timeout_s: float) -> float:
        """How long nothing can become due."""
        interval_s = self._local.ping_interval_s
        deadlines = [greeting.deadline for greeting in self._greetings.values()]
        deadlines += self._writes.deadlines()
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
            except KVTransferError as error:
                self._lose(peer.peer_id, error)
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
            except KVTransferError as error:
                self._lose(peer.peer_id, error)
            else:
                peer.keep_alive(now, interval_s)
        for acceptor in self._acceptors:
            acceptor.resume(now)
        for peer_id, reason in self._writes.expire(now):
            self._lose(peer_id, reason)
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
        except KVTransferError as error:
            self._lose(peer_id, error)
            return
        if peer_id in self._peers or peer_id in self._greetings:
            channel.flush()
            self._watch(peer_id, channel)

    def _handle(self, peer_id: int, incoming: Incoming) -> None:
        if peer_id in self._peers:
            self._on_frame(self._peers[peer_id], incoming)
        elif peer_id in self._greetings:
            self._greet(self._greetings[peer_id], incoming)

    def _greet(self, greeting: Greeting, incoming: Incoming) -> None:
        match incoming:
            case Hello() if not greeting.hellos:
                self._on_hello(greeting, incoming)
            case Ready() if greeting.incoming and greeting.hellos:
                self._local.options.require_allowed(incoming.mechanism)
                self._welcome(greeting, greeting.hellos[0], incoming.mechanism)
            case Refused():
                raise PeerRefusedError(f"the peer refused: {incoming.reason}")
            case _:
                raise ProtocolError("a connection begins with a hello each way, and a ready")

    def _on_hello(self, greeting: Greeting, hello: Hello) -> None:
        """Open our way to the peer, and tell."""
        greeting.hellos.append(hello)
        if greeting.incoming:
            greeting.workers.append(Worker(self._local.options))
        worker = greeting.workers[0]
        mechanism = worker.connect(hello.address)
        if greeting.incoming:
            greeting.channel.send(self._local.hello(worker, mechanism))
        else:
            self._local.options.require_allowed(hello.mechanism)
            greeting.channel.send(Ready(mechanism).encode())
            self._welcome(greeting, hello, hello.mechanism)

    def _welcome(self, greeting: Greeting, hello: Hello, mechanism: str) -> None:
        del self._greetings[greeting.peer_id]
        peer = Peer(self._local, greeting, hello, mechanism)
        self._peers[peer.peer_id] = peer
        self._poller.watch(
            peer.worker, lambda: None
        )  # that it is ready ends the wait; `_settle` does the rest
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
            case WriteFrame():
                self._writes.on_frame(peer.peer_id, incoming.body, peer.channel.num_unsent)
            case Ping():
                pass
            case _:
                raise ProtocolError("the handshake is over")

    def _lose(self, peer_id: int, error: KVTransferError) -> None:
        """The peer is gone, or has to go; the owner hears of it if he ever heard of the peer."""
        greeting = self._greetings.pop(peer_id, None)
        if greeting is None:
            reason = PeerLostError(f"the peer was lost: {error}")
            self._part(self._peers.pop(peer_id), reason)
            self._local.events.append(PeerLost(peer_id, error))
            return
        if not isinstance(error, PeerLostError):
            self._explain(greeting, error)
        self._turn_away(greeting)
        if greeting.incoming:
            logger.warning("turned a connection away: %s", error)
        else:
            self._local.events.append(PeerLost(peer_id, error))

    def _explain(self, greeting: Greeting, error: KVTransferError) -> None:
        """Tell the other side why; of another version, by our hello, which it can read."""
        if isinstance(error, VersionMismatchError) and greeting.incoming:
            greeting.workers.append(Worker(self._local.options))
            greeting.channel.send(self._local.hello(greeting.workers[0], ""))
        else:
            greeting.channel.send(Refused(str(error)).encode())

    def close(self) -> None:
        """Drop every peer and close every socket."""
        for acceptor in self._acceptors:
            acceptor.close()
        for greeting in self._greetings.values():
            greeting.close()
        for peer in self._peers.values():
            peer.close(TransportClosedError("this side closed"))
        self._greetings.clear()
        self._peers.clear()
        self._local.events.clear()
