"""Nodes that come and go while the router runs, and nodes whose requests fail."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from kvferry.router.app import Router
from kvferry.router.http.access import ClientTls, NodeAccess
from kvferry.router.nodes.membership import DnsTarget
from kvferry.router.nodes.pool import NodeGoneError, NodePool, UpstreamNode
from kvferry.router.nodes.sources import DnsName, NodesFile, NodeSource
from kvferry.router.nodes.states import EjectionRule, Health, NodeState
from kvferry.transports.testing.certificates import Authority
from tests.support.fake_dns import Names
from tests.support.fake_nodes import serving
from tests.support.patience import DEADLINE_S, until

PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e"}


@dataclass
class Node:
    """A node of either role that answers when the test allows it, and breaks connections if the test wants
    that.
    """

    dies: bool = False
    prompts: list[str] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.prompts.append(body["prompt"])
        if self.dies:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            return web.json_response({"choices": [], "kv_transfer_params": PARAMS})
        self.asked.set()
        async with asyncio.timeout(DEADLINE_S):
            await self.may_end.wait()
        return web.json_response({"choices": [{"text": "answer"}]})


def quick(**fields: Any) -> Node:
    node = Node(**fields)
    node.may_end.set()
    return node


class Fleet:
    """A router without nodes, and clients of its API and of its admin endpoints."""

    def __init__(self, client: TestClient[Any, Any], admin: TestClient[Any, Any]) -> None:
        self._client = client
        self._admin = admin

    async def ask(self, prompt: str = "p", **fields: Any) -> tuple[int, str]:
        async with self._client.post("/v1/completions", json={"prompt": prompt, **fields}) as response:
            return response.status, await response.text()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._client.get(path) as response:
            return response.status, await response.json()

    async def call(self, method: str, **what: Any) -> tuple[int, Any]:
        async with self._admin.request(method, "/admin/nodes", **what) as response:
            return response.status, await response.json()

    async def told(self, path: str) -> Any:
        async with self._admin.get(f"/admin/requests{path}") as response:
            assert response.status == 200
            return await response.json()

    async def add(self, role: str, url: str) -> None:
        status, _ = await self.call("POST", json={"role": role, "url": url})
        assert status == 201
        await self.until_state(url, "ready")

    async def remove(self, role: str, url: str) -> dict[str, Any]:
        status, node = await self.call("DELETE", params={"role": role, "url": url})
        assert status == 202, node
        return dict(node)

    async def seen(self) -> dict[str, dict[str, Any]]:
        _, body = await self.get("/nodes")
        return {node["url"]: node for node in body["nodes"]}

    async def until_state(self, url: str, state: str | None) -> None:
        """Wait until a node is in a state. None: until it is forgotten."""

        async def is_there() -> bool:
            node = (await self.seen()).get(url)
            return (node and node["state"]) == state

        await until(is_there)


@asynccontextmanager
async def fleet(
    *,
    ejection: EjectionRule | None = None,
    sources: Sequence[NodeSource] = (),
    node_access: NodeAccess | None = None,
) -> AsyncIterator[Fleet]:
    pools = NodePool("prefill"), NodePool("decode", ejection=ejection)
    router = Router(
        *pools,
        answer_timeout_s=0,
        check_interval_s=0.02,
        check_timeout_s=10.0,
        decode_alone="auto",
        sources=sources,
        node_access=node_access,
    )
    admin = router.admin_application(lambda: None)
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(TestClient(TestServer(app, handler_cancellation=True)))
            for app in (router.application(), admin)
        ]
        yield Fleet(*clients)


async def test_a_router_without_nodes_is_not_ready_and_serves_as_soon_as_it_learns_of_a_pair() -> None:
    async with serving(quick()) as prefill, serving(quick()) as decode, fleet() as made:
        assert (await made.get("/health"))[1]["status"] == "no healthy pair of nodes"
        async with made._client.post("/v1/completions", json={"prompt": "p"}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) > 0
            assert "knows no decode node" in await response.text()
        await made.add("prefill", prefill)
        await made.add("decode", decode)
        assert (await made.ask())[0] == 200
        assert (await made.get("/health"))[1]["status"] == "ok"


async def test_a_removed_node_finishes_its_requests_before_it_is_forgotten() -> None:
    leaving, staying = Node(), quick()
    async with (
        serving(quick()) as prefill,
        serving(leaving) as first,
        serving(staying) as second,
        fleet() as made,
    ):
        await made.add("prefill", prefill)
        await made.add("decode", first)
        asking = asyncio.create_task(made.ask())
        await leaving.asked.wait()
        await made.add("decode", second)
        removed = await made.remove("decode", first)
        assert (removed["state"], removed["in_flight"], removed["sources"]) == ("leaving", 1, [])
        for _ in range(3):
            assert (await made.ask())[0] == 200
        assert (len(leaving.prompts), len(staying.prompts)) == (1, 3)
        assert (await made.seen())[first]["state"] == "leaving"
        await made.add("decode", first)
        await made.until_state(first, "ready")
        await made.remove("decode", first)
        leaving.may_end.set()
        assert (await asking)[0] == 200
        await made.until_state(first, None)


async def test_a_removed_prefill_node_stays_until_its_offer_is_loaded() -> None:
    decode = Node()
    async with serving(quick()) as prefill, serving(decode) as url, fleet() as made:
        await made.add("prefill", prefill)
        await made.add("decode", url)
        asking = asyncio.create_task(made.ask())
        await decode.asked.wait()
        removed = await made.remove("prefill", prefill)
        assert (removed["state"], removed["in_flight"], removed["offers"]) == ("leaving", 0, 1)
        decode.may_end.set()
        assert (await asking)[0] == 200
        await made.until_state(prefill, None)


async def test_a_node_of_two_sources_exists_until_both_have_dropped_it(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    async with serving(quick()) as url:
        path.write_text(json.dumps({"decode": [url]}))
        async with fleet(sources=[NodesFile(path, interval_s=0.01)]) as made:
            await made.until_state(url, "ready")
            status, error = await made.call("DELETE", params={"role": "decode", "url": url})
            assert (status, "which is 'file'" in error["error"]["message"]) == (409, True)
            assert (await made.call("POST", json={"role": "decode", "url": url}))[0] == 201
            path.write_text("{}")
            await until(lambda: has_sources(made, url, ["admin"]))
            assert (await made.seen())[url]["state"] == "ready"
            await made.remove("decode", url)
            await made.until_state(url, None)


async def has_sources(made: Fleet, url: str, sources: list[str]) -> bool:
    return bool((await made.seen())[url]["sources"] == sources)


async def test_a_source_that_fails_says_so_in_the_routers_view(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_text("[")

    async with fleet(sources=[NodesFile(path, interval_s=0.01)]) as made:

        async def is_told() -> bool:
            (source,) = (await made.get("/nodes"))[1]["sources"]
            return source["name"] == "file" and "is no JSON" in source["problem"]

        await until(is_told)


@pytest.mark.parametrize(
    ("method", "what", "status"),
    [
        ("POST", {"json": {"role": "both", "url": "http://x:1"}}, 400),
        ("POST", {"json": {"role": "decode", "url": "dns://x:1"}}, 400),
        ("POST", {"json": {"role": "decode", "url": 3}}, 400),
        ("DELETE", {"params": {"role": "decode"}}, 400),
        ("DELETE", {"params": {"role": "decode", "url": "http://x:1"}}, 404),
    ],
)
async def test_the_admin_api_refuses_what_is_no_node(method: str, what: dict[str, Any], status: int) -> None:
    async with fleet() as made:
        answered, body = await made.call(method, **what)
        assert (answered, body["error"]["type"]) == (status, "invalid_request_error")
        assert (await made.call("GET")) == (200, {"nodes": []})


async def test_to_add_a_node_twice_changes_nothing() -> None:
    async with serving(quick()) as url, fleet() as made:
        await made.add("decode", url)
        status, node = await made.call("POST", json={"role": "decode", "url": f"{url}/"})
        assert (status, node["url"]) == (200, url)
        assert [node["url"] for node in (await made.call("GET"))[1]["nodes"]] == [url]


async def test_a_node_whose_requests_fail_is_avoided_and_comes_back_when_they_succeed() -> None:
    broken, well = quick(dies=True), quick()
    rule = EjectionRule(num_failures=3, first_s=0.3)
    async with (
        serving(quick()) as prefill,
        serving(broken) as first,
        serving(well) as second,
        fleet(ejection=rule) as made,
    ):
        for role, url in (("prefill", prefill), ("decode", first), ("decode", second)):
            await made.add(role, url)

        async def is_avoided() -> bool:
            assert (await made.ask())[0] == 200
            return bool((await made.seen())[first]["ejections"])

        await until(is_avoided)
        node = (await made.seen())[first]
        assert (len(broken.prompts), node["ejections"], node["last_probe"]["error"]) == (3, 1, "")
        assert "3 requests in a row failed" in node["why"]
        assert (await made.ask())[0] == 200
        assert len(broken.prompts) == 3
        broken.dies = False

        async def is_well() -> bool:
            assert (await made.ask())[0] == 200
            return not (await made.seen())[first]["why"]

        await until(is_well)
        assert len(broken.prompts) > 3


async def test_the_routers_view_of_a_node_shows_its_probe_and_version() -> None:
    decode = Reporting()
    async with serving_all(decode) as url, fleet() as made:
        await made.add("decode", url)

        async def knows_version() -> bool:
            return bool((await made.seen())[url]["version"])

        await until(knows_version)
        node = (await made.seen())[url]
        names = "url role kv_role load models state why in_flight offers ejections version last_probe sources"
        assert node.keys() == {*names.split(), "cached_blocks", "kept_for_prompts"}
        assert (node["role"], node["why"], node["version"]) == ("decode", "", "1.2.3")
        assert node["last_probe"].keys() == {"path", "at", "seconds", "error"}
        assert node["last_probe"]["path"] == "/ready"
        for status, state in (("overloaded", "overloaded"), ("starting", "gone"), ("ok", "ready")):
            decode.status = status
            await made.until_state(url, state)


class Reporting:
    """A node with `/ready` and `/version`. Its `/health` is always well, as that of a node that drains is."""

    def __init__(self) -> None:
        self.status = "ok"

    async def ready(self, request: web.Request) -> web.Response:
        return web.json_response({"status": self.status}, status=200 if self.status == "ok" else 503)

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "1.2.3"})

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})


@asynccontextmanager
async def serving_all(node: Reporting) -> AsyncIterator[str]:
    app = web.Application()
    for path in ("ready", "version", "health"):
        app.router.add_get(f"/{path}", getattr(node, path))
    async with TestServer(app) as server:
        yield str(server.make_url(""))


async def test_prompts_with_the_same_beginning_go_to_the_same_prefill_node() -> None:
    prefills = [quick() for _ in range(3)]
    async with AsyncExitStack() as stack, fleet() as made:
        for node in prefills:
            await made.add("prefill", await stack.enter_async_context(serving(node)))
        await made.add("decode", await stack.enter_async_context(serving(quick())))
        for index in range(24):
            assert (await made.ask(f"prefix {index % 8:3}" * 1000 + f" and the rest {index}"))[0] == 200
        for node in prefills:
            beginnings = [prompt[:10] for prompt in node.prompts]
            assert all(beginnings.count(beginning) == 3 for beginning in beginnings)


async def test_the_certificate_of_a_node_that_dns_found_has_the_name_and_not_the_address(
    tmp_path: Path,
) -> None:
    authority = Authority.make(tmp_path)
    files = authority.issue("node", "DNS:decode.models.svc")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["tls_cert"], files["tls_key"])
    app = web.Application()
    app.router.add_get("/ready", Reporting().ready)
    server = TestServer(app, scheme="https")
    await server.start_server(ssl=context)
    assert server.port is not None
    try:
        access = NodeAccess(tls=ClientTls(files["tls_ca"]))
        for name, state in (("decode.models.svc", "ready"), ("another", "gone")):
            source = DnsName("decode", DnsTarget(name, server.port, "dns+https"), 5.0, Names("127.0.0.1"))
            async with fleet(sources=[source], node_access=access) as made:
                await made.until_state(f"https://127.0.0.1:{server.port}", state)
    finally:
        await server.close()


def fail_one(pool: NodePool, *, may_eject: bool) -> UpstreamNode:
    """Send a request to a node that fails it."""
    node = pool.usable({}, {})[0]
    with pytest.raises(NodeGoneError), pool.using(node, {}):
        raise NodeGoneError(node, "failed", may_eject=may_eject)
    return node


def test_a_node_that_only_refuses_is_not_avoided_and_one_that_fails_is_the_last_resort() -> None:
    pool = NodePool("decode", ["http://a", "http://b"], ejection=EjectionRule(num_failures=1))
    for node in pool.nodes:
        node.note(Health(NodeState.READY))
    assert fail_one(pool, may_eject=False).trouble == 0
    failed = fail_one(pool, may_eject=True)
    (other,) = set(pool.nodes) - {failed}
    assert (failed.state, other.state) == (NodeState.READY, NodeState.READY)
    for _ in range(2):
        with pool.using(pool.usable({}, {})[0], {}):
            assert pool.usable({}, {}) == [other, failed]
    other.note(Health(NodeState.GONE, "no more"))
    assert pool.usable({}, {}) == [failed]


async def test_a_router_tells_what_it_did_for_a_request_and_why_that_failed() -> None:
    class Broken(Node):
        async def handle(self, request: web.Request) -> web.StreamResponse:
            return web.json_response({"why": "no room"}, status=503)

    async with serving(quick()) as prefill, serving(Broken()) as decode, fleet() as made:
        await made.add("prefill", prefill)
        await made.add("decode", decode)
        status, _ = await made.ask()
        assert status >= 500
        (request_id,) = (await made.told(""))["requests"]
        told = await made.told(f"/cmpl-{request_id}")
    assert told["process"] == "router"
    spans = {span["name"]: span for span in told["spans"]}
    assert spans["decode_call"]["attributes"]["node"] == decode
    assert spans["router"]["error"] == f"HTTP status {status}"
    events = {event["name"]: event.get("reason", "") for event in spans["router"]["events"]}
    assert "no room" in events["decode lost"]
    assert events["failed"]
