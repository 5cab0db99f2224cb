"""The admin endpoint that tells the spans of a server's latest requests to `kvferry explain`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from ...connector.spans import MAX_REQUESTS, RecentSpans, ServerSpans, SpanRecord
from ...transports.checked import record
from .errors import ApiError

#: Asks the other processes of a server, by a topic and an argument, and returns their answers.
AskOthers = Callable[[str, Any], Awaitable[list[Any]]]
#: The topics: the ids of the latest requests, and the spans of one of them.
LATEST, SPANS = "latest requests", "spans"


async def no_others(topic: str, argument: Any) -> list[Any]:
    """Ask none, for a server that is one process."""
    return []


async def find_spans(spans: RecentSpans, wanted: str, ask_others: AskOthers) -> tuple[SpanRecord, ...]:
    """Return the spans of a request, whichever process has it."""
    if found := spans.find(wanted):
        return found
    answers = [json.loads(answer) for answer in await ask_others(SPANS, wanted)]
    return next((tuple(map(record(SpanRecord).read_known, answer)) for answer in answers if answer), ())


def span_routes(
    spans: RecentSpans, process: str, engine_id: str = "", ask_others: AskOthers = no_others
) -> list[web.RouteDef]:
    """Return the admin endpoints.

    Args:
        process: What `kvferry explain` calls this server.
    """

    async def latest(request: web.Request) -> web.Response:
        others = [json.loads(answer) for answer in await ask_others(LATEST, None)]
        return web.json_response(
            {"requests": [*(each for other in others for each in other), *spans.latest()]}
        )

    async def of_request(request: web.Request) -> web.Response:
        wanted = request.match_info["request_id"]
        if not (found := await find_spans(spans, wanted, ask_others)):
            message = f"no spans of request {wanted!r}; this server keeps those of its latest {MAX_REQUESTS} requests"
            raise ApiError(404, message, kind="invalid_request_error", param="request_id")
        return web.json_response(dataclasses.asdict(ServerSpans(process, engine_id, found)))

    return [
        web.get("/admin/requests", latest),
        web.get("/admin/requests/{request_id:.+}", of_request),
    ]
