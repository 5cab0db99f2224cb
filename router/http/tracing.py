"""Spans of HTTP requests, and where they are sent: to a collector, if OpenTelemetry's SDK is installed and
told one.

`set_up_tracing` decides about the collector once per process; the spans themselves are made with or without
one. The context of a trace comes and goes as W3C Trace Context: in HTTP headers, and as `traceparent` in
`kv_transfer_params` for nodes that a proxy reaches without passing headers on. `kvferry.connector.p2p.trace`
makes the spans of handoffs.
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
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ...connector.p2p.params import TRACEPARENT, traceparent_of
from ...connector.spans import Keep, Span, active_tracer
from .errors import answered_status
from .serving import StartupError

#: OpenTelemetry's own variables. vLLM reads the first one as well.
_TRACES_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
_SERVICE_NAME: Final = "OTEL_SERVICE_NAME"
#: An exit waits this long, in seconds, for a collector that does not answer.
_EXPORT_TIMEOUT: Final = "OTEL_EXPORTER_OTLP_TIMEOUT"

_NEEDED: Final = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
_INSTALL: Final = "run `pip install '.[otel]'` in the clone of kvferry"

logger = logging.getLogger(__name__)


def set_up_tracing(endpoint: str, service: str) -> None:
    """Send spans to a collector from now on.

    Does nothing if there is no endpoint, or if the process traces already.

    Args:
        endpoint: URL for traces in OTLP over HTTP, such as `http://127.0.0.1:4318/v1/traces`; empty takes the
            one of OpenTelemetry's environment variables.
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


#: Stands for the span of what belongs to no HTTP request. It has ended, so it takes nothing in.
NO_SPAN: Final = Span("", None)
NO_SPAN.end()
_current: ContextVar[Span] = ContextVar("span", default=NO_SPAN)


def current_span() -> Span:
    """Return the span of the HTTP request that this task answers; `NO_SPAN` if there is none."""
    return _current.get()


#: The id of the HTTP request that this task answers, for its log lines.
request_id_in_logs: ContextVar[str] = ContextVar("request_id", default="")


def name_request(request_id: str) -> str:
    """Use this id in the log lines of the request that this task answers, and return it."""
    request_id_in_logs.set(request_id)
    span = current_span()
    span.name_request(request_id)
    span.set(client_request_id=request_id)
    return request_id


def traced_params(params: Mapping[str, Any] | None, span: Span) -> Mapping[str, Any] | None:
    """Return `kv_transfer_params` that carry the context of a span; as they are, if it is not exported."""
    context = span.traceparent
    return {**params, TRACEPARENT: context} if params is not None and context else params


def observed(name: str, keep: Keep) -> Middleware:
    """Make a middleware that logs each POST request when it is answered, and gives it a span below the one
    that its headers name.

    Put it first, so that the span includes what other middlewares do. A request without `traceparent` in its
    headers may have one in its `kv_transfer_params`: see `span_of_work`.

    Args:
        keep: Called with the span, and those below it, when they have ended.
    """

    @web.middleware
    async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
        request_id_in_logs.set("")  # one task may answer all requests of a connection
        if request.method != "POST":
            return await handler(request)
        began = time.monotonic()
        span = Span(name, keep, otel=_otel_of(request))
        span.set(**{"http.request.method": request.method, "url.path": request.path})

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
                span.note("the client disconnected")
                logger.info("the client of %s disconnected after %.3f s", request.path, seconds)
            else:
                logger.info("answered %s with %d in %.3f s", request.path, status, seconds)

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

    If its headers have no `traceparent` and its `kv_transfer_params` have one, the work has a span of its own
    in that trace. The span of the HTTP request began before the body was read, so it cannot belong there any
    more.
    """
    span, known = current_span(), traceparent_of(params)
    if not span.trace_id or not known or TRACEPARENT in request.headers:
        yield span
        return
    with span.child("work", traceparent=known) as work:
        span.set(continued_in_trace=work.trace_id)
        token = _current.set(work)
        try:
            yield work
        finally:
            _current.reset(token)


def _otel_of(request: web.Request) -> dict[str, Any]:
    """Return what OpenTelemetry is to know of the span of an HTTP request; nothing if this process does not
    export.
    """
    if active_tracer() is None:
        return {}
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract(request.headers, Context())
    return {"context": context, "kind": SpanKind.SERVER}
