"""A 503 has a Retry-After header where a retry can help."""

from __future__ import annotations

from aiohttp.test_utils import TestClient, TestServer

from kvferry.lab.engine.engine import Engine
from kvferry.lab.engine.settings import EngineSettings
from kvferry.lab.node.app import NodeServer
from kvferry.router.http.errors import unavailable
from kvferry.router.nodes.pool import RETRY_AFTER_S, NodePool
from kvferry.router.nodes.states import Health, NodeState


def test_only_a_temporary_failure_says_when_to_retry() -> None:
    assert unavailable("busy").response().headers["Retry-After"] == "1"
    assert "Retry-After" not in unavailable("over", retry_after_s=None).response().headers


async def test_a_starting_node_says_so_and_when_to_retry() -> None:
    async with TestClient(TestServer(NodeServer(Engine(EngineSettings())).application())) as client:
        for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/v1/completions")):
            async with client.request(method, path, json={"prompt": "a"}) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "1")


async def test_a_router_without_nodes_asks_for_a_retry_and_one_that_stops_does_not() -> None:
    pool = NodePool("prefill", ["http://127.0.0.1:1"])
    pool.nodes[0].note(Health(NodeState.GONE, "the process is gone"))
    for after_s in (RETRY_AFTER_S, None):
        assert pool.usable({}, {}) == []
        error = await pool.no_node({}, {})
        assert (error.status, error.retry_after_s) == (503, after_s)
        pool.close()
