"""The HTTP server of the router."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from web.errors import error_middleware
from web.json_body import MAX_BODY_BYTES, parse_json

from .metrics import RouterMetrics
from .nodes import Node, NodePool
from .prefills import Call, OverlappedPrefill, Prefill, WholePrefill
from .stages import NodeGoneError, check_body, copy_answer, decode_body, open_answer

__all__ = ["Router"]

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0


class Router:
    """Sends each request to a prefill node, then to a decode node.

    A node that is gone is replaced by another one as long as no byte of the answer reached the client: a prefill
    node alone, a decode node together with a new prefill, since the first offer went with it.

    Args:
        overlap: A decode begins while its prefill still runs, where the prefill node can say so early.
        silence_timeout_s: A node that sends nothing for so long is taken for gone.
        check_interval_s: Between two questions for a node's health.
    """

    def __init__(
        self,
        prefill_pool: NodePool,
        decode_pool: NodePool,
        *,
        overlap: bool,
        silence_timeout_s: float,
        check_interval_s: float,
    ) -> None:
        self._prefill_pool = prefill_pool
        self._decode_pool = decode_pool
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_timeout_s
        )
        self._check_interval_s = check_interval_s
        self._metrics = RouterMetrics(self._nodes)
        kind = OverlappedPrefill if overlap else WholePrefill
        self._prefill: Prefill = kind(prefill_pool, self._metrics)
        self._session: aiohttp.ClientSession
        self._answers: set[aiohttp.ClientResponse] = set()

    @property
    def _nodes(self) -> tuple[Node, ...]:
        return self._prefill_pool.nodes + self._decode_pool.nodes

    def application(self) -> web.Application:
        """The routes, for aiohttp."""
        app = web.Application(middlewares=[self._count, error_middleware], client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics_text)
        app.cleanup_ctx.append(self._connected)
        return app

    async def wait_until_ready(self) -> None:
        """Return once there is a healthy node of either role."""
        while not self._is_ready:
            await asyncio.sleep(self._check_interval_s / 4)

    async def stop(self, grace_s: float) -> None:
        """Let what is under way go on for so long, and then end it: each client is told so by an error."""
        deadline = time.monotonic() + grace_s
        while any(node.in_flight for node in self._nodes) and time.monotonic() < deadline:
            await asyncio.sleep(grace_s / 20)
        for pool in (self._prefill_pool, self._decode_pool):
            pool.close()
        for answer in self._answers:
            answer.close()
        await self._session.close()

    @property
    def _is_ready(self) -> bool:
        return self._prefill_pool.has_healthy_node and self._decode_pool.has_healthy_node

    async def _connected(self, app: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=self._timeout, connector=connector) as self._session:
            pools = (self._prefill_pool, self._decode_pool)
            watchers = [
                asyncio.create_task(pool.watch(self._session, self._check_interval_s)) for pool in pools
            ]
            yield
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    # -- small answers -------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        nodes = [
            {"role": node.role, "url": node.url, "healthy": node.is_healthy, "error": node.last_error}
            for node in self._nodes
        ]
        status = "ok" if self._is_ready else "no healthy pair of nodes"
        return web.json_response({"status": status, "nodes": nodes}, status=200 if self._is_ready else 503)

    async def _metrics_text(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), content_type="text/plain", charset="utf-8")

    async def _models(self, request: web.Request) -> web.StreamResponse:
        tried: set[Node] = set()
        while True:
            with (
                self._decode_pool.use_one(tried) as node,
                contextlib.suppress(aiohttp.ClientError, TimeoutError),
            ):
                async with self._session.get(node.url + "/v1/models") as response:
                    return web.Response(
                        body=await response.read(), status=response.status, content_type=response.content_type
                    )

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        if request.method == "POST":
            self._metrics.requests.labels(str(response.status)).inc()
        return response

    # -- answers -------------------------------------------------------------------------------------

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = parse_json(await request.read())
        check_body(body)
        request_id = request.headers.get("X-Request-Id", "") or uuid.uuid4().hex
        tried_decode: set[Node] = set()
        call = Call(self._session, request.path, body, _headers(request, request_id))
        while True:
            try:
                async with self._prefill.prefilled(call) as params:
                    return await self._decode(request, decode_body(body, params), call.headers, tried_decode)
            except NodeGoneError as error:
                logger.warning("%s: decode: %s", request_id, error)
                self._metrics.retries.labels("decode").inc()

    async def _decode(
        self, request: web.Request, body: Mapping[str, Any], headers: Mapping[str, str], tried: set[Node]
    ) -> web.StreamResponse:
        with self._decode_pool.use_one(tried) as node:
            async with open_answer(self._session, node, request.path, body, headers) as (upstream, first):
                self._answers.add(upstream)
                try:
                    return await copy_answer(upstream, first, request)
                finally:
                    self._answers.remove(upstream)


def _headers(request: web.Request, request_id: str) -> dict[str, str]:
    """What both nodes are told: one id for both, as vLLM's nodes want it."""
    headers = {"X-Request-Id": request_id}
    if "Authorization" in request.headers:
        headers["Authorization"] = request.headers["Authorization"]
    return headers
