"""Requests that one decode node answers by itself: questions about models, and endpoints without an answer to
hand over.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from ..http.endpoints import Endpoint
from ..http.errors import ApiError
from ..http.json_body import object_of
from ..http.tracing import current_span, name_request
from ..nodes.pool import NodeGoneError, Tried, UpstreamNode
from ..nodes.reading import read_whole
from .bodies import headers_of
from .performance import Services, too_late

#: For what a node has at hand, such as its list of models.
AT_HAND_TIMEOUT_S = 30.0
#: The types of answers that are passed on. Never another one: a browser would run a node's page as one of the
#: router's. Embeddings may be bytes, and this header says how to read them.
_TYPES, _METADATA = ("application/json", "application/octet-stream"), "metadata"
#: How servers of vLLM and reference nodes say that they do not have a path.
_UNKNOWN_PATH = "Not Found"


class OneNode:
    """Lets one decode node answer.

    Args:
        passes_keys_on: Pass a client's `Authorization` header on to nodes.
    """

    def __init__(self, services: Services, *, passes_keys_on: bool) -> None:
        self._services = services
        self._passes_keys_on = passes_keys_on

    async def answer(
        self,
        request: web.Request,
        body: Mapping[str, Any] | None = None,
        may_use: Callable[[UpstreamNode], bool] = lambda node: True,
    ) -> web.Response:
        """Return a node's answer. If a node fails, another one is asked.

        Args:
            body: Of the request; None: it has none.

        Raises:
            ApiError: No node can answer, or the answer takes too long.
        """
        tried: Tried = {}
        pool, limit_s = self._services.decode_pool, self._services.answer_timeout_s
        request_id = name_request(request.headers.get("X-Request-Id", "") or uuid.uuid4().hex)
        headers = headers_of(request.headers, request_id, passes_keys_on=self._passes_keys_on)
        timeout = aiohttp.ClientTimeout(total=AT_HAND_TIMEOUT_S) if body is None else None
        try:
            async with asyncio.timeout((body is not None and limit_s) or None) as limit:
                while (node := next(iter(pool.usable(tried, body or {}, may_use)), None)) is not None:
                    with contextlib.suppress(NodeGoneError), pool.using(node, tried):
                        return await self._asked(node, request, body, headers, timeout)
        except TimeoutError:
            if not limit.expired():
                raise
            raise too_late(limit_s) from None
        raise await pool.no_node(tried, body or {})

    async def _asked(
        self,
        node: UpstreamNode,
        request: web.Request,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        timeout: aiohttp.ClientTimeout | None,
    ) -> web.Response:
        url = URL(node.url + request.raw_path, encoded=True)
        span = current_span().child("call")
        span.set(node=node.url)
        with span:
            async with node.exchange():
                asked = self._services.session.request(
                    request.method, url, json=body, headers={**headers, **span.headers}, timeout=timeout
                )
                async with asked as response:
                    payload = await read_whole(response.content)
        if response.status in (429, 502, 503) and body is not None:
            raise NodeGoneError(node, f"answered {response.status}", may_eject=response.status == 502)
        node.note_answered()
        kind = response.content_type if response.content_type in _TYPES else _TYPES[0]
        own = {name: response.headers[name] for name in (_METADATA,) if name in response.headers}
        named = {"X-Request-Id": headers["X-Request-Id"]} if body is not None else {}
        return web.Response(body=payload, status=response.status, content_type=kind, headers={**own, **named})


def not_served(endpoint: Endpoint, status: int, payload: bytes) -> ApiError | None:
    """Return the error that says what serves an endpoint, if a node's answer says that it does not have it.

    None: it says something else.
    """
    told = object_of(payload)
    error = told.get("error")
    message = error.get("message") if isinstance(error, dict) else told.get("detail")
    if status != 404 or not isinstance(message, str) or not message.endswith(_UNKNOWN_PATH):
        return None
    return ApiError(
        404,
        f"{endpoint.path} is not served: the node answered {message!r}; it is served by {endpoint.served_by}",
        kind="invalid_request_error",
        code="not_served",
    )
