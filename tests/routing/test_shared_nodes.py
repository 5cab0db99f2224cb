"""Routers that share nodes: what the nodes say that they have to do decides where requests go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from tests.support.fake_nodes import routed

VLLM_PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
"""


@dataclass
class Node:
    """Answers at once, and says what it is told to say of its load.

    Attributes:
        page: Its `/metrics`. It is a server of vLLM then, and otherwise a node of ours.
    """

    load: Any = None
    page: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.page:
            self.version, self.models, self.metrics = self._version, self._models, self._metrics
        else:
            self.ready = self._ready

    async def _ready(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok", "load": self.load})

    async def _version(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"version": "0.32.0"})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        model = {"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 100}
        return web.json_response({"object": "list", "data": [model]})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=self.page)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not (body.get("kv_transfer_params") or {}).get("describe"):
            self.asked.append(body)
        return web.json_response({"created": 5, "choices": [{"text": "t"}], "usage": {}})


def load(running: object, waiting: object = 0, pool_usage: object = 0.5) -> dict[str, object]:
    return {"running": running, "waiting": waiting, "pool_usage": pool_usage}


async def loads_of(client: Any) -> list[Any]:
    return [node["load"] for node in (await (await client.get("/nodes")).json())["nodes"]]


async def test_the_router_shows_what_nodes_have_to_do() -> None:
    nodes = [Node(load(4, 1, 0.62)), Node(page=VLLM_PAGE), Node()]
    async with routed([], nodes) as client:
        assert await loads_of(client) == [load(4, 1, 0.62), load(5, 1, 0.5), None]


@pytest.mark.parametrize(
    "said", [load(-1), load("7"), load(True), load(float("inf")), load(10**12), [], {"running": 1}]
)
async def test_a_load_that_cannot_be_true_is_not_believed(said: object) -> None:
    async with routed([], [Node(said)]) as client:
        assert await loads_of(client) == [None]
