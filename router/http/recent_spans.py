"""The admin endpoint that tells the spans of a server's latest requests to `kvferry explain`."""

from __future__ import annotations

import dataclasses

from aiohttp import web

from ...connector.spans import MAX_REQUESTS, RecentSpans, ServerSpans
from .errors import ApiError


def span_routes(spans: RecentSpans, process: str, engine_id: str = "") -> list[web.RouteDef]:
    """Return the admin endpoints.

    Args:
        process: What `kvferry explain` calls this server.
    """

    async def latest(request: web.Request) -> web.Response:
        return web.json_response({"requests": spans.latest()})

    async def of_request(request: web.Request) -> web.Response:
        wanted = request.match_info["request_id"]
        if not (found := spans.find(wanted)):
            message = f"no spans of request {wanted!r}; this server keeps those of its latest {MAX_REQUESTS} requests"
            raise ApiError(404, message, kind="invalid_request_error", param="request_id")
        return web.json_response(dataclasses.asdict(ServerSpans(process, engine_id, found)))

    return [
        web.get("/admin/requests", latest),
        web.get("/admin/requests/{request_id:.+}", of_request),
    ]
