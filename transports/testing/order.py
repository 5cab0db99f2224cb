"""A check of the order of all events that an endpoint reports."""

from __future__ import annotations

from ..base import Connected, Endpoint, Event, MessageReceived, PeerLost, TransferEnded
from ..regions import Guard, RegionPairs
from .wrapping import WrappedEndpoint


class EventOrder:
    """Record the calls of an endpoint's owner and the events, and fail on the first one that breaks a promise.

    The module `transports.base` states the promises. Each method raises `AssertionError` if one is broken.
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
        assert peer_id not in self._known, (
            f"start_connect returned a used id: peer id {peer_id} was used before"
        )
        self._connecting.add(peer_id)

    def read_started(self, transfer_id: int, peer_id: int) -> None:
        """Record that `start_read` returned an id."""
        assert transfer_id not in self._reads, (
            f"start_read returned a used id: transfer id {transfer_id} is in use"
        )
        assert transfer_id not in self._ended, (
            f"start_read returned a used id: transfer id {transfer_id} was used before"
        )
        assert peer_id in self._connected, (
            f"start_read accepted a read from peer {peer_id}, which is not connected"
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
                assert transfer_id not in self._ended, f"transfer {transfer_id} ended twice: {event}"
                assert transfer_id in self._reads, f"transfer {transfer_id} was never started: {event}"
                del self._reads[transfer_id]
                self._ended.add(transfer_id)
                return
            case Connected(peer_id, incoming):
                assert peer_id not in self._over, (
                    f"event about peer {peer_id} after it was lost or disconnected: {event}"
                )
                assert peer_id not in self._connected, f"peer {peer_id} was connected twice: {event}"
                assert incoming != (peer_id in self._connecting), (
                    f"peer {peer_id} was reported with the wrong direction: {event}"
                )
                self._connecting.discard(peer_id)
                self._connected.add(peer_id)
            case MessageReceived(peer_id):
                assert peer_id in self._connected, (
                    f"message from peer {peer_id}, which is not connected: {event}"
                )
            case PeerLost(peer_id):
                assert peer_id in self._connecting | self._connected, (
                    f"loss of peer {peer_id}, which is unknown, or lost or disconnected already: {event}"
                )
                left = [transfer_id for transfer_id, of in self._reads.items() if of == peer_id]
                assert not left, f"peer {peer_id} was lost before its transfers {left} ended: {event}"
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
        return events
