"""OpenTelemetry spans of handoffs, made of the events that `HandoffTrace` notes.

A host that sets up OpenTelemetry's SDK gets them, and no other host pays anything: without the SDK's tracer provider nothing
of OpenTelemetry is imported or called here. The spans of one request, by the half of the handoff that this node has:

    producer   offer     from the offer until its end
               grant     from the arrival of a claim until its answer; its parent is the consumer's claim
    consumer   claim     from the order to claim until every rank of the producer has answered
               load      from the allocation of the blocks until the load's end
               read      one round of the load from one rank; its parent is the load

The parent of `offer`, `claim` and `load` is the span whose `traceparent` came with the request.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

from ..stats import HandoffEvent

#: Spans that are open at once, and requests whose context is known. More than a node has under way.
_MAX_OPEN: Final = 4096

_END_OF_OFFER: Final = {f"offer {outcome}": outcome for outcome in ("delivered", "aborted", "expired")}
_END_OF_LOAD: Final = {f"load {outcome}": outcome for outcome in ("loaded", "failed", "dropped")}
_END_OF_READ: Final = ("read ended", "read failed")


def active_tracer() -> Any | None:
    """Return OpenTelemetry's tracer for kvferry; None if the host of this process has not set up the SDK."""
    api, sdk = sys.modules.get("opentelemetry.trace"), sys.modules.get("opentelemetry.sdk.trace")
    if api is None or sdk is None or not isinstance(api.get_tracer_provider(), sdk.TracerProvider):
        return None
    return api.get_tracer("kvferry")


def send_spans(timeout_s: float) -> None:
    """Export the spans that have ended and were not sent yet; for a process that ends without its exit handlers."""
    if active_tracer() is not None:
        sys.modules["opentelemetry.trace"].get_tracer_provider().force_flush(int(timeout_s * 1e3))


def traceparent_of_span(span: Any) -> str:
    """Return the `traceparent` that names a span of OpenTelemetry."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def context_of_traceparent(traceparent: str) -> Any:
    """Return OpenTelemetry's context for a valid `traceparent`; an empty one gives an empty context, for a new trace."""
    from opentelemetry import trace
    from opentelemetry.context import Context

    if not traceparent:
        return Context()
    _, trace_id, span_id, flags = traceparent.split("-")
    remote = trace.SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=trace.TraceFlags(int(flags, 16))
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(remote), Context())


class HandoffSpans:
    """Turns events into spans. Only the handoff thread calls it.

    Args:
        tracer: OpenTelemetry's.
        rank: This process's rank in its node.
    """

    def __init__(self, tracer: Any, rank: int) -> None:
        self._tracer = tracer
        self._rank = rank
        self._parents: OrderedDict[str, str] = OrderedDict()  # by request: the traceparent that came with it
        self._open: OrderedDict[tuple[str, ...], Any] = OrderedDict()  # by kind, request and further names
        self._num_unanswered: dict[str, int] = {}  # ranks of the producer, by request that claims
        self._exposed_since: dict[str, float] = {}  # by request that loads
        self._read: dict[str, dict[str, Any]] = {}  # by request that loads: what its reads moved

    def claim_context(self, request_id: str) -> str:
        """Return the `traceparent` of a request's claim, for the producer; empty if it makes none."""
        span = self._open.get(("claim", request_id))
        return "" if span is None else traceparent_of_span(span)

    def note(self, event: HandoffEvent) -> None:
        """Begin, extend or end the spans that an event is about."""
        request_id, details = event.request_id, dict(event.details)
        if traceparent := str(details.pop("traceparent", "")):
            if event.name == "claim received":
                self._begin(event, ("grant", request_id, str(details["consumer_rank"])), traceparent, details)
                return
            self._parents[request_id] = traceparent
            if len(self._parents) > _MAX_OPEN:
                self._parents.popitem(last=False)
        parent = self._parents.get(request_id, "")
        match event.name:
            case "offer made":
                self._begin(event, ("offer", request_id), parent, details)
            case "claim received":
                # The consumer does not trace, so the answer to its claim belongs to this node's request.
                key = ("grant", request_id, str(details["consumer_rank"]))
                self._begin(event, key, parent, details)
            case "grant sent" | "denial sent":
                self._end_first_grant(event, details)
            case "claim ordered":
                self._begin(event, ("claim", request_id), parent, details)
                self._num_unanswered[request_id] = int(details["ranks"])
            case "grant received" | "denial received":
                self._answered(event, details)
            case "blocks allocated":
                self._begin(event, ("load", request_id), parent, details)
                self._exposed_since[request_id] = event.at
                self._read[request_id] = {"bytes": 0, "rounds": 0}
            case "whole offer readable":
                self._exposed_since[request_id] = event.at
                self._add(("load", request_id), event)
            case "read started":
                key = ("read", request_id, str(details["rank"]))
                self._begin(event, key, self._traceparent(("load", request_id)) or parent, details)
            case "load dropped by the engine":
                self._end(("claim", request_id), event, {"outcome": "dropped"})
            case "prompt computed" | "release received":
                self._add(("offer", request_id), event)
            case name if name in _END_OF_READ:
                self._end_read(event, details)
            case name if name in _END_OF_LOAD:
                self._end_load(event, _END_OF_LOAD[name], details)
            case name if name in _END_OF_OFFER:
                is_late = name == "offer expired"
                outcome = {"outcome": _END_OF_OFFER[name], **details}
                self._end(("offer", request_id), event, outcome, str(details["reason"]) if is_late else "")

    # -- ends that say more -------------------------------------------------------------------------

    def _end_first_grant(self, event: HandoffEvent, details: dict[str, Any]) -> None:
        key = next((key for key in self._open if key[:2] == ("grant", event.request_id)), None)
        if key is not None:
            is_denial = event.name == "denial sent"
            outcome = {"outcome": "denied" if is_denial else "granted", **details}
            self._end(key, event, outcome)

    def _answered(self, event: HandoffEvent, details: dict[str, Any]) -> None:
        if event.name == "denial received":
            denied = {"outcome": "denied", **details}
            self._end(("claim", event.request_id), event, denied, str(details["reason"]))
            return
        self._num_unanswered[event.request_id] = self._num_unanswered.get(event.request_id, 1) - 1
        if self._num_unanswered[event.request_id] <= 0:
            self._end(("claim", event.request_id), event, {"outcome": "granted", **details})

    def _end_read(self, event: HandoffEvent, details: dict[str, Any]) -> None:
        request_id = event.request_id
        if (moved := self._read.get(request_id)) is not None and event.name == "read ended":
            moved["bytes"] += details["bytes"]
            moved["rounds"] += 1
            moved["transport"], moved["mechanism"] = details["transport"], details["mechanism"]
        failed = event.name == "read failed"
        key = ("read", request_id, str(details["rank"]))
        self._end(
            key,
            event,
            {**details, "outcome": "failed" if failed else "read"},
            details["guard"] if failed else "",
        )

    def _end_load(self, event: HandoffEvent, outcome: str, details: dict[str, Any]) -> None:
        request_id = event.request_id
        since = self._exposed_since.pop(request_id, event.at)
        moved = self._read.pop(request_id, {})
        why = str(details.get("error", ""))
        figures = {"outcome": outcome, "exposed_seconds": round(max(0.0, event.at - since), 6)}
        self._end(("load", request_id), event, {**moved, **figures}, why if outcome == "failed" else "")
        self._end(("claim", request_id), event, {"outcome": outcome}, why if outcome == "failed" else "")

    # -- spans --------------------------------------------------------------------------------------

    def _begin(
        self, event: HandoffEvent, key: tuple[str, ...], traceparent: str, details: Mapping[str, Any]
    ) -> None:
        self._drop(key, event)  # a request id that is used again, or a claim that was repeated
        attributes = {"kvferry.request_id": event.request_id, "kvferry.rank": self._rank, **_named(details)}
        self._open[key] = self._tracer.start_span(
            f"kvferry.{key[0]}",
            context=context_of_traceparent(traceparent),
            attributes=attributes,
            start_time=_nanoseconds(event.at),
        )
        if len(self._open) > _MAX_OPEN:
            self._drop(next(iter(self._open)), event)

    def _add(self, key: tuple[str, ...], event: HandoffEvent) -> None:
        if (span := self._open.get(key)) is not None:
            span.add_event(event.name, _named(event.details), _nanoseconds(event.at))

    def _end(
        self, key: tuple[str, ...], event: HandoffEvent, details: Mapping[str, Any], failure: str = ""
    ) -> None:
        if key[0] == "claim":
            self._num_unanswered.pop(key[1], None)
        if (span := self._open.pop(key, None)) is None:
            return
        span.set_attributes(_named(details))
        if failure:
            from opentelemetry.trace import Status, StatusCode

            span.set_status(Status(StatusCode.ERROR, failure))
        span.end(_nanoseconds(event.at))

    def _drop(self, key: tuple[str, ...], event: HandoffEvent) -> None:
        self._end(key, event, {"outcome": "unknown"})

    def _traceparent(self, key: tuple[str, ...]) -> str:
        span = self._open.get(key)
        return "" if span is None else traceparent_of_span(span)


def _named(details: Mapping[str, Any]) -> dict[str, Any]:
    return {f"kvferry.{name}": value for name, value in details.items()}


def _nanoseconds(at: float) -> int:
    return int(at * 1e9)
