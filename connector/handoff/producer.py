"""The producer's side of the handoff protocol: offers, their guards and their leases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ...transports.errors import KVTransferStateError
from .config import HandoffConfig
from .events import Action, BlockTables, ClearGuard, Disconnect, Identity, OfferEnded, Send, SetGuard
from .messages import (
    PROTOCOL_VERSION,
    Claim,
    ConsumerMessage,
    Deny,
    Grant,
    Heartbeat,
    Hello,
    Release,
    Revoke,
    Welcome,
)

__all__ = ["ProducerProtocol"]

#: In place of a peer id: nobody has claimed the offer.
_NOBODY = -1


@dataclass
class _Offer:
    """An offer that is held. It is *offered* while `claimant` is nobody, else *claimed*."""

    request_id: str
    lease: int
    guard_index: int
    block_ids: BlockTables
    num_tokens: int
    deadline: float
    claimant: int = _NOBODY


@dataclass(frozen=True)
class _Early:
    """What a consumer said about an offer that has not come yet."""

    peer_id: int
    message: Claim | Release
    deadline: float


@dataclass
class _Peer:
    """A connected consumer. Before its `Hello` it has until `hello_deadline`; afterwards, forever."""

    hello_deadline: float

    @property
    def is_ready(self) -> bool:
        return self.hello_deadline == math.inf


class ProducerProtocol:
    """Holds offers until each is delivered, aborted or expired.

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
        self._free_guards = list(range(num_guards))
        self._last_lease = 0
        self._offers: dict[int, _Offer] = {}  # by lease
        self._lease_of: dict[str, int] = {}  # by request
        self._early: dict[int, _Early] = {}  # by lease
        self._peers: dict[int, _Peer] = {}

    @property
    def num_offers(self) -> int:
        """Offers that are held."""
        return len(self._offers)

    # -- orders of this node -------------------------------------------------------------------------

    def offer(
        self, request_id: str, lease: int, block_ids: BlockTables, num_tokens: int, now: float
    ) -> list[Action]:
        """Hold a request's blocks for a consumer. `OfferEnded` follows, exactly once.

        Raises:
            KVTransferStateError: `lease` is not greater than every earlier one, or the request is offered already.
        """
        if lease <= self._last_lease or request_id in self._lease_of:
            raise KVTransferStateError(f"offer {lease} of {request_id!r} after {self._last_lease}")
        self._last_lease = lease
        early = self._early.pop(lease, None)
        skipped = [number for number in self._early if number < lease]
        actions = [action for number in skipped for action in self._forget_early(number, "was never made")]
        if (
            early is not None
            and early.message.request_id == request_id
            and isinstance(early.message, Release)
        ):
            return [*actions, OfferEnded(request_id, "aborted", "its consumer gave it up before it was made")]
        if not self._free_guards:
            if early is not None:
                actions += self._deny(early.peer_id, early.message, "was refused: too many offers are held")
            return [*actions, OfferEnded(request_id, "aborted", "too many offers are held")]
        index = self._free_guards.pop()
        held = _Offer(request_id, lease, index, block_ids, num_tokens, now + self._config.lease_s)
        self._offers[lease] = held
        self._lease_of[request_id] = lease
        actions.append(SetGuard(index, lease))
        if early is not None and isinstance(early.message, Claim):
            actions += self._claim(early.peer_id, early.message, now)
        return actions

    def abort(self, request_id: str, now: float) -> list[Action]:
        """End an offer now. Unknown requests are ignored: the offer may have ended by itself."""
        lease = self._lease_of.get(request_id)
        return [] if lease is None else self._revoke(self._offers[lease], "aborted", "was aborted")

    # -- what happened -------------------------------------------------------------------------------

    def peer_connected(self, peer_id: int, now: float) -> list[Action]:
        """A consumer connected; it must say `Hello` within `connect_timeout_s`."""
        self._peers[peer_id] = _Peer(now + self._config.connect_timeout_s)
        return []

    def peer_lost(self, peer_id: int, now: float) -> list[Action]:
        """A peer is gone: what it had claimed ends. Unknown peers are ignored."""
        if self._peers.pop(peer_id, None) is None:
            return []
        for lease in [lease for lease, early in self._early.items() if early.peer_id == peer_id]:
            # A release stays true when its sender has gone; a claim does not.
            if isinstance(self._early[lease].message, Claim):
                del self._early[lease]
        claimed = [held for held in self._offers.values() if held.claimant == peer_id]
        return [action for held in claimed for action in self._end(held, "aborted", "its consumer was lost")]

    def receive(self, peer_id: int, message: ConsumerMessage, now: float) -> list[Action]:
        """A message came. From a peer that is not (or no longer) connected it is ignored."""
        peer = self._peers.get(peer_id)
        if peer is None:
            return []
        if isinstance(message, Hello):
            peer.hello_deadline = math.inf
            return [Send(peer_id, self._welcome)]
        if not peer.is_ready:
            return [*self.peer_lost(peer_id, now), Disconnect(peer_id)]
        match message:
            case Claim():
                return self._claim(peer_id, message, now)
            case Heartbeat():
                self._renew(peer_id, message, now)
                return []
            case Release():
                return self._release(peer_id, message, now)

    def greet(self, peer_id: int) -> list[Action]:
        """Answer a `Hello` of another version, so that its sender can tell what is wrong."""
        return [Send(peer_id, self._welcome)] if peer_id in self._peers else []

    # -- time ----------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Action]:
        """Do what is due."""
        actions: list[Action] = []
        for held in [held for held in self._offers.values() if held.deadline <= now]:
            actions += self._revoke(
                held, "expired", f"expired {self._config.lease_s} s after its last sign of life"
            )
        for lease in [lease for lease, early in self._early.items() if early.deadline <= now]:
            actions += self._forget_early(lease, "was not made in time")
        for peer_id in [peer_id for peer_id, peer in self._peers.items() if peer.hello_deadline <= now]:
            actions += [*self.peer_lost(peer_id, now), Disconnect(peer_id)]
        return actions

    def next_deadline(self) -> float:
        """When `advance` will have something to do; infinity if never."""
        return min(
            min((held.deadline for held in self._offers.values()), default=math.inf),
            min((early.deadline for early in self._early.values()), default=math.inf),
            min((peer.hello_deadline for peer in self._peers.values()), default=math.inf),
        )

    def shutdown(self, now: float) -> list[Action]:
        """End every offer and drop every peer."""
        actions: list[Action] = []
        for lease in list(self._early):
            actions += self._forget_early(lease, "will not be made: the producer shuts down")
        for held in list(self._offers.values()):
            actions += self._revoke(held, "aborted", "was aborted: the producer shuts down")
        actions += [Disconnect(peer_id) for peer_id in self._peers]
        self._peers.clear()
        return actions

    # -- one offer -----------------------------------------------------------------------------------

    def _claim(self, peer_id: int, claim: Claim, now: float) -> list[Action]:
        if claim.lease > self._last_lease:
            return self._keep_early(peer_id, claim, now)
        held = self._offers.get(claim.lease)
        if held is None or held.request_id != claim.request_id:
            return self._deny(peer_id, claim, "is over, or was never made")
        if held.claimant not in (_NOBODY, peer_id):
            return self._deny(peer_id, claim, "is claimed by another consumer")
        held.claimant = peer_id
        held.deadline = now + self._config.lease_s
        grant = Grant(held.request_id, held.lease, held.guard_index, held.num_tokens, held.block_ids)
        return [Send(peer_id, grant)]

    def _renew(self, peer_id: int, heartbeat: Heartbeat, now: float) -> None:
        for lease in heartbeat.leases:
            held = self._offers.get(lease)
            if held is not None and held.claimant in (_NOBODY, peer_id):
                held.deadline = now + self._config.lease_s

    def _release(self, peer_id: int, release: Release, now: float) -> list[Action]:
        if release.lease > self._last_lease:
            return self._keep_early(peer_id, release, now)
        held = self._offers.get(release.lease)
        if held is None or held.request_id != release.request_id or held.claimant not in (_NOBODY, peer_id):
            return []
        if release.delivered and held.claimant == peer_id:
            return self._end(held, "delivered", "was delivered")
        return self._end(held, "aborted", "its consumer gave it up")

    def _keep_early(self, peer_id: int, message: Claim | Release, now: float) -> list[Action]:
        """Wait for the offer. The first to speak about it is its consumer; he may change a claim into a release."""
        known = self._early.get(message.lease)
        changes = known is not None and known.peer_id == peer_id and isinstance(known.message, Claim)
        if known is not None and not (changes and isinstance(message, Release)):
            return self._deny(peer_id, message, "is claimed by another consumer, or given up")
        if known is None and len(self._early) >= self._config.max_early_claims:
            return self._deny(peer_id, message, "has not been made, and too many others are waited for")
        self._early[message.lease] = _Early(peer_id, message, now + self._config.early_claim_wait_s)
        return []

    def _forget_early(self, lease: int, what: str) -> list[Action]:
        early = self._early.pop(lease)
        return self._deny(early.peer_id, early.message, what)

    def _deny(self, peer_id: int, message: Claim | Release, what: str) -> list[Action]:
        """Answer a claim. A release needs no answer."""
        if not isinstance(message, Claim):
            return []
        return [Send(peer_id, Deny(message.request_id, message.lease, f"the offer {what}"))]

    def _revoke(self, held: _Offer, outcome: Literal["aborted", "expired"], what: str) -> list[Action]:
        actions = self._end(held, outcome, what)
        if held.claimant != _NOBODY:
            revoke = Send(held.claimant, Revoke(held.request_id, held.lease, f"the offer {what}"))
            actions.insert(1, revoke)
        return actions

    def _end(
        self, held: _Offer, outcome: Literal["delivered", "aborted", "expired"], reason: str
    ) -> list[Action]:
        """Close the offer. The guard is cleared first: from then on no copy of its blocks is accepted."""
        del self._offers[held.lease]
        del self._lease_of[held.request_id]
        self._free_guards.append(held.guard_index)
        return [ClearGuard(held.guard_index), OfferEnded(held.request_id, outcome, reason)]
