"""`TcpTransport`, and its backend: connections, handshakes, and what to do about each frame."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from .._busy_poll import BusyPoll
from .._descriptors import warn_if_few
from .._slices import SliceLimits, SlicePlan
from ..endpoint import Peer, PeerState, PeerTable, Read
from ..errors import (
    KVTransferError,
    ProtocolError,
    VersionMismatchError,
)
from ..movers import MAX_WAIT_S, Mover
from ..network import Found, HostStreamBackend
from ..regions import Pool
from ..serving import HostTransport, PeerPool, ServedPool, mover_for
from ..streams import FrameSocket, KeepAlive
from .iovec import Wait
from .options import SCHEME, Address, TcpOptions
from .security import Security
from .slices import Reader, Server, limits_of
from .stream import TcpStream, TlsStream
from .wire import MAX_SLICE_BYTES, End, Fetch, Hello, Incoming, Kind, decode

logger = logging.getLogger(__name__)

#: How long one call waits for the rest of a slice. It ends sooner if anything but the rest of the slice
#: arrives; but a timer waits as long.
_MAX_RECEIVE_S = 0.005


@dataclass(eq=False)
class Link:
    """What is kept per peer.

    Attributes:
        address, found: Where we connected to; None if the peer connected to us.
        stream: The connection; None before a lookup has ended.
        remote, pool, limits, reader, server: None before the peer's hello.
    """

    address: Address | None = None
    found: Found | None = None
    stream: TcpStream | None = None
    remote: Hello | None = None
    pool: PeerPool | None = None
    limits: SliceLimits | None = None
    reader: Reader | None = None
    server: Server | None = None

    def __repr__(self) -> str:
        return f"<Link {self.address or 'incoming'}>"


class TcpBackend(HostStreamBackend[Link]):
    """One process among its peers. One thread calls it, and all its work is done there."""

    message_kind, ping_kind, refused_kind = Kind.MESSAGE, Kind.PING, Kind.REFUSED

    def __init__(
        self,
        peers: PeerTable[Link],
        options: TcpOptions,
        security: Security,
        served: ServedPool,
    ) -> None:
        super().__init__(peers)
        self._options = options
        self._security = security
        self._served = served
        self._mover = mover = served.mover
        self._max_slice_bytes = served.max_slice_bytes(limits_of(options), MAX_SLICE_BYTES)
        self._links: dict[Peer[Link], Link] = {}  # the connected peers
        if mover.fileno() >= 0:
            self.poller.watch(mover, mover.poll)
        self._busy_poll = BusyPoll(options.spin_us * 1e-6)
        self._reading: Peer[Link] | None = None  # the peer of the latest read
        self._serving: Peer[Link] | None = None  # the peer of the latest fetch
        self._may_wait_s = 0.0  # how long the current turn may wait within a call that receives
        self._keep_alive = KeepAlive(self, self._links, options.peer_timeout_s)

    # -- connections -----------------------------------------------------------------------------------

    def stream_of(self, link: Link) -> FrameSocket | None:
        return link.stream

    def streams_of(self, link: Link) -> Iterable[FrameSocket]:
        return () if link.stream is None else (link.stream,)

    def listen(self, address: str) -> str:
        """See `Endpoint.listen`.

        `tcp://host:port`; with port 0 the system chooses, an empty address means the options.

        Raises:
            ConfigurationError: the address is malformed, taken or not ours to bind; TLS is needed and there
                are no certificates; or the address is a wildcard and `advertise_host` is not set.
        """
        host, ports = self._options.ports_of(Address.parse(address) if address else None)
        with_tls = self._security.for_listening(host)
        listener, where = self._options.listen(host, ports)
        self.accept_from(listener, partial(self._accepted, with_tls))
        return str(Address(where.host, where.port, with_tls))

    def _accepted(self, with_tls: bool, sock: socket.socket) -> Link:
        return Link(stream=self._stream_over(sock, with_tls, host=None))

    def _stream_over(self, sock: socket.socket, with_tls: bool, host: str | None) -> TcpStream:
        """Wrap a socket. `host`: where it connects to; None if it was accepted."""
        max_queued_bytes = self._options.max_queued_bytes
        if not with_tls:
            return TcpStream(sock, max_queued_bytes)
        contexts = self._security.contexts
        context = contexts.accept if host is None else contexts.connect
        admit = self._security.require_admitted
        return TlsStream(sock, max_queued_bytes, context, admit, host)

    def prepare(self, address: str) -> Link:
        return Link(Address.parse(address))

    def connect(self, peer: Peer[Link]) -> None:
        address = peer.connection.address
        assert address is not None
        self._security.for_connecting(address)
        self.look_up(peer, address)

    def dial(self, peer: Peer[Link], found: Found) -> None:
        link = peer.connection
        link.found = found
        assert link.address is not None
        with_tls = self._security.for_connecting(link.address)
        sock = found.dial()
        try:
            link.stream = self._stream_over(sock, with_tls, link.address.host)
        except BaseException:
            sock.close()
            raise

    def greet(self, peer: Peer[Link]) -> None:
        if not peer.incoming:
            self.stream(peer).send(self._hello())

    def hang_up(self, peer: Peer[Link], error: KVTransferError) -> None:
        link = peer.connection
        self._lookups.forget(peer)
        self._links.pop(peer, None)
        if self._serving is peer:
            self._serving = None
        if link.stream is not None:
            if peer.incoming and link.remote is None:
                self.refuse(link.stream, error)
            self.drop(link.stream)
        if link.reader is not None and link.server is not None:
            link.reader.close()
            link.server.close()

    # -- the handshake ---------------------------------------------------------------------------------

    def _hello(self) -> bytes:
        served = self._served
        return Hello(served.guards.num_guards, served.sizes, self._max_slice_bytes).encode()

    def on_frame(self, peer: Peer[Link], kind: int, body: bytes) -> None:
        link, incoming = peer.connection, decode(kind, body)
        if link.remote is not None:
            self._on_link_frame(peer, link, incoming)
        else:
            self._on_handshake(peer, link, incoming)

    def lose(self, peer: Peer[Link], error: Exception) -> None:
        is_stranger = peer.incoming and peer.state is PeerState.HANDSHAKING
        if is_stranger and isinstance(error, VersionMismatchError):
            self.stream(peer).send(self._hello())  # so that the other side learns our version
        super().lose(peer, error)

    def _on_handshake(self, peer: Peer[Link], link: Link, incoming: Incoming) -> None:
        match incoming:
            case Hello():
                self._on_hello(peer, link, incoming)
            case _:
                raise ProtocolError("a connection begins with one hello each way")

    def _on_hello(self, peer: Peer[Link], link: Link, hello: Hello) -> None:
        stream = link.stream
        assert stream is not None
        link.remote = hello
        link.pool = PeerPool.of(hello.num_guards, hello.num_bytes)
        link.limits = limits_of(self._options).within(hello.max_slice_bytes)
        post, flush, fail = partial(self._post, peer), partial(self._flush, peer), partial(self.lose, peer)
        link.reader = reader = Reader(self._options, self._mover, stream, post, self.peers.end_read, fail)
        link.server = Server(self._served, self._max_slice_bytes, stream, flush, fail)
        stream.sink = reader.sink
        stream.expects_slices = lambda: bool(reader.num_in_flight)
        stream.wait = partial(self._wait, reader)
        if peer.incoming:
            stream.send(self._hello())
        self._links[peer] = link
        self.peers.connected(peer)

    def _wait(self, reader: Reader) -> Wait:
        """Return how a call that receives a slice waits for the rest of it.

        The caller of `turn` decides whether it may.
        """
        spin_s = self._busy_poll.period_s if reader.num_in_flight <= 1 else 0.0
        return Wait(self.poller.fileno(), self._may_wait_s, spin_s)

    # -- what arrives ----------------------------------------------------------------------------------

    def _on_link_frame(self, peer: Peer[Link], link: Link, incoming: Incoming) -> None:
        assert link.reader is not None
        assert link.server is not None
        match incoming:
            case Fetch():
                link.server.answer(incoming)
                self._serving = peer
                self._busy_poll.extend()
            case End():
                link.reader.on_end(incoming)
            case _:
                raise ProtocolError("the handshake is over")

    def _flush(self, peer: Peer[Link]) -> None:
        """Send what was queued on the connection, now or as soon as there is room."""
        try:
            stream = self.stream(peer)
            stream.flush()
            self.watch_room(peer, stream)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this peer alone
            self.lose(peer, error)

    def _post(self, peer: Peer[Link], frame: bytes) -> None:
        stream = self.stream(peer)
        stream.send(frame)
        self.watch_room(peer, stream)

    # -- reads -----------------------------------------------------------------------------------------

    def sums_of(self, peer: Peer[Link]) -> str:
        if peer.connection.stream is not None and peer.connection.stream.is_encrypted:
            return "tls"
        return "xxh3" if self._options.checksums else ""

    def start_read(self, read: Read[Link]) -> None:
        link = read.peer.connection
        assert link.pool is not None
        assert link.limits is not None
        assert link.reader is not None
        assert link.stream is not None
        targets = self._served.require_read(link.pool, read)
        read.mechanism = f"{SCHEME}{'+tls' if link.stream.is_encrypted else ''}{self._mover.suffix}"
        link.reader.start(read, SlicePlan.of(read.pairs, targets, link.limits))
        self._reading = read.peer
        # Two steps until something is seen here: the fetch arrives, perhaps at a thread that sleeps; then a
        # slice comes. The period starts when the fetch has left: preparing it takes as long as a good part of
        # the period.
        self._busy_poll.extend(num_steps=2)

    def stop_read(self, read: Read[Link]) -> bool:
        reader = read.peer.connection.reader
        assert reader is not None
        return reader.stop(read)

    # -- the loop --------------------------------------------------------------------------------------

    def turn(self, timeout_s: float) -> None:
        self._may_wait_s = min(timeout_s, _MAX_RECEIVE_S)
        if self._poll_busily(timeout_s):
            return
        if self._mover.has_open_tickets:
            # The signal of a copy may not come if the GPU failed.
            super().turn(min(timeout_s, MAX_WAIT_S))
            self._mover.poll()
        else:
            super().turn(timeout_s)

    def _poll_busily(self, timeout_s: float) -> bool:
        """Poll for what comes next, as long as it is near; return whether anything came.

        With more than one slice in flight the next one is on its way while we sleep, so there is nothing to
        gain. While a slice waits for room in a socket, its reader has enough to do, and may need this core
        for that.
        """
        if self.peers.has_events or not self._has_at_most_one_slice() or self._is_sending():
            return False
        if not self._busy_poll.wait(self.poller.fileno(), time.monotonic() + timeout_s):
            return False
        self.poller.poll(0.0)
        self._busy_poll.extend()
        return True

    def _has_at_most_one_slice(self) -> bool:
        if self._reading is None:
            return True
        reader = self._reading.connection.reader
        return reader is None or reader.num_in_flight <= 1

    def _is_sending(self) -> bool:
        if self._serving is None:
            return False
        server = self._serving.connection.server
        return server is not None and server.num_unsent > 0

    def on_tick(self, peer: Peer[Link], missed_s: float) -> None:
        if peer.connection.server is not None:
            peer.connection.server.require_progress(
                self.peers.clock(), missed_s, self._options.peer_timeout_s
            )

    # -- the end ---------------------------------------------------------------------------------------

    def stop_serving(self) -> None:
        # What is still sent from the pool is followed by an end frame, which then finds its guard cleared.
        self._served.guards.clear_all()
        self._mover.drain()

    def close(self) -> None:
        with ExitStack() as closing:  # last first, and each of them whatever happens to the others
            closing.callback(self._mover.close)
            closing.callback(super().close)


class TcpTransport(HostTransport):
    """Peers over TCP, with TLS beyond loopback. See the package for how a read works.

    The owner's thread does all work. If the owner does not call `wait_events` for `peer_timeout_s`, its peers
    lose it.

    Args:
        options: See `TcpOptions`.

    Raises:
        ConfigurationError: an option is unknown or wrong, or a TLS file cannot be used. Nothing was opened.
    """

    scheme: ClassVar[str] = SCHEME
    options_type = TcpOptions
    options: TcpOptions

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        super().__init__(options)
        self._security = Security(self.options)

    def make_mover(self, pool: Pool) -> Mover:
        return mover_for(pool, limits_of(self.options).max_bytes, self.options.staging_bytes)

    def make_backend(self, peers: PeerTable[Link], served: ServedPool) -> TcpBackend:
        warn_if_few(SCHEME, 0, self.options.max_connecting, 1)
        return TcpBackend(peers, self.options, self._security, served)
