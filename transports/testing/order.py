"""A check of the order of all events that an endpoint reports."""

from __future__ import annotations

from typing import NoReturn

from ..base import Connected, Endpoint, Event, MessageReceived, PeerLost, TransferEnded
from ..errors import KVTransferError, TransportError, UnexpectedError
from ..regions import Guard, RegionPairs
from .wrapping import WrappedEndpoint


def broken(promise: str, seen: object, cause: BaseException | None = None) -> NoReturn:
    """Fail the test: say which promise is broken and what was seen."""
    __tracebackhide__ = True  # the caller is of interest
    raise AssertionError(f"broken promise: {promise}; seen: {seen}") from cause


def require(holds: bool, promise: str, seen: object) -> None:
    """Fail the test if a promise does not hold."""
    __tracebackhide__ = True
    if not holds:
        broken(promise, seen)


class EventOrder:
    """Record the calls of an endpoint's owner and its events.

    Each method fails the test if a promise is broken.

    The module `transports.base` states the promises.
    """

    def __init__(self) -> None:
        self._connecting: set[int] = set()
        self._connected: set[int] = set()
        self._over: set[int] = set()  # lost or disconnected
        self._reads: dict[int, int] = {}  # those that have not ended, with the peer
        self._ended: set[int] = set()

    @property
    def unended(self) -> frozenset[int]:
        """The reads whose end was not reported."""
        return frozenset(self._reads)

    @property
    def connecting(self) -> frozenset[int]:
        """The peers that we connect to: not connected, lost or disconnected yet."""
        return frozenset(self._connecting)

    def connect_started(self, peer_id: int) -> None:
        """Record that `start_connect` returned an id."""
        require(
            peer_id not in self._known,
            "ids of peers are never used twice",
            f"`start_connect` returned {peer_id}, a peer id that was used before",
        )
        self._connecting.add(peer_id)

    def read_started(self, transfer_id: int, peer_id: int) -> None:
        """Record that `start_read` returned an id."""
        require(
            transfer_id not in self._reads and transfer_id not in self._ended,
            "ids of transfers are never used twice",
            f"`start_read` returned {transfer_id}, a transfer id that was used before",
        )
        require(
            peer_id in self._connected,
            "only a connected peer is read from",
            f"`start_read` accepted a read from peer {peer_id}, which is not connected",
        )
        self._reads[transfer_id] = peer_id

    def disconnected(self, peer_id: int) -> None:
        """Record that `disconnect` returned."""
        if peer_id in self._connecting | self._connected:
            self._end(peer_id)

    def happened(self, event: Event) -> None:
        """Record that `wait_events` returned this event."""
        match event:
            case TransferEnded(transfer_id):
                promise = "each read ends with exactly one `TransferEnded`"
                require(
                    transfer_id not in self._ended, promise, f"transfer {transfer_id} ended twice: {event}"
                )
                require(
                    transfer_id in self._reads, promise, f"transfer {transfer_id} was never started: {event}"
                )
                del self._reads[transfer_id]
                self._ended.add(transfer_id)
                return
            case Connected(peer_id, incoming):
                promise = "`Connected` is the first event of a peer, and comes once"
                require(
                    peer_id not in self._over,
                    promise,
                    f"event about peer {peer_id} after it was lost or disconnected: {event}",
                )
                require(
                    peer_id not in self._connected, promise, f"peer {peer_id} was connected twice: {event}"
                )
                require(
                    incoming != (peer_id in self._connecting),
                    "`incoming` says which side connected",
                    f"peer {peer_id} was reported with the wrong direction: {event}",
                )
                self._connecting.discard(peer_id)
                self._connected.add(peer_id)
            case MessageReceived(peer_id):
                require(
                    peer_id in self._connected,
                    "messages come between the `Connected` of their peer and its `PeerLost` or `disconnect`",
                    f"message from peer {peer_id}, which is not connected: {event}",
                )
            case PeerLost(peer_id):
                require(
                    peer_id in self._connecting | self._connected,
                    "`PeerLost` is the last event of a peer, comes once, and does not come after `disconnect`",
                    f"loss of peer {peer_id}, which is unknown, or lost or disconnected already: {event}",
                )
                left = [transfer_id for transfer_id, of in self._reads.items() if of == peer_id]
                require(
                    not left,
                    "the reads from a peer end before its `PeerLost`",
                    f"peer {peer_id} was lost before its transfers {left} ended: {event}",
                )
                self._end(peer_id)

    @property
    def _known(self) -> set[int]:
        return self._connecting | self._connected | self._over

    def _end(self, peer_id: int) -> None:
        self._connecting.discard(peer_id)
        self._connected.discard(peer_id)
        self._over.add(peer_id)


class CheckedEndpoint(WrappedEndpoint):
    """An endpoint around another one. An `EventOrder` checks its events."""

    def __init__(self, inner: Endpoint) -> None:
        super().__init__(inner)
        self.order = EventOrder()

    def start_connect(self, address: str, *, timeout_s: float) -> int:
        peer_id = super().start_connect(address, timeout_s=timeout_s)
        self.order.connect_started(peer_id)
        return peer_id

    def disconnect(self, peer_id: int) -> None:
        super().disconnect(peer_id)
        self.order.disconnected(peer_id)

    def start_read(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int:
        transfer_id = super().start_read(peer_id, pairs, guard, timeout_s=timeout_s)
        self.order.read_started(transfer_id, peer_id)
        return transfer_id

    def wait_events(self, timeout_s: float) -> list[Event]:
        events = super().wait_events(timeout_s)
        for event in events:
            self.order.happened(event)
            _require_reason(event)
        return events


def _require_reason(event: Event) -> None:
    """Require that an event that reports a failure has an error which says why."""
    promise = "whatever fails, the event has an error of `transports.errors` that says why"
    match event:
        case TransferEnded(error=error) if error is not None:
            require(
                isinstance(error, TransportError), "a read that fails ends with a `TransportError`", event
            )
            require(bool(str(error)), promise, f"an error without text in {event}")
        case PeerLost(error=error):
            require(isinstance(error, KVTransferError), promise, f"{error!r} in {event}")
            require(bool(str(error)), promise, f"an error without text in {event}")
            is_explained = not isinstance(error, UnexpectedError) or error.__cause__ is not None
            require(is_explained, promise, f"an `UnexpectedError` without a cause in {event}")
