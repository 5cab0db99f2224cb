"""The producer's side of the handoff protocol: offers, their guards and their leases."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from ...transports.errors import KVTransferStateError
from .claimants import Claimants, Speaker
from .config import HandoffConfig
from .events import (
    Action,
    BlockTables,
    ClearGuard,
    Disconnect,
    Identity,
    OfferEnded,
    Send,
    SetGuard,
)
from .messages import (
    PROTOCOL_VERSION,
    Claim,
    ConsumerMessage,
    Deny,
    Grant,
    Heartbeat,
    Hello,
    Parked,
    Progress,
    Release,
    Revoke,
    Welcome,
)

#: What a parked claim hears in the time after which its consumer would give up.
_WORDS_PER_CLAIM_TIMEOUT = 3


@dataclass
class _Announced:
    """An offer that is to come: its request has arrived, and its prompt is not computed yet. Claims of it are parked.

    Attributes:
        next_word: When those who claimed are told again that the offer is still to come; infinity while there are none.
    """

    request_id: str
    claimants: Claimants = field(default_factory=Claimants)
    next_word: float = math.inf


@dataclass
class _Offer:
    """An offer that is held. It is *open* while its prompt is computed; *offered* while nobody reads it, else *claimed*."""

    request_id: str
    lease: int
    block_ids: BlockTables
    num_tokens: int
    num_ready: int
    content: str
    deadline: float
    renewable_until: float = math.inf
    guard_index: int = -1
    claimants: Claimants = field(default_factory=Claimants)

    @property
    def is_complete(self) -> bool:
        """Whether its request has finished; before, the blocks are the engine's, and no lease runs."""
        return self.deadline < math.inf


@dataclass
class _Peer:
    """A connected consumer. Before its `Hello` it has until `hello_deadline`; afterwards, forever."""

    hello_deadline: float
    speaker: Speaker

    @property
    def is_ready(self) -> bool:
        return self.hello_deadline == math.inf


class ProducerProtocol:
    """Holds offers until each is delivered, aborted or expired.

    An offer is read by all ranks of one consumer, each for itself, and delivered when each has what it wanted. A
    rank that is lost ends its own share only: the others read on.

    Every method takes `now`, in seconds of any monotonic clock, and returns actions to be done in order.

    Args:
        identity: This node.
        num_guards: Offers that can be held at once; one more ends at once, as aborted.
    """

    def __init__(self, identity: Identity, config: HandoffConfig, num_guards: int) -> None:
        self._welcome = Welcome(
            PROTOCOL_VERSION,
            identity.engine_id,
            identity.epoch,
            identity.digest,
            identity.fields,
            identity.layout.to_plain(),
        )
        self._config = config
        self._parked_interval_s = config.claim_timeout_s / _WORDS_PER_CLAIM_TIMEOUT
        self._free_guards = list(range(num_guards))
        self._announced: dict[int, _Announced] = {}  # by lease
        self._offers: dict[int, _Offer] = {}  # by lease
        self._lease_of: dict[str, int] = {}  # by request
        self._peers: dict[int, _Peer] = {}

    @property
    def num_offers(self) -> int:
        """Offers that are held."""
        return len(self._offers)

    @property
    def num_announced(self) -> int:
        """Offers that are to come."""
        return len(self._announced)

    # -- orders of this node -------------------------------------------------------------------------

    def announce(self, request_id: str, lease: int) -> list[Action]:
        """A request arrived that will be offered under this number. From now on claims of it are parked.

        What follows is `offer` or `open`, or `withdraw`.

        Raises:
            KVTransferStateError: the number is in use.
        """
        if lease in self._announced or lease in self._offers:
            raise KVTransferStateError(f"lease number of {request_id!r} is in use")
        self._announced[lease] = _Announced(request_id)
        return []

    def offer(
        self,
        request_id: str,
        lease: int,
        block_ids: BlockTables,
        num_tokens: int,
        now: float,
        content: str = "",
    ) -> list[Action]:
        """Hold a finished request's blocks for a consumer. `OfferEnded` follows, exactly once.

        Args:
            content: What a consumer compares with its own prompt; see `Grant`.

        Raises:
            KVTransferStateError: the number is that of another offer, or the request is offered already.
        """
        config = self._config
        deadline, until = now + config.lease_s, now + config.max_hold_s
        return self._hold(
            _Offer(request_id, lease, block_ids, num_tokens, num_tokens, content, deadline, until)
        )

    def open(
        self,
        request_id: str,
        lease: int,
        block_ids: BlockTables,
        num_tokens: int,
        num_ready: int,
        content: str = "",
    ) -> list[Action]:
        """Let a consumer read a request's blocks while its prompt is still computed. `OfferEnded` follows, exactly once.

        No lease runs before `complete`: what is computed is the engine's, which says `abort` when it loses the blocks.

        Args:
            block_ids: The block tables so far.
            num_tokens: Tokens that will be offered in the end.
            num_ready: Tokens whose keys and values are there.
            content: As for `offer`.

        Raises:
            KVTransferStateError: as for `offer`.
        """
        return self._hold(_Offer(request_id, lease, block_ids, num_tokens, num_ready, content, math.inf))

    def extend(self, request_id: str, block_ids: BlockTables, num_ready: int) -> list[Action]:
        """More tokens of an open offer are there. Unknown requests are ignored: the offer may have ended by itself.

        Block tables that are not just longer than they were end it.
        """
        lease = self._lease_of.get(request_id)
        return [] if lease is None else self._extend(self._offers[lease], block_ids, num_ready)

    def complete(self, request_id: str, block_ids: BlockTables, now: float) -> list[Action]:
        """The request of an open offer has finished: all is there, and the lease runs. Else as `extend`."""
        lease = self._lease_of.get(request_id)
        if lease is None:
            return []
        held = self._offers[lease]
        held.deadline, held.renewable_until = now + self._config.lease_s, now + self._config.max_hold_s
        return self._extend(held, block_ids, held.num_tokens)

    def withdraw(self, lease: int) -> list[Action]:
        """An announced offer never comes: deny those who claimed it. Unknown numbers are ignored."""
        announced = self._announced.pop(lease, None)
        if announced is None:
            return []
        what = "was never made: its request ended, or lost its blocks"
        return self._deny_all(announced.request_id, lease, announced.claimants, what)

    def give_up(self, request_id: str, lease: int) -> list[Action]:
        """No consumer will come for this offer, as a router says that tried one. A claimed or unknown one is left alone:
        its consumer decides.
        """
        held = self._offers.get(lease)
        if held is None or held.request_id != request_id or held.claimants.peers:
            return []
        return self._end(held, "aborted", "was given up: no consumer could claim it")

    def abort(self, request_id: str, now: float) -> list[Action]:
        """End an offer now. Unknown requests are ignored: the offer may have ended by itself."""
        lease = self._lease_of.get(request_id)
        return [] if lease is None else self._revoke(self._offers[lease], "aborted", "was aborted")

    # -- what happened -------------------------------------------------------------------------------

    def guard_failed(self, index: int, why: str) -> list[Action]:
        """A `SetGuard` failed: end its offer, which no consumer could check."""
        held = [held for held in self._offers.values() if held.guard_index == index]
        return [action for offer in held for action in self._revoke(offer, "aborted", f"was aborted: {why}")]

    def peer_connected(self, peer_id: int, now: float) -> list[Action]:
        """A consumer connected; it must say `Hello` within `connect_timeout_s`."""
        nobody = Speaker(peer_id, "", 0)
        self._peers[peer_id] = _Peer(now + self._config.connect_timeout_s, nobody)
        return []

    def peer_lost(self, peer_id: int, now: float) -> list[Action]:
        """A peer is gone: what it had claimed ends. Unknown peers are ignored."""
        if self._peers.pop(peer_id, None) is None:
            return []
        for announced in self._announced.values():
            announced.claimants.lose(peer_id)
        lost = [held for held in self._offers.values() if held.claimants.lose(peer_id)]
        return [action for held in lost for action in self._end_if_done(held, "its consumer was lost")]

    def receive(self, peer_id: int, message: ConsumerMessage, now: float) -> list[Action]:
        """A message came. From a peer that is not (or no longer) connected it is ignored."""
        peer = self._peers.get(peer_id)
        if peer is None:
            return []
        if isinstance(message, Hello):
            if not peer.is_ready:
                peer.hello_deadline = math.inf
                peer.speaker = Speaker(peer_id, message.engine_id, message.epoch)
            return [Send(peer_id, self._welcome)]
        if not peer.is_ready:
            return [*self.peer_lost(peer_id, now), Disconnect(peer_id)]
        match message:
            case Claim():
                return self._claim(peer.speaker, message, now)
            case Heartbeat():
                self._heartbeat(peer_id, message, now)
                return []
            case Release():
                return self._release(peer.speaker, message)

    def greet(self, peer_id: int) -> list[Action]:
        """Answer a `Hello` of another version, so that its sender can tell what is wrong."""
        return [Send(peer_id, self._welcome)] if peer_id in self._peers else []

    # -- time ----------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Action]:
        """Do what is due."""
        actions: list[Action] = []
        for held in [held for held in self._offers.values() if held.deadline <= now]:
            why = f"{self._config.lease_s} s after its last sign of life"
            if held.renewable_until <= now:
                why = f"after {self._config.max_hold_s} s in which nobody was done with it"
            actions += self._revoke(held, "expired", f"expired {why}")
        for lease, announced in self._announced.items():
            if announced.next_word <= now:
                peers = announced.claimants.peers
                announced.next_word = now + self._parked_interval_s if peers else math.inf
                actions += [Send(peer_id, Parked(announced.request_id, lease)) for peer_id in peers]
        for peer_id in [peer_id for peer_id, peer in self._peers.items() if peer.hello_deadline <= now]:
            actions += [*self.peer_lost(peer_id, now), Disconnect(peer_id)]
        return actions

    def next_deadline(self) -> float:
        """When `advance` will have something to do; infinity if never."""
        return min(
            min((held.deadline for held in self._offers.values()), default=math.inf),
            min((announced.next_word for announced in self._announced.values()), default=math.inf),
            min((peer.hello_deadline for peer in self._peers.values()), default=math.inf),
        )

    def shutdown(self, now: float) -> list[Action]:
        """End every offer and drop every peer."""
        actions: list[Action] = []
        for lease, announced in self._announced.items():
            what = "will not be made: the producer shuts down"
            actions += self._deny_all(announced.request_id, lease, announced.claimants, what)
        self._announced.clear()
        for held in list(self._offers.values()):
            actions += self._revoke(held, "aborted", "was aborted: the producer shuts down")
        actions += [Disconnect(peer_id) for peer_id in self._peers]
        self._peers.clear()
        return actions

    # -- one offer -----------------------------------------------------------------------------------

    def _hold(self, held: _Offer) -> list[Action]:
        request_id, lease = held.request_id, held.lease
        if lease in self._offers or request_id in self._lease_of:
            raise KVTransferStateError(
                f"request {request_id!r} is offered a second time, or its lease number is"
            )
        announced = self._announced.pop(lease, None)
        if announced is not None:
            held.claimants = announced.claimants
        if held.claimants.are_done:
            return [OfferEnded(request_id, "aborted", "its consumer gave it up before it was made")]
        if not self._free_guards:
            what = "was refused: too many offers are held"
            denials = self._deny_all(request_id, lease, held.claimants, what)
            return [*denials, OfferEnded(request_id, "aborted", "too many offers are held")]
        held.guard_index = self._free_guards.pop()
        self._offers[lease] = held
        self._lease_of[request_id] = lease
        grants = [self._grant(held, peer) for peer in held.claimants.peers]
        # A consumer that is granted may read at once: the guard must hold before it hears of that.
        return [SetGuard(held.guard_index, lease), *grants]

    def _claim(self, speaker: Speaker, claim: Claim, now: float) -> list[Action]:
        known = self._offers.get(claim.lease) or self._announced.get(claim.lease)
        if known is None or known.request_id != claim.request_id:
            # The engine announces an offer before any router hears of it: what is unknown here will not come.
            return [_denial(speaker.peer_id, claim.request_id, claim.lease, "is over, or was never made")]
        if refusal := known.claimants.claim(speaker, claim):
            return [_denial(speaker.peer_id, claim.request_id, claim.lease, refusal)]
        if isinstance(known, _Announced):
            known.next_word = min(known.next_word, now + self._parked_interval_s)
            return [Send(speaker.peer_id, Parked(claim.request_id, claim.lease))]
        self._renew(known, now)
        return [self._grant(known, speaker.peer_id)]

    def _grant(self, held: _Offer, peer_id: int) -> Action:
        grant = Grant(
            held.request_id,
            held.lease,
            held.guard_index,
            held.num_tokens,
            held.num_ready,
            held.block_ids,
            held.content,
        )
        return Send(peer_id, grant)

    def _extend(self, held: _Offer, block_ids: BlockTables, num_ready: int) -> list[Action]:
        if num_ready <= held.num_ready:
            return []
        ends = [len(table) for table in held.block_ids]
        if held.block_ids != tuple(table[:end] for table, end in zip(block_ids, ends, strict=True)):
            return self._revoke(held, "aborted", "was aborted: its blocks are others now")
        more = tuple(table[end:] for table, end in zip(block_ids, ends, strict=True))
        held.block_ids, held.num_ready = block_ids, num_ready
        progress = Progress(held.request_id, held.lease, num_ready, more)
        return [Send(peer_id, progress) for peer_id in held.claimants.peers]

    def _renew(self, held: _Offer, now: float) -> None:
        if held.is_complete and now < held.renewable_until:
            held.deadline = now + self._config.lease_s

    def _heartbeat(self, peer_id: int, heartbeat: Heartbeat, now: float) -> None:
        for lease in heartbeat.leases:
            held = self._offers.get(lease)
            if held is not None and held.claimants.may_renew(peer_id):
                self._renew(held, now)

    def _release(self, speaker: Speaker, release: Release) -> list[Action]:
        known = self._offers.get(release.lease) or self._announced.get(release.lease)
        if known is None or known.request_id != release.request_id:
            return []
        known.claimants.release(speaker, release)
        return [] if isinstance(known, _Announced) else self._end_if_done(known, "its consumer gave it up")

    def _end_if_done(self, held: _Offer, why_not: str) -> list[Action]:
        """End an offer that every rank of its consumer is done with."""
        if not held.claimants.are_done:
            return []
        if held.claimants.have_everything:
            return self._end(held, "delivered", "was delivered")
        return self._end(held, "aborted", why_not)

    def _deny_all(self, request_id: str, lease: int, claimants: Claimants, what: str) -> list[Action]:
        return [_denial(peer_id, request_id, lease, what) for peer_id in claimants.peers]

    def _revoke(self, held: _Offer, outcome: Literal["aborted", "expired"], what: str) -> list[Action]:
        actions = self._end(held, outcome, what)
        revoke = Revoke(held.request_id, held.lease, f"the offer {what}")
        actions[1:1] = [Send(peer_id, revoke) for peer_id in held.claimants.peers]
        return actions

    def _end(
        self, held: _Offer, outcome: Literal["delivered", "aborted", "expired"], reason: str
    ) -> list[Action]:
        """Close the offer. The guard is cleared first: from then on no copy of its blocks is accepted."""
        del self._offers[held.lease]
        del self._lease_of[held.request_id]
        self._free_guards.append(held.guard_index)
        return [ClearGuard(held.guard_index), OfferEnded(held.request_id, outcome, reason)]


def _denial(peer_id: int, request_id: str, lease: int, what: str) -> Action:
    return Send(peer_id, Deny(request_id, lease, f"the offer {what}"))
