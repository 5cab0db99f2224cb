"""The consumer's side of the handoff protocol: claims and reads."""

from __future__ import annotations

import math

from ...transports.errors import (
    KVTransferError,
    KVTransferStateError,
    ProtocolError,
    StaleLeaseError,
    TransferTimeoutError,
    TransportClosedError,
)
from ...transports.regions import Guard
from .config import HandoffConfig
from .events import Action, Identity, LoadEnded, LocalBlocks, RemoteOffer, Send, StartRead
from .loads import Load, Part, PartKey, PartState, Verdict
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
from .pairing import NodePlanner, NodePlanners, RankPlan
from .peers import Peers, PeerSession

__all__ = ["ConsumerProtocol"]


class ConsumerProtocol:
    """Claims offers and reads them; reports every load that was asked for, exactly once.

    An offer is claimed at every rank of its producer, and read from those that have something of ours. What happens to
    one part happens to the load.

    Every method takes `now`, in seconds of any monotonic clock, and returns actions to be done in order.
    Requests are named by this node's own ids; an offer carries the producer's.

    Args:
        identity: This node.
        rank: Which rank of this node we are.
        num_ranks: Ranks of this node; each claims an offer for itself.
    """

    def __init__(self, identity: Identity, config: HandoffConfig, rank: int = 0, num_ranks: int = 1) -> None:
        self._config = config
        self._rank = rank
        self._num_ranks = num_ranks
        self._peers = Peers(identity, config)
        self._planners = NodePlanners(identity.layout, rank)
        self._loads: dict[str, Load] = {}  # by request
        self._request_of: dict[PartKey, str] = {}
        self._given_up: dict[str, list[RemoteOffer]] = {}  # by address; over before their peer was ready
        self._failed: dict[str, KVTransferError] = {}  # by request; claims that failed before their load

    @property
    def num_loads(self) -> int:
        """Requests that are claimed, reading, or failed and not yet asked for."""
        return len(self._loads) + len(self._failed)

    @property
    def num_reads(self) -> int:
        """Reads that were started and have not ended: their blocks belong to the transport."""
        return sum(load.num_reads for load in self._loads.values())

    # -- orders of this node -------------------------------------------------------------------------

    def claim(self, request_id: str, offer: RemoteOffer, now: float) -> list[Action]:
        """Take the offer, before there are blocks to read it into; its lease follows our heartbeats from now on.

        A failure is remembered, and reported by `load`.

        Raises:
            KVTransferStateError: the request has claimed already.
        """
        if request_id in self._loads or request_id in self._failed:
            raise KVTransferStateError(f"request {request_id!r} claims a second time")
        load = Load(request_id, offer)
        if len(set(load.keys)) != len(load.keys):
            self._remember(request_id, StaleLeaseError("the offer names one address for two ranks"))
            return []
        if others := [self._request_of[key] for key in load.keys if key in self._request_of]:
            error = StaleLeaseError(f"the offer is claimed already, by request {others[0]!r}")
            self._remember(request_id, error)
            return []
        self._loads[request_id] = load
        self._request_of.update(dict.fromkeys(load.keys, request_id))
        actions = [action for part in load.parts for action in self._peers.want(part.address, now)]
        return actions + self._send_claims(load, now)

    def load(self, request_id: str, blocks: LocalBlocks, now: float) -> list[Action]:
        """Read into these blocks as soon as the offer is granted. `LoadEnded` follows, exactly once.

        A request that never claimed, or whose failure was forgotten, ends at once as failed.

        Raises:
            KVTransferStateError: the request is being loaded already.
        """
        load = self._loads.get(request_id)
        if load is None:
            error = self._failed.pop(request_id, None) or StaleLeaseError("the request holds no offer")
            return [LoadEnded(request_id, "failed", error, blocks)]
        if load.blocks is not None:
            raise KVTransferStateError(f"request {request_id!r} is loaded a second time")
        load.blocks = blocks
        return self._start_reads(load, now)

    def drop(self, request_id: str, now: float) -> list[Action]:
        """The request is over: release its offer. `LoadEnded` follows if `load` was called. Unknown ones are ignored."""
        self._failed.pop(request_id, None)
        load = self._loads.get(request_id)
        return [] if load is None else self._end(load, Verdict("dropped"))

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
        load = self._loads[request_id]
        if message.request_id != load.offer.request_id:
            return []
        part = load.part_at(address)
        if isinstance(message, Grant):
            return self._granted(load, part, message, now)
        return self._producer_ended(load, part, message)

    # -- reads, time, end ----------------------------------------------------------------------------

    def read_ended(self, read: StartRead, error: KVTransferError | None, now: float) -> list[Action]:
        """A read is over, or could not be started. Call it exactly once for each `StartRead`.

        Raises:
            KVTransferStateError: the request is not reading from this rank.
        """
        load = self._loads.get(read.request_id)
        if load is None or load.parts[read.rank].state is not PartState.READING:
            raise KVTransferStateError(f"request {read.request_id!r} is not reading")
        part = load.parts[read.rank]
        part.state, part.deadline = PartState.GRANTED, math.inf
        if error is not None:
            return self._end(load, Verdict("failed", error))
        return [] if load.num_reads else self._end(load, Verdict("loaded"))

    def advance(self, now: float) -> list[Action]:
        """Do what is due."""
        actions: list[Action] = []
        for address in self._peers.overdue(now):
            timeout = TransferTimeoutError(f"{address} did not shake hands in time")
            actions += self._fail_peer(address, timeout, now)
        for load in list(self._loads.values()):
            for part in load.parts:
                if part.deadline <= now:
                    actions += self._time_out(load, part, now)
        for address, session in self._peers.sessions():
            if session.next_heartbeat <= now:
                actions += self._heartbeat(address, session, now)
        return actions + self._peers.advance(now)

    def next_deadline(self) -> float:
        """When `advance` will have something to do; infinity if never."""
        deadlines = (part.deadline for load in self._loads.values() for part in load.parts)
        return min(self._peers.next_deadline(), min(deadlines, default=math.inf))

    def shutdown(self, now: float) -> list[Action]:
        """End every load and drop every peer. Loads that are reading end when their reads have: see `num_reads`."""
        actions: list[Action] = []
        for load in list(self._loads.values()):
            actions += self._end(load, Verdict("failed", TransportClosedError("this node shuts down")))
        self._failed.clear()
        self._given_up.clear()
        return actions + self._peers.close()

    # -- one peer ------------------------------------------------------------------------------------

    def _welcome(self, address: str, welcome: Welcome, now: float) -> list[Action]:
        try:
            session = self._peers.welcome(address, welcome)
        except KVTransferError as error:
            return self._fail_peer(address, error, now)
        actions = [
            self._release_of(offer, session, delivered=False)
            for offer in self._given_up.pop(address, [])
            if _is_of(offer, session)
        ]
        for load in [load for load in self._loads.values() if load.has_part_at(address)]:
            actions += self._send_claims(load, now)
        return actions

    def _fail_peer(self, address: str, error: KVTransferError, now: float) -> list[Action]:
        session = self._peers.session(address)
        if session is not None:
            self._planners.forget(session.peer_id)
        actions = self._peers.fail(address, now)
        self._given_up.pop(address, None)
        for load in [load for load in self._loads.values() if load.has_part_at(address)]:
            part = load.part_at(address)
            part.release, part.deadline = False, math.inf  # a read of a dropped peer ends by itself
            actions += self._end(load, Verdict("failed", error))
        return actions

    def _heartbeat(self, address: str, session: PeerSession, now: float) -> list[Action]:
        leases = [
            load.offer.lease
            for load in self._loads.values()
            if load.has_part_at(address) and load.part_at(address).state is not PartState.CONNECTING
        ]
        session.next_heartbeat = now + self._config.heartbeat_s if leases else math.inf
        return [
            Send(session.peer_id, Heartbeat(tuple(leases[first : first + MAX_HEARTBEAT_LEASES])))
            for first in range(0, len(leases), MAX_HEARTBEAT_LEASES)
        ]

    # -- one load ------------------------------------------------------------------------------------

    def _send_claims(self, load: Load, now: float) -> list[Action]:
        """Claim at every rank whose hands are shaken; once all are, see whether the two nodes can be paired."""
        if load.verdict is not None:
            return []
        actions: list[Action] = []
        for part in load.parts:
            session = self._peers.session(part.address)
            if session is None or part.state is not PartState.CONNECTING:
                continue
            if not _is_of(load.offer, session):
                error = StaleLeaseError(
                    f"{part.address} is not the node that made the offer, or it was restarted"
                )
                return actions + self._end(load, Verdict("failed", error))
            part.state, part.deadline = PartState.CLAIMING, now + self._config.claim_timeout_s
            session.next_heartbeat = min(session.next_heartbeat, now + self._config.heartbeat_s)
            claim = Claim(load.offer.request_id, load.offer.lease, self._rank, self._num_ranks)
            actions.append(Send(session.peer_id, claim))
        try:
            self._planner(load)
        except KVTransferError as error:
            actions += self._end(load, Verdict("failed", error))
        return actions

    def _planner(self, load: Load) -> NodePlanner | None:
        """The planner for the load's producer; None until hands are shaken with all of its ranks.

        Raises:
            IncompatiblePeerError: the two nodes cannot be paired.
        """
        sessions = [self._peers.session(part.address) for part in load.parts]
        known = [session for session in sessions if session is not None]
        return self._planners.get(known) if len(known) == len(sessions) else None

    def _granted(self, load: Load, part: Part, grant: Grant, now: float) -> list[Action]:
        if part.state is not PartState.CLAIMING or load.verdict is not None:
            return []
        if grant.num_tokens < load.offer.num_tokens:
            error = StaleLeaseError(
                f"the offer was said to be of {load.offer.num_tokens} tokens; it is of {grant.num_tokens}"
            )
            return self._end(load, Verdict("failed", error))
        part.state, part.deadline = PartState.GRANTED, now + self._config.load_wait_s
        part.grant = grant
        return self._start_reads(load, now)

    def _producer_ended(self, load: Load, part: Part, message: Deny | Revoke) -> list[Action]:
        part.release = False
        return self._end(load, Verdict("failed", StaleLeaseError(message.reason)))

    def _start_reads(self, load: Load, now: float) -> list[Action]:
        """Read, if everything is there: blocks, and the grants of all ranks."""
        if load.blocks is None or not load.is_granted:
            return []
        try:
            plans = self._plan(load, load.blocks)
        except KVTransferError as error:
            return self._end(load, Verdict("failed", error))
        for part in load.parts:
            part.deadline = math.inf
        actions = [self._start_read(load, plan, now) for plan in plans]
        return actions or self._end(load, Verdict("loaded"))

    def _plan(self, load: Load, blocks: LocalBlocks) -> list[RankPlan]:
        grants = load.grants()
        planner = self._planner(load)
        assert planner is not None
        if len({(grant.num_tokens, grant.block_ids) for grant in grants}) > 1:
            raise StaleLeaseError("the ranks of the producer granted different blocks")
        return planner.plan(blocks, grants[0].block_ids, grants[0].num_tokens)

    def _start_read(self, load: Load, plan: RankPlan, now: float) -> Action:
        part = load.parts[plan.rank]
        session, grant = self._peers.session(part.address), part.grant
        assert session is not None
        assert grant is not None
        part.state = PartState.READING
        # The transport ends the read after one timeout. If it does not, its peer is dropped after two.
        part.deadline = now + 2 * self._config.read_timeout_s
        return StartRead(
            load.request_id,
            plan.rank,
            session.peer_id,
            plan.pairs,
            Guard(grant.guard_index, grant.lease),
            self._config.read_timeout_s,
            plan.num_regions_per_layer,
        )

    def _time_out(self, load: Load, part: Part, now: float) -> list[Action]:
        match part.state:
            case PartState.CLAIMING:
                error = TransferTimeoutError("the claim was not answered in time")
                return self._end(load, Verdict("failed", error))
            case PartState.GRANTED:
                error = TransferTimeoutError("no blocks to load into came in time")
                return self._end(load, Verdict("failed", error))
            case _:
                error = TransferTimeoutError("a read did not end in time")
                return self._fail_peer(part.address, error, now)

    def _end(self, load: Load, verdict: Verdict) -> list[Action]:
        """Report the end, at once or, if something writes into the blocks, when that is over. The first verdict counts."""
        load.verdict = load.verdict or verdict
        for part in load.parts:
            if part.state is not PartState.READING:
                part.deadline = math.inf
        return [] if load.num_reads else self._report(load, load.verdict)

    def _report(self, load: Load, verdict: Verdict) -> list[Action]:
        """Forget the load; tell the producer's ranks, and whoever asked for the load."""
        del self._loads[load.request_id]
        for key in load.keys:
            del self._request_of[key]
        actions = [action for part in load.parts for action in self._release(load, part, verdict)]
        if load.blocks is not None:
            actions.append(LoadEnded(load.request_id, verdict.outcome, verdict.error, load.blocks))
        elif verdict.error is not None:
            self._remember(load.request_id, verdict.error)
        return actions

    def _release(self, load: Load, part: Part, verdict: Verdict) -> list[Action]:
        """Tell one rank that the load is over, now or when hands are shaken; not if it knows, or is gone."""
        if not part.release:
            return []
        session = self._peers.session(part.address)
        if session is None:
            self._given_up.setdefault(part.address, []).append(load.offer)
            return []
        if not _is_of(load.offer, session):
            return []
        return [self._release_of(load.offer, session, delivered=verdict.outcome == "loaded")]

    def _release_of(self, offer: RemoteOffer, session: PeerSession, *, delivered: bool) -> Action:
        release = Release(offer.request_id, offer.lease, delivered, self._rank, self._num_ranks)
        return Send(session.peer_id, release)

    def _remember(self, request_id: str, error: KVTransferError) -> None:
        if len(self._failed) >= self._config.max_failed_claims:
            del self._failed[next(iter(self._failed))]
        self._failed[request_id] = error


def _is_of(offer: RemoteOffer, session: PeerSession) -> bool:
    return (offer.engine_id, offer.epoch) == (session.engine_id, session.epoch)
