"""Stopping a router process: it finishes the requests in flight, or ends at once after a second signal."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from kvferry.router.http.launcher_link import LAUNCHER_VARIABLE
from kvferry.router.main import configure, drain_timeout_s
from tests.support.fake_nodes import serving
from tests.support.patience import DEADLINE_S

ROUTER = Path(__file__).parents[2] / "examples" / "router.py"
EVENTS = [b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n"]


@dataclass
class Node:
    """A node of either role. It streams the end of its answer when the test allows it."""

    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if not (await request.json())["stream"]:
            return web.json_response({"choices": [], "kv_transfer_params": None})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENTS[0])
        await asyncio.wait_for(self.may_end.wait(), DEADLINE_S)
        for event in EVENTS[1:]:
            await response.write(event)
        return response


@dataclass
class Running:
    """A router process with a stream in flight."""

    node: Node
    url: str
    admin_url: str  # empty without an admin port
    session: aiohttp.ClientSession
    stream: aiohttp.ClientResponse
    process: asyncio.subprocess.Process
    link: socket.socket

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), DEADLINE_S)

    async def rest(self) -> str:
        return (await asyncio.wait_for(self.stream.read(), DEADLINE_S)).decode()

    async def until_draining(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                async with self.session.get(f"{self.url}/ready") as response:
                    if (await response.json())["status"] == "draining":
                        assert response.status == 503
                        return
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running(*arguments: str) -> AsyncIterator[Running]:
    node = Node()
    ours, theirs = socket.socketpair()
    async with serving(node) as node_url, aiohttp.ClientSession() as session:
        with ours, theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(ROUTER), "--port", "0"),
                *("--prefill", node_url, "--decode", node_url, *arguments),
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, LAUNCHER_VARIABLE: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
            try:
                assert process.stdout is not None
                urls = [""]
                while "listening on" not in urls[-1]:
                    urls.append((await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)).decode())
                admin_url, url = (line.rpartition(" ")[2].strip() for line in urls[-2:])
                body = {"prompt": "p", "stream": True}
                async with session.post(f"{url}/v1/completions", json=body) as stream:
                    assert await stream.content.readexactly(len(EVENTS[0])) == EVENTS[0]
                    yield Running(node, url, admin_url, session, stream, process, ours)
            finally:
                if process.returncode is None:
                    process.kill()
                await process.communicate()


async def test_a_router_that_is_stopped_finishes_the_requests_in_flight() -> None:
    async with running() as router:
        router.process.send_signal(signal.SIGTERM)
        await router.until_draining()
        body = {"prompt": "p", "stream": False}
        async with router.session.post(f"{router.url}/v1/completions", json=body) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) > 0
            assert "the router is draining" in json.loads(await response.read())["error"]["message"]
        router.node.may_end.set()
        assert await router.rest() == b"".join(EVENTS[1:]).decode()
        assert await router.ended() == 0


async def test_after_a_drain_hook_the_first_signal_changes_nothing_and_requests_are_still_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVFERRY_ADMIN_API_KEY", "sk-admin")
    async with running("--admin-port", "0", "--drain-delay-s", "0.1") as router:
        headers = {"Authorization": "Bearer sk-admin"}
        async with router.session.post(f"{router.admin_url}/admin/drain", headers=headers) as response:
            assert (response.status, await response.json()) == (202, {"status": "draining", "requests": 1})
        await router.until_draining()
        async with router.session.get(f"{router.url}/health") as response:
            assert (response.status, response.headers["Connection"]) == (200, "close")
        router.process.send_signal(signal.SIGTERM)
        router.node.may_end.set()
        assert await router.rest() == b"".join(EVENTS[1:]).decode()
        assert await router.ended() == 0


@pytest.mark.parametrize("how", ["a second signal", "the launcher's end", "the drain timeout"])
async def test_a_router_that_must_end_at_once_tells_its_clients(how: str) -> None:
    arguments = ("--drain-timeout-s", "0.2") if how == "the drain timeout" else ()
    async with running(*arguments) as router:
        began = time.monotonic()
        if how == "the launcher's end":
            router.link.close()
        else:
            router.process.send_signal(signal.SIGTERM)
        if how == "a second signal":
            await router.until_draining()
            router.process.send_signal(signal.SIGTERM)
        assert "the router is stopping" in await router.rest()
        assert await router.ended() == 0
        assert time.monotonic() - began < 20  # the drain timeout's default is 30 s


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        ((), 30.0),
        (("--drain-timeout-s", "7"), 7.0),
        (("--drain-timeout-s", "0"), 0.0),
        (("--reuse-port",), math.inf),
        (("--reuse-port", "--drain-timeout-s", "7"), 7.0),
    ],
)
def test_a_drain_has_a_limit_unless_another_router_serves_the_port(
    arguments: tuple[str, ...], seconds: float
) -> None:
    parser = argparse.ArgumentParser()
    configure(parser)
    options = parser.parse_args(["--node", "http://127.0.0.1:1", *arguments])
    assert drain_timeout_s(options) == seconds
