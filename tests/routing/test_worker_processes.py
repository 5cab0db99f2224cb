"""A router of several processes: one port, one page, one set of metrics, and an end of any of them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from tests.support.client import children_of, is_alive
from tests.support.fake_nodes import serving
from tests.support.patience import DEADLINE_S

ROUTER = Path(__file__).parents[2] / "examples" / "router.py"
EVENT, END = b'data: {"n": 1}\n\n', b"data: [DONE]\n\n"


@dataclass
class Node:
    """A node of either role. It ends its streams when the test allows it."""

    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if not (await request.json()).get("stream"):
            return web.json_response({"choices": [], "kv_transfer_params": None})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENT)
        await asyncio.wait_for(self.may_end.wait(), DEADLINE_S)
        await response.write(END)
        return response


@dataclass
class Running:
    """A router process and its workers."""

    node: Node
    url: str
    admin_url: str
    session: aiohttp.ClientSession  # a connection per request, so that all workers are asked
    process: asyncio.subprocess.Process

    def workers(self) -> list[int]:
        return children_of(self.process.pid)

    async def json(self, path: str) -> Any:
        async with self.session.get(path) as response:
            return await response.json()

    async def complete(self) -> int:
        async with self.session.post(f"{self.url}/v1/completions", json={"prompt": "p"}) as response:
            await response.read()
            return response.status

    async def counts(self) -> dict[str, float]:
        async with self.session.get(f"{self.url}/metrics") as response:
            families = text_string_to_metric_families(await response.text())
        wanted = ("kvferry_router_requests_total", "kvferry_router_node_in_flight")
        found: dict[str, float] = dict.fromkeys(wanted, 0.0)
        for sample in (sample for family in families for sample in family.samples):
            if sample.name in wanted:
                found[sample.name] += sample.value
        return found

    async def shows(self, counts: dict[str, float]) -> bool:
        return await self.counts() == counts

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), DEADLINE_S)


@asynccontextmanager
async def running(*arguments: str) -> AsyncIterator[Running]:
    node = Node()
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with serving(node) as node_url, aiohttp.ClientSession(connector=connector) as session:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(ROUTER), "--port", "0", "--dev", "--processes", "2"),
            *("--prefill", node_url, "--decode", node_url, "--check-interval-s", "0.1", *arguments),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            urls = [""]
            while "router listening on" not in urls[-1]:
                urls.append((await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)).decode())
                assert urls[-1], "the router has ended"
            admin_url, url = (line.rpartition(" ")[2].strip() for line in urls[-2:])
            yield Running(node, url, admin_url, session, process)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = holds()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def streams(router: Running, num: int) -> AsyncIterator[list[aiohttp.ClientResponse]]:
    async def begin() -> aiohttp.ClientResponse:
        body = {"prompt": "p", "stream": True}
        stream = await router.session.post(f"{router.url}/v1/completions", json=body)
        assert await stream.content.readexactly(len(EVENT)) == EVENT
        return stream

    begun = await asyncio.gather(*(begin() for _ in range(num)))
    try:
        yield begun
    finally:
        for stream in begun:
            stream.close()


async def rest_of(stream: aiohttp.ClientResponse) -> bytes:
    try:
        return await asyncio.wait_for(stream.read(), DEADLINE_S)
    except aiohttp.ClientError:
        return b""


async def test_any_process_shows_page_metrics_nodes_and_spans_of_all() -> None:
    async with running() as router:
        num = 0

        async def are_all_used() -> bool:
            nonlocal num
            num += 40
            assert set(await asyncio.gather(*(router.complete() for _ in range(40)))) == {200}
            state = await router.json(f"{router.url}/page/state")
            return len({record["number"] >> 40 for record in state["finished"]}) == 2

        await until(are_all_used)
        states = await asyncio.gather(*(router.json(f"{router.url}/page/state") for _ in range(20)))
        assert {sum(state["history"]["done"]) for state in states} == {num}
        assert len({state["run"] for state in states}) == 1
        newest = states[0]["finished"][-1]["id"]
        for _ in range(10):
            await until(
                partial(
                    router.shows, {"kvferry_router_requests_total": num, "kvferry_router_node_in_flight": 0}
                )
            )
            found = await router.json(f"{router.admin_url}/admin/requests/{newest}")
            assert {span["name"] for span in found["spans"]} >= {"router"}
        # A page that asks for what is new gets each request once.
        last = max(state["last"] for state in states)
        assert (await router.json(f"{router.url}/page/state?since={last}"))["finished"] == []
        await router.complete()
        assert len((await router.json(f"{router.url}/page/state?since={last}"))["finished"]) == 1

        body = {"role": "decode", "url": "http://127.0.0.1:9"}
        async with router.session.post(f"{router.admin_url}/admin/nodes", json=body) as response:
            assert response.status == 201

        async def do_all_know() -> bool:
            answers = await asyncio.gather(*(router.json(f"{router.url}/nodes") for _ in range(20)))
            return {len(answer["nodes"]) for answer in answers} == {3}

        await until(do_all_know)


async def test_a_killed_process_loses_only_its_own_requests_and_another_one_takes_its_place() -> None:
    async with running() as router, streams(router, 20) as begun:
        assert set(await asyncio.gather(*(router.complete() for _ in range(40)))) == {200}
        # A request is counted just after the client has its answer.
        name, nodes = "kvferry_router_requests_total", "kvferry_router_node_in_flight"
        await until(partial(router.shows, {name: 40, nodes: 20}))
        killed, other = router.workers()
        os.kill(killed, signal.SIGKILL)
        await until(lambda: len(router.workers()) == 2 and killed not in router.workers())
        assert other in router.workers()
        router.node.may_end.set()
        rests = await asyncio.gather(*map(rest_of, begun))
        assert set(rests) <= {END, b""}
        num_lost = rests.count(b"")
        assert set(await asyncio.gather(*(router.complete() for _ in range(20)))) == {200}

        # What a scrape has shown is kept, in whichever process.
        expected = {name: 40 + 20 - num_lost + 20, nodes: 0}
        await until(partial(router.shows, expected))
        for _ in range(10):
            assert await router.counts() == expected


async def test_a_signal_to_the_parent_drains_all_processes() -> None:
    async with running() as router, streams(router, 10) as begun:
        workers = router.workers()
        router.process.send_signal(signal.SIGTERM)

        async def refuses() -> bool:
            return set(await asyncio.gather(*(router.complete() for _ in range(10)))) == {503}

        await until(refuses)
        router.node.may_end.set()
        assert set(await asyncio.gather(*map(rest_of, begun))) == {END}
        assert await router.ended() == 0
        assert not any(map(is_alive, workers))


async def test_a_signal_to_one_process_lets_another_one_take_its_place() -> None:
    async with running() as router:
        drained = router.workers()[0]
        os.kill(drained, signal.SIGTERM)
        await until(lambda: not is_alive(drained))
        await until(lambda: len([pid for pid in router.workers() if is_alive(pid)]) == 2)

        async def all_answer() -> bool:
            return set(await asyncio.gather(*(router.complete() for _ in range(10)))) == {200}

        await until(all_answer)


async def test_the_admin_endpoint_drains_all_processes_and_a_second_signal_ends_them() -> None:
    async with running() as router, streams(router, 10) as begun:
        async with router.session.post(f"{router.admin_url}/admin/drain") as response:
            assert await response.json() == {"status": "draining", "requests": 10}
        for number in (signal.SIGTERM, signal.SIGINT):  # two of the same may become one
            router.process.send_signal(number)
        assert await router.ended() == 0
        assert all(b"error" in rest or not rest for rest in await asyncio.gather(*map(rest_of, begun)))


async def test_no_process_outlives_the_parent() -> None:
    async with running() as router, streams(router, 4):
        workers = router.workers()
        router.process.kill()
        await router.ended()
        await until(lambda: not any(map(is_alive, workers)))


async def test_a_worker_that_cannot_start_ends_the_router_with_its_error() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SPOILED),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert (process.returncode, errors.count(b"no exporter here")) == (2, 1)


SPOILED = """
import sys
from kvferry.router import main
from kvferry.router.http.serving import StartupError

def fail(*arguments):
    raise StartupError("no exporter here")

main.set_up_tracing = fail
sys.exit(main.main(["--port", "0", "--processes", "2", "--node", "http://127.0.0.1:9"]))
"""
