"""What an owner may rely on about the order of events, as a check of every event that an endpoint reports."""

from __future__ import annotations

from ..base import Connected, Endpoint, Event, MessageReceived, PeerLost, TransferEnded
from ..regions import Guard, RegionPairs
from .wrapping import WrappedEndpoint


class EventOrder:
    """Knows what the owner of an endpoint did and what it was told, and fails on the first event that breaks a promise.

    See the module `transports.base` for the promises. Each method raises `AssertionError` if one is broken.
    """

    def __init__(self) -> None:
        self._connecting: set[int] = set()
        self._connected: set[int] = set()
        self._over: set[int] = set()  # lost or disconnected
        self._reads: dict[int, int] = {}  # those that have not ended, with the peer
        self._ended: set[int] = set()

    @property
    def unended(self) -> frozenset[int]:
        """The transfers whose end was not reported."""
        return frozenset(self._reads)

    @property
    def connecting(self) -> frozenset[int]:
        """The peers that neither were reported to be connected or lost, nor were disconnected."""
        return frozenset(self._connecting)

    def connect_started(self, peer_id: int) -> None:
        """`start_connect` returned an id."""
        assert peer_id not in self._known, f"peer id {peer_id} was used before"
        self._connecting.add(peer_id)

    def read_started(self, transfer_id: int, peer_id: int) -> None:
        """`start_read` returned an id."""
        assert transfer_id not in self._reads, f"transfer id {transfer_id} is in use"
        assert transfer_id not in self._ended, f"transfer id {transfer_id} was used before"
        assert peer_id in self._connected, f"a read from peer {peer_id} was accepted, which is not connected"
        self._reads[transfer_id] = peer_id

    def disconnected(self, peer_id: int) -> None:
        """`disconnect` returned."""
        if peer_id in self._connecting | self._connected:
            self._end(peer_id)

    def happened(self, event: Event) -> None:
        """`wait_events` returned this event."""
        match event:
            case TransferEnded(transfer_id):
                assert transfer_id not in self._ended, f"transfer {transfer_id} ended twice: {event}"
                assert transfer_id in self._reads, f"transfer {transfer_id} was never started: {event}"
                del self._reads[transfer_id]
                self._ended.add(transfer_id)
                return
            case Connected(peer_id, incoming):
                assert peer_id not in self._over, (
                    f"peer {peer_id} is over, and its id must not come back: {event}"
                )
                assert peer_id not in self._connected, f"peer {peer_id} was connected twice: {event}"
                assert incoming != (peer_id in self._connecting), (
                    f"another side started the connection: {event}"
                )
                self._connecting.discard(peer_id)
                self._connected.add(peer_id)
            case MessageReceived(peer_id):
                assert peer_id in self._connected, f"a message of a peer that is not connected: {event}"
            case PeerLost(peer_id):
                assert peer_id in self._connecting | self._connected, (
                    f"not a peer of ours, or no more: {event}"
                )
                left = [transfer_id for transfer_id, of in self._reads.items() if of == peer_id]
                assert not left, f"transfers {left} have not ended, but their peer is lost: {event}"
                self._end(peer_id)

    @property
    def _known(self) -> set[int]:
        return self._connecting | self._connected | self._over

    def _end(self, peer_id: int) -> None:
        self._connecting.discard(peer_id)
        self._connected.discard(peer_id)
        self._over.add(peer_id)


class CheckedEndpoint(WrappedEndpoint):
    """An endpoint whose events are checked by an `EventOrder`."""

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
