"""`ZeroMQTransport`, and its backend: connections, handshakes, and what to do about each message."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from .._slices import SliceLimits, SlicePlan
from ..endpoint import Backend, Peer, PeerTable, Read
from ..errors import BackpressureError, KVTransferError, ProtocolError, VersionMismatchError
from ..movers import MAX_WAIT_S, Mover
from ..network import Found, Lookups
from ..regions import Pool
from ..serving import HostTransport, PeerPool, ServedPool, mover_for
from ..streams import Poller
from .channel import Channel
from .frames import Frame
from .options import SCHEME, Address, ZeroMQOptions
from .security import Security
from .slices import Reader, Server, limits_of
from .sockets import Sockets
from .wire import MAX_SLICE_BYTES, Fetch, Hello, Incoming, Message, Slice, Stale, decode


@dataclass(eq=False)
class Handshake:
    """A connection that is not a peer yet, and may never be one.

    Attributes:
        refusal: Why it never will be one. It stays open so that our hello, which names our version, can
            arrive.
    """

    channel: Channel
    refusal: VersionMismatchError | None = None


@dataclass(frozen=True, eq=False)
class Link:
    """The connection to a peer whose handshake is over.

    Attributes:
        limits: How reads from the peer are cut.
    """

    channel: Channel
    remote: PeerPool
    limits: SliceLimits
    reader: Reader
    server: Server


#: What is kept per peer: first the `Address` to connect to, then a `Handshake`, then a `Link`.
Connection = Address | Handshake | Link


class ZeroMQBackend(Backend[Connection]):
    """The backend of one endpoint. One thread calls it. `channel.Observer` describes the `on_…` methods."""

    def __init__(
        self, peers: PeerTable[Connection], options: ZeroMQOptions, security: Security, served: ServedPool
    ) -> None:
        self._peers = peers
        self._options = options
        self._security = security
        self._served = served
        self._mover = served.mover
        self._limits = limits_of(options)
        max_slice_bytes = served.max_slice_bytes(self._limits, MAX_SLICE_BYTES)
        self._hello = Hello(served.guards.num_guards, served.sizes, max_slice_bytes)
        with ExitStack() as opened:
            self._poller = Poller()
            opened.callback(self._poller.close)
            if self._mover.fileno() >= 0:
                # It only has to end the wait: `turn` polls the mover.
                self._poller.watch(self._mover, lambda: None)
            self._sockets = Sockets(options, security, self._poller, self, peers.log)
            opened.pop_all()
        self._lookups = Lookups(peers, self._poller, self._dial)
        # Those that were not hung up on. What a channel reports later means nothing.
        self._known: dict[Channel, Peer[Connection]] = {}
        self._is_closing = False

    # -- connections -----------------------------------------------------------------------------------

    def listen(self, address: str) -> str:
        """See `Endpoint.listen`.

        `zeromq://host:port`; with port 0 the system chooses, an empty address means the options.

        Raises:
            ConfigurationError: the address is malformed, taken or not ours to bind; CURVE is needed and there
                are no keys; or the address is a wildcard and `advertise_host` is not set.
        """
        return self._sockets.listen(*self._options.ports_of(Address.parse(address) if address else None))

    def on_accepted(self, channel: Channel) -> None:
        self._known[channel] = self._peers.add_incoming(Handshake(channel))

    def prepare(self, address: str) -> Connection:
        return Address.parse(address)

    def connect(self, peer: Peer[Connection]) -> None:
        address = peer.connection
        assert isinstance(address, Address), "a peer is connected to once"
        self._security.for_connecting(address)  # an address that is refused anyway is not looked up
        self._lookups.start(peer, address)

    def _dial(self, peer: Peer[Connection], found: Found) -> None:
        address = peer.connection
        assert isinstance(address, Address), "a peer is connected to once"
        channel = self._sockets.dial(address, found, self._security.for_connecting(address))
        peer.connection = Handshake(channel)
        self._known[channel] = peer
        channel.send([self._hello.head(), self._hello.body()])

    def hang_up(self, peer: Peer[Connection], error: KVTransferError) -> None:
        connection = peer.connection
        if isinstance(connection, Address):
            self._lookups.forget(peer)
            return
        self._known.pop(connection.channel, None)
        if isinstance(connection, Link):
            connection.reader.close()
            connection.server.close()
        if self._is_closing:
            # `Sockets.close` closes it, and what was sent still leaves within libzmq's linger period.
            connection.channel.forget()
        else:
            self._sockets.hang_up(connection.channel)

    def handshake_error(self, peer: Peer[Connection]) -> KVTransferError:
        refusal = _refusal(peer.connection) or self._lookups.timeout_error(peer)
        return refusal or super().handshake_error(peer)

    def send(self, peer: Peer[Connection], message: bytes) -> None:
        channel = _link(peer).channel
        if channel.queued_bytes and channel.queued_bytes + len(message) > self._options.max_queued_bytes:
            raise BackpressureError(
                f"the peer does not receive its messages: {channel.queued_bytes} bytes are queued"
            )
        channel.send([Message(message).head(), message])

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
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this peer alone
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
            # Let the other side learn our version before we hang up, which the deadline of the handshake
            # does.
            handshake.refusal = error
            handshake.channel.send([self._hello.head(), self._hello.body()])
            return
        if not isinstance(hello, Hello) or handshake.refusal is not None:
            raise ProtocolError("a connection begins with one hello")
        channel = handshake.channel
        fail = partial(self._peers.lose, peer)
        reader = Reader(self._options, self._served, channel, self._peers.end_read, fail)
        server = Server(self._served, channel, self._hello.max_slice_bytes, fail)
        remote = PeerPool.of(hello.num_guards, hello.num_bytes)
        limits = self._limits.within(hello.max_slice_bytes)
        peer.connection = Link(channel, remote, limits, reader, server)
        if peer.incoming:
            channel.send([self._hello.head(), self._hello.body()])
        self._peers.connected(peer)

    def _handle(self, peer: Peer[Connection], link: Link, incoming: Incoming) -> None:
        match incoming:
            case Message():
                self._peers.message(peer, incoming.body)
            case Fetch():
                link.server.answer(incoming)
            case Slice():
                link.reader.on_slice(incoming)
            case Stale():
                link.reader.on_stale(incoming)
            case Hello():
                raise ProtocolError("a connection begins with one hello")

    # -- reads -----------------------------------------------------------------------------------------

    def sums_of(self, peer: Peer[Connection]) -> str:
        return "xxh3" if self._options.checksums else ""

    def start_read(self, read: Read[Connection]) -> None:
        link = _link(read.peer)
        targets = self._served.require_read(link.remote, read)
        read.mechanism = link.channel.mechanism + self._served.mover.suffix
        link.reader.start(read, SlicePlan.of(read.pairs, targets, link.limits))

    def stop_read(self, read: Read[Connection]) -> bool:
        return _link(read.peer).reader.stop(read)

    # -- the loop --------------------------------------------------------------------------------------

    def turn(self, timeout_s: float) -> None:
        self._sockets.pump()
        # Looked at after the pump: what it reports must not wait for the next thing to happen.
        if self._mover.has_open_tickets:
            timeout_s = min(timeout_s, MAX_WAIT_S)
        self._sockets.wait(0.0 if self._peers.has_events else timeout_s)
        self._mover.poll()

    def interrupt(self) -> None:
        self._poller.interrupt()

    # -- the end ---------------------------------------------------------------------------------------

    def stop_serving(self) -> None:
        # libzmq may still send from the pool until its context is closed. But a reader accepts
        # those bytes only after an answer of this thread, and this thread gives no more answers.
        self._served.guards.clear_all()
        self._is_closing = True
        self._mover.drain()

    def close(self) -> None:
        with ExitStack() as closing:  # last first, and each of them whatever happens to the others
            closing.callback(self._mover.close)
            closing.callback(self._poller.close)
            closing.callback(self._sockets.close)


def _link(peer: Peer[Connection]) -> Link:
    assert isinstance(peer.connection, Link), "only a connected peer sends and is read from"
    return peer.connection


def _refusal(connection: Connection) -> VersionMismatchError | None:
    return connection.refusal if isinstance(connection, Handshake) else None


class ZeroMQTransport(HostTransport):
    """Peers over TCP, on this host or another. See the package for how a read works.

    The owner's thread does all work except libzmq's own. In an asyncio program give it an executor of one
    thread: `await loop.run_in_executor(owner, endpoint.wait_events, 0.1)`.

    Args:
        options: See `ZeroMQOptions`.

    Raises:
        ConfigurationError: an option is unknown or wrong, or a key file cannot be used. Nothing was opened.
        BackendUnavailableError: keys are given, and this libzmq has no CURVE.
    """

    scheme = SCHEME
    options_type = ZeroMQOptions
    options: ZeroMQOptions

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        super().__init__(options)
        self._security = Security(self.options)

    def make_mover(self, pool: Pool) -> Mover:
        return mover_for(pool, limits_of(self.options).max_bytes, self.options.staging_bytes)

    def make_backend(self, peers: PeerTable[Connection], served: ServedPool) -> ZeroMQBackend:
        return ZeroMQBackend(peers, self.options, self._security, served)
