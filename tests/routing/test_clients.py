"""Clients that leave at any moment: work for them ends, and no process writes a traceback."""

from __future__ import annotations

import asyncio
import json
import logging
import types
from collections.abc import Callable, Container, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient

from kvferry.router.answer.performance import Performance
from kvferry.router.app import Router
from tests.support.fake_nodes import let_rendezvous, routed
from tests.support.patience import DEADLINE_S, until

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
    head = f"POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + (raw[:5] if is_cut else raw))
    await writer.drain()
    return writer


# -- a handler that is cancelled at every await --------------------------------------------------------


@types.coroutine
def cancelled_at(
    moments: Container[int], coroutine: Coroutine[Any, Any, Any], passed: list[int]
) -> Generator[Any, Any, Any]:
    """Run a coroutine, and cancel its task at these of its suspensions. Notes each suspension in `passed`."""
    go_on: Callable[[Any], Any] = coroutine.send
    value: Any = None
    while True:
        try:
            awaited = go_on(value)
        except StopIteration as end:
            return end.value
        passed.append(len(passed) + 1)
        if passed[-1] in moments:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        try:
            value, go_on = (yield awaited), coroutine.send
        except BaseException as error:  # noqa: BLE001 - the coroutine decides what becomes of it
            value, go_on = error, coroutine.throw


@dataclass
class Counting:
    """A prefill node and a decode node, which count their requests that run, and the offers that they hold.

    Attributes:
        made, over: Names of offers that were made; and that were loaded or released.
    """

    num_running: int = 0
    made: set[str] = field(default_factory=set)
    over: set[str] = field(default_factory=set)

    @property
    def num_held(self) -> int:
        return self.num_running + len(self.made - self.over)

    async def release(self, request: web.Request) -> web.StreamResponse:
        params = (await request.json())["kv_transfer_params"]
        self.over.add(params.get("release_as") or params["name"])
        return web.Response()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.num_running += 1
        try:
            return await self._answer(request, await request.json())
        finally:
            self.num_running -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        params = body["kv_transfer_params"]
        if params.get("do_remote_decode"):
            self.made.add(name := params["release_as"])
            return web.json_response({"choices": [], "kv_transfer_params": {**PARAMS, "name": name}})
        self.over.add(params["name"])
        if not body.get("stream"):
            return web.json_response({"choices": []})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for text in ("a", "b"):
            await response.write(b'data: {"choices": [{"text": "%s"}]}\n\n' % text.encode())
            await asyncio.sleep(0.001)  # so that the events arrive one by one
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.mark.parametrize(
    "cancelled", [(Router, "_answer"), (Performance, "run")], ids=["handler", "exchange"]
)
@pytest.mark.parametrize("prompt", ["p", ["p", "q"]], ids=["one prompt", "two prompts"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("num_cancels", [1, 2])
async def test_a_request_that_is_cancelled_at_any_await_leaves_nothing(
    cancelled: tuple[type[Any], str],
    prompt: object,
    stream: bool,
    num_cancels: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second cancellation comes while the first one is still being dealt with, as when a server stops."""
    of, name = cancelled
    original, answer = getattr(of, name), Router._answer
    moments = range(0)
    num_passed = 0
    ended = asyncio.Event()

    async def run(*args: Any) -> Any:
        nonlocal num_passed
        passed: list[int] = []
        try:
            return await cancelled_at(moments, original(*args), passed)
        finally:
            num_passed = max(num_passed, len(passed))

    async def noted(*args: Any) -> web.StreamResponse:
        try:
            return await (run if of is Router else answer)(*args)
        finally:
            ended.set()

    monkeypatch.setattr(of, name, run)
    monkeypatch.setattr(Router, "_answer", noted)
    node = Counting()
    async with routed([node], [node]) as client:

        async def is_over() -> bool:
            report = await (await client.get("/nodes")).json()
            held = sum(one["in_flight"] + one["offers"] for one in report["nodes"])
            left = [repr(task.get_coro()) for task in asyncio.all_tasks()]
            own = [one for one in left if "Performance" in one or "MergedAnswer" in one]
            return held == node.num_held == len(own) == 0

        while num_passed >= moments.start:  # until a request ends before it would be cancelled
            moments = range(moments.start + 1, moments.start + 1 + num_cancels)
            num_passed = 0
            ended.clear()
            writer = await post(client, {"prompt": prompt, "stream": stream}, is_cut=False)
            await asyncio.wait_for(ended.wait(), DEADLINE_S)
            await until(is_over)
            writer.close()
        assert moments.start > 2
