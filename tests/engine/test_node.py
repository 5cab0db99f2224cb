"""A node with an engine: its states, and that a failure of one request affects no other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer

import kvferry.lab.node.app
from kvferry.lab.client import events_of
from kvferry.lab.engine.engine import Engine
from kvferry.lab.engine.settings import EngineSettings
from kvferry.lab.node.app import NodeServer
from kvferry.runner_mixin.kv_cache import KVCacheManager
from tests.support.engines import served_engine
from tests.support.patience import DEADLINE_S

PROMPTS = {"a": "the first one", "victim": "the victim's", "b": "another one"}

Client = TestClient[web.Request, web.Application]
Sabotage = Callable[[Engine, pytest.MonkeyPatch], None]


class Boom(Exception):
    """An exception of an undocumented type."""


@pytest.fixture
def settings(tiny_model: Callable[[str], Path]) -> EngineSettings:
    return EngineSettings(model=str(tiny_model("llama")), num_blocks=60, max_model_len=256, num_threads=1)


@asynccontextmanager
async def running(settings: EngineSettings) -> AsyncIterator[tuple[Engine, NodeServer, Client]]:
    async with asyncio.timeout(DEADLINE_S), served_engine(settings) as served:
        yield served


def body_of(name: str, **more: Any) -> dict[str, Any]:
    return {
        "prompt": PROMPTS[name],
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def ask(client: Client, name: str, **more: Any) -> Awaitable[ClientResponse]:
    headers = {"X-Request-Id": name}
    return client.post("/v1/completions", json=body_of(name, **more), headers=headers)


async def health(client: Client, path: str = "/health") -> tuple[int, Mapping[str, Any]]:
    async with client.get(path) as response:
        return response.status, await response.json()


def stream_of(text: str) -> list[dict[str, Any]]:
    return list(events_of(text.encode().splitlines()))


def token_ids(events: list[dict[str, Any]]) -> list[int]:
    return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]


# -- one request ---------------------------------------------------------------------------------------------


def tokenizer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = engine.tokenizer.encode

    def raising(text: Any, **options: Any) -> Any:
        if text == PROMPTS["victim"]:
            raise Boom
        return encode(text, **options)

    monkeypatch.setattr(engine.tokenizer, "encode", raising)


def engine_admission(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    check = engine._started()._check

    def raising(source: Any) -> None:
        if "victim" in source.request_id:
            raise Boom
        check(source)

    monkeypatch.setattr(engine._started(), "_check", raising)


def wording(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("whole", "chunk"):
        monkeypatch.setattr(
            kvferry.lab.node.app.Envelope,
            name,
            _raising_for_victim(getattr(kvferry.lab.node.app.Envelope, name)),
        )


def _raising_for_victim(method: Any) -> Any:
    def raising(self: Any, *arguments: Any, **options: Any) -> Any:
        if "victim" in self.request_id:
            raise Boom
        return method(self, *arguments, **options)

    return raising


def second_write(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the second write to the victim's socket raise, in the middle of its stream."""
    write, num_writes = web.StreamResponse.write, [0]

    async def raising(self: web.StreamResponse, data: Any) -> None:
        if "victim" in self.headers.get("X-Request-Id", ""):
            num_writes[0] += 1
            if num_writes[0] == 2:
                raise Boom
        await write(self, data)

    monkeypatch.setattr(web.StreamResponse, "write", raising)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sabotage", [tokenizer, engine_admission, wording, second_write])
async def test_an_exception_for_one_request_fails_only_that_request(
    sabotage: Sabotage, stream: bool, settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(settings) as (engine, server, client):
        expected = {}
        for name in PROMPTS:
            expected[name] = (await (await ask(client, name)).json())["choices"][0]["token_ids"]
        with monkeypatch.context() as patches:
            sabotage(engine, patches)
            answers = await asyncio.gather(*(ask(client, name, stream=stream) for name in PROMPTS))
            texts = dict(zip(PROMPTS, [await one.text() for one in answers], strict=True))
        victim = answers[list(PROMPTS).index("victim")]
        if sabotage is second_write and not stream:
            assert victim.status == 200  # whole answers are not written with this call
        elif victim.status == 200:
            assert "Boom" in stream_of(texts["victim"])[-1]["error"]["message"]
        else:
            assert victim.status == 500
            assert "Boom" in json.loads(texts["victim"])["error"]["message"]
        for name in "ab":
            if stream:
                assert token_ids(stream_of(texts[name])) == expected[name]
            else:
                assert json.loads(texts[name])["choices"][0]["token_ids"] == expected[name]
        assert await health(client) == (200, {"status": "ok"})
        again = await (await ask(client, "victim")).json()
        assert again["choices"][0]["token_ids"] == expected["victim"]
        while not engine.stats().is_idle or server.num_answering:
            await asyncio.sleep(0.005)
        assert engine.stats().num_free_blocks == engine.stats().num_blocks


# -- states --------------------------------------------------------------------------------------------------


async def test_a_node_that_drains_finishes_its_answers_and_refuses_new_ones(settings: EngineSettings) -> None:
    async with running(settings) as (_, server, client):
        expected = (await (await ask(client, "a", max_tokens=100)).json())["choices"][0]["token_ids"]
        begun = [asyncio.ensure_future(ask(client, "a", max_tokens=100, stream=s)) for s in (True, False)]
        while server.num_answering < 2:
            await asyncio.sleep(0.002)
        status, ready = await health(client, "/ready")
        load = ready.pop("load")
        assert (status, ready) == (200, {"status": "ok", "models": [Path(settings.model).name]})
        assert 0 <= load["running"] + load["waiting"] <= 2
        assert 0 <= load["pool_usage"] <= 1
        server.drain()
        assert await health(client, "/ready") == (503, {"status": "draining"})
        assert await health(client) == (200, {"status": "draining"})
        refused = await ask(client, "b")
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        assert "node is stopping" in (await refused.json())["error"]["message"]
        # A release is no new work: it lets the drain end before the lease of the offer does.
        release = await ask(client, "b", max_tokens=1, kv_transfer_params={"do_release": True})
        assert release.status != 503
        # Neither is the order to stop an answer for another node, or an answer that comes back from there.
        order = await ask(client, "b", kv_transfer_params={"move": "5" * 32})
        assert order.status == 200
        known = {"token_ids": expected[:9], "created": 5}
        back = await ask(client, "a", max_tokens=100, kv_transfer_params={"continues": known})
        assert (await back.json())["choices"][0]["token_ids"] == expected
        streamed, whole = await asyncio.gather(*begun)
        assert token_ids(stream_of(await streamed.text())) == expected
        assert (await whole.json())["choices"][0]["token_ids"] == expected
        while server.num_answering:
            await asyncio.sleep(0.002)


async def test_health_reports_that_a_node_is_starting(settings: EngineSettings) -> None:
    server = NodeServer(Engine(settings))
    async with TestClient(TestServer(server.application())) as client:
        assert await health(client) == (503, {"status": "starting"})


def fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the block manager raise once more tokens are cached than a prompt has."""
    cache_blocks = KVCacheManager.cache_blocks

    def raising(self: KVCacheManager, request: Any, num_computed_tokens: int) -> None:
        if num_computed_tokens > 40:
            raise Boom("the blocks are in a mess")
        cache_blocks(self, request, num_computed_tokens)

    monkeypatch.setattr(KVCacheManager, "cache_blocks", raising)


async def test_streams_whole_answers_and_health_report_why_the_engine_ended(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(settings) as (_, _, client):
        fatal(monkeypatch)
        streamed, whole = await asyncio.gather(
            ask(client, "a", max_tokens=100, stream=True), ask(client, "b", max_tokens=100)
        )
        assert "in a mess" in stream_of(await streamed.text())[-1]["error"]["message"]
        assert whole.status == 503
        assert "in a mess" in (await whole.json())["error"]["message"]
        status, state = await health(client)
        assert (status, state["status"]) == (503, "dead")
        assert "in a mess" in state["error"]
        late = await ask(client, "b")
        assert late.status == 503
        assert "in a mess" in (await late.json())["error"]["message"]
