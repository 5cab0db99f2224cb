"""A router over fake nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from aiohttp.typedefs import Handler

from kvferry.router.answer.performance import DecodeAlone
from kvferry.router.app import Router
from kvferry.router.choice.fleet import Mode
from kvferry.router.choice.ways import Options
from kvferry.router.http.access import ApiKeys
from kvferry.router.http.errors import error_middleware
from kvferry.router.nodes.pool import NodePool
from kvferry.router.nodes.states import NodeState
from tests.support.patience import DEADLINE_S


class NodeHandler(Protocol):
    """Answers the completions of a fake node.

    It answers at its `paths` as well, if it has any. Methods `ready`, `health`, `metrics`, `version`,
    `models` and `release`, if there are any, answer the path of their name, and the router's releases of
    offers.
    """

    async def handle(self, request: web.Request) -> web.StreamResponse: ...


@asynccontextmanager
async def routed(
    prefill: Sequence[NodeHandler],
    decode: Sequence[NodeHandler],
    *,
    rendezvous: bool = True,
    continue_answers: bool = True,
    answer_timeout_s: float = 0.0,
    check_interval_s: float = 60.0,
    check_timeout_s: float = 5.0,
    decode_alone: DecodeAlone = "auto",
    does_both: bool = False,
    placement: Mode = "auto",
    host: str = "127.0.0.1",
    expects_ready: bool = True,
) -> AsyncIterator[TestClient[Any, Any]]:
    """Yield a client of a router that has checked all these nodes, on this host, and has found them ready if
    it should.

    Args:
        does_both: All of them are prefill nodes and decode nodes.
    """
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(serving(node)) for node in (*prefill, *decode)]
        urls = [url.replace("127.0.0.1", host) for url in served]
        own = urls if does_both else urls[: len(prefill)], urls if does_both else urls[len(prefill) :]
        pools = NodePool("prefill", own[0]), NodePool("decode", own[1])
        router = Router(
            *pools,
            options=Options(rendezvous, continue_answers),
            answer_timeout_s=answer_timeout_s,
            check_interval_s=check_interval_s,
            check_timeout_s=check_timeout_s,
            decode_alone=decode_alone,
            placement=placement,
            admin_keys=ApiKeys(),
        )
        server = TestServer(router.application(), handler_cancellation=True)
        client = await stack.enter_async_context(TestClient(server))
        for pool in pools:
            for node in pool.nodes:
                await node.await_check(DEADLINE_S)
                assert node.state is NodeState.READY or not expects_ready, node.last_error
        yield client


#: Where a decode node can claim from a fake prefill node.
PLACE = {
    "remote_engine_id": "e",
    "remote_epoch": "5",
    "remote_addresses": ["shm:x"],
    "tp_size": 1,
    "rendezvous_supported": True,
}


def let_rendezvous(prefill: Any, decode: Any) -> None:
    """Let two fake nodes say, before their first request, that both can be asked at once."""

    async def ready(request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok", "kv_transfer_params": PLACE})

    async def metrics(request: web.Request) -> web.StreamResponse:
        return web.Response(text='kvferry_build_info{protocol="7",version="0"} 1.0\n')

    prefill.ready, decode.metrics = ready, metrics


async def _answer_200(request: web.Request) -> web.StreamResponse:
    return web.Response()


@asynccontextmanager
async def serving(node: NodeHandler) -> AsyncIterator[str]:
    """Serve a fake node inside the block. Yields its URL."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params = body.get("kv_transfer_params")
        if isinstance(params, dict) and params.get("do_release"):
            return await release(request)
        return await node.handle(request)

    release: Handler = getattr(node, "release", _answer_200)
    app = web.Application(middlewares=[error_middleware])
    for path in ("/v1/completions", *getattr(node, "paths", ())):
        app.router.add_post(path, complete)
    app.router.add_get("/health", getattr(node, "health", _answer_200))
    app.router.add_get("/v1/models", getattr(node, "models", _answer_200))
    app.router.add_get("/metrics", getattr(node, "metrics", _answer_200))
    for name in ("ready", "version"):
        if handler := getattr(node, name, None):
            app.router.add_get(f"/{name}", handler)
    # Cancel a handler when its client disconnects, as a real node does.
    async with TestServer(app, handler_cancellation=True) as server:
        yield str(server.make_url(""))
