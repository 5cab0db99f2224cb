"""A 503 says when to come back, where coming back helps."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import TestClient, TestServer

from reference.engine.engine import Engine
from reference.engine.settings import EngineSettings
from reference.node.app import NodeServer
from reference.router.nodes import RETRY_AFTER_S, NodePool, NodeState
from reference.web.errors import ApiError, unavailable


def test_only_what_is_temporary_says_when_to_come_back() -> None:
    assert unavailable("busy").response().headers["Retry-After"] == "1"
    assert "Retry-After" not in unavailable("over", retry_after_s=None).response().headers


async def test_a_node_that_starts_says_so_and_when_to_come_back() -> None:
    async with TestClient(TestServer(NodeServer(Engine(EngineSettings())).application())) as client:
        for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/v1/completions")):
            async with client.request(method, path, json={"prompt": "a"}) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "1")


async def test_a_router_without_nodes_is_asked_again_and_one_that_stops_is_not() -> None:
    pool = NodePool("prefill", ["http://127.0.0.1:1"])
    pool.nodes[0].state = NodeState.GONE
    for after_s in (RETRY_AFTER_S, None):
        with pytest.raises(ApiError) as caught:
            async with pool.use_one({}):
                pass
        assert (caught.value.status, caught.value.retry_after_s) == (503, after_s)
        pool.close()
