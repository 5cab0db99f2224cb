"""What happens to each request in a handoff, as events: `kvferry explain` shows them, and `spans` makes spans of them.

The handoff thread passes everything by a `HandoffTrace` on its way: orders of the engine, messages of peers, and the
protocol's actions. The protocol itself knows nothing of it. Messages name a request by the producer's id and a lease, so
a consumer's trace keeps the claims that are under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ...transports.base import Route, TransferEnded
from ...transports.errors import KVTransferError
from ..handoff.events import Action, LoadEnded, OfferCompleted, OfferEnded, Send, StartRead
from ..handoff.messages import (
    Claim,
    Deny,
    Grant,
    Heartbeat,
    Hello,
    Message,
    Parked,
    Progress,
    Release,
    Revoke,
    Welcome,
    decode,
)
from ..stats import HandoffEvent
from .orders import OpenOrder, RequestOrders
from .spans import HandoffSpans

#: Claims whose requests are remembered: more than a node has under way.
_MAX_CLAIMS = 4096


class HandoffTrace:
    """Notes events. Only the handoff thread calls it.

    Args:
        note: Called with each event, if it is to be kept for `kvferry explain`.
        spans: Makes spans of the events, if this process exports them.
    """

    def __init__(
        self, note: Callable[[HandoffEvent], None] | None, spans: HandoffSpans | None = None
    ) -> None:
        self._note_event = note
        self._spans = spans
        # (the producer's request or the rendezvous, lease) → this node's request
        self._claims: dict[tuple[str, int], str] = {}
        self._claim_of: dict[str, tuple[str, int]] = {}  # the inverse
        self._num_rounds: dict[str, int] = {}  # of loads under way

    def _note(self, request_id: str, name: str, **details: str | float) -> None:
        event = HandoffEvent(request_id, time.time(), name, details)
        if self._note_event is not None:
            self._note_event(event)
        if self._spans is not None:
            self._spans.note(event)

    def claim_context(self, request_id: str) -> str:
        """Return the `traceparent` that a request's claim is to carry; empty if this process exports no spans."""
        return "" if self._spans is None else self._spans.claim_context(request_id)

    def ordered(self, orders: RequestOrders) -> None:
        """Note what the engine ordered about one request in a step."""
        request_id = orders.request_id
        traced = {"traceparent": orders.traceparent} if orders.traceparent else {}
        if (announced := orders.announcement) is not None:
            if announced.name:
                self._remember(request_id, (announced.name, announced.lease))
            self._note(request_id, "offer announced", **traced)
        if (offer := orders.offer) is not None:
            num_ready = offer.num_ready if isinstance(offer, OpenOrder) else offer.num_tokens
            self._note(request_id, "offer made", tokens=offer.num_tokens, ready=num_ready)
        if orders.completion is not None:
            self._note(request_id, "prompt computed")
        if orders.abort:
            self._note(request_id, "offer aborted by the engine")
        if (claimed := orders.claim) is not None:
            self._remember(request_id, (claimed.request_id, claimed.lease))
            self._note(
                request_id,
                "claim ordered",
                producer=claimed.engine_id,
                producer_request=claimed.request_id,
                ranks=len(claimed.addresses),
                **traced,
            )
        if orders.load is not None:
            blocks = sum(len(set(group.block_ids) - {0}) for group in orders.load)
            self._note(request_id, "blocks allocated", blocks=blocks)
        if orders.drop:
            self._note(request_id, "load dropped by the engine")

    def received(self, data: bytes, version: int) -> None:
        """Note a message of a peer that speaks this version. One that cannot be read is the protocol's to refuse."""
        try:
            message = decode(data, version)
        except KVTransferError:
            return
        self._about(message, "received")

    def performed(self, action: Action) -> None:
        """Note an action of the protocol."""
        match action:
            case Send(_, message):
                self._about(message, "sent")
            case StartRead():
                number = self._num_rounds[action.request_id] = self._num_rounds.get(action.request_id, 0) + 1
                self._note(
                    action.request_id,
                    "read started",
                    round=number,
                    rank=action.rank,
                    regions=len(action.pairs),
                    bytes=action.pairs.num_bytes,
                    guard=action.guard.index,
                )
            case OfferCompleted(request_id):
                self._note(request_id, "whole offer readable")
            case OfferEnded(request_id, outcome, reason):
                # The guard was cleared by the action before.
                self._note(request_id, f"offer {outcome}", reason=reason)
                self._forget(request_id)
            case LoadEnded(request_id, outcome, error):
                self._note(request_id, f"load {outcome}", **({} if error is None else {"error": str(error)}))
                self._forget(request_id)

    def read_ended(self, read: StartRead, ended: TransferEnded, route: Route) -> None:
        """Note the end of a read, after which its guard was checked."""
        self._note(
            read.request_id,
            "read ended" if ended.error is None else "read failed",
            rank=read.rank,
            bytes=ended.num_bytes,
            ms=round(ended.seconds * 1e3, 3),
            transport=route.scheme,
            mechanism=ended.mechanism,
            guard="held" if ended.error is None else str(ended.error),
        )

    def _about(self, message: Message, way: str) -> None:
        if isinstance(message, Hello | Welcome | Heartbeat):
            return  # about no request
        # A producer's own requests are among them only by the name of a rendezvous; others keep their id.
        request_id = self._claims.get((message.request_id, message.lease), message.request_id)
        match message:
            case Claim(rank=rank, num_ranks=num_ranks, traceparent=traceparent):
                # The sender has noted its context already, when it ordered the claim.
                traced = {"traceparent": traceparent} if traceparent and way == "received" else {}
                self._note(request_id, f"claim {way}", consumer_rank=rank, ranks=num_ranks, **traced)
            case Parked():
                self._note(request_id, f"claim parked, {way}")
            case Grant(guard_index=guard, num_tokens=num_tokens, num_ready=num_ready):
                self._note(request_id, f"grant {way}", guard=guard, tokens=num_tokens, ready=num_ready)
            case Progress(num_ready=num_ready):
                self._note(request_id, f"progress {way}", ready=num_ready)
            case Deny(reason=reason):
                self._note(request_id, f"denial {way}", reason=reason)
            case Revoke(reason=reason):
                self._note(request_id, f"revocation {way}", reason=reason)
            case Release(delivered=delivered, rank=rank):
                self._note(request_id, f"release {way}", delivered=int(delivered), consumer_rank=rank)

    def _remember(self, request_id: str, claim: tuple[str, int]) -> None:
        self._forget(request_id)  # an id may be used again
        self._claims[claim] = request_id
        self._claim_of[request_id] = claim
        if len(self._claim_of) > _MAX_CLAIMS:
            # A claim that was dropped before its load was ordered has no end that would be seen here.
            self._forget(next(iter(self._claim_of)))

    def _forget(self, request_id: str) -> None:
        self._num_rounds.pop(request_id, None)
        if (claim := self._claim_of.pop(request_id, None)) is not None:
            self._claims.pop(claim, None)
