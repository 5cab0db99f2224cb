"""The consumer's side of the handoff protocol: claims, reads, and the releases that end them.

In come the engine's orders, messages of producers, losses of peers, the ends of reads, and the time. Out go
actions: connections, messages, reads, and the end of each load.

What must never break: a load succeeds only if each of its reads ended with its guard still holding. Its end
comes once, and not before the last read is over, because until then something writes into its blocks.
"""

from __future__ import annotations

import math

from ...transports.checked import printable
from ...transports.errors import (
    ForeignTransportError,
    KVTransferError,
    KVTransferStateError,
    ProtocolError,
    TransferTimeoutError,
    TransportClosedError,
)
from ...transports.regions import Guard
from ..errors import ConnectorError, ContentMismatchError, RendezvousError, StaleLeaseError
from .config import HandoffConfig
from .events import Action, Identity, LoadEnded, LocalBlocks, OfferCompleted, RemoteOffer, StartRead
from .loads import Load, Loads, LoadState, Part, Verdict
from .messages import (
    Claim,
    Deny,
    Grant,
    Parked,
    ProducerMessage,
    Progress,
    Release,
    Revoke,
    Welcome,
)
from .pairing import NodePlanner, NodePlanners, RankPlan
from .peers import Peers, PeerSession

#: So many times in a row an address whose handshake timed out is tried again, to release what its rank
#: offers. With the default deadlines this takes as long as a lease.
_MAX_LATE_TRIES = 3


class ConsumerProtocol:
    """Claims offers and reads them. Every load that was asked for is reported exactly once.

    An offer is claimed at every rank of its producer, and read from those that have something of ours. What
    ends one part of a load ends the load.

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
        self._planners = NodePlanners(identity.layout, rank)
        self._block_sizes = identity.layout.block_sizes
        self._loads = Loads(config.max_failed_claims, config.max_peer_ranks)
        #: By address; loads that ended before there was a session.
        self._unreleased: dict[str, list[RemoteOffer]] = {}
        #: When a rendezvous last gave its blocks up for others.
        self._yielded_at = -math.inf

    @property
    def loads(self) -> tuple[Load, ...]:
        """All loads that have not been reported. Only this protocol may change them."""
        return tuple(self._loads)

    @property
    def num_loads(self) -> int:
        """Requests that are claimed, reading, or failed and not yet asked for."""
        return len(self._loads) + self._loads.num_failures

    @property
    def num_reads(self) -> int:
        """Reads that were started and have not ended: their blocks belong to the transport."""
        return sum(load.num_reads for load in self._loads)

    # -- orders of this node -------------------------------------------------------------------------

    def claim(
        self, request_id: str, offer: RemoteOffer, now: float, *, traceparent: str = ""
    ) -> list[Action]:
        """Claim the offer before there are blocks to read it into.

        Its lease follows our heartbeats from now on.

        A failure is remembered, and reported by `load`.

        Args:
            traceparent: The span of this claim, for the producer; empty if the request is not traced.

        Raises:
            KVTransferStateError: the request has claimed already.
        """
        if self._loads.knows(request_id):
            raise KVTransferStateError(f"request {request_id!r} claims a second time")
        load = Load(request_id, offer, traceparent)
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
        load.fill(blocks, now)
        return self._read_on(load, now)

    def drop(self, request_id: str, now: float) -> list[Action]:
        """Release the offer of a request that is over.

        `LoadEnded` follows if `load` was called. Unknown ones are ignored.
        """
        self._loads.take_failure(request_id)
        load = self._loads.get(request_id)
        return [] if load is None else self._end(load, Verdict("dropped"))

    # -- what happened to peers ----------------------------------------------------------------------

    def connecting(self, address: str, peer_id: int, now: float) -> list[Action]:
        """Note that a `Connect` was started, and the peer id of the connection."""
        return self._peers.started(address, peer_id)

    def connect_failed(self, address: str, error: KVTransferError, now: float) -> list[Action]:
        """Fail what waits for a `Connect` that could not be started."""
        actions = self._fail_peer(address, error, now)
        if isinstance(error, ForeignTransportError):
            self._peers.forget(address)  # nothing was tried, so there is nothing to back off from
        return actions

    def peer_connected(self, peer_id: int, now: float) -> list[Action]:
        """Begin the handshake with a peer that is connected."""
        return [] if self._peers.address_of(peer_id) is None else self._peers.say_hello(peer_id)

    def peer_lost(self, peer_id: int, error: KVTransferError, now: float) -> list[Action]:
        """Fail the loads from a peer that is gone, could not be reached, or is to be dropped.

        Unknown peers are ignored.
        """
        address = self._peers.address_of(peer_id)
        return [] if address is None else self._fail_peer(address, error, now)

    def version_with(self, peer_id: int) -> int | None:
        """The version of the protocol that a producer speaks with us; None before the end of the
        handshake.
        """
        address = self._peers.address_of(peer_id)
        session = None if address is None else self._peers.session(address)
        return None if session is None else session.version

    def receive(self, peer_id: int, message: ProducerMessage, now: float) -> list[Action]:
        """Handle a message. One from a peer that is not (or no longer) connected is ignored."""
        address = self._peers.address_of(peer_id)
        if address is None:
            return []
        if isinstance(message, Welcome):
            return self._welcome(address, message, now)
        session = self._peers.session(address)
        if session is None:
            error = ProtocolError(
                f"unexpected {type(message).__name__} from {address}: no Welcome came before it"
            )
            return self._fail_peer(address, error, now)
        load = self._loads.of_part((address, session.epoch, message.lease))
        if load is None or message.request_id != load.offer.request_id:
            return []  # the load ended while the message was in flight
        part = load.part_at(address)
        match message:
            case Grant():
                return self._granted(load, part, message, now)
            case Parked() if part.grant is not None:
                load.keep_waiting(part, now + self._config.progress_wait_s)
                return []
            case Parked():
                if self._should_yield(load, now):
                    self._yielded_at = now
                    why = f"it held blocks for {now - load.filled_at:.0f} s that others wait for, and its prompt was not computed"
                    return self._end(load, Verdict("failed", RendezvousError(why)))
                load.park(part, now + self._config.claim_timeout_s)
                return []
            case Progress():
                return self._progressed(load, part, message, now)
            case Deny() | Revoke():
                load.forgive(part)
                is_unmet = load.offer.is_rendezvous and part.grant is None
                kind = RendezvousError if is_unmet else StaleLeaseError
                return self._end(load, Verdict("failed", kind(printable(message.reason))))

    # -- reads, time, end ----------------------------------------------------------------------------

    def read_ended(self, read: StartRead, error: KVTransferError | None, now: float) -> list[Action]:
        """Note that a read is over, or could not be started. Call it exactly once for each `StartRead`.

        Raises:
            KVTransferStateError: the request is not reading from this rank.
        """
        load = self._loads.get(read.request_id)
        if load is None or load.parts[read.rank].state is not LoadState.READING:
            raise KVTransferStateError(f"request {read.request_id!r} is not reading")
        load.end_read(load.parts[read.rank])
        if error is not None:
            return self._end(load, Verdict("failed", error))
        # A round ends with its last read: the next one is planned for all ranks together.
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
        deadlines = (load.next_deadline for load in self._loads)
        return min(self._peers.next_deadline(), min(deadlines, default=math.inf))

    def shutdown(self, now: float) -> list[Action]:
        """End every load and drop every peer.

        Loads that are reading end when their reads have: see `num_reads`.
        """
        error = TransportClosedError("this node shuts down")
        actions: list[Action] = []
        # Before the peers are dropped: each end releases an offer, which frees the producer's blocks at once.
        for load in self._loads:
            actions += self._end(load, Verdict("failed", error))
        self._loads.forget_failures()
        actions += self._peers.close()
        return actions

    def begin_anew(self, identity: Identity, error: ConnectorError) -> list[Action]:
        """End every load, drop every peer, and compare the next ones with `identity`: this node, perhaps with
        another digest.

        Loads that are reading end when their reads have. A claim whose load has not been asked for fails as
        soon as it is.
        """
        actions: list[Action] = []
        # Before the peers are dropped, as in `shutdown`.
        for load in self._loads:
            actions += self._end(load, Verdict("failed", error))
        for load in self._loads:
            for part in load.parts:
                # These reads end by themselves, now that their peers are dropped, and there is no session for
                # a release.
                load.forgive(part)
        for _, session in self._peers.sessions():
            self._planners.forget(session.peer_id)
        actions += self._peers.begin_anew(identity)
        self._unreleased.clear()
        return actions

    # -- one peer ------------------------------------------------------------------------------------

    def _welcome(self, address: str, welcome: Welcome, now: float) -> list[Action]:
        if repeated := self._peers.lower_version(address, welcome):
            return repeated
        try:
            session = self._peers.welcome(address, welcome)
        except KVTransferError as error:
            return self._fail_peer(address, error, now)
        actions: list[Action] = []
        for offer in self._unreleased.pop(address, []):
            if _is_of(offer, session):
                # A producer ignores releases of ranks that have not claimed.
                actions += [self._claim(offer, session), self._release(offer, session, delivered=False)]
        actions += self._peers.compare(welcome, self._rank)
        for load in self._loads.at(address):
            actions += self._send_claims(load, now)
        return actions

    def _fail_peer(self, address: str, error: KVTransferError, now: float) -> list[Action]:
        """Drop a peer and fail the loads that have a part there."""
        session = self._peers.session(address)
        if session is not None:
            self._planners.forget(session.peer_id)
        # Whatever the transport says about it: a rank whose process does not get the core in time is alive,
        # and does not know that its offer will not be read.
        is_late = address in self._peers.overdue(now)
        actions = self._peers.fail(address, now)
        may_come = is_late and self._peers.num_failures(address) <= _MAX_LATE_TRIES
        if not may_come:
            self._unreleased.pop(address, None)
        for load in self._loads.at(address):
            if not may_come:
                # A read of this peer ends by itself, now that the peer is dropped, so its deadline no longer
                # counts.
                load.forgive(load.part_at(address))
            actions += self._end(load, Verdict("failed", error))
        return actions + (self._peers.want(address, now) if address in self._unreleased else [])

    def _heartbeat(self, address: str, session: PeerSession, now: float) -> list[Action]:
        leases = [
            load.offer.lease
            for load in self._loads.at(address)
            if load.part_at(address).state is not LoadState.CONNECTING
        ]
        session.next_heartbeat = now + self._config.heartbeat_s if leases else math.inf
        return session.heartbeats(leases)

    # -- one load ------------------------------------------------------------------------------------

    def _send_claims(self, load: Load, now: float) -> list[Action]:
        """Claim at every rank with which there is a session.

        Once that is every rank, see whether the nodes can be paired.
        """
        if load.verdict is not None:
            return []
        actions: list[Action] = []
        for part in load.parts:
            session = self._peers.session(part.address)
            if session is None or part.state is not LoadState.CONNECTING:
                continue
            if not _is_of(load.offer, session):
                error = StaleLeaseError(
                    f"{part.address} is not the node that made the offer, or it was restarted"
                )
                return actions + self._end(load, Verdict("failed", error))
            load.claim(part, now + self._config.claim_timeout_s)
            session.next_heartbeat = min(session.next_heartbeat, now + self._config.heartbeat_s)
            actions.append(self._claim(load.offer, session, load.traceparent))
        try:
            planner = self._planner(load)
        except KVTransferError as error:
            return actions + self._end(load, Verdict("failed", error))
        if planner is not None:
            actions += self._peers.leave_out(load.offer.engine_id, load.offer.epoch, planner.left_out)
        return actions

    def _planner(self, load: Load) -> NodePlanner | None:
        """The planner for the load's producer; None until there is a session with each of its ranks.

        Raises:
            IncompatiblePeerError: the two nodes cannot be paired.
        """
        sessions = [self._peers.session(part.address) for part in load.parts]
        known = [session for session in sessions if session is not None]
        return self._planners.get(known) if len(known) == len(sessions) else None

    def _should_yield(self, load: Load, now: float) -> bool:
        """Whether a rendezvous holds blocks in vain while another load waits for blocks.

        Two nodes whose pools are full could otherwise wait for each other: the offer of the other load holds
        the blocks in which this prompt would be computed. One load gives way at a time, so that not all of a
        long queue is computed twice.
        """
        patience = self._config.progress_wait_s
        if not load.offer.is_rendezvous or now < max(load.filled_at, self._yielded_at) + patience:
            return False
        waits_since = (
            each.next_deadline - self._config.load_wait_s for each in self._loads if each.lacks_blocks
        )
        return any(now - since >= patience for since in waits_since)

    def _granted(self, load: Load, part: Part, grant: Grant, now: float) -> list[Action]:
        if part.state is not LoadState.CLAIMING or load.verdict is not None:
            return []
        # Before any byte is read: blocks of another prompt would be right bytes in the wrong place, and would
        # enter the prefix cache under this prompt's hashes.
        if grant.content != load.offer.content:
            return self._end(load, Verdict("failed", ContentMismatchError(load.offer.num_tokens)))
        # The params came over a path that is not authenticated; the grant is what counts.
        if grant.num_tokens < load.offer.num_tokens:
            error = StaleLeaseError(
                f"the params name {load.offer.num_tokens} tokens, but the offer has only {grant.num_tokens}"
            )
            return self._end(load, Verdict("failed", error))
        load.accept(part, grant, now + self._config.load_wait_s)
        # Until now the load waited for the prompt to be computed, which is no part of the transfer's time.
        is_late = load.offer.is_rendezvous and load.has_waited and load.is_whole
        completed: list[Action] = [OfferCompleted(load.request_id)] if is_late else []
        return completed + self._read_on(load, now)

    def _progressed(self, load: Load, part: Part, progress: Progress, now: float) -> list[Action]:
        if load.verdict is not None or part.grant is None:
            return []
        try:
            load.advance(part, progress)
        except ProtocolError as error:
            return self._fail_peer(part.address, error, now)
        completed: list[Action] = [OfferCompleted(load.request_id)] if load.is_whole else []
        return completed + ([] if load.num_reads else self._read_on(load, now))

    def _read_on(self, load: Load, now: float) -> list[Action]:
        """Read what is ready, once blocks and the grants of all ranks are there; end when nothing is left to
        read.
        """
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
        # A rank that is not read in this round waits for those that are: their deadlines bound its wait.
        load.wait_for_progress(math.inf if plans else now + self._config.progress_wait_s)
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
        session, grant = self._peers.session(part.address), part.grant
        assert session is not None
        assert grant is not None
        guard = Guard(grant.guard_index, grant.guard_value or grant.lease)
        read = StartRead(
            load.request_id,
            part.rank,
            session.peer_id,
            plan.pairs,
            guard,
            self._config.read_timeout_s,
            plan.num_regions_per_layer,
        )
        # READING is set after all that can fail: the end of a read that no action starts would never be
        # reported. The transport ends the read after one timeout. If it does not, its peer is dropped after
        # two.
        load.start_read(part, now + 2 * self._config.read_timeout_s)
        return [read]

    def _time_out(self, load: Load, part: Part, now: float) -> list[Action]:
        if part.state is LoadState.READING:
            # The load cannot be reported while the transport may write. Dropping the peer makes the transport
            # end the read.
            error = TransferTimeoutError(f"timed out waiting for a read from {part.address} to end")
            return self._fail_peer(part.address, error, now)
        return self._end(load, Verdict("failed", load.lateness(part)))

    def _end(self, load: Load, verdict: Verdict) -> list[Action]:
        """Report the end: at once, or if something writes into the blocks, when that is over."""
        verdict = load.decide(verdict)
        return [] if load.num_reads else self._report(load, verdict)

    def _report(self, load: Load, verdict: Verdict) -> list[Action]:
        """Forget the load, release its offer, and report it if it was asked for."""
        self._loads.remove(load)
        actions = self._release_all(load, delivered=verdict.outcome == "loaded")
        if load.blocks is not None:
            actions.append(LoadEnded(load.request_id, verdict.outcome, verdict.error, load.blocks))
        elif verdict.error is not None:
            self._loads.remember(load.request_id, verdict.error)
        return actions

    # -- releases ------------------------------------------------------------------------------------

    def _release_all(self, load: Load, *, delivered: bool) -> list[Action]:
        """Send a release to every rank of the producer that is owed one.

        A rank without a session yet gets it when there is one. Without a release it would hold its blocks
        until the lease runs out.
        """
        actions: list[Action] = []
        for part in load.parts:
            session = self._peers.session(part.address)
            if not part.is_owed_release:
                continue
            if session is None:
                unreleased = self._unreleased.setdefault(part.address, [])
                unreleased.append(load.offer)
                del unreleased[: -self._config.max_failed_claims]
            elif _is_of(load.offer, session):
                if part.state is LoadState.CONNECTING:
                    actions.append(self._claim(load.offer, session))
                actions.append(self._release(load.offer, session, delivered=delivered))
        return actions

    def _claim(self, offer: RemoteOffer, session: PeerSession, traceparent: str = "") -> Action:
        claim = Claim(
            offer.request_id, offer.lease, self._rank, self._num_ranks, traceparent, offer.is_rendezvous
        )
        return session.send(claim)

    def _release(self, offer: RemoteOffer, session: PeerSession, *, delivered: bool) -> Action:
        release = Release(offer.request_id, offer.lease, delivered, self._rank, self._num_ranks)
        return session.send(release)


def _is_of(offer: RemoteOffer, session: PeerSession) -> bool:
    """Whether a session is with the start of the node that made the offer."""
    return (offer.engine_id, offer.epoch) == (session.engine_id, session.epoch)
