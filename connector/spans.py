"""Spans of requests: what a process did for a request, from when until when, and how it ended.

A span is written once, where the work happens. When it ends, it becomes a
`SpanRecord`, which is kept for `kvferry explain`. A host that has set up OpenTelemetry's SDK exports it as
well; without the SDK's tracer provider nothing of OpenTelemetry is imported or called here.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Annotated, Any, Final, Self

from ..transports.checked import each, mapping, record, refuse, seconds, string

#: Begins the names of spans and attributes at collectors, where other programs have theirs. An attribute
#: that has it here already is meant for programs: `kvferry explain` does not print it.
PREFIX: Final = "kvferry."

#: Requests whose spans a server keeps, and spans of each: the latest ones, because the last ones say how it
#: ended.
MAX_REQUESTS: Final = 512
MAX_SPANS: Final = 128

#: What the `id` of an answer has before the request's id.
_ANSWERS: Final = ("cmpl-", "chatcmpl-")

#: Events of a span. Further ones are dropped: a long prompt makes progress very often.
MAX_EVENTS: Final = 128

#: The event of a router's span that says what a part of the time until the first token was spent on: `kind`
#: and `seconds`, and the `node` that worked on it. `also` names other kinds that it contains.
PART: Final = "part"


_time = seconds(0, 1e15)


def _details(value: object) -> Mapping[str, str | float]:
    for detail in mapping(value).values():
        if not isinstance(detail, str) and not (isinstance(detail, int | float) and abs(detail) < 1e18):
            refuse("a mapping of words and numbers", value)
    return mapping(value)


def _event(value: object) -> Mapping[str, str | float]:
    event = _details(value)
    _time(event.get("at"))
    string(event.get("name"))
    return event


@dataclass(frozen=True)
class SpanRecord:
    """Describe a span that has ended. It has no word of a prompt or an answer.

    Attributes:
        request_id: The id of the request where the span was made; empty if the request was refused before it
            had one.
        start: In seconds since 1970, as all times, so that the spans of two nodes can be joined as well as
            their clocks agree.
        events: What happened meanwhile: `at`, `name`, and figures and words that go with it.
        error: Why the work failed; empty if it did not.
    """

    request_id: str
    name: str
    start: Annotated[float, _time]
    end: Annotated[float, _time]
    attributes: Annotated[Mapping[str, str | float], _details] = field(default_factory=dict)
    events: Annotated[tuple[Mapping[str, str | float], ...], each(_event, 1 << 20)] = ()
    error: str = ""


@dataclass(frozen=True)
class ServerSpans:
    """What a server reports about one request.

    Attributes:
        process: What it calls itself: `router`, or by its role `prefill`, `decode` or `node`.
        engine_id: Of a node; empty for a router.
    """

    process: str
    engine_id: str
    spans: Annotated[tuple[SpanRecord, ...], each(record(SpanRecord).read_known, 1 << 20)]


Keep = Callable[[SpanRecord], None]


class RecentSpans:
    """A bounded number of ended spans. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: OrderedDict[str, deque[SpanRecord]] = OrderedDict()

    def keep(self, span: SpanRecord, request_id: str = "") -> None:
        """Add a span.

        Args:
            request_id: The `X-Request-Id`, if the span knows the request by another one.
        """
        if not (request_id := request_id or span.request_id):
            return  # the request was refused before it was read
        with self._lock:
            self._requests.setdefault(request_id, deque(maxlen=MAX_SPANS)).append(span)
            if len(self._requests) > MAX_REQUESTS:
                self._requests.popitem(last=False)

    def find(self, wanted: str) -> tuple[SpanRecord, ...]:
        """Return the spans of a request, in the order of their ends.

        Args:
            wanted: The `X-Request-Id` that the client or the router sent, the `id` of the answer, or a node's
                own id, which is the answer's with a suffix.
        """
        answered = next((wanted.removeprefix(kind) for kind in _ANSWERS if wanted.startswith(kind)), "")
        with self._lock:
            for request_id in (wanted, answered, answered.rpartition("-")[0]):
                if request_id in self._requests:
                    return tuple(self._requests[request_id])
        return ()

    def latest(self) -> list[str]:
        """Return the ids of all requests, oldest first."""
        with self._lock:
            return list(self._requests)


def active_tracer() -> Any | None:
    """Return OpenTelemetry's tracer for kvferry; None if the host of this process has not set up the SDK."""
    api, sdk = sys.modules.get("opentelemetry.trace"), sys.modules.get("opentelemetry.sdk.trace")
    if api is None or sdk is None or not isinstance(api.get_tracer_provider(), sdk.TracerProvider):
        return None
    return api.get_tracer("kvferry")


def send_spans(timeout_s: float) -> None:
    """Export the spans that have ended and were not sent yet; for a process that ends without its exit
    handlers.
    """
    if active_tracer() is not None:
        sys.modules["opentelemetry.trace"].get_tracer_provider().force_flush(int(timeout_s * 1e3))


def _context_of(traceparent: str) -> Any:
    """Return OpenTelemetry's context for a valid `traceparent`; an empty one gives an empty context, for a
    new trace.
    """
    from opentelemetry import trace
    from opentelemetry.context import Context

    if not traceparent:
        return Context()
    _, trace_id, span_id, flags = traceparent.split("-")
    remote = trace.SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=trace.TraceFlags(int(flags, 16))
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(remote), Context())


class Span:
    """A span that is open until the end of its `with` block, or until `end`, after which nothing changes it.

    One thread at a time may use it.

    Args:
        keep: Called with the record when the span ends. None: it is only exported.
        request_id: Empty: the parent's.
        at: When it began, in seconds since 1970. None: now.
        parent: A span of this process.
        traceparent: The parent at the collector, if that is another one.
        otel: Further arguments for OpenTelemetry's `start_span`.

    Attributes:
        start, attributes, events: As of `SpanRecord`. Nothing else changes them.
    """

    def __init__(
        self,
        name: str,
        keep: Keep | None,
        request_id: str = "",
        *,
        at: float | None = None,
        parent: Span | None = None,
        traceparent: str = "",
        otel: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.request_id: str = request_id or (parent.request_id if parent is not None else "")
        self._keep = keep
        self._parent = parent
        # All spans of a request have one clock: a host may set its own while a request is under way.
        self._zero: float = time.time() - time.monotonic() if parent is None else parent._zero
        self.start: float = self.now() if at is None else at
        self.attributes: dict[str, str | float] = {}
        self.events: list[dict[str, str | float]] = []
        self._error = ""
        self._is_open = True
        self._otel: Any = None
        if (tracer := active_tracer()) is not None:
            context = _context_of(traceparent)
            if parent is not None and parent._otel is not None and not traceparent:
                context = sys.modules["opentelemetry.trace"].set_span_in_context(parent._otel, context)
            start_time = _nanoseconds(self.start)
            self._otel = tracer.start_span(
                PREFIX + name, **{"context": context, "start_time": start_time, **(otel or {})}
            )

    def now(self) -> float:
        """Return the time in seconds since 1970, by the clock that the spans of a request share."""
        return self._zero + time.monotonic()

    @property
    def trace_id(self) -> str:
        """Its trace in hexadecimal; empty if it is not exported."""
        return "" if self._otel is None else f"{self._otel.get_span_context().trace_id:032x}"

    @property
    def traceparent(self) -> str:
        """The span's name in HTTP headers; empty if it is not exported."""
        if self._otel is None:
            return ""
        context = self._otel.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers that make the receiver's span a child of this one; empty if it is not exported."""
        headers: dict[str, str] = {}
        if self._otel is not None:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            TraceContextTextMapPropagator().inject(headers, trace.set_span_in_context(self._otel))
        return headers

    def child(self, name: str, at: float | None = None, traceparent: str = "") -> Span:
        """Begin a span below this one, now or at a time in seconds since 1970.

        See `Span` for the arguments.
        """
        return Span(name, self._keep, at=at, parent=self, traceparent=traceparent)

    def name_request(self, request_id: str) -> None:
        """Say which request this span and those above it are about."""
        if not self._is_open:
            return
        self.request_id = request_id
        if self._parent is not None:
            self._parent.name_request(request_id)

    def set(self, **attributes: str | float) -> None:
        """Add attributes."""
        if self._is_open:
            self.attributes.update(attributes)

    def note(self, event: str, **details: str | float) -> None:
        """Add something that happened now."""
        if self._is_open and len(self.events) < MAX_EVENTS:
            self.events.append({"at": self.now(), "name": event, **details})

    def fail(self, why: str) -> None:
        """Mark the span as failed."""
        if self._is_open:
            self._error = why

    def end(self, at: float | None = None) -> None:
        """End the span, now or at a time in seconds since 1970. Later calls do nothing."""
        if not self._is_open:
            return
        self._is_open = False
        end = self.now() if at is None else at
        if self._keep is not None:
            attributes, events = self.attributes, tuple(self.events)
            self._keep(
                SpanRecord(self.request_id, self.name, self.start, end, attributes, events, self._error)
            )
        if self._otel is not None:
            self._export(end)

    def _export(self, end: float) -> None:
        span = self._otel
        span.set_attributes(_named(self.attributes))
        for event in self.events:
            details = {key: value for key, value in event.items() if key not in ("at", "name")}
            span.add_event(str(event["name"]), _named(details), _nanoseconds(float(event["at"])))
        if self._error:
            from opentelemetry.trace import Status, StatusCode

            span.set_status(Status(StatusCode.ERROR, self._error))
        span.end(_nanoseconds(end))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):  # and not a client that left
            self.fail(f"{type(error).__name__}: {error}")
        self.end()


def _named(details: Mapping[str, str | float]) -> dict[str, str | float]:
    return {name if "." in name else PREFIX + name: value for name, value in details.items()}


def _nanoseconds(at: float) -> int:
    return int(at * 1e9)
