"""What transports to other hosts have in common: options, addresses, listening, and connecting to a host by
its name.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - `getaddrinfo` would import it at its first call, which needs a descriptor
import functools
import ipaddress
import selectors
import socket
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Generic, Self, cast
from urllib.parse import urlsplit

from .checked import integer, seconds, shown
from .endpoint import C, Peer, PeerTable
from .errors import BackpressureError, ConfigurationError, KVTransferError, PeerLostError
from .outside import outside, typed
from .serving import HandshakeOptions
from .streams import FrameSocket, Poller, StreamBackend

#: Lookups that run at a time. Python cannot end one, so a resolver that does not answer blocks up to this
#: many threads.
_MAX_THREADS = 4

#: Most addresses of one name that are probed, and the seconds until the first one is taken unprobed.
_MAX_PROBES, _PROBE_S = 8, 2.0

_BACKLOG = 128


# == addresses =====================================================================================


@dataclass(frozen=True)
class HostPort:
    """A host name or IP address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return self.authority

    @property
    def authority(self) -> str:
        """`host:port`, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, scheme: str) -> Self:
        """Read `scheme://host:port`.

        Raises:
            ConfigurationError: it is malformed, or of another scheme.
        """
        found, query = cls._parse_with_query(text, scheme)
        if query:
            raise malformed_address(text, scheme)
        return found

    @classmethod
    def _parse_with_query(cls, text: str, scheme: str) -> tuple[Self, str]:
        """Read `scheme://host:port?query`. Raises ConfigurationError: see `parse`."""
        try:
            parts = urlsplit(text)
            host, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise malformed_address(text, scheme) from error
        is_plain = host and all(c.isascii() and (c.isalnum() or c in ".:-_%") for c in host)
        if parts.scheme != scheme or not is_plain or port is None:
            raise malformed_address(text, scheme)
        if parts.path or parts.fragment or "@" in parts.netloc:
            raise malformed_address(text, scheme)
        return cls(host, port), parts.query


@dataclass(frozen=True)
class PlainAddress(HostPort):
    """`scheme://host:port`, with the scheme of the subclass and nothing more."""

    scheme: ClassVar[str]

    @classmethod
    def parse(cls, text: str, scheme: str = "") -> Self:
        """Read an address. Raises ConfigurationError: it is malformed, or of another scheme."""
        return super().parse(text, scheme or cls.scheme)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


def malformed_address(text: str, scheme: str) -> ConfigurationError:
    """Make the error for an address that is not one of `scheme`."""
    return ConfigurationError(f"not a {scheme}://host:port address: {text!r}", key="address", value=text)


@functools.lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Return whether traffic to `host` never leaves this machine.

    The only name that counts is `localhost`.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_port_range(text: str) -> range:
    """Return the ports that `"low-high"` names; none if it is malformed, or the first one is higher than the
    last.
    """
    low, _, high = text.partition("-")
    if not all(port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536 for port in (low, high)):
        return range(0)
    return range(int(low), int(high) + 1)


# == options =======================================================================================


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(HandshakeOptions):
    """Options that the network transports have in common, in addition to those of `HandshakeOptions`.

    Attributes:
        bind_host: Host name or IP address to listen on.
        port: Port to listen on; 0 lets the system choose.
        port_range: `"low-high"`: listen on the first free port of these; instead of `port`.
        advertise_host: The host that peers connect to. It is required when `bind_host` is a wildcard, and
            chooses the NIC on a machine with several.
        allow_plaintext: Talk to other machines without encryption. Any process that reaches the port can then
            read the pool, so use it only on a network where there are only nodes. `tcp` needs `tls="off"` as
            well, and `zeromq` `curve="off"`.
        slice_bytes: Maximum bytes of one region that travel as one message; at most `MAX_SLICE_BYTES`. With
            `tcp` and `zeromq` shorter regions share a message of about this size.
        window_slices: Maximum slices in flight from one peer. Half of them should be what the link carries in
            a round trip; fewer slices stay in the processor's cache.
        peer_timeout_s: A peer that is silent for longer is lost.
        staging_bytes: For a pool on a GPU: pinned main memory per direction, through which its slices pass.
            It must hold two slices of `slice_bytes`; twice the bytes of a window keep the wire busy.
    """

    MAX_SLICE_BYTES: ClassVar[int]
    MAX_WINDOW_BYTES: ClassVar[int]

    bind_host: str = "127.0.0.1"
    port: Annotated[int, integer(0, 65535)] = 0
    port_range: str = ""
    advertise_host: str = ""
    allow_plaintext: bool = False
    slice_bytes: Annotated[int, integer(64 << 10)] = 4 << 20
    window_slices: Annotated[int, integer(1, 64)] = 6
    peer_timeout_s: Annotated[float, seconds(0.4, 3600)] = 2.0
    staging_bytes: Annotated[int, integer(1 << 20, 1 << 40)] = 48 << 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slice_bytes > self.MAX_SLICE_BYTES:
            raise ConfigurationError(
                f"slice_bytes must be at most {self.MAX_SLICE_BYTES}, got {self.slice_bytes}",
                key="slice_bytes",
                value=self.slice_bytes,
            )
        if self.slice_bytes * self.window_slices > self.MAX_WINDOW_BYTES:
            raise ConfigurationError(
                f"slice_bytes * window_slices must be at most {self.MAX_WINDOW_BYTES}, got "
                f"{self.slice_bytes} * {self.window_slices}; lower one of them",
                key="window_slices",
                value=self.window_slices,
            )
        self.ports()

    def ports(self) -> range:
        """Return the ports to try, in order.

        Raises:
            ConfigurationError: `port_range` is malformed, or set in addition to `port`.
        """
        if not self.port_range:
            return range(self.port, self.port + 1)
        found = parse_port_range(self.port_range)
        if self.port or not found:
            raise ConfigurationError(
                f"port_range must be 'low-high' within 1-65535, and port must not be set; got "
                f"port_range={shown(self.port_range)}, port={self.port}",
                key="port_range",
                value=self.port_range,
            )
        return found

    def ports_of(self, address: HostPort | None) -> tuple[str, range]:
        """Return the host to listen on and the ports to try: those of an address, or without one those of the
        options.
        """
        if address is None:
            return self.bind_host, self.ports()
        return address.host, range(address.port, address.port + 1)

    def listen(self, host: str, ports: range) -> tuple[socket.socket, HostPort]:
        """Listen on the first of `ports` that is free; return the socket, and where peers connect to reach
        it.

        Raises:
            ConfigurationError: see `listen_on`; or `advertise_host` is not set, and the socket is on every
                interface.
        """
        listener = listen_on(host, ports)
        bound_host, port = listener.getsockname()[:2]
        if not self.advertise_host and ipaddress.ip_address(bound_host).is_unspecified:
            listener.close()
            raise ConfigurationError(
                f"cannot listen on {bound_host}: that is every interface; set advertise_host to the address that peers "
                "connect to",
                key="advertise_host",
                value="",
            )
        return listener, HostPort(self.advertise_host or bound_host, port)


@dataclass(frozen=True, kw_only=True)
class PlaintextOptions(NetworkOptions):
    """Options of the transports that use UCX, and can neither encrypt nor authenticate.

    Attributes:
        tls: UCX transports to choose from, as in `UCX_TLS`. Empty means all; with `nixl`, that variable if it
            is set. `ucx` never uses shared memory: UCX cannot survive a peer's death over it.
        net_devices: Network devices to choose from, as in `UCX_NET_DEVICES`. Empty means all, or `lo` alone
            unless `allow_plaintext`; with `nixl`, that variable if it is set.
    """

    scheme: ClassVar[str]

    tls: str = ""
    net_devices: str = ""
    slice_bytes: Annotated[int, integer(64 << 10)] = 2 << 20
    window_slices: Annotated[int, integer(1, 64)] = 4

    def require_reachable_by(self, host: str) -> None:
        """Check that we may talk to `host`, or listen on it.

        Raises:
            ConfigurationError: it is on another machine, and `allow_plaintext` is not set.
        """
        if not self.allow_plaintext and not is_loopback(host):
            raise ConfigurationError(
                f"{host} is beyond this machine, and {self.scheme} neither encrypts nor authenticates: set "
                "allow_plaintext=true if only nodes are on that network, or use tcp or zeromq",
                key="allow_plaintext",
                value=False,
            )


def _prepare(sock: socket.socket, host: str) -> None:
    """Set what must be set before a socket connects, or listens, at an IP address."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if is_loopback(host):
        # Loopback has no link to share. BBR, which is the default of many machines, paces it all the same, by
        # timers, and then a read takes a third more processor time. Every kernel has Reno, which never paces.
        with contextlib.suppress(OSError):  # a sandbox that forbids the choice
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


# == listening =====================================================================================


def listen_on(host: str, ports: range) -> socket.socket:
    """Listen on the first of `ports` that is free. Port 0 lets the system choose.

    Raises:
        ConfigurationError: `host` is not an address of this machine, or no port is free.
    """
    try:
        found = socket.getaddrinfo(host, ports[0], type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigurationError(
            f"cannot resolve bind_host={host!r}: {error}", key="bind_host", value=host
        ) from error
    family, _, _, _, address = found[0]
    for port in ports:
        with outside(f"cannot listen on {host} port {port}", ConfigurationError):
            bound = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _prepare(bound, str(address[0]))  # accepted sockets inherit it
            bound.bind((address[0], port, *address[2:]))
            bound.listen(_BACKLOG)
        except OSError as error:
            bound.close()
            reason = error
        else:
            return bound
    tried = str(ports[0]) if len(ports) == 1 else f"{ports[0]}-{ports[-1]}, the last one"
    raise ConfigurationError(
        f"cannot listen on {host} port {tried}: {reason}", key="port", value=ports[0]
    ) from reason


# == connecting ====================================================================================


@dataclass(frozen=True)
class Found:
    """A socket address."""

    family: int
    sockaddr: tuple[Any, ...]

    @property
    def host(self) -> str:
        """The IP address, with a scope if it has one."""
        return str(self.sockaddr[0])

    def dial(self) -> socket.socket:
        """Begin to connect, and return the non-blocking socket.

        If nothing listens there, the first `recv` says so.

        Raises:
            PeerLostError: the host cannot be reached from here.
            BackpressureError: no file descriptor is left.
        """
        with outside(f"cannot connect to {HostPort(*self.sockaddr[:2])}", PeerLostError):
            sock = socket.socket(self.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                _prepare(sock, self.host)
                with contextlib.suppress(BlockingIOError):
                    sock.connect(self.sockaddr)
            except BaseException:
                sock.close()
                raise
            return sock


class Lookups(Generic[C]):
    """Looks up the hosts of peers, in threads, because the system's resolver may take many seconds to answer.

    The peers' table watches the deadlines: a peer whose lookup takes too long is lost like any other.

    Args:
        dial: Called in the owner's thread with a peer and the address of its host. Whatever it raises ends
            the peer.
    """

    def __init__(self, peers: PeerTable[C], poller: Poller, dial: Callable[[Peer[C], Found], None]) -> None:
        self._peers = peers
        self._poller = poller
        self._dial = dial
        self._hosts: dict[int, str] = {}  # what is being looked up, by the peer's id
        self._lock = threading.Lock()  # guards the rest
        self._waiting: deque[tuple[int, HostPort]] = deque()
        self._num_threads = 0

    def start(self, peer: Peer[C], where: HostPort) -> None:
        """Look a host up and dial it, at once if it is an IP address.

        Raises:
            BackpressureError: no thread can be started. Nothing was started.
        """
        found = _resolved(where, socket.AI_NUMERICHOST)
        self._hosts[peer.peer_id] = where.host
        if isinstance(found, Found):
            self._end(peer.peer_id, found)
            return
        with self._lock:
            self._waiting.append((peer.peer_id, where))
        try:
            self._start_thread()
        except RuntimeError as error:
            self.forget(peer)
            raise BackpressureError(f"cannot look up {where.host!r}: {error}; raise `ulimit -u`") from error

    def forget(self, peer: Peer[C]) -> None:
        """Drop the lookup for this peer, if there is one. For `Backend.hang_up`."""
        if self._hosts.pop(peer.peer_id, None) is not None:
            with self._lock:
                self._waiting = deque(entry for entry in self._waiting if entry[0] != peer.peer_id)

    def timeout_error(self, peer: Peer[C]) -> KVTransferError | None:
        """Make the error of a peer whose host was not found in time; None if it was.

        For `Backend.handshake_error`.
        """
        if peer.peer_id not in self._hosts:
            return None
        return PeerLostError(
            f"timed out after {peer.timeout_s:g} s looking up host {self._hosts[peer.peer_id]!r}: is its name service up?"
        )

    def _start_thread(self) -> None:
        with self._lock:
            if self._num_threads == _MAX_THREADS:
                return
            self._num_threads += 1
        try:
            threading.Thread(target=self._work, name="kvferry-lookup", daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._num_threads -= 1
                if self._num_threads:  # the other threads will do it
                    return
            raise

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_threads -= 1
                    return
                peer_id, where = self._waiting.popleft()
            found = _resolved(where)
            # After the endpoint was closed this does nothing, and the thread ends with its lookup.
            self._poller.call_soon(partial(self._end, peer_id, found))

    def _end(self, peer_id: int, found: Found | KVTransferError) -> None:
        if self._hosts.pop(peer_id, None) is None:
            return
        peer = self._peers.peer(peer_id)
        assert peer is not None, "a peer that left was forgotten"
        try:
            if isinstance(found, KVTransferError):
                raise found
            self._dial(peer, found)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this peer alone
            self._peers.lose(peer, error)


def _resolved(where: HostPort, flags: int = 0) -> Found | KVTransferError:
    try:
        found = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM, flags=flags)
    except Exception as error:  # noqa: BLE001 - e.g. a name that cannot be encoded; a thread that dies would report nothing
        return typed(
            error, f"cannot connect to {where.authority}: cannot look up {where.host!r}", PeerLostError
        )
    addresses = [Found(family, sockaddr) for family, _, _, _, sockaddr in found]
    return addresses[0] if len(addresses) == 1 else _that_accepts(addresses)


def _that_accepts(addresses: Sequence[Found]) -> Found:
    """Return the first address that accepts a connection, or the first one if none does in time.

    A name may have addresses of both families, and a peer usually listens on only one of them. Each probe is
    closed at once; the peer treats it as a client that left.
    """
    # In a lookup's thread, which may block. All at once: a silent address must not delay another.
    with contextlib.ExitStack() as stack:
        probes = stack.enter_context(selectors.PollSelector())
        for address in addresses[:_MAX_PROBES]:
            with contextlib.suppress(KVTransferError):
                probe = stack.enter_context(contextlib.closing(address.dial()))
                probes.register(probe, selectors.EVENT_WRITE, address)
        ends = time.monotonic() + _PROBE_S
        while probes.get_map() and (left_s := ends - time.monotonic()) > 0:
            for key, _ in probes.select(left_s):
                probes.unregister(probe := cast(socket.socket, key.fileobj))
                if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    return cast(Found, key.data)
    return addresses[0]


# == backends ======================================================================================


class HostStreamBackend(StreamBackend[C]):
    """A `StreamBackend` that looks up the hosts that it connects to.

    A subclass calls `look_up` in `connect`.
    """

    def __init__(self, peers: PeerTable[C]) -> None:
        super().__init__(peers)
        self._lookups = Lookups(peers, self.poller, self._dial)

    @abstractmethod
    def dial(self, peer: Peer[C], found: Found) -> None:
        """Give the connection of a peer a socket that begins to connect. Whatever it raises ends the peer."""

    def look_up(self, peer: Peer[C], where: HostPort) -> None:
        """Find the host of a peer, and dial it. Raises BackpressureError: see `Lookups.start`."""
        self._lookups.start(peer, where)

    def _dial(self, peer: Peer[C], found: Found) -> None:
        self.dial(peer, found)
        self.begin(peer)

    def hang_up(self, peer: Peer[C], error: KVTransferError) -> None:
        self._lookups.forget(peer)
        super().hang_up(peer, error)

    def handshake_error(self, peer: Peer[C]) -> KVTransferError:
        return self._lookups.timeout_error(peer) or super().handshake_error(peer)


class PlainStreamBackend(HostStreamBackend[C]):
    """A `HostStreamBackend` whose control connections are in plaintext, and begin with a preface each way.

    A connection is the address to connect to, a `PlainAddress`, until it has a socket, its `channel`.

    Attributes:
        address_type: How its addresses are written.
        preface: The frame that each side sends first.
    """

    address_type: ClassVar[type[PlainAddress]]
    preface: ClassVar[bytes]

    def __init__(self, peers: PeerTable[C], options: PlaintextOptions) -> None:
        super().__init__(peers)
        self._plaintext = options

    @abstractmethod
    def wrap(self, sock: socket.socket) -> C:
        """Make the connection of a socket. Its handshake begins."""

    def stream_of(self, connection: C) -> FrameSocket | None:
        return getattr(connection, "channel", None)

    def listen(self, address: str) -> str:
        host, ports = self._plaintext.ports_of(self.address_type.parse(address) if address else None)
        self._plaintext.require_reachable_by(host)
        listener, where = self._plaintext.listen(host, ports)
        self.accept_from(listener, self.wrap)
        return str(self.address_type(where.host, where.port))

    def prepare(self, address: str) -> C:
        parsed = self.address_type.parse(address)
        self._plaintext.require_reachable_by(parsed.host)
        return cast(C, parsed)

    def connect(self, peer: Peer[C]) -> None:
        assert isinstance(peer.connection, PlainAddress), "a peer is connected to once"
        self.look_up(peer, peer.connection)

    def dial(self, peer: Peer[C], found: Found) -> None:
        peer.connection = self.wrap(found.dial())

    def greet(self, peer: Peer[C]) -> None:
        self.stream(peer).send(self.preface)
