"""The router asks both nodes at once where they can do that, and one after the other where they cannot or did
not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient

from tests.support.fake_nodes import routed
from tests.support.patience import DEADLINE_S

WHERE = {"remote_engine_id": "e", "remote_epoch": "5", "remote_addresses": ["shm:x"], "tp_size": 1}
PARAMS = {"do_remote_prefill": True, **WHERE, "remote_block_ids": [[3]], "rendezvous_supported": True}


@dataclass
class Fake:
    """A node that can be asked at once with another one.

    The test decides when and what each of its requests is answered.

    Attributes:
        hold: What the next answers wait for.
        statuses: Of the next answers; then 200.
        num_hung_up: Requests that the router ended.
    """

    params: dict[str, Any] | None = None
    protocol: int = 7
    hold: asyncio.Event | None = None
    statuses: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    releases: list[dict[str, Any]] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    num_hung_up: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.asked.set()
        status = self.statuses.pop(0) if self.statuses else 200
        try:
            if self.hold is not None:
                await asyncio.wait_for(self.hold.wait(), DEADLINE_S)
        except asyncio.CancelledError:
            self.num_hung_up += 1
            raise
        params = {} if self.params is None else {"kv_transfer_params": self.params}
        return web.json_response({"choices": [], **params}, status=status, headers=self.headers)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=f'kvferry_build_info{{protocol="{self.protocol}",version="0"}} 1.0\n')

    async def release(self, request: web.Request) -> web.StreamResponse:
        self.releases.append(await request.json())
        return web.json_response({"choices": []})

    def names(self) -> list[str | None]:
        """Return the name of the rendezvous of each request."""
        return [body["kv_transfer_params"].get("rendezvous") for body in self.bodies]


@asynccontextmanager
async def introduced(
    prefills: Sequence[Fake], decodes: Sequence[Fake], **options: Any
) -> AsyncIterator[TestClient[Any, Any]]:
    """Yield a client of a router that has had an answer of each prefill node."""
    async with routed(prefills, decodes, **options) as client:
        for _ in prefills:
            assert await ask(client) == 200
        for node in (*prefills, *decodes):
            node.bodies.clear()
            node.asked.clear()
        yield client


async def ask(client: TestClient[Any, Any], **fields: Any) -> int:
    async with client.post("/v1/completions", json={"prompt": "p", "max_tokens": 9, **fields}) as response:
        await response.read()
        return response.status


async def value(client: TestClient[Any, Any], name: str) -> float:
    async with client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


async def test_both_nodes_are_asked_at_once_by_a_name() -> None:
    prefill, decode = Fake(PARAMS), Fake()
    async with introduced([prefill], [decode]) as client:
        prefill.hold, decode.hold = decode.asked, prefill.asked  # each answers only when the other is asked
        assert await ask(client) == 200
        assert await value(client, "kvferry_router_rendezvous_total") == 1
    (name,) = prefill.names()
    wish = prefill.bodies[0]["kv_transfer_params"]
    assert (wish["do_remote_decode"], len(name or ""), prefill.bodies[0]["stream"]) == (True, 32, False)
    expected = {"do_remote_prefill": True, "do_remote_decode": False, "rendezvous": name, **WHERE}
    assert decode.bodies[0]["kv_transfer_params"] == expected


async def test_a_decode_node_holds_no_blocks_for_a_prompt_in_a_queue() -> None:
    prefill, decode = Fake(PARAMS), Fake()
    async with introduced([prefill], [decode]) as client:
        prefill.hold = decode.hold = asyncio.Event()
        asking = [asyncio.create_task(ask(client)) for _ in range(10)]
        while len(prefill.bodies) < 10:
            await asyncio.sleep(0.01)
        prefill.hold.set()
        assert await asyncio.gather(*asking) == [200] * 10
    assert prefill.names().count(None) == 2


@pytest.mark.parametrize("status", [503, 429, 500])
async def test_a_prefill_that_fails_before_the_decode_node_answers_is_repeated(status: int) -> None:
    prefill, other, decode = Fake(PARAMS), Fake(PARAMS), Fake()
    async with introduced([prefill, other], [decode]) as client:
        prefill.statuses, other.statuses = [status], [status]  # whichever is asked first
        decode.hold = asyncio.Event()
        asking = asyncio.create_task(ask(client))
        await asyncio.wait_for(decode.asked.wait(), DEADLINE_S)
        while not decode.num_hung_up:
            await asyncio.sleep(0.01)
        decode.hold.set()
        assert await asking == 200
        assert await value(client, 'kvferry_router_retries_total{role="prefill"}') >= 1
    # Both nodes were asked once more, one after the other, and the decode node was not blamed.
    assert [name is None for name in decode.names()] == [False, True]


async def test_when_the_decode_node_is_lost_its_prefill_ends_and_the_next_has_another_name() -> None:
    prefill, gone, other = Fake(PARAMS), Fake(), Fake()
    async with introduced([prefill], [gone, other]) as client:
        prefill.hold = asyncio.Event()
        gone.statuses, other.statuses = [503], [503, 200]
        gone.hold, other.hold = asyncio.Event(), asyncio.Event()
        asking = asyncio.create_task(ask(client))
        for num in (1, 2):  # each decode node answers when the prefill node has its request as well
            held = [gone, other]
            while len(prefill.bodies) < num or not held:
                await asyncio.sleep(0.01)
                held = [each for each in (gone, other) if each.asked.is_set() and not each.hold.is_set()]
            held[0].hold.set()
        while not prefill.num_hung_up or len(prefill.bodies) < 2:
            await asyncio.sleep(0.01)
        prefill.hold.set()
        await asking
        while not prefill.releases:
            await asyncio.sleep(0.01)
    names = prefill.names()
    assert len(set(names)) == len(names) >= 2
    released = prefill.releases[0]["kv_transfer_params"]
    assert (released["do_release"], released["rendezvous"]) == (True, names[0])


async def test_a_prefill_that_the_decode_node_does_not_need_is_ended() -> None:
    prefill, decode = Fake(PARAMS), Fake(headers={"X-KV-Transfer": "none"})
    async with introduced([prefill], [decode]) as client:
        prefill.hold = asyncio.Event()
        assert await ask(client) == 200
        while not prefill.num_hung_up:
            await asyncio.sleep(0.01)


async def test_where_a_node_can_be_reached_is_forgotten_when_its_process_is_gone() -> None:
    prefill, decode = Fake(PARAMS), Fake()
    statuses = [200]

    async def health(request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "starting"}, status=statuses[0])

    prefill.health = health  # type: ignore[attr-defined]
    async with introduced([prefill], [decode], check_interval_s=0.02) as client:
        statuses[0] = 503
        while await ask(client) == 200:
            await asyncio.sleep(0.01)
        statuses[0] = 200
        prefill.bodies.clear()
        while await ask(client) != 200:
            await asyncio.sleep(0.01)
    assert prefill.names()[0] is None
