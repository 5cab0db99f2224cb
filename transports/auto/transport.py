"""`AutoTransport`: one transport of two, with a choice for each peer."""

from __future__ import annotations

import itertools
import logging
import select
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import ClassVar

from .._adapter import AdaptedEndpoint
from .._options import parse_options, require_valid
from .._outside import outside
from ..base import Arena, Connected, Endpoint, Event, MessageReceived, PeerLost, Route, TransferEnded
from ..endpoint import PeerTransport
from ..errors import (
    ConfigurationError,
    IncompatiblePeerError,
    KVTransferError,
    PeerLostError,
    TransportClosedError,
)
from ..regions import Guard, Pool, RegionPairs
from ..registry import check_options
from ..shm import SharedMemoryTransport
from .address import NO_NETWORK, SCHEME, AutoAddress, this_host
from .guards import JoinedGuards
from .network import create_network
from .waker import Waker

logger = logging.getLogger(__name__)

#: Shared memory connects at once or not at all; what is left of the time is the network's.
_LOCAL_CONNECT_S = 1.0
#: The network transport waits for both; the other's own deadlines are looked after this often.
_MAX_WAIT_S = 0.25


@dataclass(frozen=True)
class AutoOptions:
    """Options of the transport.

    Attributes:
        local_options: Those of `shm`.
        network: The transport to other hosts, the same on all nodes; empty: `ucx` if it works here, else `zeromq`.
        network_options: Those of `network`, which must be named.
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


@dataclass(frozen=True)
class _Peer:
    """A peer of ours, and what it is to the transport that serves it.

    Attributes:
        fallback: Where to connect should this attempt fail; empty: nowhere else.
        deadline: Until when a connection may be made, in `time.monotonic` seconds.
    """

    peer_id: int
    endpoint: Endpoint
    their_id: int
    reason: str
    fallback: str = ""
    deadline: float = 0.0


class AutoTransport(PeerTransport):
    """Peers on this host over shared memory, others over a network transport. See the package.

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
        self._network = create_network(settings.network, settings.network_options)
        with ExitStack() as opened, outside(f"cannot open transport {SCHEME!r}", ConfigurationError):
            opened.callback(self._network.close)
            self._local = SharedMemoryTransport(settings.local_options)
            opened.pop_all()
        self.guards = JoinedGuards((self._local.guards, self._network.guards))

    def __repr__(self) -> str:
        return f"<AutoTransport of {self._local!r} and {self._network!r}>"

    def _allocate(self, num_bytes: int) -> Arena:
        return self._local.allocate(num_bytes)

    def _open(self, pool: Pool) -> Endpoint:
        local = self._local.register(pool)
        if pool.kind == "host":
            return AutoEndpoint(local, self._network.register(pool))
        logger.info("the pool is on a GPU: peers on other hosts are not served")
        return AutoEndpoint(local, None)

    def _free(self) -> None:
        self._local.close()
        self._network.close()


class AutoEndpoint(Endpoint):
    """An endpoint of shared memory and one of a network transport, as one.

    Args:
        network: None if peers on other hosts cannot be served.
    """

    scheme = SCHEME

    def __init__(self, local: AdaptedEndpoint, network: Endpoint | None) -> None:
        self._local = local
        self._network = network
        self._host = this_host()
        self._waker = None if network is None else Waker(local.fileno(), network.wake)
        self._ids = itertools.count(1)
        self._peers: dict[int, _Peer] = {}
        self._transfers: dict[tuple[Endpoint, int], int] = {}
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
        network = NO_NETWORK if self._network is None else self._network.listen(wanted.network)
        return str(AutoAddress(self._host, self._local.listen(wanted.local), network))

    def start_connect(self, address: str, *, timeout_s: float) -> int:
        self._require_open()
        there = AutoAddress.parse(address)
        peer_id, deadline = next(self._ids), time.monotonic() + timeout_s
        has_network = self._network is not None and there.network != NO_NETWORK
        if there.host == self._host:
            their_id = self._local.start_connect(there.local, timeout_s=min(timeout_s, _LOCAL_CONNECT_S))
            fallback = there.network if has_network else ""
            peer = _Peer(peer_id, self._local, their_id, "on this host", fallback, deadline)
        elif self._network is None or not has_network:
            error = IncompatiblePeerError(
                field="host, where a pool is on a GPU", local=self._host, remote=there.host
            )
            self._events.append(PeerLost(peer_id, error))
            return peer_id
        else:
            their_id = self._network.start_connect(there.network, timeout_s=timeout_s)
            peer = _Peer(peer_id, self._network, their_id, "on another host")
        self._peers[peer_id] = peer
        return peer_id

    def disconnect(self, peer_id: int) -> None:
        peer = self._peers.pop(peer_id, None)
        if peer is not None:
            peer.endpoint.disconnect(peer.their_id)
            self._events = [e for e in self._events if isinstance(e, TransferEnded) or e.peer_id != peer_id]

    def send(self, peer_id: int, message: bytes) -> None:
        self._require_open()
        peer = self._peer(peer_id)
        peer.endpoint.send(peer.their_id, message)

    def start_read(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int:
        self._require_open()
        peer = self._peer(peer_id)
        theirs = peer.endpoint.start_read(peer.their_id, pairs, guard, timeout_s=timeout_s)
        return self._started(peer, theirs)

    def _started(self, peer: _Peer, their_transfer_id: int) -> int:
        transfer_id = self._transfers[peer.endpoint, their_transfer_id] = next(self._ids)
        return transfer_id

    def route_of(self, peer_id: int) -> Route:
        peer = self._peers.get(peer_id)
        return Route(self.scheme, "") if peer is None else Route(peer.endpoint.scheme, peer.reason)

    def _peer(self, peer_id: int) -> _Peer:
        if peer_id not in self._peers:
            raise PeerLostError(f"no peer {peer_id} any more")
        return self._peers[peer_id]

    # -- the owner's loop ----------------------------------------------------------------------------

    def wait_events(self, timeout_s: float) -> list[Event]:
        self._require_open()
        until = time.monotonic() + timeout_s
        self._take(self._local, self._poll_local())
        while True:
            left_s = 0.0 if self._events else max(0.0, until - time.monotonic())
            network = self._network or self._local
            happened = network.wait_events(min(left_s, _MAX_WAIT_S))
            self._take(network, happened)
            self._take(self._local, self._poll_local())
            if self._events or self._is_woken or time.monotonic() >= until:
                self._is_woken = False
                events, self._events = self._events, []
                return events

    def _poll_local(self) -> Iterator[Event]:
        """Take everything from shared memory: the waker tells of what is new, not of what is left."""
        yield from self._local.wait_events(0)
        poll = select.poll()
        poll.register(self._local, select.POLLIN)
        while poll.poll(0):
            yield from self._local.wait_events(0)

    def _take(self, endpoint: Endpoint, happened: Iterable[Event]) -> None:
        for event in happened:
            self._events += self._translated(endpoint, event)

    def _translated(self, endpoint: Endpoint, event: Event) -> list[Event]:
        """One transport's event in our own ids; nothing, if it is of a connection that is tried elsewhere."""
        if isinstance(event, TransferEnded):
            transfer_id = self._transfers.pop((endpoint, event.transfer_id))
            return [replace(event, transfer_id=transfer_id)]
        peer = self._find(endpoint, event)
        match event:
            case Connected():
                self._peers[peer.peer_id] = replace(peer, fallback="")
                if not event.incoming:
                    logger.info("peer %d is reached by %s: %s", peer.peer_id, endpoint.scheme, peer.reason)
            case PeerLost(error=error) if peer.fallback:
                return self._fall_back(peer, error)
            case PeerLost():
                del self._peers[peer.peer_id]
        return [replace(event, peer_id=peer.peer_id)]

    def _find(self, endpoint: Endpoint, event: Connected | MessageReceived | PeerLost) -> _Peer:
        for peer in self._peers.values():
            if peer.endpoint is endpoint and peer.their_id == event.peer_id:
                return peer
        peer = _Peer(next(self._ids), endpoint, event.peer_id, "the peer chose it")
        self._peers[peer.peer_id] = peer
        return peer

    def _fall_back(self, peer: _Peer, error: KVTransferError) -> list[Event]:
        """Shared memory did not connect: try the network, under the same id."""
        reason = f"on this host, but shared memory does not connect: {error}"
        left_s = max(0.0, peer.deadline - time.monotonic())
        assert self._network is not None, "there is a fallback only if there is a network"
        try:
            their_id = self._network.start_connect(peer.fallback, timeout_s=left_s)
        except KVTransferError as refusal:
            del self._peers[peer.peer_id]
            return [PeerLost(peer.peer_id, refusal)]
        self._peers[peer.peer_id] = _Peer(peer.peer_id, self._network, their_id, reason)
        return []

    def wake(self) -> None:
        self._is_woken = True
        (self._network or self._local).wake()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._waker is not None:
            self._waker.close()
        self._local.close()
        if self._network is not None:
            self._network.close()
        self._peers.clear()
        self._transfers.clear()
