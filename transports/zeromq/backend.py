"""Everything between `register` and `close`: connections, handshakes, and what to do about each message."""

from __future__ import annotations

from contextlib import ExitStack

from .._lookups import Found, Lookups
from .._memory import require_transfer
from .._poller import Poller
from .._slices import SlicePlan
from ..endpoint import Backend, Peer, PeerTable, Read
from ..errors import (
    BackpressureError,
    KVTransferError,
    PeerLostError,
    ProtocolError,
    VersionMismatchError,
)
from .channel import Channel
from .frames import Frame
from .options import Address, ZeroMQOptions
from .peers import Connection, Handshake, Link, Lookup
from .reads import Reader, limits_of
from .security import Security
from .serving import PoolServer
from .sockets import Sockets
from .wire import Fetch, Hello, Incoming, Message, Slice, Stale, decode


class ZeroMQBackend(Backend[Connection]):
    """The backend of one endpoint. One thread calls it. `channel.Observer` describes the `on_…` methods."""

    def __init__(
        self, peers: PeerTable[Connection], options: ZeroMQOptions, security: Security, source: PoolServer
    ) -> None:
        self._peers = peers
        self._options = options
        self._security = security
        self._source = source
        self._limits = limits_of(options)
        self._hello = Hello(
            source.guards.num_guards, tuple(segment.num_bytes for segment in source.pool.segments)
        )
        with ExitStack() as opened:
            self._poller = Poller()
            opened.callback(self._poller.close)
            self._sockets = Sockets(options, security, self._poller, self, peers.log)
            opened.pop_all()
        self._lookups: Lookups[Peer[Connection]] = Lookups(self._poller.interrupt)
        # Those that were not hung up on. What a channel reports later means nothing.
        self._known: dict[Channel, Peer[Connection]] = {}
        self._is_closing = False

    # -- connections -----------------------------------------------------------------------------------

    def listen(self, address: str) -> str:
        """See `Endpoint.listen`. `zeromq://host:port`; with port 0 the system chooses, an empty address means the options.

        Raises:
            ConfigurationError: the address is malformed, taken or not ours to bind; CURVE is needed and there are no
                keys; or the address is a wildcard and `advertise_host` is not set.
        """
        if not address:
            return self._sockets.listen(self._options.bind_host, self._options.ports())
        parsed = Address.parse(address)
        return self._sockets.listen(parsed.host, range(parsed.port, parsed.port + 1))

    def on_accepted(self, channel: Channel) -> None:
        self._known[channel] = self._peers.add_incoming(Handshake(channel))

    def prepare(self, address: str) -> Connection:
        return Lookup(Address.parse(address))

    def connect(self, peer: Peer[Connection]) -> None:
        lookup = peer.connection
        assert isinstance(lookup, Lookup)
        address = lookup.address
        lookup.keys = self._security.for_connecting(address)
        self._lookups.start(peer.peer_id, peer, address.host, address.port, peer.timeout_s)
        self._dial_found()

    def _dial_found(self) -> None:
        """Connect to the hosts that have been looked up."""
        for _, peer, found in self._lookups.take():
            try:
                self._dial(peer, found)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is over for this peer alone
                self._peers.lose(peer, error)

    def _dial(self, peer: Peer[Connection], found: Found | KVTransferError) -> None:
        if not isinstance(found, Found):
            raise found
        lookup = peer.connection
        assert isinstance(lookup, Lookup)
        channel = self._sockets.dial(lookup.address, found, lookup.keys)
        peer.connection = Handshake(channel)
        self._known[channel] = peer
        channel.send([self._hello.head(), self._hello.body()])

    def hang_up(self, peer: Peer[Connection], error: KVTransferError) -> None:
        connection = peer.connection
        if isinstance(connection, Lookup):
            self._lookups.forget(peer.peer_id)
            return
        self._known.pop(connection.channel, None)
        if self._is_closing:
            # `Sockets.close` closes it, and what was sent still leaves within libzmq's linger period.
            connection.channel.forget()
        else:
            self._sockets.hang_up(connection.channel)

    def handshake_error(self, peer: Peer[Connection]) -> KVTransferError:
        connection = peer.connection
        if isinstance(connection, Lookup):
            return PeerLostError(
                f"timed out after {peer.timeout_s:g} s looking up host {connection.address.host!r}: is its name "
                "service up?"
            )
        return _refusal(connection) or super().handshake_error(peer)

    def send(self, peer: Peer[Connection], message: bytes) -> None:
        channel = _link(peer).channel
        if channel.queued_bytes and channel.queued_bytes + len(message) > self._options.max_queued_bytes:
            raise BackpressureError(
                f"the peer does not receive its messages: {channel.queued_bytes} bytes are queued"
            )
        channel.send([Message.head(), message])

    # -- what arrives ----------------------------------------------------------------------------------

    def on_message(self, channel: Channel, frames: list[Frame]) -> None:
        peer = self._known.get(channel)
        if peer is None:
            return
        try:
            if isinstance(peer.connection, Link):
                self._handle(peer, peer.connection, decode(frames))
            elif isinstance(peer.connection, Handshake):
                self._on_handshake(peer, peer.connection, frames)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is over for this peer alone
            self._peers.lose(peer, error)

    def on_lost(self, channel: Channel, error: Exception) -> None:
        peer = self._known.get(channel)
        if peer is not None:
            self._peers.lose(peer, _refusal(peer.connection) or error)

    def _on_handshake(self, peer: Peer[Connection], handshake: Handshake, frames: list[Frame]) -> None:
        """The first message of a connection has to be a hello."""
        try:
            hello = decode(frames)
        except VersionMismatchError as error:
            if not peer.incoming or handshake.refusal is not None:
                raise
            # Let the other side learn our version before we hang up, which the deadline of the handshake does.
            handshake.refusal = error
            handshake.channel.send([self._hello.head(), self._hello.body()])
            return
        if not isinstance(hello, Hello) or handshake.refusal is not None:
            raise ProtocolError("a connection begins with one hello")
        channel = handshake.channel
        reader = Reader(self._options, channel, self._peers.end_read)
        peer.connection = Link(channel, hello.num_guards, hello.pool(), reader)
        if peer.incoming:
            channel.send([self._hello.head(), self._hello.body()])
        self._peers.connected(peer)

    def _handle(self, peer: Peer[Connection], link: Link, incoming: Incoming) -> None:
        match incoming:
            case Message():
                self._peers.message(peer, incoming.body)
            case Fetch():
                self._source.answer(link.channel, incoming)
            case Slice():
                link.reader.on_slice(incoming)
            case Stale():
                link.reader.on_stale(incoming)
            case Hello():
                raise ProtocolError("a connection begins with one hello")

    # -- reads -----------------------------------------------------------------------------------------

    def start_read(self, read: Read[Connection]) -> None:
        link = _link(read.peer)
        targets = require_transfer(self._source.pool, link.pool, link.num_guards, read.pairs, read.guard)
        read.mechanism = link.channel.mechanism
        link.reader.start(read, SlicePlan.of(read.pairs, targets, self._limits))

    def stop_read(self, read: Read[Connection]) -> bool:
        # Only this thread puts bytes into place, slice by slice, so nothing is half written.
        _link(read.peer).reader.stop(read)
        return True

    # -- the loop --------------------------------------------------------------------------------------

    def turn(self, timeout_s: float) -> None:
        if self._lookups:
            self._dial_found()
        self._sockets.pump()
        # Looked at after the pump: what it reports must not wait for the next thing to happen.
        self._sockets.wait(0.0 if self._peers.has_events else timeout_s)

    def interrupt(self) -> None:
        self._poller.interrupt()

    # -- the end ---------------------------------------------------------------------------------------

    def stop_serving(self) -> None:
        # libzmq may still send from the pool until its context is closed. But a reader accepts
        # those bytes only after an answer of this thread, and this thread gives no more answers.
        self._source.guards.clear_all()
        self._is_closing = True

    def close(self) -> None:
        with ExitStack() as closing:  # last first, and each of them whatever happens to the others
            closing.callback(self._poller.close)
            closing.callback(self._sockets.close)
            closing.callback(self._lookups.close)


def _link(peer: Peer[Connection]) -> Link:
    assert isinstance(peer.connection, Link), "only a connected peer sends and is read from"
    return peer.connection


def _refusal(connection: Connection) -> VersionMismatchError | None:
    return connection.refusal if isinstance(connection, Handshake) else None
