"""A collector of OpenTelemetry spans: OTLP over HTTP, in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class CollectedSpan:
    """A span as it arrived.

    Attributes:
        parent_id: Empty for the root of a trace.
        start_s: When it began, in Unix time.
        end_s: When it ended.
    """

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    is_error: bool
    start_s: float
    end_s: float


@dataclass
class Collector:
    """The spans that arrived so far."""

    url: str
    spans: list[CollectedSpan] = field(default_factory=list)


@contextmanager
def collecting(host: str = "127.0.0.1") -> Iterator[Collector]:
    """Collect spans inside the block.

    Args:
        host: The address to listen on.
    """
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            collector.spans += _spans_of(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer((host, 0), Handler)
    server.daemon_threads = False
    collector = Collector(f"http://{host}:{server.server_address[1]}/v1/traces")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _spans_of(request: Any) -> Iterator[CollectedSpan]:
    for resource in request.resource_spans:
        service = _values(resource.resource.attributes).get("service.name", "")
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield CollectedSpan(
                    service,
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    _values(span.attributes),
                    span.status.code == 2,
                    span.start_time_unix_nano / 1e9,
                    span.end_time_unix_nano / 1e9,
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}
