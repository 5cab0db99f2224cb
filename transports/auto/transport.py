"""`AutoTransport`: joins shared memory and network transports, and chooses one of them for each peer."""

from __future__ import annotations

import itertools
import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

from ..base import (
    Arena,
    Connected,
    Endpoint,
    Event,
    GuardTable,
    PeerLost,
    Route,
    TransferEnded,
    Transport,
)
from ..endpoint import PeerTransport
from ..errors import (
    BackendUnavailableError,
    ConfigurationError,
    KVTransferError,
    PeerLostError,
    TransportClosedError,
)
from ..options import parse_options, require_valid
from ..outside import outside
from ..regions import Extents, Guard, Pool, RegionPairs
from ..registry import check_options, create_transport
from ..shm import SharedMemoryTransport
from ..shm.cuda import NotExportableError
from ..streams import PollableEndpoint
from .address import SCHEME, AutoAddress, this_host

logger = logging.getLogger(__name__)

#: Shared memory connects at once or not at all; the network gets what is left of the time.
_LOCAL_CONNECT_S = 1.0

#: A wait of the network endpoint is no shorter than a millisecond, so a shorter one is slept.
_SLEPT_S = 1e-3

_PREFERRED, _ALWAYS_THERE = "ucx", "zeromq"

#: The one transport that another one can stand in for. Its endpoint is pollable: one thread cannot wait for
#: two others.
_OPTIONAL = "nixl"


@dataclass(frozen=True)
class AutoOptions:
    """Options of the transport.

    Attributes:
        local_options: Options of `shm`.
        network: The transport to other hosts, the same on all nodes. Empty: `ucx` if it works here, otherwise
            `zeromq`. `"nixl,NAME"`: `nixl` between nodes that have NIXL and a network that it may use, such
            as RDMA, otherwise NAME.
        network_options: Options of the transport that `network` names. If it names two, this maps each to its
            options.
    """

    local_options: Mapping[str, object] = field(default_factory=dict)
    network: str = ""
    network_options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_valid(self)
        names = self.names
        if SCHEME in names:
            raise ConfigurationError(
                f"network must be a transport to other hosts, got {SCHEME!r}", key="network", value=SCHEME
            )
        if len(names) > 2 or (len(names) == 2 and (names[0] != _OPTIONAL or names[1] in ("", _OPTIONAL))):
            raise ConfigurationError(
                f"network must be one transport, or '{_OPTIONAL},' and another one; got {self.network!r}",
                key="network",
                value=self.network,
            )
        if self.network_options and not self.network:
            raise ConfigurationError(
                "network_options need the transport that they are for: set network to its name",
                key="network",
                value=self.network,
            )
        for name, options in self.network_options.items() if len(names) == 2 else ():
            if name not in names or not isinstance(options, Mapping):
                raise ConfigurationError(
                    f"network_options must map {names[0]!r} and {names[1]!r} to the options of each, because network "
                    f"names both; got {name!r}: {options!r}",
                    key="network_options",
                    value=name,
                )

    @property
    def names(self) -> tuple[str, ...]:
        """`network` as names, the preferred one first."""
        return tuple(name.strip() for name in self.network.split(","))

    def options_of(self, name: str) -> Mapping[str, object]:
        """Return the options of one of `names`."""
        if len(self.names) == 1:
            return self.network_options
        return cast(Mapping[str, object], self.network_options.get(name, {}))


@dataclass(eq=False)
class _Peer:
    """One of our peers, and the child endpoint that serves it.

    Attributes:
        child, their_id: The endpoint, and the id that it gave to the peer.
        reason: Why this one. See `Route`.
        left: The attempts that follow if this one fails: endpoints, and what to connect to. Empty once it is
            connected.
        deadline: When the attempts to connect end, in `time.monotonic` seconds.
    """

    peer_id: int
    child: Endpoint
    their_id: int
    reason: str
    left: Sequence[tuple[Endpoint, str]] = ()
    deadline: float = 0.0


class AutoTransport(PeerTransport):
    """Serves peers on this host over shared memory, others over a network transport. See the package.

    Raises:
        ConfigurationError: an option is unknown or wrong. Nothing was opened.
        BackendUnavailableError: shared memory, or the network transport, cannot work here.
    """

    scheme: ClassVar[str] = SCHEME
    options_type = AutoOptions

    @classmethod
    def check_options(cls, options: Mapping[str, object]) -> None:
        settings = parse_options(AutoOptions, options, SCHEME)
        SharedMemoryTransport.check_options(settings.local_options)
        for name in filter(None, settings.names):
            check_options(name, settings.options_of(name))

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        super().__init__()
        settings = parse_options(AutoOptions, options, SCHEME)
        self._networks: list[Transport] = []
        with ExitStack() as opened, outside(f"cannot open transport {SCHEME!r}", ConfigurationError):
            for network in _create_networks(settings):
                opened.callback(network.close)
                self._networks.append(network)
            self._local = SharedMemoryTransport(settings.local_options)
            opened.pop_all()
        self.guards = _JoinedGuards([child.guards for child in (self._local, *self._networks)])

    def __repr__(self) -> str:
        return f"<AutoTransport of {', '.join(map(repr, (self._local, *self._networks)))}>"

    def _allocate(self, num_bytes: int) -> Arena:
        return self._local.allocate(num_bytes)

    def _open(self, pool: Pool) -> Endpoint:
        local: Endpoint | None
        try:
            local = self._local.register(pool)
        except NotExportableError as error:
            networks = " or ".join(network.scheme for network in self._networks)
            logger.warning("peers on this host are served over %s: %s", networks, error)
            local = None
        return AutoEndpoint(local, [network.register(pool) for network in self._networks])

    def _free(self) -> None:
        for child in (self._local, *self._networks):
            child.close()


def _create_networks(settings: AutoOptions) -> Iterator[Transport]:
    """Create the transports to other hosts, the preferred one first. One that is optional may be missing.

    Raises: as `create_transport` does, for a transport that is not optional.
    """
    *optional, last = settings.names
    for name in optional:
        network = _create_optional(name, settings.options_of(name))
        if network is not None:
            yield network
    yield create_transport(last, settings.options_of(last)) if last else _create_default()


def _create_optional(scheme: str, options: Mapping[str, object]) -> Transport | None:
    """Create a transport if it reaches other hosts from here."""
    check_options(scheme, options)  # what is wrong with them is an error; what this machine lacks is not
    try:
        made = create_transport(scheme, options)
    except (BackendUnavailableError, ConfigurationError) as error:
        logger.warning("%s is not offered to peers: %s", scheme, error)
        return None
    try:
        made.require_network()
    except BackendUnavailableError as error:
        made.close()
        logger.warning("%s is not offered to peers: %s", scheme, error)
        return None
    logger.info("%s is offered to peers on other hosts", scheme)
    return made


def _create_default() -> Transport:
    """Create `ucx` if that is installed and works here, otherwise `zeromq`."""
    try:
        made, reason = create_transport(_PREFERRED, {}), "it is installed and works"
    except (BackendUnavailableError, ConfigurationError) as error:
        made, reason = create_transport(_ALWAYS_THERE, {}), f"{_PREFERRED} cannot be used: {error}"
    logger.info("other hosts are served by %s: %s", made.scheme, reason)
    return made


class _JoinedGuards(GuardTable):
    """Guards that peers check over any of several transports: each word is stored in every table."""

    def __init__(self, tables: Sequence[GuardTable]) -> None:
        self._tables = tables
        self.num_guards = min(table.num_guards for table in tables)
        self.checks_reads = any(table.checks_reads for table in tables)

    def set(self, index: int, value: int) -> None:
        for table in self._tables:
            table.set(index, value)

    def clear(self, index: int) -> None:
        for table in self._tables:
            table.clear(index)

    def allow(self, index: int, extents_of: Callable[[], Extents]) -> None:
        for table in self._tables:
            table.allow(index, extents_of)


class AutoEndpoint(Endpoint):
    """Makes one endpoint of several *child* endpoints, one of shared memory and the others of network
    transports.

    Peers and transfers have ids of ours, because the children number theirs independently. The children keep
    all promises about the order of events, so passing each event on under our id keeps them as well. Only the
    loss of a peer that is then tried over another child is dropped.

    Args:
        local: The endpoint of shared memory. None if other processes cannot map the pool: then all peers are
            served over the network.
        networks: Those of network transports, the preferred one first. All but the last are pollable.
    """

    scheme = SCHEME

    def __init__(self, local: Endpoint | None, networks: Sequence[Endpoint]) -> None:
        self._local = local
        self._networks = networks
        self._host = this_host()
        *preferred, self._waited = networks
        self._polled: list[PollableEndpoint[Any]] = []
        for child in preferred if local is None else (local, *preferred):
            assert isinstance(child, PollableEndpoint), "the options name no other"
            self._polled.append(child)
        self._waker = _Waker([child.fileno() for child in self._polled], self._waited.wake)
        self._ids = itertools.count(1)
        self._peers: dict[int, _Peer] = {}
        # The same peers by the ids of the children, and our transfer ids by theirs: an event names its peer
        # by those.
        self._peers_of: dict[tuple[Endpoint, int], _Peer] = {}
        self._transfers_of: dict[tuple[Endpoint, int], int] = {}
        self._events: list[Event] = []
        self._is_woken = False
        self._is_closed = False

    def _require_open(self) -> None:
        if self._is_closed:
            raise TransportClosedError("the endpoint is closed")

    # -- peers ---------------------------------------------------------------------------------------

    def listen(self, address: str) -> str:
        """Accept peers over all.

        `address` is empty, an address that this returned, or the last network transport's own.

        Raises:
            ConfigurationError: it is malformed, taken, or not ours to bind.
        """
        wanted = AutoAddress(self._host, "", (address,))
        if address.startswith(f"{SCHEME}:"):
            wanted = AutoAddress.parse(address)
        self._require_open()
        asked = dict(self._shared_with(wanted))
        networks = tuple(child.listen(asked.get(child, "")) for child in self._networks)
        local = self._local.listen(wanted.local) if self._local is not None else ""
        return str(AutoAddress(self._host, local, networks))

    def _shared_with(self, there: AutoAddress) -> list[tuple[Endpoint, str]]:
        """Return the network endpoints that a node with this address has as well, and its address for
        each.
        """
        found = [
            (child, address)
            for child in self._networks
            for address in there.networks
            if address.startswith(f"{child.scheme}:")
        ]
        # If there is none, the last one says what is wrong with the address.
        return found or [(self._networks[-1], there.networks[-1])]

    def start_connect(self, address: str, *, timeout_s: float) -> int:
        self._require_open()
        there = AutoAddress.parse(address)
        ways, reason = self._shared_with(there), "on another host"
        missing = {child.scheme for child in self._networks} - {child.scheme for child, _ in ways}
        if missing:
            reason += f", and the peer does not offer {', '.join(missing)}"
        if there.host == self._host:
            if self._local is not None and there.local:
                ways, reason = [(self._local, there.local), *ways], "on this host"
            else:
                whose = "this" if self._local is None else "its"
                reason = f"on this host, but {whose} pool cannot be mapped by other processes"
        return self._try(next(self._ids), ways, reason, time.monotonic() + timeout_s)

    def _try(self, peer_id: int, ways: Sequence[tuple[Endpoint, str]], reason: str, deadline: float) -> int:
        """Begin to connect in the first of these ways. Raises: as the child does."""
        (child, address), *left = ways
        timeout_s = max(0.0, deadline - time.monotonic())
        if child is self._local:
            timeout_s = min(timeout_s, _LOCAL_CONNECT_S)
        elif left:
            timeout_s /= 2  # the rest is for the others
        try:
            their_id = child.start_connect(address, timeout_s=timeout_s)
        except ConfigurationError as error:
            # Its options may not allow what the peer offers. They say nothing about the other transports.
            if child is self._local or not left:
                raise
            return self._try(peer_id, left, self._after(reason, child, error), deadline)
        self._add(_Peer(peer_id, child, their_id, reason, left, deadline))
        return peer_id

    def _after(self, reason: str, child: Endpoint, error: KVTransferError) -> str:
        name = "shared memory" if child is self._local else child.scheme
        return f"{reason}, but {name} does not connect: {error}"

    def _add(self, peer: _Peer) -> None:
        self._peers[peer.peer_id] = self._peers_of[peer.child, peer.their_id] = peer

    def _remove(self, peer: _Peer) -> None:
        del self._peers[peer.peer_id], self._peers_of[peer.child, peer.their_id]

    def disconnect(self, peer_id: int) -> None:
        peer = self._peers.get(peer_id)
        if peer is not None:
            self._remove(peer)
            peer.child.disconnect(peer.their_id)
        self._events = [e for e in self._events if isinstance(e, TransferEnded) or e.peer_id != peer_id]

    def send(self, peer_id: int, message: bytes) -> None:
        self._require_open()
        peer = self._peer(peer_id)
        peer.child.send(peer.their_id, message)

    def start_read(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int:
        self._require_open()
        peer = self._peer(peer_id)
        their_id = peer.child.start_read(peer.their_id, pairs, guard, timeout_s=timeout_s)
        transfer_id = self._transfers_of[peer.child, their_id] = next(self._ids)
        return transfer_id

    def route_of(self, peer_id: int) -> Route:
        peer = self._peers.get(peer_id)
        if peer is None:
            return Route(self.scheme, "")
        return replace(peer.child.route_of(peer.their_id), reason=peer.reason)

    def _peer(self, peer_id: int) -> _Peer:
        if peer_id not in self._peers:
            raise PeerLostError(f"peer {peer_id} is not connected")
        return self._peers[peer_id]

    # -- the owner's loop ----------------------------------------------------------------------------

    def wait_events(self, timeout_s: float) -> list[Event]:
        self._require_open()
        until = time.monotonic() + timeout_s
        self._poll()
        while True:
            next_look = min((child.next_deadline() for child in self._polled), default=math.inf)
            left_s = 0.0 if self._events else max(0.0, min(until, next_look) - time.monotonic())
            if next_look < until and 0.0 < left_s < _SLEPT_S:
                time.sleep(left_s)
                left_s = 0.0
            # One thread can wait for one of them. The waker ends this wait if one of the others has something
            # to do.
            self._events += self._translated(self._waited, self._waited.wait_events(left_s))
            self._poll()
            if self._events or self._is_woken or time.monotonic() >= until:
                self._is_woken = False
                events, self._events = self._events, []
                return events

    def _poll(self) -> None:
        """Take everything from the children that are not waited for: the waker reports what is new, but not
        what is left.
        """
        for child in self._polled:
            self._events += self._translated(child, child.wait_events(0))
            poll = select.poll()
            poll.register(child, select.POLLIN)
            while poll.poll(0):
                self._events += self._translated(child, child.wait_events(0))

    def _translated(self, child: Endpoint, events: list[Event]) -> Iterator[Event]:
        """Yield a child's events with our ids, except the loss of a peer that is now tried over the
        network.
        """
        for event in events:
            if isinstance(event, TransferEnded):
                yield replace(event, transfer_id=self._transfers_of.pop((child, event.transfer_id)))
                continue
            peer = self._peers_of.get((child, event.peer_id))
            if peer is None:
                assert isinstance(event, Connected), "every other event is of a peer that we know"
                peer = _Peer(next(self._ids), child, event.peer_id, "the peer chose it")
                self._add(peer)
            if isinstance(event, Connected):
                peer.left = ()  # from here on a loss is a loss
                if not event.incoming:
                    logger.info("peer %d is reached by %s: %s", peer.peer_id, child.scheme, peer.reason)
            elif isinstance(event, PeerLost):
                self._remove(peer)
                error = self._fall_back(peer, event.error)
                if error is not None:
                    yield PeerLost(peer.peer_id, error)
                continue
            yield replace(event, peer_id=peer.peer_id)

    def _fall_back(self, peer: _Peer, error: KVTransferError) -> KVTransferError | None:
        """A peer was lost: try the next way, under the same id. Returns the error if there is none left."""
        reason = peer.reason
        while peer.left:
            reason = self._after(reason, peer.child, error)
            try:
                self._try(peer.peer_id, peer.left, reason, peer.deadline)
            except KVTransferError as refusal:
                error = refusal
                peer = replace(peer, child=peer.left[0][0], left=peer.left[1:])
            else:
                return None
        return error

    def wake(self) -> None:
        self._is_woken = True
        self._waited.wake()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._waker.close()
        for endpoint in (*self._polled, self._waited):
            endpoint.close()
        self._peers.clear()
        self._peers_of.clear()
        self._transfers_of.clear()
        self._events.clear()


class _Waker:
    """A thread that calls `wake` whenever something new becomes readable at a descriptor.

    It does nothing else.

    Args:
        descriptors: Of epoll instances, or of anything else that can be polled; open until `close` has
            returned.
    """

    # Edge-triggered below: until the owner has come round to it, a ready descriptor would keep this thread
    # spinning.

    def __init__(self, descriptors: Iterable[int], wake: Callable[[], None]) -> None:
        self._wake = wake
        self._stopped = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        for descriptor in descriptors:
            self._epoll.register(descriptor, select.EPOLLIN | select.EPOLLET)
        self._epoll.register(self._stopped, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="kvferry-auto", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            ready = [descriptor for descriptor, _ in self._epoll.poll()]
            if self._stopped in ready:
                return
            self._wake()

    def close(self) -> None:
        """End the thread."""
        os.eventfd_write(self._stopped, 1)
        self._thread.join()
        self._epoll.close()
        os.close(self._stopped)
