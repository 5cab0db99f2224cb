"""The consumer's side of the handoff protocol: claims and reads."""

from __future__ import annotations

import math

from ...transports.errors import (
    ForeignTransportError,
    KVTransferError,
    KVTransferStateError,
    ProtocolError,
    TransferTimeoutError,
    TransportClosedError,
)
from ...transports.regions import Guard
from ..errors import ConnectorError, ContentMismatchError, StaleLeaseError
from .config import HandoffConfig
from .events import (
    Action,
    Identity,
    LoadEnded,
    LocalBlocks,
    OfferCompleted,
    RemoteOffer,
    Send,
    StartRead,
)
from .loads import Load, Loads, Part, PartState, Verdict
from .messages import (
    Claim,
    Deny,
    Grant,
    Parked,
    ProducerMessage,
    Progress,
    Revoke,
    Welcome,
)
from .pairing import NodePlanner, NodePlanners, RankPlan
from .peers import Peers, PeerSession
from .releases import Releases, is_of


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

    def __init__(
        self,
        identity: Identity,
        config: HandoffConfig,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self._config = config
        self._rank = rank
        self._num_ranks = num_ranks
        self._peers = Peers(identity, config)
        self._releases = Releases(self._peers, rank, num_ranks)
        self._planners = NodePlanners(identity.layout, rank)
        self._block_sizes = identity.layout.block_sizes
        self._loads = Loads(config.max_failed_claims, config.max_peer_ranks)

    @property
    def num_loads(self) -> int:
        """Requests that are claimed, reading, or failed and not yet asked for."""
        return len(self._loads) + self._loads.num_failures

    @property
    def num_reads(self) -> int:
        """Reads that were started and have not ended: their blocks belong to the transport."""
        return sum(load.num_reads for load in self._loads)

    # -- orders of this node -------------------------------------------------------------------------

    def claim(self, request_id: str, offer: RemoteOffer, now: float) -> list[Action]:
        """Take the offer, before there are blocks to read it into; its lease follows our heartbeats from now on.

        A failure is remembered, and reported by `load`.

        Raises:
            KVTransferStateError: the request has claimed already.
        """
        if self._loads.knows(request_id):
            raise KVTransferStateError(f"request {request_id!r} claims a second time")
        load = Load(request_id, offer)
        try:
            self._loads.add(load)
        except ConnectorError as error:
            self._loads.remember(request_id, error)
            return []
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
            error = self._loads.take_failure(request_id) or StaleLeaseError("the request holds no offer")
            return [LoadEnded(request_id, "failed", error, blocks)]
        if load.blocks is not None:
            raise KVTransferStateError(f"request {request_id!r} is loaded a second time")
        load.blocks, load.num_taken = blocks, [0] * len(blocks)
        return self._read_on(load, now)

    def drop(self, request_id: str, now: float) -> list[Action]:
        """The request is over: release its offer. `LoadEnded` follows if `load` was called. Unknown ones are ignored."""
        self._loads.take_failure(request_id)
        load = self._loads.get(request_id)
        return [] if load is None else self._end(load, Verdict("dropped"))

    # -- what happened to peers ----------------------------------------------------------------------

    def connecting(self, address: str, peer_id: int, now: float) -> list[Action]:
        """A `Connect` was started and goes by this peer id."""
        return self._peers.started(address, peer_id)

    def connect_failed(self, address: str, error: KVTransferError, now: float) -> list[Action]:
        """A `Connect` could not be started."""
        actions = self._fail_peer(address, error, now)
        if isinstance(error, ForeignTransportError):
            self._peers.forget(address)  # nothing was tried, so there is nothing to back off from
        return actions

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
        load = self._loads.of_part((address, session.epoch, message.lease))
        if load is None or message.request_id != load.offer.request_id:
            return []  # it was dropped while the message was under way
        part = load.part_at(address)
        match message:
            case Grant():
                return self._granted(load, part, message, now)
            case Parked():
                if part.state is PartState.CLAIMING and load.verdict is None:
                    part.deadline = now + self._config.claim_timeout_s
                return []
            case Progress():
                return self._progressed(load, part, message, now)
            case Deny() | Revoke():
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
        return [] if load.num_reads else self._read_on(load, now)

    def advance(self, now: float) -> list[Action]:
        """Do what is due."""
        actions: list[Action] = []
        for address in self._peers.overdue(now):
            actions += self._fail_peer(address, self._peers.lateness(address), now)
        for load in self._loads:
            for part in load.parts:
                if part.deadline <= now:
                    actions += self._time_out(load, part, now)
        for address, session in self._peers.sessions():
            if session.next_heartbeat <= now:
                actions += self._heartbeat(address, session, now)
        return actions + self._peers.advance(now)

    def next_deadline(self) -> float:
        """When `advance` will have something to do; infinity if never."""
        deadlines = (part.deadline for load in self._loads for part in load.parts)
        return min(self._peers.next_deadline(), min(deadlines, default=math.inf))

    def shutdown(self, now: float) -> list[Action]:
        """End every load and drop every peer. Loads that are reading end when their reads have: see `num_reads`."""
        error = TransportClosedError("this node shuts down")
        actions: list[Action] = []
        for load in self._loads:
            actions += self._end(load, Verdict("failed", error))
        self._loads.forget_failures()
        actions += self._peers.close()
        self._releases.clear()
        return actions

    # -- one peer ------------------------------------------------------------------------------------

    def _welcome(self, address: str, welcome: Welcome, now: float) -> list[Action]:
        try:
            session = self._peers.welcome(address, welcome)
        except KVTransferError as error:
            return self._fail_peer(address, error, now)
        actions = self._releases.greet(address, session) + self._peers.compare(welcome, self._rank)
        for load in self._loads.at(address):
            actions += self._send_claims(load, now)
        return actions

    def _fail_peer(self, address: str, error: KVTransferError, now: float) -> list[Action]:
        session = self._peers.session(address)
        if session is not None:
            self._planners.forget(session.peer_id)
        actions = self._peers.fail(address, now)
        self._releases.forget(address)
        for load in self._loads.at(address):
            part = load.part_at(address)
            part.release, part.deadline = False, math.inf
            actions += self._end(load, Verdict("failed", error))
        return actions

    def _heartbeat(self, address: str, session: PeerSession, now: float) -> list[Action]:
        leases = [
            load.offer.lease
            for load in self._loads.at(address)
            if load.part_at(address).state is not PartState.CONNECTING
        ]
        session.next_heartbeat = now + self._config.heartbeat_s if leases else math.inf
        return session.heartbeats(leases)

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
            if not is_of(load.offer, session):
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
        # Before any byte is read: blocks of another prompt would be right bytes in the wrong place, and would enter the
        # prefix cache under this prompt's hashes.
        if grant.content != load.offer.content:
            return self._end(load, Verdict("failed", ContentMismatchError(load.offer.num_tokens)))
        if grant.num_tokens < load.offer.num_tokens:
            error = StaleLeaseError(
                f"the offer was said to be of {load.offer.num_tokens} tokens; it is of {grant.num_tokens}"
            )
            return self._end(load, Verdict("failed", error))
        part.state, part.deadline = PartState.GRANTED, now + self._config.load_wait_s
        part.grant = grant
        return self._read_on(load, now)

    def _progressed(self, load: Load, part: Part, progress: Progress, now: float) -> list[Action]:
        if load.verdict is not None or part.grant is None:
            return []
        try:
            part.advance(progress)
        except ProtocolError as error:
            return self._fail_peer(part.address, error, now)
        completed: list[Action] = [OfferCompleted(load.request_id)] if load.is_whole else []
        return completed + ([] if load.num_reads else self._read_on(load, now))

    def _producer_ended(self, load: Load, part: Part, message: Deny | Revoke) -> list[Action]:
        part.release = False
        return self._end(load, Verdict("failed", StaleLeaseError(message.reason)))

    def _read_on(self, load: Load, now: float) -> list[Action]:
        """Read what is ready, once blocks and the grants of all ranks are there; end when nothing is left to read."""
        if load.verdict is not None:
            return self._end(load, load.verdict)
        if load.blocks is None or not load.is_granted:
            return []
        try:
            plans = self._plan_round(load)
        except KVTransferError as error:
            return self._end(load, Verdict("failed", error))
        if not plans and load.is_taken:
            return self._end(load, Verdict("loaded"))
        for part in load.parts:
            part.deadline = math.inf if plans else now + self._config.progress_wait_s
        return [action for plan in plans for action in self._start(load, plan, now)]

    def _plan_round(self, load: Load) -> list[RankPlan]:
        planner, tables = self._planner(load), load.tables()
        assert planner is not None
        blocks = load.take_readable(self._block_sizes)
        if not any(group.block_ids for group in blocks):
            return []
        return planner.plan(blocks, tables, load.num_ready)

    def _start(self, load: Load, plan: RankPlan, now: float) -> list[Action]:
        part = load.parts[plan.rank]
        session = self._peers.session(part.address)
        assert session is not None
        # The transport ends the read after one timeout. If it does not, its peer is dropped after two.
        part.deadline = now + 2 * self._config.read_timeout_s
        grant = part.grant
        assert grant is not None
        read = StartRead(
            load.request_id,
            part.rank,
            session.peer_id,
            plan.pairs,
            Guard(grant.guard_index, grant.lease),
            self._config.read_timeout_s,
            plan.num_regions_per_layer,
        )
        # READING is set after all that can fail: the end of a read that no action starts would never be reported.
        part.state = PartState.READING
        return [read]

    def _time_out(self, load: Load, part: Part, now: float) -> list[Action]:
        if part.state is PartState.READING:
            return self._fail_peer(part.address, TransferTimeoutError("a read did not end in time"), now)
        return self._end(load, Verdict("failed", load.lateness(part)))

    def _end(self, load: Load, verdict: Verdict) -> list[Action]:
        """Report the end, at once or, if something writes into the blocks, when that is over. The first verdict counts."""
        load.verdict = load.verdict or verdict
        for part in load.parts:
            if part.state is not PartState.READING:
                part.deadline = math.inf
        return [] if load.num_reads else self._report(load, load.verdict)

    def _report(self, load: Load, verdict: Verdict) -> list[Action]:
        """Forget the load; tell the producer's ranks, and whoever asked for the load."""
        self._loads.remove(load)
        actions = self._releases.release(load, delivered=verdict.outcome == "loaded")
        if load.blocks is not None:
            actions.append(LoadEnded(load.request_id, verdict.outcome, verdict.error, load.blocks))
        elif verdict.error is not None:
            self._loads.remember(load.request_id, verdict.error)
        return actions
