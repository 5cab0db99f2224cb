"""A router over nodes that a test plays."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from .app import Router
from .nodes import NodePool

__all__ = ["PlayedNode", "routed"]


class PlayedNode(Protocol):
    """What answers a node's completions."""

    async def handle(self, request: web.Request) -> web.StreamResponse: ...


@asynccontextmanager
async def routed(
    prefill: Sequence[PlayedNode], decode: Sequence[PlayedNode], *, overlap: bool = False
) -> AsyncIterator[TestClient[Any, Any]]:
    """A client of a router over these nodes, all of which it has found healthy."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(_serving(node)) for node in (*prefill, *decode)]
        pools = NodePool("prefill", urls[: len(prefill)]), NodePool("decode", urls[len(prefill) :])
        router = Router(*pools, overlap=overlap, silence_timeout_s=10, check_interval_s=60)
        client = await stack.enter_async_context(TestClient(TestServer(router.application())))
        for pool in pools:
            for node in pool.nodes:
                node.mark_up()
        yield client


@asynccontextmanager
async def _serving(node: PlayedNode) -> AsyncIterator[str]:
    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/completions", node.handle)
    app.router.add_get("/health", health)
    # A handler ends when its client goes away, as that of a real node does.
    async with TestServer(app, handler_cancellation=True) as server:
        yield str(server.make_url(""))
