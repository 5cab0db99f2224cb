"""The producer's side of the handoff protocol: offers, their guards and their leases.

In come the engine's orders, messages of consumers, losses of peers, and the time. Out go actions: messages,
guards to set and to clear, and the end of each offer.

What must never break: the guard of an offer is cleared before its end is reported, because after that the
engine writes other bytes into the blocks. Every offer ends, at the latest with its lease, and its end comes
once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from ...transports.errors import KVTransferStateError
from .config import HandoffConfig
from .events import (
    Action,
    BlockTables,
    ClaimUnmet,
    ClearGuard,
    Disconnect,
    ExtendGuard,
    Identity,
    OfferEnded,
    Send,
    SetGuard,
)
from .messages import (
    Claim,
    ConsumerMessage,
    Deny,
    Grant,
    Heartbeat,
    Hello,
    Parked,
    ProducerMessage,
    Release,
    Revoke,
    Welcome,
)
from .offers import ConsumerPeer, Offer, OfferState


@dataclass
class _Peer:
    """A connected peer.

    Attributes:
        hello_deadline: When its `Hello` must have come; infinity once it has.
        consumer: Which node it is of; None before its `Hello`.
        version: The version of the protocol that it speaks with us, once its `Hello` has come.
    """

    hello_deadline: float
    version: int
    consumer: ConsumerPeer | None = None


class ProducerProtocol:
    """Holds offers until each is delivered, aborted or expired.

    All ranks of a consumer read an offer, each for itself, and so do those of further consumers if it is for
    more loads. It is delivered when each rank has what it wanted. A rank that is lost ends its own share
    only; the others read on.

    An offer's guard is set when the offer is made (`_make`) and cleared when it ends (`_end`), nowhere else.

    Every method takes `now`, in seconds of any monotonic clock, and returns actions to be done in order.

    Args:
        identity: This node.
        num_guards: Offers that can be held at once. One more ends at once, as aborted.
    """

    def __init__(self, identity: Identity, config: HandoffConfig, num_guards: int) -> None:
        self._welcome = _welcome_of(identity)
        self.layout = identity.layout
        self.spoken = identity.spoken
        self._config = config
        self._free_guards = list(range(num_guards))
        self._offers: dict[int, Offer] = {}  # by lease
        self._lease_of: dict[str, int] = {}  # by request; of the offers that are made
        self._peers: dict[int, _Peer] = {}
        self._past: dict[int, str] = {}  # by lease; rendezvous that are over, the oldest first: why

    @property
    def offers(self) -> tuple[Offer, ...]:
        """All offers that have not ended. Only this protocol may change them."""
        return tuple(self._offers.values())

    @property
    def num_offers(self) -> int:
        """Offers that are held under a guard."""
        return len(self._lease_of)

    @property
    def num_announced(self) -> int:
        """Offers that are still to be made."""
        return len(self._offers) - len(self._lease_of) - self.num_awaited

    @property
    def num_awaited(self) -> int:
        """Rendezvous that were claimed and whose request has not arrived."""
        return sum(offer.state is OfferState.AWAITED for offer in self._offers.values())

    # -- orders of this node -------------------------------------------------------------------------

    def announce(
        self, request_id: str, lease: int, name: str = "", now: float = 0.0, num_loads: int = 1
    ) -> list[Action]:
        """Expect an offer of this request under this lease number. From now on claims of it are parked.

        `offer`, `open` or `withdraw` follows.

        Args:
            name: Of a rendezvous, which peers may have claimed already; empty: it is none.
            num_loads: Loads after which the offer is over; 1 in a rendezvous.

        Raises:
            KVTransferStateError: the number is in use.
        """
        awaited = self._offers.get(lease)
        if awaited is not None and name and awaited.state is OfferState.AWAITED and awaited.name == name:
            awaited.announce(request_id, now)
            return []
        if awaited is not None:
            raise KVTransferStateError(f"lease number of {request_id!r} is in use")
        self._offers[lease] = Offer(request_id, lease, self._config, name, num_loads)
        return []

    def offer(
        self,
        request_id: str,
        lease: int,
        block_ids: BlockTables,
        num_tokens: int,
        now: float,
        content: str = "",
        guard_value: int = 0,
    ) -> list[Action]:
        """Hold a finished request's blocks for a consumer. `OfferEnded` follows, exactly once.

        Args:
            content: What a consumer compares with its own prompt; see `Grant`.
            guard_value: A number that no other offer ever has; 0: the lease number is one.

        Raises:
            KVTransferStateError: the number is that of another offer, or the request is offered already.
        """
        offer = self._new_offer(request_id, lease)
        grant = self._grant_of(offer, block_ids, num_tokens, num_tokens, content, guard_value)
        if grant is None:
            return self._refuse(offer)
        offer.offer(grant, now)
        return self._make(offer)

    def open(
        self,
        request_id: str,
        lease: int,
        block_ids: BlockTables,
        num_tokens: int,
        num_ready: int,
        content: str = "",
        guard_value: int = 0,
    ) -> list[Action]:
        """Let a consumer read a request's blocks while its prompt is still being computed.

        `OfferEnded` follows, exactly once.

        No lease runs before `complete`. The blocks are the engine's until then: it calls `abort` before it
        reuses them.

        Args:
            block_ids: The block tables so far.
            num_tokens: Tokens that will be offered in the end.
            num_ready: Tokens whose keys and values are computed.
            content, guard_value: As for `offer`.

        Raises:
            KVTransferStateError: as for `offer`.
        """
        offer = self._new_offer(request_id, lease)
        grant = self._grant_of(offer, block_ids, num_tokens, num_ready, content, guard_value)
        if grant is None:
            return self._refuse(offer)
        offer.open(grant)
        return self._make(offer)

    def extend(self, request_id: str, block_ids: BlockTables, num_ready: int) -> list[Action]:
        """Note that more tokens of an open offer are ready, and inform its claimants.

        Unknown requests are ignored, because the offer may have ended by itself. Block tables that are not
        the known ones with blocks added end the offer.
        """
        offer = self._made(request_id)
        return [] if offer is None else self._extend(offer, block_ids, num_ready)

    def complete(self, request_id: str, block_ids: BlockTables, now: float) -> list[Action]:
        """Note that the request of an open offer has finished: all tokens are ready, and the lease runs.

        Unknown requests and other block tables are treated as by `extend`.
        """
        offer = self._made(request_id)
        if offer is None or offer.state is not OfferState.OPEN:
            return []
        offer.complete(now)
        return self._extend(offer, block_ids, offer.granted.num_tokens)

    def withdraw(self, lease: int) -> list[Action]:
        """Deny the claims of an announced offer that will never be made. Other numbers are ignored."""
        offer = self._offers.get(lease)
        if offer is None or offer.state is not OfferState.ANNOUNCED:
            return []
        return self._deny(offer, "was never made: its request ended, or lost its blocks")

    def give_up(self, request_id: str, lease: int) -> list[Action]:
        """End an offer for which no consumer will come, as a router says that tried one.

        Where a consumer reads, that consumer decides, and no further one is expected. Unknown offers are
        ignored. In a rendezvous `request_id` is its name; if its request has not arrived, claims of it are
        denied.
        """
        offer = self._offers.get(lease)
        if offer is None or offer.known_as != request_id:
            return []
        if offer.state is OfferState.AWAITED:
            return self._deny(offer, "was given up by the router")
        if not offer.is_made:
            return []
        offer.claimants.expect_no_more()
        if offer.claimants.peers or offer.claimants.are_done:
            return self._end_if_done(offer, "its consumer gave it up")
        return self._end(offer, "aborted", "was given up: no consumer could claim it")

    def abort(self, request_id: str, now: float) -> list[Action]:
        """End an offer now. Unknown requests are ignored, because the offer may have ended by itself."""
        offer = self._made(request_id)
        return [] if offer is None else self._revoke(offer, "aborted", "was aborted")

    # -- what happened -------------------------------------------------------------------------------

    def guard_failed(self, index: int, why: str) -> list[Action]:
        """End the offer of a `SetGuard` that failed: no consumer could check what it reads."""
        offers = [offer for offer in self.offers if offer.grant and offer.grant.guard_index == index]
        return [
            action for offer in offers for action in self._revoke(offer, "aborted", f"was aborted: {why}")
        ]

    def peer_connected(self, peer_id: int, now: float) -> list[Action]:
        """Expect a `Hello` of this peer within `connect_timeout_s`."""
        self._peers[peer_id] = _Peer(now + self._config.connect_timeout_s, self.spoken[-1])
        return []

    def peer_lost(self, peer_id: int, now: float) -> list[Action]:
        """End what a peer that is gone had claimed. Unknown peers are ignored."""
        if self._peers.pop(peer_id, None) is None:
            return []
        lost = [offer for offer in self.offers if offer.lose(peer_id) and offer.is_made]
        return [action for offer in lost for action in self._end_if_done(offer, "its consumer was lost")]

    def receive(self, peer_id: int, message: ConsumerMessage, now: float) -> list[Action]:
        """Handle a message. One from a peer that is not (or no longer) connected is ignored."""
        peer = self._peers.get(peer_id)
        if peer is None:
            return []
        if isinstance(message, Hello):
            if peer.consumer is None:
                peer.hello_deadline = math.inf
                peer.consumer = ConsumerPeer(peer_id, message.engine_id, message.epoch)
                peer.version = message.version
            return self._answer_hello(peer_id, peer.version)
        if peer.consumer is None:
            return [*self.peer_lost(peer_id, now), Disconnect(peer_id)]
        match message:
            case Claim():
                return self._claim(peer.consumer, message, now)
            case Heartbeat():
                self._heartbeat(peer_id, message, now)
                return []
            case Release():
                return self._release(peer.consumer, message)

    def answer_hello(self, peer_id: int, version: int) -> list[Action]:
        """Answer a `Hello` of a version that we do not speak with the nearest one that we do.

        A newer peer can say hello again in that version; an older one can report that it must be upgraded.
        """
        if peer_id not in self._peers:
            return []
        return self._answer_hello(peer_id, min(max(version, self.spoken[0]), self.spoken[-1]))

    def version_with(self, peer_id: int) -> int | None:
        """The version of the protocol that a consumer speaks with us; None before its `Hello`, and for
        unknown peers.
        """
        peer = self._peers.get(peer_id)
        return None if peer is None or peer.consumer is None else peer.version

    # -- time ----------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Action]:
        """Do what is due."""
        actions: list[Action] = []
        for offer in [offer for offer in self.offers if offer.deadline <= now]:
            if offer.is_unmet(now):
                actions += self._give_up_waiting(offer)
            elif offer.is_unfinished:
                parked = Parked(offer.known_as, offer.lease)
                actions += self._send_to(offer.claimants.peers, parked)
                offer.next_answer(now)
            else:
                actions += self._revoke(offer, "expired", offer.lateness(now))
        for peer_id in [peer_id for peer_id, peer in self._peers.items() if peer.hello_deadline <= now]:
            actions += [*self.peer_lost(peer_id, now), Disconnect(peer_id)]
        return actions

    def next_deadline(self) -> float:
        """When `advance` will have something to do; infinity if never."""
        return min(
            min((offer.deadline for offer in self._offers.values()), default=math.inf),
            min((peer.hello_deadline for peer in self._peers.values()), default=math.inf),
        )

    def shutdown(self, now: float) -> list[Action]:
        """End every offer and drop every peer."""
        return self._end_all("the producer shuts down")

    def begin_anew(self, identity: Identity, why: str) -> list[Action]:
        """End every offer, drop every peer, and answer from now on as `identity`: the same node, perhaps with
        another digest.

        Consumers compare digests once per connection, so those that come back compare the new one.
        """
        self._welcome = _welcome_of(identity)
        return self._end_all(why)

    def _end_all(self, why: str) -> list[Action]:
        actions: list[Action] = []
        for offer in self.offers:
            if not offer.is_made:
                actions += self._deny(offer, f"will not be made: {why}")
            else:
                actions += self._revoke(offer, "aborted", f"was aborted: {why}")
        # After the offers: a peer that is disconnected would not get its `Deny` or `Revoke`.
        actions += [Disconnect(peer_id) for peer_id in self._peers]
        self._peers.clear()
        return actions

    # -- one offer -----------------------------------------------------------------------------------

    def _made(self, request_id: str) -> Offer | None:
        lease = self._lease_of.get(request_id)
        return None if lease is None else self._offers[lease]

    def _new_offer(self, request_id: str, lease: int) -> Offer:
        """Find or begin the record of an offer that is made now.

        Raises:
            KVTransferStateError: the number is that of another offer, or the request is offered already.
        """
        offer = self._offers.get(lease) or Offer(request_id, lease, self._config)
        if offer.is_made or offer.request_id != request_id or request_id in self._lease_of:
            raise KVTransferStateError(
                f"request {request_id!r} cannot be offered: it is offered already, or its lease number is in use"
            )
        self._offers[lease] = offer
        return offer

    def _grant_of(
        self,
        offer: Offer,
        block_ids: BlockTables,
        num_tokens: int,
        num_ready: int,
        content: str,
        guard_value: int,
    ) -> Grant | None:
        """Take a guard for an offer.

        None: it ends before it is made, because it is unwanted or no guard is free.
        """
        if self._is_unwanted(offer) or not self._free_guards:
            return None
        index = self._free_guards.pop()
        return Grant(
            offer.known_as, offer.lease, index, num_tokens, num_ready, block_ids, content, guard_value
        )

    def _refuse(self, offer: Offer) -> list[Action]:
        """End an offer that cannot be made. It never had a guard, so there is none to clear."""
        if self._is_unwanted(offer):
            why = "its consumer gave it up before it was made"
        else:
            why = "too many offers are held"
        denials = self._deny(offer, f"was refused: {why}")
        return [*denials, OfferEnded(offer.request_id, "aborted", why)]

    def _is_unwanted(self, offer: Offer) -> bool:
        """Whether no consumer will come: every rank of it is done, or was denied because the request came too
        late.
        """
        return offer.claimants.are_done or (offer.name != "" and offer.lease in self._past)

    def _make(self, offer: Offer) -> list[Action]:
        """Set the guard of an offer and grant it to the claims that were parked."""
        self._lease_of[offer.request_id] = offer.lease
        grants = self._send_to(offer.claimants.peers, offer.granted)
        # A consumer may read as soon as it has a grant, so the guard must be set before the grant is sent.
        value = offer.granted.guard_value or offer.lease
        granted = offer.granted
        return [SetGuard(granted.guard_index, value, offer.request_id, granted.block_ids), *grants]

    def _claim(self, peer: ConsumerPeer, claim: Claim, now: float) -> list[Action]:
        offer = self._named(claim)
        if offer is None and claim.rendezvous:
            if refusal := self._cannot_wait(claim):
                unmet = ClaimUnmet(claim.request_id, refusal)
                return [unmet, *self._send_to([peer.peer_id], _denial(claim, refusal))]
            offer = self._offers[claim.lease] = Offer("", claim.lease, self._config, claim.request_id)
            offer.await_request(now + self._config.rendezvous_wait_s)
        if offer is None:
            # The engine announces an offer before any router can know it. So an unknown number will never be
            # offered here, and there is no reason to park its claim.
            return self._send_to([peer.peer_id], _denial(claim, "is over, or was never made"))
        if refusal := offer.claim(peer, claim, now):
            return self._send_to([peer.peer_id], _denial(claim, refusal))
        if not offer.is_made:
            return self._send_to([peer.peer_id], Parked(claim.request_id, claim.lease))
        return self._send_to([peer.peer_id], offer.granted)

    def _cannot_wait(self, claim: Claim) -> str:
        """Why a claim is not kept until its request arrives; empty if it is."""
        if past := self._past.get(claim.lease):
            return past
        if claim.lease in self._offers:
            return "has another name"
        if self.num_awaited >= self._config.max_rendezvous:
            return f"cannot be waited for: max_rendezvous={self._config.max_rendezvous} other claims wait already"
        return ""

    def _give_up_waiting(self, offer: Offer) -> list[Action]:
        """Deny the claims of a rendezvous whose request should have arrived."""
        why = (
            f"was not made: no request named it within {self._config.rendezvous_wait_s:g} s of the claim; did the router "
            "send the prefill request to this node?"
        )
        unmet = [ClaimUnmet(offer.name, why)] if offer.claimants.peers else []
        return [*unmet, *self._deny(offer, why)]

    def _forget(self, offer: Offer, why: str) -> None:
        """Drop an offer that is over.

        A late claim of a rendezvous is denied at once, and does not wait for its request.
        """
        del self._offers[offer.lease]
        if offer.name:
            if len(self._past) >= self._config.max_rendezvous:
                del self._past[next(iter(self._past))]
            self._past[offer.lease] = why

    def _extend(self, offer: Offer, block_ids: BlockTables, num_ready: int) -> list[Action]:
        try:
            progress = offer.extend(block_ids, num_ready)
        except KVTransferStateError:
            return self._revoke(offer, "aborted", "was aborted: its request has other blocks now")
        if progress is None:
            return []
        # Before a consumer knows of the blocks, because it may read them at once.
        extended = ExtendGuard(offer.granted.guard_index, block_ids)
        return [extended, *self._send_to(offer.claimants.peers, progress)]

    def _heartbeat(self, peer_id: int, heartbeat: Heartbeat, now: float) -> None:
        for lease in heartbeat.leases:
            offer = self._offers.get(lease)
            # Only the consumer's own heartbeats count. Otherwise any peer that learned a number could keep an
            # offer alive whose consumer is gone.
            if offer is not None and offer.claimants.may_renew(peer_id):
                offer.renew(now)

    def _release(self, peer: ConsumerPeer, release: Release) -> list[Action]:
        offer = self._named(release)
        if offer is None:
            return []
        offer.release(peer, release)
        # An announced offer ends when it is made: only then is the engine owed an end.
        return self._end_if_done(offer, "its consumer gave it up") if offer.is_made else []

    def _named(self, message: Claim | Release) -> Offer | None:
        """The offer that a message is about.

        The request must fit as well, so that a stale message changes nothing.
        """
        offer = self._offers.get(message.lease)
        if offer is None or offer.known_as != message.request_id:
            return None
        # A consumer that claims without the mark does not expect what a rendezvous grants.
        return offer if not offer.name or not isinstance(message, Claim) or message.rendezvous else None

    def _end_if_done(self, offer: Offer, why_not: str) -> list[Action]:
        """End an offer if all its loads are over."""
        if not offer.claimants.are_done:
            return []
        if offer.claimants.have_everything:
            return self._end(offer, "delivered", "was delivered")
        return self._end(offer, "aborted", why_not)

    def _deny(self, offer: Offer, what: str) -> list[Action]:
        """End an offer that was not made, and deny its claims. Its end is not reported."""
        self._forget(offer, what)
        offer.end()
        return self._send_to(offer.claimants.peers, _denial(offer, what))

    def _revoke(self, offer: Offer, outcome: Literal["aborted", "expired"], what: str) -> list[Action]:
        """End an offer before its consumer is done, and send a `Revoke` to the ranks that read."""
        actions = self._end(offer, outcome, what)
        revoke = Revoke(offer.known_as, offer.lease, f"the offer {what}")
        # The guard first: bytes that a consumer reads while the message is in flight must not count.
        return [*actions[:1], *self._send_to(offer.claimants.peers, revoke), *actions[1:]]

    def _end(
        self, offer: Offer, outcome: Literal["delivered", "aborted", "expired"], reason: str
    ) -> list[Action]:
        """End an offer that was made: the one place where a guard is cleared and freed.

        Returns:
            `ClearGuard`, then `OfferEnded`. `OfferEnded` lets the engine reuse the blocks. From the moment
            when the guard is clear no consumer accepts what it copies, so this order is what keeps another
            request's bytes from being taken for this one's.
        """
        self._forget(offer, "is over")
        del self._lease_of[offer.request_id]
        index = offer.granted.guard_index
        # The word can be given to another offer at once: a read that still goes on under it looks for this
        # lease number, which no other offer ever has.
        self._free_guards.append(index)
        offer.end()
        return [ClearGuard(index), OfferEnded(offer.request_id, outcome, reason)]

    def _answer_hello(self, peer_id: int, version: int) -> list[Action]:
        return [Send(peer_id, replace(self._welcome, version=version), version)]

    def _send_to(self, peers: Iterable[int], message: ProducerMessage) -> list[Action]:
        return [Send(peer_id, message, self._peers[peer_id].version) for peer_id in peers]


def _welcome_of(identity: Identity) -> Welcome:
    return Welcome(
        identity.spoken[-1],
        identity.engine_id,
        identity.epoch,
        identity.digest,
        identity.fields,
        identity.layout.to_plain(),
        identity.release,
    )


def _denial(claimed: Claim | Offer, what: str) -> Deny:
    name = claimed.request_id if isinstance(claimed, Claim) else claimed.known_as
    return Deny(name, claimed.lease, f"the offer {what}")
