"""The spans of a handoff: `kvferry explain` shows them, and a host that has set up OpenTelemetry's SDK
exports them.

The handoff thread passes everything by a `HandoffTrace` on its way: orders of the engine, messages of peers,
and the protocol's actions. The protocol itself knows nothing of it. The spans of one request, by the half of
the handoff that this node has:

    producer   offer     from the offer until its end
               grant     from the arrival of a claim until its answer; its parent is the consumer's claim
    consumer   claim     from the order to claim until every rank of the producer has answered
               load      from the allocation of the blocks until the load's end
               read      one round of the load from one rank; its parent is the load

The parent of `offer`, `claim` and `load` is the span whose `traceparent` came with the request. What else
happens is an event of the span that is open.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from ...transports.base import Route, TransferEnded
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
)
from ..spans import Keep, Span
from ..stats import TransferRecord
from .orders import OpenOrder, RequestOrders

#: Spans that are open at once, and requests and claims that are remembered: more than a node has under way. A
#: claim that was dropped before its load was ordered has no end that would be seen here.
_MAX_OPEN = 4096

#: The name of a span, its request, and for a grant or a read the rank at the other side.
_Key = tuple[str, ...]


class HandoffTrace:
    """Makes the spans. Only the handoff thread calls it.

    Messages name a request by the producer's id and a lease, so a consumer's trace keeps the claims that are
    under way.

    Args:
        keep: Called with each span that has ended, for `kvferry explain`. None: spans are only exported.
        rank: This process's rank in its node.
    """

    def __init__(self, keep: Keep | None, rank: int) -> None:
        self._keep = keep
        self._rank = rank
        self._open: OrderedDict[_Key, Span] = OrderedDict()
        self._parents: OrderedDict[str, str] = OrderedDict()  # by request: the traceparent that came with it
        # (the producer's request or the rendezvous, lease) → this node's request
        self._claims: dict[tuple[str, int], str] = {}
        self._claim_of: dict[str, tuple[str, int]] = {}  # the inverse
        self._num_unanswered: dict[str, int] = {}  # by request that claims: ranks of the producer
        self._num_rounds: dict[str, int] = {}  # by request that loads

    def claim_context(self, request_id: str) -> str:
        """Return the `traceparent` that a request's claim is to carry; empty if this process exports no
        spans.
        """
        span = self._open.get(("claim", request_id))
        return "" if span is None else span.traceparent

    def ordered(self, orders: RequestOrders) -> None:
        """Note what the engine ordered about one request in a step."""
        request_id = orders.request_id
        if orders.traceparent:
            self._parents[request_id] = orders.traceparent
            if len(self._parents) > _MAX_OPEN:
                self._parents.popitem(last=False)
        if (announced := orders.announcement) is not None and announced.name:
            self._remember(request_id, (announced.name, announced.lease))
            self._take_over_grants(announced.name, request_id)
        if (offer := orders.offer) is not None:
            ready = offer.num_ready if isinstance(offer, OpenOrder) else offer.num_tokens
            self._begin(("offer", request_id), {"tokens": offer.num_tokens, "ready": ready})
        if orders.completion is not None:
            self._note(("offer", request_id), "prompt computed")
        if orders.abort:
            self._note(("offer", request_id), "aborted by the engine")
        if (claimed := orders.claim) is not None:
            self._remember(request_id, (claimed.request_id, claimed.lease))
            names = {"producer": claimed.engine_id, "producer_request": claimed.request_id}
            self._begin(("claim", request_id), names)
            self._num_unanswered[request_id] = len(claimed.addresses)
        if orders.load is not None:
            self._begin(("load", request_id))
        if orders.drop:
            self._end(("claim", request_id), "dropped")

    def received(self, message: Message) -> None:
        """Note a message of a peer."""
        self._about(message, is_sent=False)

    def performed(self, action: Action) -> None:
        """Note an action of the protocol."""
        match action:
            case Send(_, message):
                self._about(message, is_sent=True)
            case StartRead(request_id=request_id, rank=rank, pairs=pairs):
                number = self._num_rounds[request_id] = self._num_rounds.get(request_id, 0) + 1
                figures = {"round": number, "regions": len(pairs)}
                self._begin(("read", request_id, str(rank)), figures, self._open.get(("load", request_id)))
            case OfferCompleted(request_id):
                self._note(("load", request_id), "whole offer readable")
            case OfferEnded(request_id, outcome, reason):
                # The guard was cleared by the action before.
                failure = reason if outcome == "expired" else ""
                self._end(("offer", request_id), outcome, failure, reason=reason)
                self._forget(request_id)

    def read_ended(self, read: StartRead, ended: TransferEnded, route: Route) -> None:
        """Note the end of a read, after which its guard was checked."""
        failure = "" if ended.error is None else str(ended.error)
        self._end(
            ("read", read.request_id, str(read.rank)),
            "failed" if failure else "read",
            failure,
            transport=route.scheme,
            mechanism=ended.mechanism,
            bytes=ended.num_bytes,
            seconds=ended.seconds,
            guard=failure or "held",
        )

    def load_ended(self, ended: LoadEnded, figures: TransferRecord) -> None:
        """Note the end of a load, with the figures that the metrics have of it."""
        request_id, failure = ended.request_id, "" if ended.error is None else str(ended.error)
        if (span := self._open.get(("load", request_id))) is not None:
            span.set(
                transport=figures.transport,
                mechanism=figures.mechanism,
                reason=figures.reason,
                blocks=figures.num_blocks,
                regions=figures.num_regions,
                bytes=figures.num_bytes,
                rounds=self._num_rounds.get(request_id, 0),
                seconds=figures.seconds,
                exposed_seconds=figures.exposed_seconds,
            )
        for name in ("load", "claim"):
            self._end((name, request_id), ended.outcome, failure)
        self._forget(request_id)

    def _about(self, message: Message, *, is_sent: bool) -> None:
        if isinstance(message, Hello | Welcome | Heartbeat):
            return  # about no request
        # A producer's own requests are among them only by the name of a rendezvous; others keep their id.
        request_id = self._claims.get((message.request_id, message.lease), message.request_id)
        offer, claim, load = ("offer", request_id), ("claim", request_id), ("load", request_id)
        ours = load if load in self._open else claim
        match message:
            case Claim(rank=rank) if is_sent:
                self._note(claim, "claim sent", consumer_rank=rank)
            case Claim(rank=rank, num_ranks=ranks, traceparent=traceparent):
                # If the consumer does not trace, the answer to its claim belongs to this node's request.
                self._begin(("grant", request_id, str(rank)), {"ranks": ranks}, traceparent=traceparent)
            case Parked():
                self._note(
                    self._first_grant(request_id) if is_sent else claim,
                    "claim parked until the offer is made",
                )
            case Grant(num_tokens=tokens, num_ready=ready) if is_sent:
                self._end(
                    self._first_grant(request_id),
                    "granted",
                    tokens=tokens,
                    ready=ready,
                    guard=message.guard_index,
                )
            case Grant(num_tokens=tokens, num_ready=ready):
                self._num_unanswered[request_id] = self._num_unanswered.get(request_id, 1) - 1
                if self._num_unanswered[request_id] <= 0:
                    self._end(claim, "granted", tokens=tokens, ready=ready, guard=message.guard_index)
            case Deny(reason=reason) if is_sent:
                self._end(self._first_grant(request_id), "denied", reason=reason)
            case Deny(reason=reason):
                self._end(claim, "denied", reason, reason=reason)
            case Progress(num_ready=ready):
                self._note(offer if is_sent else ours, "progress", ready=ready)
            case Revoke(reason=reason):
                self._note(offer if is_sent else ours, "offer revoked", reason=reason)
            case Release(delivered=delivered, rank=rank):
                details = {"delivered": int(delivered), "consumer_rank": rank}
                self._note(ours if is_sent else offer, "release", **details)

    def _first_grant(self, request_id: str) -> _Key:
        """Return the claim that an answer is about: it does not name the consumer's rank, and the oldest
        claim is answered first.
        """
        return next((key for key in self._open if key[:2] == ("grant", request_id)), ("grant",))

    def _take_over_grants(self, name: str, request_id: str) -> None:
        """Give a request the spans of its rendezvous's claims that came before it did, which only know the
        rendezvous.
        """
        for key in [key for key in self._open if key[:2] == ("grant", name)]:
            span = self._open.pop(key)
            span.request_id = request_id
            self._open["grant", request_id, key[2]] = span

    # -- spans --------------------------------------------------------------------------------------

    def _begin(
        self,
        key: _Key,
        attributes: Mapping[str, str | float] | None = None,
        parent: Span | None = None,
        traceparent: str = "",
    ) -> None:
        self._end(key, "unknown")  # a request id that is used again, or a claim that was repeated
        name, request_id = key[:2]
        if parent is None:
            traceparent = traceparent or self._parents.get(request_id, "")
        span = Span(name, self._keep, request_id, parent=parent, traceparent=traceparent)
        span.set(**(attributes or {}), **({"peer_rank": int(key[2])} if len(key) > 2 else {}))
        self._open[key] = span
        if len(self._open) > _MAX_OPEN:
            self._end(next(iter(self._open)), "unknown")

    def _note(self, key: _Key, event: str, **details: str | float) -> None:
        if (span := self._open.get(key)) is not None:
            span.note(event, **details)

    def _end(self, key: _Key, outcome: str, failure: str = "", **attributes: str | float) -> None:
        if key[0] == "claim":
            self._num_unanswered.pop(key[1], None)
        if (span := self._open.pop(key, None)) is None:
            return
        span.set(outcome=outcome, request_id=span.request_id, rank=self._rank, **attributes)
        if failure:
            span.fail(failure)
        span.end()

    # -- claims -------------------------------------------------------------------------------------

    def _remember(self, request_id: str, claim: tuple[str, int]) -> None:
        self._forget(request_id)  # an id may be used again
        self._claims[claim] = request_id
        self._claim_of[request_id] = claim
        if len(self._claim_of) > _MAX_OPEN:
            self._forget(next(iter(self._claim_of)))

    def _forget(self, request_id: str) -> None:
        self._num_rounds.pop(request_id, None)
        if (claim := self._claim_of.pop(request_id, None)) is not None:
            self._claims.pop(claim, None)
