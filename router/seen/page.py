"""The page at `/`: the nodes, the requests in flight, the throughput, and where the time of recent requests
went.

The page is one file without anything from elsewhere. It asks for `STATE_PATH` once per second. It does not
use server-sent events, because a browser's `EventSource` cannot send an API key.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Any, Final

from aiohttp import web

import kvferry

from ..http.access import ApiKeys, has_key
from ..http.errors import ApiError, bad_request

#: What the page asks for. Unlike the page itself, the answers name nodes and requests.
STATE_PATH: Final = "/page/state"
#: What the page asks for when a finished request is opened.
EXPLAIN_PATH: Final = "/page/explain"

_HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class Page:
    """Serves the page and its figures.

    Args:
        describe: Returns the router's state, given the `last` of a former answer: `status`, `is_ready`,
            `latencies`, `nodes`, and what `RecentRequests.report` has.
        explain: Returns the lines of `kvferry explain` of a request, given its id and the router's URL.
        admin_keys: The keys of the admin endpoints, which tell the same. None: there are no admin endpoints.
    """

    def __init__(
        self,
        describe: Callable[[int], Awaitable[Mapping[str, Any]]],
        explain: Callable[[str, str], Awaitable[list[str]]],
        admin_keys: ApiKeys | None,
    ) -> None:
        self._describe = describe
        self._explain = explain
        self._admin_keys = admin_keys
        self._began = time.monotonic()
        #: A page that sees another one knows that the router was restarted and counts from 0.
        self._run_id = uuid.uuid4().hex
        self._html = (files(__package__) / "page.html").read_text(encoding="utf-8")
        self._headers = {
            "Content-Security-Policy": content_security_policy(self._html),
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-cache",
        }

    def add_routes(self, app: web.Application) -> None:
        """Add the routes of the page."""
        app.router.add_get("/", self._page)
        app.router.add_get(STATE_PATH, self._state)
        app.router.add_get(EXPLAIN_PATH, self._account)

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=self._html, content_type="text/html", headers=self._headers)

    async def _state(self, request: web.Request) -> web.Response:
        """Answer with the state.

        `?since=N` leaves out finished requests that a former answer, whose `last` was N, had.
        """
        since = request.query.get("since", "0")
        if not re.fullmatch("[0-9]{1,15}", since):
            raise bad_request(f"since={since[:80]!r}: it must be the 'last' of a former answer", "since")
        state = {
            "run": self._run_id,
            "version": kvferry.__version__,
            "now": time.time(),
            "uptime_s": round(time.monotonic() - self._began, 1),
            **await self._describe(int(since)),
        }
        return web.json_response(state, headers=_HEADERS)

    async def _account(self, request: web.Request) -> web.Response:
        """Answer with the account of `?request=ID`."""
        if self._admin_keys is None:
            message = "this router has no admin endpoints, so it explains no requests: start it with --admin-port or --dev"
            raise ApiError(403, message, kind="permission_error")
        if self._admin_keys and not has_key(request, self._admin_keys):
            message = (
                "a key of the admin endpoints is required: run `kvferry explain` with --admin-api-key-file"
            )
            raise ApiError(401, message, kind="invalid_request_error", code="invalid_api_key")
        if not (request_id := request.query.get("request", "")):
            raise bad_request("request: give the id of a request", "request")
        lines = await self._explain(request_id, f"{request.scheme}://{request.host}")
        return web.json_response({"lines": lines}, headers=_HEADERS)


def content_security_policy(html: str) -> str:
    """Return a policy that allows the script and the style in `html`, requests to the page's origin, and
    nothing else.
    """
    sources = {
        tag: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in re.findall(f"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
        )
        for tag in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
