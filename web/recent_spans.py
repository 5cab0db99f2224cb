"""The spans of a server's latest requests, and the admin endpoint that tells them to `kvferry explain`."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict, deque
from typing import Final

from aiohttp import web

from ..connector.spans import ServerSpans, SpanRecord
from .errors import ApiError

#: Requests whose spans a server keeps, and spans of each: the latest ones, because the last ones say how it ended.
MAX_REQUESTS: Final = 512
MAX_SPANS: Final = 128

#: What the `id` of an answer has before the request's id.
_ANSWERS: Final = ("cmpl-", "chatcmpl-")


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
            wanted: The `X-Request-Id` that the client or the router sent, the `id` of the answer, or a node's own id, which is
                the answer's with a suffix.
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

    def routes(self, process: str, engine_id: str = "") -> list[web.RouteDef]:
        """Return the admin endpoints.

        Args:
            process: What `kvferry explain` calls this server.
        """

        async def latest(request: web.Request) -> web.Response:
            return web.json_response({"requests": self.latest()})

        async def spans(request: web.Request) -> web.Response:
            wanted = request.match_info["request_id"]
            if not (found := self.find(wanted)):
                message = f"no spans of request {wanted!r}; this server keeps those of its latest {MAX_REQUESTS} requests"
                raise ApiError(404, message, kind="invalid_request_error", param="request_id")
            return web.json_response(dataclasses.asdict(ServerSpans(process, engine_id, found)))

        return [
            web.get("/admin/requests", latest),
            web.get("/admin/requests/{request_id:.+}", spans),
        ]
