"""Traces of requests: OpenTelemetry's SDK, if it is installed and has somewhere to send spans, and otherwise nothing.

`set_up_tracing` decides once per process. Until then, and without the SDK, every span is `NO_SPAN`, which does nothing.
The context of a trace comes and goes as W3C Trace Context: in HTTP headers, and as `traceparent` in `kv_transfer_params`
for nodes that a proxy reaches without passing headers on. `kvferry.connector.p2p.spans` adds the spans of handoffs.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final, Self

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ..connector.p2p.params import TRACEPARENT, traceparent_of
from ..connector.p2p.spans import (
    active_tracer,
    context_of_traceparent,
    traceparent_of_span,
)
from .errors import answered_status
from .serving import StartupError

#: OpenTelemetry's own variables. vLLM reads the first one as well.
_TRACES_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
_SERVICE_NAME: Final = "OTEL_SERVICE_NAME"
#: An exit waits this long, in seconds, for a collector that does not answer.
_EXPORT_TIMEOUT: Final = "OTEL_EXPORTER_OTLP_TIMEOUT"

_NEEDED: Final = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
_INSTALL: Final = "install kvferry[otel]"

logger = logging.getLogger(__name__)


def set_up_tracing(endpoint: str, service: str) -> None:
    """Send spans to a collector from now on. Does nothing if there is no endpoint, or if the process traces already.

    Args:
        endpoint: URL for traces in OTLP over HTTP, such as `http://127.0.0.1:4318/v1/traces`; empty takes the one of
            OpenTelemetry's environment variables.
        service: Name of this process in traces, unless `OTEL_SERVICE_NAME` is set.

    Raises:
        StartupError: an endpoint is given, and OpenTelemetry is not installed.
    """
    if endpoint:
        # Worker processes of an engine find it there as well.
        os.environ[_TRACES_ENDPOINT] = endpoint
    if not (os.environ.get(_TRACES_ENDPOINT) or os.environ.get(_ENDPOINT)):
        return
    if not all(map(_is_installed, _NEEDED)):
        if endpoint:
            raise StartupError(
                f"--otlp-traces-endpoint {endpoint}: OpenTelemetry is not installed; {_INSTALL}"
            )
        logger.warning(
            "not tracing: %s is set, but OpenTelemetry is not installed; %s",
            _TRACES_ENDPOINT if os.environ.get(_TRACES_ENDPOINT) else _ENDPOINT,
            _INSTALL,
        )
        return
    if active_tracer() is None:
        _start_sdk(service)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _start_sdk(service: str) -> None:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    os.environ.setdefault(_EXPORT_TIMEOUT, "2")
    named = {} if os.environ.get(_SERVICE_NAME) else {"service.name": f"kvferry-{service}"}
    resource = Resource.create({**named, "service.instance.id": str(os.getpid())})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


class Span:
    """A span that is open until the end of its `with` block, or until `end`."""

    def __init__(self, otel_span: Any) -> None:
        self._span = otel_span
        self._is_open = True

    @property
    def trace_id(self) -> str:
        """Its trace in hexadecimal; empty without tracing."""
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def traceparent(self) -> str:
        """The span's name in HTTP headers; empty without tracing."""
        return traceparent_of_span(self._span)

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers that make the receiver's span a child of this one."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers, trace.set_span_in_context(self._span))
        return headers

    def traced_params(self, params: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return `kv_transfer_params` that carry the context of this span."""
        return None if params is None else {**params, TRACEPARENT: self.traceparent}

    def child(self, name: str, at: float | None = None, **attributes: str | float) -> Span:
        """Begin a span below this one, now or at a time in seconds since 1970."""
        from opentelemetry import trace

        tracer = active_tracer()
        assert tracer is not None, "there is a span, so this process traces"
        context = trace.set_span_in_context(self._span)
        start = None if at is None else int(at * 1e9)
        return Span(tracer.start_span(name, context=context, start_time=start, attributes=_named(attributes)))

    def set(self, **attributes: str | float) -> None:
        """Add attributes."""
        if self._is_open:
            self._span.set_attributes(_named(attributes))

    def fail(self, why: str) -> None:
        """Mark the span as failed."""
        from opentelemetry.trace import Status, StatusCode

        if self._is_open:
            self._span.set_status(Status(StatusCode.ERROR, why))

    def end(self, at: float | None = None) -> None:
        """End the span, now or at a time in seconds since 1970. Later calls do nothing."""
        if self._is_open:
            self._is_open = False
            self._span.end(None if at is None else int(at * 1e9))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):  # and not a client that left
            self.fail(f"{type(error).__name__}: {error}")
        self.end()


class _NoSpan(Span):
    """Stands for every span of a process that does not trace."""

    def __init__(self) -> None:
        super().__init__(None)

    @property
    def trace_id(self) -> str:
        return ""

    @property
    def traceparent(self) -> str:
        return ""

    @property
    def headers(self) -> dict[str, str]:
        return {}

    def traced_params(self, params: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        return params

    def child(self, name: str, at: float | None = None, **attributes: str | float) -> Span:
        return self

    def set(self, **attributes: str | float) -> None:
        return

    def fail(self, why: str) -> None:
        return

    def end(self, at: float | None = None) -> None:
        return


NO_SPAN: Final[Span] = _NoSpan()
_current: ContextVar[Span] = ContextVar("span", default=NO_SPAN)


def current_span() -> Span:
    """Return the span of the HTTP request that this task answers; `NO_SPAN` if there is none."""
    return _current.get()


#: The id of the HTTP request that this task answers, for its log lines.
request_id_in_logs: ContextVar[str] = ContextVar("request_id", default="")


def name_request(request_id: str) -> str:
    """Use this id in the log lines of the request that this task answers, and return it."""
    request_id_in_logs.set(request_id)
    current_span().set(client_request_id=request_id)
    return request_id


def observed(name: str) -> Middleware:
    """Make a middleware that logs each POST request when it is answered, and gives it a span below the one that its headers
    name.

    Put it first, so that the span includes what other middlewares do. A request without `traceparent` in its headers
    may have one in its `kv_transfer_params`: see `span_of_work`.
    """

    @web.middleware
    async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
        request_id_in_logs.set("")  # one task may answer all requests of a connection
        if request.method != "POST":
            return await handler(request)
        began = time.monotonic()

        async def answer() -> web.StreamResponse:
            try:
                response = await handler(request)
            except asyncio.CancelledError:
                log_end(answered_status(request))
                raise
            log_end(answered_status(request) or response.status)
            return response

        def log_end(status: int | None) -> None:
            seconds = time.monotonic() - began
            if status is None:
                logger.info("the client of %s disconnected after %.3f s", request.path, seconds)
            else:
                logger.info("answered %s with %d in %.3f s", request.path, status, seconds)

        tracer = active_tracer()
        if tracer is None:
            return await answer()
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        span = Span(
            tracer.start_span(
                name,
                context=TraceContextTextMapPropagator().extract(request.headers, context_of_traceparent("")),
                kind=SpanKind.SERVER,
                attributes={"http.request.method": request.method, "url.path": request.path},
            )
        )
        token = _current.set(span)
        try:
            with span:
                response = await answer()
                span.set(**{"http.response.status_code": response.status})
                if response.status >= 500:
                    span.fail(f"HTTP status {response.status}")
                return response
        finally:
            _current.reset(token)

    return observe


@contextmanager
def span_of_work(request: web.Request, params: Any) -> Iterator[Span]:
    """Yield the span that a node's work on a request belongs to: that of the HTTP request.

    If its headers have no `traceparent` and its `kv_transfer_params` have one, the work has a span of its own in that
    trace. The span of the HTTP request began before the body was read, so it cannot belong there any more.
    """
    span, known = current_span(), traceparent_of(params)
    tracer = active_tracer()
    if span is NO_SPAN or tracer is None or not known or TRACEPARENT in request.headers:
        yield span
        return
    with Span(tracer.start_span("kvferry.work", context=context_of_traceparent(known))) as work:
        span.set(continued_in_trace=work.trace_id)
        token = _current.set(work)
        try:
            yield work
        finally:
            _current.reset(token)


def _named(attributes: Mapping[str, str | float]) -> dict[str, str | float]:
    return {name if "." in name else f"kvferry.{name}": value for name, value in attributes.items()}
