"""`AutoTransport`: joins shared memory and a network transport, and chooses one of them for each peer."""

from __future__ import annotations

import itertools
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import ClassVar

from .._options import parse_options, require_valid
from .._outside import outside
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
from ..regions import Guard, Pool, RegionPairs
from ..registry import check_options, create_transport
from ..shm import SharedMemoryTransport
from ..shm.cuda import NotExportableError
from ..shm.transport import SharedMemoryEndpoint
from .address import SCHEME, AutoAddress, this_host

logger = logging.getLogger(__name__)

#: Shared memory connects at once or not at all; the network gets what is left of the time.
_LOCAL_CONNECT_S = 1.0

_PREFERRED, _ALWAYS_THERE = "ucx", "zeromq"


@dataclass(frozen=True)
class AutoOptions:
    """Options of the transport.

    Attributes:
        local_options: Options of `shm`.
        network: The transport to other hosts, the same on all nodes. Empty: `ucx` if it works here, otherwise `zeromq`.
        network_options: Options of the transport that `network` names.
    """

    local_options: Mapping[str, object] = field(default_factory=dict)
    network: str = ""
    network_options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_valid(self)
        if self.network == SCHEME:
            raise ConfigurationError(
                f"network must be a transport to other hosts, got {SCHEME!r}", key="network", value=SCHEME
            )


@dataclass(eq=False)
class _Peer:
    """One of our peers, and the child endpoint that serves it.

    Attributes:
        child, their_id: The endpoint, and the id that it gave to the peer.
        reason: Why this one. See `Route`.
        fallback: The address to connect to over the network if this attempt fails; empty if there is none.
        deadline: When the attempts to connect end, in `time.monotonic` seconds.
    """

    peer_id: int
    child: Endpoint
    their_id: int
    reason: str
    fallback: str = ""
    deadline: float = 0.0


class AutoTransport(PeerTransport):
    """Serves peers on this host over shared memory, others over a network transport. See the package.

    Raises:
        ConfigurationError: an option is unknown or wrong. Nothing was opened.
        BackendUnavailableError: shared memory, or the network transport, cannot work here.
    """

    scheme: ClassVar[str] = SCHEME

    @classmethod
    def check_options(cls, options: Mapping[str, object]) -> None:
        settings = parse_options(AutoOptions, options, SCHEME)
        SharedMemoryTransport.check_options(settings.local_options)
        if settings.network:
            check_options(settings.network, settings.network_options)

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        super().__init__()
        settings = parse_options(AutoOptions, options, SCHEME)
        self._network = _create_network(settings.network, settings.network_options)
        with ExitStack() as opened, outside(f"cannot open transport {SCHEME!r}", ConfigurationError):
            opened.callback(self._network.close)
            self._local = SharedMemoryTransport(settings.local_options)
            opened.pop_all()
        self.guards = _JoinedGuards((self._local.guards, self._network.guards))

    def __repr__(self) -> str:
        return f"<AutoTransport of {self._local!r} and {self._network!r}>"

    def _allocate(self, num_bytes: int) -> Arena:
        return self._local.allocate(num_bytes)

    def _open(self, pool: Pool) -> Endpoint:
        try:
            local = self._local.register(pool)
            assert isinstance(local, SharedMemoryEndpoint)
        except NotExportableError as error:
            logger.warning("peers on this host are served over %s: %s", self._network.scheme, error)
            local = None
        return AutoEndpoint(local, self._network.register(pool))

    def _free(self) -> None:
        self._local.close()
        self._network.close()


def _create_network(scheme: str, options: Mapping[str, object]) -> Transport:
    """Create the transport `scheme`. If it is empty: `ucx` if that is installed and works here, otherwise `zeromq`.

    Raises:
        ConfigurationError: as `create_transport` raises it, or there are options but no scheme.
        BackendUnavailableError: the transport `scheme` cannot work here.
    """
    if scheme:
        return create_transport(scheme, options)
    if options:
        raise ConfigurationError(
            "network_options need the transport that they are for: set network to its name",
            key="network",
            value=scheme,
        )
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

    def set(self, index: int, value: int) -> None:
        for table in self._tables:
            table.set(index, value)

    def clear(self, index: int) -> None:
        for table in self._tables:
            table.clear(index)


class AutoEndpoint(Endpoint):
    """Makes one endpoint of two *child* endpoints, one of shared memory and one of a network transport.

    Peers and transfers have ids of ours, because the children number theirs independently. The children keep all promises
    about the order of events, so passing each event on under our id keeps them as well. Only the loss of a peer that is
    then tried over the network is dropped.

    Args:
        local: None if other processes cannot map the pool. Then all peers are served over the network.
    """

    scheme = SCHEME

    def __init__(self, local: SharedMemoryEndpoint | None, network: Endpoint) -> None:
        self._local = local
        self._network = network
        self._host = this_host()
        self._waker = _Waker(local.fileno(), network.wake) if local is not None else None
        self._ids = itertools.count(1)
        self._peers: dict[int, _Peer] = {}
        # The same peers by the ids of the children, and our transfer ids by theirs: an event names its peer by those.
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
        """Accept peers over both. `address` is empty, an address that this returned, or the network transport's own.

        Raises:
            ConfigurationError: it is malformed, taken, or not ours to bind.
        """
        wanted = AutoAddress(self._host, "", address)
        if address.startswith(f"{SCHEME}:"):
            wanted = AutoAddress.parse(address)
        self._require_open()
        network = self._network.listen(wanted.network)
        local = self._local.listen(wanted.local) if self._local is not None else ""
        return str(AutoAddress(self._host, local, network))

    def start_connect(self, address: str, *, timeout_s: float) -> int:
        self._require_open()
        there = AutoAddress.parse(address)
        deadline = time.monotonic() + timeout_s
        if there.host == self._host and there.local and self._local is not None:
            their_id = self._local.start_connect(there.local, timeout_s=min(timeout_s, _LOCAL_CONNECT_S))
            peer = _Peer(next(self._ids), self._local, their_id, "on this host", there.network, deadline)
        else:
            their_id = self._network.start_connect(there.network, timeout_s=timeout_s)
            peer = _Peer(next(self._ids), self._network, their_id, self._reason_for_network(there))
        self._add(peer)
        return peer.peer_id

    def _reason_for_network(self, there: AutoAddress) -> str:
        if there.host != self._host:
            return "on another host"
        return f"on this host, but {'this' if self._local is None else 'its'} pool cannot be mapped by other processes"

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
        return Route(self.scheme, "") if peer is None else Route(peer.child.scheme, peer.reason)

    def _peer(self, peer_id: int) -> _Peer:
        if peer_id not in self._peers:
            raise PeerLostError(f"peer {peer_id} is not connected")
        return self._peers[peer_id]

    # -- the owner's loop ----------------------------------------------------------------------------

    def wait_events(self, timeout_s: float) -> list[Event]:
        self._require_open()
        until = time.monotonic() + timeout_s
        self._poll_local()
        while True:
            wait_until = until if self._local is None else min(until, self._local.next_deadline())
            left_s = 0.0 if self._events else max(0.0, wait_until - time.monotonic())
            # One thread can wait for one of the two. The waker ends this wait if shared memory has something to do.
            self._events += self._translated(self._network, self._network.wait_events(left_s))
            self._poll_local()
            if self._events or self._is_woken or time.monotonic() >= until:
                self._is_woken = False
                events, self._events = self._events, []
                return events

    def _poll_local(self) -> None:
        """Take everything from shared memory: the waker reports what is new, but not what is left."""
        if self._local is None:
            return
        self._events += self._translated(self._local, self._local.wait_events(0))
        poll = select.poll()
        poll.register(self._local, select.POLLIN)
        while poll.poll(0):
            self._events += self._translated(self._local, self._local.wait_events(0))

    def _translated(self, child: Endpoint, events: list[Event]) -> Iterator[Event]:
        """Yield a child's events with our ids, except the loss of a peer that is now tried over the network."""
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
                peer.fallback = ""  # from here on a loss is a loss
                if not event.incoming:
                    logger.info("peer %d is reached by %s: %s", peer.peer_id, child.scheme, peer.reason)
            elif isinstance(event, PeerLost):
                self._remove(peer)
                error = self._fall_back(peer, event.error) if peer.fallback else event.error
                if error is not None:
                    yield PeerLost(peer.peer_id, error)
                continue
            yield replace(event, peer_id=peer.peer_id)

    def _fall_back(self, peer: _Peer, error: KVTransferError) -> KVTransferError | None:
        """Shared memory did not connect: try the network, under the same id. Returns why that cannot begin either."""
        left_s = max(0.0, peer.deadline - time.monotonic())
        try:
            their_id = self._network.start_connect(peer.fallback, timeout_s=left_s)
        except KVTransferError as refusal:
            return refusal
        reason = f"on this host, but shared memory does not connect: {error}"
        self._add(_Peer(peer.peer_id, self._network, their_id, reason))
        return None

    def wake(self) -> None:
        self._is_woken = True
        self._network.wake()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._local is not None and self._waker is not None:
            self._waker.close()
            self._local.close()
        self._network.close()
        self._peers.clear()
        self._peers_of.clear()
        self._transfers_of.clear()
        self._events.clear()


class _Waker:
    """A thread that calls `wake` whenever something new becomes readable at `descriptor`. It does nothing else.

    Args:
        descriptor: Of an epoll instance, or of anything else that can be polled; open until `close` has returned.
    """

    # Edge-triggered below: until the owner has come round to it, a ready descriptor would keep this thread spinning.

    def __init__(self, descriptor: int, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._stopped = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
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
