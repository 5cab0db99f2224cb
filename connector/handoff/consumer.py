"""The consumer's side of the handoff protocol: claims and reads."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Literal

from ...transports.errors import (
    KVTransferError,
    KVTransferStateError,
    ProtocolError,
    RegionError,
    StaleLeaseError,
    TransferTimeoutError,
    TransportClosedError,
)
from ...transports.regions import Guard
from .config import HandoffConfig
from .events import Action, Identity, LoadEnded, LocalBlocks, RemoteOffer, Send, StartRead
from .messages import (
    MAX_HEARTBEAT_LEASES,
    Claim,
    Deny,
    Grant,
    Heartbeat,
    ProducerMessage,
    Release,
    Revoke,
    Welcome,
)
from .pairing import pair_blocks
from .peers import Peers, PeerSession

__all__ = ["ConsumerProtocol"]


class _State(enum.Enum):
    CONNECTING = enum.auto()
    CLAIMING = enum.auto()
    GRANTED = enum.auto()
    READING = enum.auto()
    DRAINING = enum.auto()


@dataclass
class _Handoff:
    """One request's way from the claim to the report.

    Attributes:
        deadline: End of the present state. A connecting one has none of its own: its peer's counts.
        grant: What the producer granted; from the state GRANTED on.
        blocks: Where to load to; None until somebody asked for it.
        verdict: How a draining one will be reported.
        release: Whether the producer is still to be told that a draining one is over.
    """

    request_id: str
    offer: RemoteOffer
    address: str
    state: _State = _State.CONNECTING
    deadline: float = math.inf
    grant: Grant | None = None
    blocks: LocalBlocks | None = None
    verdict: tuple[Literal["failed", "dropped"], KVTransferError | None] = ("dropped", None)
    release: bool = True

    @property
    def key(self) -> _OfferKey:
        return (self.address, self.offer.epoch, self.offer.lease)


_OfferKey = tuple[str, int, int]


class ConsumerProtocol:
    """Claims offers and reads them; reports every load that was asked for, exactly once.

    Every method takes `now`, in seconds of any monotonic clock, and returns actions to be done in order.
    Requests are named by this node's own ids; an offer carries the producer's.

    Args:
        identity: This node.
        rank: Which of an offer's addresses is this rank's.
    """

    def __init__(self, identity: Identity, config: HandoffConfig, rank: int = 0) -> None:
        self._config = config
        self._rank = rank
        self._peers = Peers(identity, config)
        self._handoffs: dict[str, _Handoff] = {}  # by request
        self._request_of: dict[_OfferKey, str] = {}
        self._given_up: dict[str, list[RemoteOffer]] = {}  # by address; dropped before their peer was ready
        self._failed: dict[str, KVTransferError] = {}  # by request; claims that failed before their load

    @property
    def num_loads(self) -> int:
        """Requests that are claimed, reading, or failed and not yet asked for."""
        return len(self._handoffs) + len(self._failed)

    @property
    def num_reads(self) -> int:
        """Reads that were started and have not ended: their blocks belong to the transport."""
        return sum(h.state in (_State.READING, _State.DRAINING) for h in self._handoffs.values())

    # -- orders of this node -------------------------------------------------------------------------

    def claim(self, request_id: str, offer: RemoteOffer, now: float) -> list[Action]:
        """Take the offer, before there are blocks to read it into; its lease follows our heartbeats from now on.

        A failure is remembered, and reported by `load`.

        Raises:
            KVTransferStateError: the request has claimed already.
        """
        if request_id in self._handoffs or request_id in self._failed:
            raise KVTransferStateError(f"request {request_id!r} claims a second time")
        if self._rank >= len(offer.addresses):
            error = StaleLeaseError(
                f"the offer has {len(offer.addresses)} addresses, none for rank {self._rank}"
            )
            self._remember(request_id, error)
            return []
        handoff = _Handoff(request_id, offer, offer.addresses[self._rank])
        if handoff.key in self._request_of:
            other = self._request_of[handoff.key]
            self._remember(request_id, StaleLeaseError(f"the offer is claimed already, by request {other!r}"))
            return []
        self._handoffs[request_id] = handoff
        self._request_of[handoff.key] = request_id
        actions = self._peers.want(handoff.address, now)
        session = self._peers.session(handoff.address)
        return actions if session is None else self._send_claim(handoff, session, now)

    def load(self, request_id: str, blocks: LocalBlocks, now: float) -> list[Action]:
        """Read into these blocks as soon as the offer is granted. `LoadEnded` follows, exactly once.

        A request that never claimed, or whose failure was forgotten, ends at once as failed.

        Raises:
            KVTransferStateError: the request is being loaded already.
        """
        handoff = self._handoffs.get(request_id)
        if handoff is None:
            error = self._failed.pop(request_id, None) or StaleLeaseError("the request holds no offer")
            return [LoadEnded(request_id, "failed", error, blocks)]
        if handoff.blocks is not None:
            raise KVTransferStateError(f"request {request_id!r} is loaded a second time")
        handoff.blocks = blocks
        return self._start_read(handoff, now) if handoff.state is _State.GRANTED else []

    def drop(self, request_id: str, now: float) -> list[Action]:
        """The request is over: release its offer. `LoadEnded` follows if `load` was called. Unknown ones are ignored."""
        self._failed.pop(request_id, None)
        handoff = self._handoffs.get(request_id)
        if handoff is None:
            return []
        if handoff.state is _State.CONNECTING:
            self._given_up.setdefault(handoff.address, []).append(handoff.offer)
        return self._end(handoff, "dropped", None)

    # -- what happened to peers ----------------------------------------------------------------------

    def connecting(self, address: str, peer_id: int, now: float) -> list[Action]:
        """A `Connect` was started and goes by this peer id."""
        return self._peers.started(address, peer_id)

    def connect_failed(self, address: str, error: KVTransferError, now: float) -> list[Action]:
        """A `Connect` could not be started."""
        return self._fail_peer(address, error, now)

    def peer_connected(self, peer_id: int, now: float) -> list[Action]:
        """The peer can be talked to."""
        return [] if self._peers.address_of(peer_id) is None else self._peers.greet(peer_id)

    def peer_lost(self, peer_id: int, error: KVTransferError, now: float) -> list[Action]:
        """The peer is gone, never came, or is to be dropped. Unknown peers are ignored."""
        address = self._peers.address_of(peer_id)
        return [] if address is None else self._fail_peer(address, error, now)

    def receive(self, peer_id: int, message: ProducerMessage, now: float) -> list[Action]:
        """A message came. From a peer that is not (or no longer) connected it is ignored."""
        address = self._peers.address_of(peer_id)
        if address is None:
            return []
        if isinstance(message, Welcome):
            return self._welcome(address, message, now)
        session = self._peers.session(address)
        if session is None:
            error = ProtocolError(f"{type(message).__name__} before Welcome")
            return self._fail_peer(address, error, now)
        request_id = self._request_of.get((address, session.epoch, message.lease))
        if request_id is None:
            return []  # it was dropped while the message was under way
        handoff = self._handoffs[request_id]
        if isinstance(message, Grant):
            return self._granted(handoff, message, now)
        return self._producer_ended(handoff, message)

    # -- reads, time, end ----------------------------------------------------------------------------

    def read_ended(self, request_id: str, error: KVTransferError | None, now: float) -> list[Action]:
        """The read of a `StartRead` is over, or could not be started. Call it exactly once for each.

        Raises:
            KVTransferStateError: the request is not reading.
        """
        handoff = self._handoffs.get(request_id)
        if handoff is None or handoff.state not in (_State.READING, _State.DRAINING):
            raise KVTransferStateError(f"request {request_id!r} is not reading")
        if handoff.state is _State.DRAINING:
            return self._report(handoff, *handoff.verdict)
        return self._report(handoff, "loaded" if error is None else "failed", error)

    def advance(self, now: float) -> list[Action]:
        """Do what is due."""
        actions: list[Action] = []
        for address in self._peers.overdue(now):
            timeout = TransferTimeoutError(f"{address} did not shake hands in time")
            actions += self._fail_peer(address, timeout, now)
        for handoff in [h for h in self._handoffs.values() if h.deadline <= now]:
            actions += self._time_out(handoff, now)
        for address, session in self._peers.sessions():
            if session.next_heartbeat <= now:
                actions += self._heartbeat(address, session, now)
        return actions + self._peers.advance(now)

    def next_deadline(self) -> float:
        """When `advance` will have something to do; infinity if never."""
        deadlines = (handoff.deadline for handoff in self._handoffs.values())
        return min(self._peers.next_deadline(), min(deadlines, default=math.inf))

    def shutdown(self, now: float) -> list[Action]:
        """End every load and drop every peer. Loads that are reading end when their reads have: see `num_reads`."""
        actions: list[Action] = []
        for handoff in list(self._handoffs.values()):
            actions += self._end(handoff, "failed", TransportClosedError("this node shuts down"))
        self._failed.clear()
        self._given_up.clear()
        return actions + self._peers.close()

    # -- one peer ------------------------------------------------------------------------------------

    def _welcome(self, address: str, welcome: Welcome, now: float) -> list[Action]:
        try:
            session = self._peers.welcome(address, welcome)
        except KVTransferError as error:
            return self._fail_peer(address, error, now)
        actions: list[Action] = [
            Send(session.peer_id, Release(offer.request_id, offer.lease, delivered=False))
            for offer in self._given_up.pop(address, [])
            if _is_of(offer, session)
        ]
        for handoff in [h for h in self._handoffs.values() if h.address == address]:
            if handoff.state is _State.CONNECTING:
                actions += self._send_claim(handoff, session, now)
        return actions

    def _fail_peer(self, address: str, error: KVTransferError, now: float) -> list[Action]:
        actions = self._peers.fail(address, now)
        self._given_up.pop(address, None)
        for handoff in [h for h in self._handoffs.values() if h.address == address]:
            actions += self._end(handoff, "failed", error, release=False)
            handoff.deadline = math.inf  # a read of a dropped peer ends by itself
        return actions

    def _heartbeat(self, address: str, session: PeerSession, now: float) -> list[Action]:
        leases = [
            handoff.offer.lease
            for handoff in self._handoffs.values()
            if handoff.address == address and handoff.state is not _State.CONNECTING
        ]
        session.next_heartbeat = now + self._config.heartbeat_s if leases else math.inf
        return [
            Send(session.peer_id, Heartbeat(tuple(leases[first : first + MAX_HEARTBEAT_LEASES])))
            for first in range(0, len(leases), MAX_HEARTBEAT_LEASES)
        ]

    # -- one handoff ---------------------------------------------------------------------------------

    def _send_claim(self, handoff: _Handoff, session: PeerSession, now: float) -> list[Action]:
        offer = handoff.offer
        if not _is_of(offer, session):
            error = StaleLeaseError(
                f"{handoff.address} is not the node that made the offer, or it was restarted"
            )
            return self._end(handoff, "failed", error, release=False)
        handoff.state = _State.CLAIMING
        handoff.deadline = now + self._config.claim_timeout_s
        session.next_heartbeat = min(session.next_heartbeat, now + self._config.heartbeat_s)
        return [Send(session.peer_id, Claim(offer.request_id, offer.lease))]

    def _granted(self, handoff: _Handoff, grant: Grant, now: float) -> list[Action]:
        if handoff.state is not _State.CLAIMING or grant.request_id != handoff.offer.request_id:
            return []
        if grant.num_tokens < handoff.offer.num_tokens:
            error = StaleLeaseError(
                f"the offer was said to be of {handoff.offer.num_tokens} tokens; it is of {grant.num_tokens}"
            )
            return self._end(handoff, "failed", error)
        handoff.state = _State.GRANTED
        handoff.deadline = now + self._config.load_wait_s
        handoff.grant = grant
        return [] if handoff.blocks is None else self._start_read(handoff, now)

    def _producer_ended(self, handoff: _Handoff, message: Deny | Revoke) -> list[Action]:
        if message.request_id != handoff.offer.request_id:
            return []
        return self._end(handoff, "failed", StaleLeaseError(message.reason), release=False)

    def _start_read(self, handoff: _Handoff, now: float) -> list[Action]:
        session, grant, blocks = self._peers.session(handoff.address), handoff.grant, handoff.blocks
        assert session is not None
        assert grant is not None
        assert blocks is not None
        try:
            pairs = pair_blocks(blocks, grant.block_ids)
            regions = session.planner.plan(pairs)
        except RegionError as error:
            return self._end(handoff, "failed", error)
        if not len(regions):
            return self._report(handoff, "loaded", None)
        handoff.state = _State.READING
        # The transport ends the read after one timeout. If it does not, its peer is dropped after two.
        handoff.deadline = now + 2 * self._config.read_timeout_s
        read = StartRead(
            handoff.request_id,
            session.peer_id,
            regions,
            Guard(grant.guard_index, grant.lease),
            self._config.read_timeout_s,
            num_blocks=sum(map(len, pairs)),
            num_regions_per_layer=session.planner.num_regions_per_layer(pairs),
        )
        return [read]

    def _time_out(self, handoff: _Handoff, now: float) -> list[Action]:
        match handoff.state:
            case _State.CLAIMING:
                return self._end(
                    handoff, "failed", TransferTimeoutError("the claim was not answered in time")
                )
            case _State.GRANTED:
                return self._end(
                    handoff, "failed", TransferTimeoutError("no blocks to load into came in time")
                )
            case _:
                error = TransferTimeoutError("a read did not end in time")
                return self._fail_peer(handoff.address, error, now)

    def _end(
        self,
        handoff: _Handoff,
        outcome: Literal["failed", "dropped"],
        error: KVTransferError | None,
        release: bool = True,
    ) -> list[Action]:
        """Report the end, at once or, if something writes into the blocks, when that is over."""
        if handoff.state is _State.READING:
            handoff.state = _State.DRAINING
            handoff.verdict = (outcome, error)
        handoff.release = handoff.release and release
        return [] if handoff.state is _State.DRAINING else self._report(handoff, outcome, error)

    def _report(
        self,
        handoff: _Handoff,
        outcome: Literal["loaded", "failed", "dropped"],
        error: KVTransferError | None,
    ) -> list[Action]:
        """Forget the handoff; tell the producer, and whoever asked for the load."""
        del self._handoffs[handoff.request_id]
        del self._request_of[handoff.key]
        actions: list[Action] = []
        session = self._peers.session(handoff.address)
        if handoff.release and session is not None and _is_of(handoff.offer, session):
            release = Release(handoff.offer.request_id, handoff.offer.lease, delivered=outcome == "loaded")
            actions.append(Send(session.peer_id, release))
        if handoff.blocks is not None:
            actions.append(LoadEnded(handoff.request_id, outcome, error, handoff.blocks))
        elif error is not None:
            self._remember(handoff.request_id, error)
        return actions

    def _remember(self, request_id: str, error: KVTransferError) -> None:
        if len(self._failed) >= self._config.max_failed_claims:
            del self._failed[next(iter(self._failed))]
        self._failed[request_id] = error


def _is_of(offer: RemoteOffer, session: PeerSession) -> bool:
    return (offer.engine_id, offer.epoch) == (session.engine_id, session.epoch)
