"""One offer of a producer: its state, what it grants, and the ranks that read it.

`ProducerProtocol` puts in what the engine and the consumers did; out come the grants and progress that are to
be sent.

What must never break: only the holder of the lease number is granted anything, and no more tokens than are
computed.
"""

from __future__ import annotations

import enum
import logging
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...transports.errors import KVTransferStateError
from .config import HandoffConfig
from .events import BlockTables
from .messages import Claim, Grant, Progress, Release

logger = logging.getLogger(__name__)

#: How often a consumer hears that the request still runs, within the time after which it would give up. With
#: three, a message may be late, as from a busy host, and the next one still comes in time.
_ANSWERS_PER_CLAIM_TIMEOUT = 3


class OfferState(enum.Enum):
    """The states of the producer's table in `docs/design.md`."""

    #: A rendezvous was claimed, and its request has not arrived. Claims are parked.
    AWAITED = "awaited"
    #: The request has arrived; its offer is still to be made. Claims are parked.
    ANNOUNCED = "announced"
    #: The prompt is still being computed. The blocks are the engine's, and no lease runs.
    OPEN = "open"
    #: The request has finished. The lease runs, and heartbeats of the ranks that read renew it.
    LEASED = "leased"
    #: Its guard is clear, or it never had one.
    ENDED = "ended"


#: Which states may follow which; `docs/design.md` says by which event.
OFFER_TRANSITIONS: Mapping[OfferState, frozenset[OfferState]] = {
    OfferState.AWAITED: frozenset({OfferState.ANNOUNCED, OfferState.ENDED}),
    OfferState.ANNOUNCED: frozenset(set(OfferState) - {OfferState.AWAITED, OfferState.ANNOUNCED}),
    OfferState.OPEN: frozenset({OfferState.LEASED, OfferState.ENDED}),
    OfferState.LEASED: frozenset({OfferState.ENDED}),
    OfferState.ENDED: frozenset(),
}


@dataclass(frozen=True)
class ConsumerPeer:
    """The connection of one rank of a consumer, and the node that the rank named in its `Hello`."""

    peer_id: int
    engine_id: str
    epoch: int


#: A consumer: engine id, epoch, number of its ranks.
_Consumer = tuple[str, int, int]


@dataclass
class _Reader:
    """A node that has claimed an offer. Each of its ranks goes through its loads by itself.

    Attributes:
        num_ranks: Of the node.
        peer_of: By rank: the peer of a rank that reads.
        outcomes: By rank, a value per load that it is done with: whether it had what it wanted.
    """

    num_ranks: int
    peer_of: dict[int, int] = field(default_factory=dict)
    outcomes: dict[int, list[bool]] = field(default_factory=lambda: defaultdict(list))

    @property
    def num_begun(self) -> int:
        """Loads that a rank has begun."""
        return max(self.num_begun_by(rank) for rank in range(self.num_ranks))

    @property
    def num_over(self) -> int:
        """Loads that every rank is done with."""
        return min(len(self.outcomes.get(rank, ())) for rank in range(self.num_ranks))

    def num_begun_by(self, rank: int) -> int:
        return len(self.outcomes.get(rank, ())) + (rank in self.peer_of)


class Claimants:
    """The ranks of the nodes that read an offer. Each rank claims once and is done once per load of its node.

    The first rank that claims begins a load of its node, and decides how many ranks that has. Only a rank
    that claimed can release. Otherwise a peer that merely learned the lease number of an offer could end it.

    Args:
        num_loads: Loads after which the offer is over. They may be of different nodes.
    """

    def __init__(self, num_loads: int = 1) -> None:
        self._num_loads = num_loads
        self._readers: dict[_Consumer, _Reader] = {}

    @property
    def peers(self) -> list[int]:
        """Peers that read; those of one node by rank."""
        return [reader.peer_of[rank] for reader in self._readers.values() for rank in sorted(reader.peer_of)]

    @property
    def are_done(self) -> bool:
        """Whether every load is over."""
        return sum(reader.num_over for reader in self._readers.values()) >= self._num_loads

    @property
    def have_everything(self) -> bool:
        """Whether every load is over, and every rank had what it wanted."""
        readers = self._readers.values()
        return self.are_done and all(all(each) for reader in readers for each in reader.outcomes.values())

    def may_renew(self, peer_id: int) -> bool:
        """Whether a heartbeat of this peer counts: it reads, or no rank has claimed yet."""
        return not self._readers or peer_id in self.peers

    def claim(self, peer: ConsumerPeer, claim: Claim) -> str:
        """Let a rank read. A repeated claim changes nothing.

        Returns:
            Why it may not; empty if it may.
        """
        if refusal := self._refusal(peer, claim):
            return refusal
        reader = self._readers.setdefault(_consumer_of(peer, claim), _Reader(claim.num_ranks))
        reader.peer_of[claim.rank] = peer.peer_id
        return ""

    def release(self, peer: ConsumerPeer, release: Release) -> None:
        """Note that a rank that claimed is done. Any other release is ignored."""
        reader = self._readers.get(_consumer_of(peer, release))
        if reader is not None and reader.peer_of.get(release.rank) == peer.peer_id:
            del reader.peer_of[release.rank]
            reader.outcomes[release.rank].append(release.delivered)

    def lose(self, peer_id: int) -> bool:
        """End the share of each rank that read through a peer which is gone.

        Returns:
            Whether there was one.
        """
        lost = [
            (reader, rank)
            for reader in self._readers.values()
            for rank, reads in reader.peer_of.items()
            if reads == peer_id
        ]
        for reader, rank in lost:
            del reader.peer_of[rank]
            reader.outcomes[rank].append(False)
        return bool(lost)

    def expect_no_more(self) -> None:
        """Let no load begin that has not begun. Until then the offer is not over for those that have."""
        self._num_loads = min(self._num_loads, max(1, self._num_begun))

    @property
    def _num_begun(self) -> int:
        return sum(reader.num_begun for reader in self._readers.values())

    def _refusal(self, peer: ConsumerPeer, claim: Claim) -> str:
        if claim.rank >= claim.num_ranks:
            return f"has no share for rank {claim.rank} of {claim.num_ranks}"
        reader = self._readers.get(_consumer_of(peer, claim)) or _Reader(claim.num_ranks)
        if reader.peer_of.get(claim.rank) == peer.peer_id:
            return ""
        if claim.rank in reader.peer_of:
            return "is claimed by another consumer"
        # Another rank may be ahead of this one. Otherwise the claim begins a load.
        if reader.num_begun_by(claim.rank) == reader.num_begun and self._num_begun >= self._num_loads:
            return (
                "is over for this rank"
                if reader.outcomes.get(claim.rank)
                else "is claimed by another consumer"
            )
        # Each rank has a connection of its own. So one peer can hold at most one claim of an offer, and a
        # peer that claims for every rank cannot make this table grow.
        return "is claimed by this peer for another rank" if peer.peer_id in self.peers else ""


def _consumer_of(peer: ConsumerPeer, message: Claim | Release) -> _Consumer:
    return peer.engine_id, peer.epoch, message.num_ranks


class Offer:
    """One offer, from the arrival of its request until its end. Only its own methods change it.

    In a rendezvous it begins with whichever comes first, the request or a claim.

    Args:
        name: The router's name of a rendezvous; empty: peers name the offer by its request.
        num_loads: As in `Claimants`.

    Attributes:
        request_id: This node's id of the request; empty while it is awaited.
        state: Where it is in the producer's table.
        grant: The grant that its claimants get; it has the guard, too. None before the offer is made.
        deadline: When something is due: until its request has finished, the next word to those that claimed;
            after that, the end of the lease; infinity if nothing is.
        claimants: The ranks that read it.
    """

    def __init__(
        self, request_id: str, lease: int, config: HandoffConfig, name: str = "", num_loads: int = 1
    ) -> None:
        self.request_id = request_id
        self.lease = lease
        self.name = name
        self.state = OfferState.ANNOUNCED if request_id else OfferState.AWAITED
        self.grant: Grant | None = None
        self.deadline = math.inf
        self.claimants = Claimants(num_loads)
        self._config = config
        self._renewable_until = math.inf
        self._awaited_until = math.inf

    def __repr__(self) -> str:
        # Never the lease number: a peer that knows it can read without a claim, and a repr ends up in logs.
        ready = f", {self.grant.num_ready} of {self.grant.num_tokens} tokens ready" if self.grant else ""
        return f"<offer of request {self.request_id!r}: {self.state.value}{ready}, {len(self.claimants.peers)} read>"

    @property
    def is_made(self) -> bool:
        """Whether it is held under a guard: made, and not ended."""
        return self.state not in (OfferState.AWAITED, OfferState.ANNOUNCED, OfferState.ENDED)

    @property
    def is_unfinished(self) -> bool:
        """Whether its request has not finished, so that claimants wait for more than they were granted."""
        return self.state in (OfferState.AWAITED, OfferState.ANNOUNCED, OfferState.OPEN)

    @property
    def known_as(self) -> str:
        """The id by which messages name it."""
        return self.name or self.request_id

    @property
    def granted(self) -> Grant:
        """The grant of an offer that is made."""
        assert self.grant is not None, f"{self!r} grants nothing yet"
        return self.grant

    # -- what this node does -------------------------------------------------------------------------

    def await_request(self, until: float) -> None:
        """Wait for the request of a rendezvous until then."""
        self._awaited_until = self.deadline = until

    def announce(self, request_id: str, now: float) -> None:
        """Note that the request of a rendezvous has arrived."""
        self.request_id, self._awaited_until = request_id, math.inf
        self._go_to(OfferState.ANNOUNCED)
        self.next_answer(now)

    def is_unmet(self, now: float) -> bool:
        """Whether its request should have arrived by now."""
        return self.state is OfferState.AWAITED and self._awaited_until <= now

    def open(self, grant: Grant) -> None:
        """Make it while its prompt is still being computed.

        No lease runs: a consumer that is alive cannot speed the prefill up, and the engine keeps the blocks
        anyway. The node still tells the peers that have claimed it that the request runs, because a chunk can
        take longer than they wait for a silent node.
        """
        self.grant = grant
        self._go_to(OfferState.OPEN)

    def offer(self, grant: Grant, now: float) -> None:
        """Make it for a request that has finished. The lease runs."""
        self.grant = grant
        self._start_lease(now)

    def complete(self, now: float) -> None:
        """Note that the request of an open offer has finished. The lease runs from now on."""
        self._start_lease(now)

    def extend(self, block_ids: BlockTables, num_ready: int) -> Progress | None:
        """Note that more tokens are ready.

        Returns:
            The message for the claimants; None if nothing is new.

        Raises:
            KVTransferStateError: the block tables are not the known ones with blocks added. Nothing is
                changed.
        """
        grant = self.granted
        if num_ready <= grant.num_ready:
            return None
        ends = [len(table) for table in grant.block_ids]
        if grant.block_ids != tuple(table[:end] for table, end in zip(block_ids, ends, strict=True)):
            raise KVTransferStateError(f"{self!r} was extended by other block tables than it has")
        more = tuple(table[end:] for table, end in zip(block_ids, ends, strict=True))
        self.grant = replace(grant, num_ready=num_ready, block_ids=block_ids)
        return Progress(self.known_as, self.lease, num_ready, more)

    def end(self) -> None:
        """End it. The caller clears its guard."""
        self.deadline = math.inf
        self._go_to(OfferState.ENDED)

    # -- what consumers do ---------------------------------------------------------------------------

    def claim(self, peer: ConsumerPeer, claim: Claim, now: float) -> str:
        """Let a rank read, or wait for the offer to be made.

        Returns:
            Why it may not; empty if it may.
        """
        if refusal := self.claimants.claim(peer, claim):
            return refusal
        if self.is_unfinished:
            self.deadline = min(self.deadline, now + self._answer_interval_s)
        self.renew(now)
        return ""

    def release(self, peer: ConsumerPeer, release: Release) -> None:
        """Note that a rank is done."""
        self.claimants.release(peer, release)

    def lose(self, peer_id: int) -> bool:
        """Note that a peer is gone.

        Returns:
            Whether it read.
        """
        return self.claimants.lose(peer_id)

    def renew(self, now: float) -> None:
        """Let the lease run anew, unless the request finished `max_hold_s` ago.

        That bound is the producer's: a consumer that sends heartbeats for ever must not keep blocks for ever.
        """
        if self.state is OfferState.LEASED and now < self._renewable_until:
            self.deadline = now + self._config.lease_s

    def next_answer(self, now: float) -> None:
        """Note that the claimants were told just now that the request still runs."""
        next_answer = now + self._answer_interval_s if self.claimants.peers else math.inf
        self.deadline = min(next_answer, self._awaited_until)

    def lateness(self, now: float) -> str:
        """Why the lease of an overdue offer ran out."""
        if self._renewable_until <= now:
            return (
                f"expired: its consumer was not done {self._config.max_hold_s} s after the request finished"
            )
        return f"expired: its consumer sent no heartbeat for {self._config.lease_s} s"

    # -- state ---------------------------------------------------------------------------------------

    @property
    def _answer_interval_s(self) -> float:
        return self._config.claim_timeout_s / _ANSWERS_PER_CLAIM_TIMEOUT

    def _start_lease(self, now: float) -> None:
        self.deadline = now + self._config.lease_s
        # A claim that comes within the lease gets time to read, even if `max_hold_s` is shorter.
        self._renewable_until = now + max(self._config.max_hold_s, self._config.lease_s)
        self._go_to(OfferState.LEASED)

    def _go_to(self, state: OfferState) -> None:
        """Change the state: the one place that does.

        Raises:
            KVTransferStateError: `OFFER_TRANSITIONS` does not have this change.
        """
        if state not in OFFER_TRANSITIONS[self.state]:
            raise KVTransferStateError(f"{self!r} cannot become {state.value}")
        logger.debug("%r becomes %s", self, state.value)
        self.state = state
