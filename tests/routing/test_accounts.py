"""What the page shows of the nodes of a request: which nodes the router asks, with what, and what it shows of
their answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from kvferry.connector.spans import RecentSpans, ServerSpans, SpanRecord
from kvferry.router.http.access import ClientTls, NodeAccess, OwnKey
from kvferry.router.http.admin import admin_application
from kvferry.router.http.recent_spans import span_routes
from kvferry.router.nodes.reading import node_session, refuse_no_answers
from kvferry.router.seen.accounts import Accounts
from tests.support.fake_nodes import routed, serving
from tests.support.patience import DEADLINE_S

KEY = "s3cret-ferry"


class VllmNode:
    """Explains requests as our connector in a server of vLLM does."""

    def __init__(self, *spans: SpanRecord) -> None:
        self.headers: list[str] = []
        self._spans = spans

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "owned_by": "vllm"}]})

    async def handle(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers.get("Authorization", ""))
        params = (await request.json())["kv_transfer_params"]
        told = ServerSpans("vllm", "e", self._spans if params == {"explain": "a"} else ())
        return web.json_response({"kv_transfer_params": {"spans": dataclasses.asdict(told)}})


class ReferenceNode:
    """Says that its admin endpoints are at a port."""

    def __init__(self, port: int | None) -> None:
        self._port = port

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", **({"admin_port": self._port} if self._port else {})})

    async def handle(self, request: web.Request) -> web.Response:
        raise AssertionError("a reference node is asked at its admin endpoints")


@asynccontextmanager
async def admin_endpoints(refuses: bool, seen: list[str]) -> AsyncIterator[int]:
    """Serve the spans of a request `a`, or ask for a key."""
    spans = RecentSpans()
    spans.keep(SpanRecord("a", "node", 1.1, 1.3))

    @web.middleware
    async def note(request: web.Request, handler: Any) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization", ""))
        if refuses:
            return web.json_response({"error": {"message": "a key"}}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    app = admin_application(span_routes(spans, "prefill"))
    app.middlewares.append(note)
    async with TestServer(app) as server:
        yield server.port or 0


async def account(
    *named: str, known: tuple[str, ...] = (), server_name: str = "", tls: ClientTls | None = None
) -> list[str]:
    """Return what a router with a key of its nodes shows of a request that it sent to the nodes `named`."""
    spans = RecentSpans()
    for url in named:
        spans.keep(SpanRecord("a", "prefill_call", 1.0, 2.0, attributes={"node": url}))
    access = NodeAccess(OwnKey("X", KEY), tls)
    async with node_session(access, (access.present, refuse_no_answers)) as session:
        nodes = dict.fromkeys(known or named, server_name)
        return await Accounts(spans, lambda: nodes).lines("a", "http://r", session)


async def test_a_node_of_vllm_is_asked_by_a_request_with_the_routers_key() -> None:
    node = VllmNode(SpanRecord("a", "load_wait", 1.5, 1.75, error="the claim was refused"))
    async with serving(node) as url:
        text = "\n".join(await account(url.rstrip("/")))
    assert node.headers == [f"Bearer {KEY}"]
    assert "the load failed: the claim was refused" in text
    assert "250.0 ms" in text


async def test_admin_endpoints_are_asked_without_a_key_and_one_that_needs_it_says_so() -> None:
    for refuses, wanted in ((False, "200.0 ms"), (True, "run `kvferry explain` with --admin-api-key-file")):
        seen: list[str] = []
        async with admin_endpoints(refuses, seen) as port, serving(ReferenceNode(port)) as url:
            text = "\n".join(await account(url.rstrip("/")))
        assert seen == [""]
        assert wanted in text


async def test_a_node_without_admin_endpoints_says_how_to_get_them() -> None:
    async with serving(ReferenceNode(None)) as url:
        assert "start it with --admin-port" in "\n".join(await account(url.rstrip("/")))


async def test_no_address_is_asked_that_is_no_node_any_more() -> None:
    node = VllmNode(SpanRecord("a", "queue", 1.0, 2.0))
    async with serving(node) as url:
        assert url.rstrip("/") in "\n".join(await account(url.rstrip("/"), known=("http://other",)))
    assert node.headers == []


async def test_a_node_that_is_gone_or_hostile_leaves_the_others_account() -> None:
    class Hostile(VllmNode):
        async def handle(self, request: web.Request) -> web.Response:
            return web.json_response(
                {"kv_transfer_params": {"spans": {"process": "x\n\x1b[2J", "spans": [5]}}}
            )

    right = VllmNode(SpanRecord("a", "queue", 1.0, 1.125))
    async with serving(Hostile()) as hostile, serving(right) as url:
        lines = await account("http://127.0.0.1:9", hostile.rstrip("/"), url.rstrip("/"))
    assert all(line.isprintable() for line in lines)
    text = "\n".join(lines)
    assert "it answers what no server of kvferry answers" in text
    assert "125.0 ms" in text
    assert "127.0.0.1:9" in text


async def test_the_page_gets_the_account_of_a_request_that_it_names() -> None:
    class Answering(VllmNode):
        async def handle(self, request: web.Request) -> web.Response:
            if "explain" in ((await request.json()).get("kv_transfer_params") or {}):
                return await super().handle(request)
            return web.json_response({"choices": []})

    async with routed([Answering()], [Answering(SpanRecord("a", "queue", 1.0, 1.375))]) as client:
        async with client.post(
            "/v1/completions", json={"prompt": "p"}, headers={"X-Request-Id": "a"}
        ) as answer:
            await answer.read()
        async with asyncio.timeout(DEADLINE_S):
            told = await (await client.get("/page/explain", params={"request": "a"})).json()
        unknown = await (await client.get("/page/explain", params={"request": "b"})).json()
        assert (await client.get("/page/explain")).status == 400
    assert "375.0 ms" in "\n".join(told["lines"])
    assert "no spans of this request" in "\n".join(unknown["lines"])
