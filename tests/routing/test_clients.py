"""Clients that leave at any moment: work for them ends, and no process writes a traceback."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient

from tests.support.fake_nodes import let_rendezvous, routed
from tests.support.patience import DEADLINE_S

PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e"}


@dataclass
class Waiting:
    """A node that waits when it reaches one of the moments of an answer."""

    moment: str
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        try:
            return await self._answer(request, body)
        finally:
            self.ended.set()

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            await self._pass("prefill")
            return web.json_response({"choices": [], "kv_transfer_params": PARAMS})
        await self._pass("decode")
        if not body.get("stream"):
            return web.json_response({"choices": []})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        await self._pass("stream")
        while True:  # more than fits into all buffers on the way
            await response.write(b"data: " + bytes(1 << 16) + b"\n\n")
            self.reached.set()

    async def _pass(self, moment: str) -> None:
        if moment == self.moment:
            self.reached.set()
            await asyncio.sleep(DEADLINE_S)


async def in_flight(client: TestClient[Any, Any]) -> float:
    async with client.get("/metrics") as response:
        lines = [line for line in (await response.text()).splitlines() if "node_in_flight{" in line]
    return sum(float(line.split()[-1]) for line in lines)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():
            await asyncio.sleep(0.01)


WHOLE = [("body", False), ("prefill", False), ("decode", False)]
STREAMED = [("body", True), ("prefill", True), ("decode", True), ("stream", True), ("full buffers", True)]


@pytest.mark.parametrize(("moment", "stream"), WHOLE + STREAMED)
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("aborts", [False, True], ids=["closes", "resets"])
async def test_a_client_that_leaves_causes_no_traceback(
    moment: str, stream: bool, at_once: bool, aborts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    prefill, decode = Waiting(moment), Waiting(moment)
    if at_once:
        let_rendezvous(prefill, decode)
    async with routed([prefill], [decode]) as client:
        writer = await post(client, {"prompt": "p", "stream": stream}, is_cut=moment == "body")
        if moment != "body":
            node = prefill if moment == "prefill" else decode
            await asyncio.wait_for(node.reached.wait(), DEADLINE_S)
        if aborts:
            writer.transport.abort()
        writer.close()
        if moment != "body":
            await asyncio.wait_for(node.ended.wait(), DEADLINE_S)

        async def is_over() -> bool:
            return await in_flight(client) == 0

        await until(is_over)
    assert not unhandled
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]


async def post(client: TestClient[Any, Any], body: dict[str, Any], *, is_cut: bool) -> asyncio.StreamWriter:
    """Send a request, or only the beginning of one, and read nothing."""
    raw = json.dumps(body).encode()
    _, writer = await asyncio.open_connection(client.host, client.port, limit=1)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + (raw[:5] if is_cut else raw))
    await writer.drain()
    return writer
