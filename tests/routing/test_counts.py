"""What the router counts and logs of each request, whenever its client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request

from kvferry.connector.spans import PART, RecentSpans, SpanRecord
from kvferry.router.answer.handoffs import NO_REASON
from kvferry.router.app import Router
from kvferry.router.http.errors import note_answered
from kvferry.router.http.tracing import observed
from kvferry.router.nodes.pool import NodePool
from tests.support.fake_nodes import routed
from tests.support.patience import DEADLINE_S, until

PARAMS = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_epoch": "5",
    "remote_addresses": ["shm:x"],
    "tp_size": 1,
    "remote_block_ids": [[3]],
    "rendezvous_supported": True,
}
MODEL = "m"
DONE = b"data: [DONE]\n\n"
EVENTS = b'data: {"choices": [{"text": "one"}]}\n\n' + DONE


class Node:
    """A prefill or decode node that can be asked at once with another one.

    Args:
        holds: Keeps each stream open after its last event.
        offers: Offers the cache of each prompt.
        wait_at: The number of a request, counted from 1, that is not answered while its connection is open.
    """

    def __init__(self, *, holds: bool = False, offers: bool = True, wait_at: int = 0) -> None:
        self.holds = holds
        self.offers = offers
        self.wait_at = wait_at
        self.num_asked = 0
        self.is_asked = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.num_asked += 1
        body = await request.json()
        if self.num_asked == self.wait_at:
            self.is_asked.set()
            await asyncio.sleep(DEADLINE_S)
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            answer: dict[str, Any] = {"choices": [], "kv_transfer_params": PARAMS if self.offers else None}
            return web.json_response(answer)
        if not body.get("stream"):
            return web.json_response({"choices": []})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENTS)
        if self.holds:
            await asyncio.sleep(DEADLINE_S)
        return response

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"continues_answers": MODEL})

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text='kvferry_build_info{protocol="7",version="0"} 1.0\n')


JSON = "Content-Type: application/json\r\n"


async def ask(client: TestClient[Any, Any], *, leaves_at: bytes, **body: Any) -> None:
    """Send a request on a connection of its own, and close it as soon as these bytes have arrived."""
    reader, writer = await asyncio.open_connection(client.host, client.port)
    raw = json.dumps({"prompt": "p", **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: r\r\nConnection: close\r\n{JSON}Content-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    if leaves_at:
        await asyncio.wait_for(reader.readuntil(leaves_at), DEADLINE_S)
    writer.close()
    await writer.wait_closed()


async def counts(client: TestClient[Any, Any]) -> Mapping[str, float]:
    """Return the requests by status, and how many durations were noted."""
    async with client.get("/metrics") as response:
        page = await response.text()
    found = {}
    for line in page.splitlines():
        if line.startswith("kvferry_router_requests_total{"):
            found[line.split('"')[1]] = float(line.split()[-1])
        if line.startswith("kvferry_router_request_duration_seconds_count"):
            found["durations"] = float(line.split()[-1])
    return found


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    ends = ("answered /", "the client of")
    return [message.split(" in ")[0] for message in caplog.messages if message.startswith(ends)]


@pytest.mark.parametrize("way", ["one after the other", "rendezvous", "several prompts"])
async def test_a_stream_whose_client_leaves_at_its_last_event_has_been_answered(
    way: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "kvferry")
    kept: list[SpanRecord] = []
    monkeypatch.setattr(RecentSpans, "keep", lambda self, span, request_id="": kept.append(span))
    # In a rendezvous the decode node may have answered before the prefill node's own answer has ended.
    prefill = Node(wait_at=2 if way == "rendezvous" else 0)
    decode = Node(holds=way == "one after the other")
    prompt = ["p", "q"] if way == "several prompts" else "p"
    async with routed([prefill], [decode], rendezvous=way == "rendezvous") as client:
        if way == "rendezvous":  # which needs the prefill node's first answer
            await ask(client, leaves_at=b"}", prompt="p")
        num_before = 1 if way == "rendezvous" else 0
        num = 1 if way == "rendezvous" else 4
        for _ in range(num):
            await ask(client, leaves_at=DONE, prompt=prompt, stream=True)

        async def all_are_counted() -> bool:
            found = await counts(client)
            return sum(found.values()) == 2 * (num_before + num)

        await until(all_are_counted)
        found = await counts(client)
        async with client.get("/page/state") as response:
            records = (await response.json())["finished"]
    assert found == {"200": num_before + num, "durations": num_before + num}
    assert logged(caplog) == ["answered /v1/completions with 200"] * (num_before + num)
    assert {(record["status"], record["error"]) for record in records} == {(200, "")}
    if way != "several prompts":  # each of which has its own
        streamed = [span for span in kept if span.name == "router"][-num:]
        assert all("ttft_s" in span.attributes for span in streamed)
        assert all(any(event["name"] == PART for event in span.events) for span in streamed)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_end_is_counted_as_such(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvferry")
    decode = Node(wait_at=1)
    async with routed([Node()], [decode]) as client:
        await leave_when(decode.is_asked, client, stream=stream)

        async def is_counted() -> bool:
            return bool(await counts(client) != {"durations": 0.0})

        await until(is_counted)
        assert await counts(client) == {"499": 1, "durations": 0}
    assert [message.split(" disconnected")[0] for message in logged(caplog)] == [
        "the client of /v1/completions"
    ]


async def leave_when(moment: asyncio.Event, client: TestClient[Any, Any], **body: Any) -> None:
    raw = json.dumps({"prompt": "p", **body}).encode()
    _, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nHost: r\r\n{JSON}Content-Length: {len(raw)}\r\n\r\n".encode() + raw
    )
    await asyncio.wait_for(moment.wait(), DEADLINE_S)
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("way", ["rendezvous", "in_turn", "without_offer", "alone"])
async def test_the_time_to_the_first_token_of_a_stream_is_measured_by_the_way_of_its_prompt(way: str) -> None:
    prefill = [] if way == "alone" else [Node(offers=way != "without_offer")]
    async with routed(prefill, [Node()], rendezvous=way == "rendezvous", decode_alone="always") as client:
        if way == "rendezvous":  # which needs the prefill node's first answer
            await ask(client, leaves_at=b"}")
        began = time.monotonic()
        for stream in (True, True, False):
            await ask(client, leaves_at=DONE if stream else b"}", stream=stream)
        took_s = time.monotonic() - began
        async with client.get("/metrics") as response:
            page = await response.text()
    measured = re.findall(r'time_to_first_token_seconds_(count|sum){way="(\w+)"} (\S+)', page)
    assert len(measured) == 2 * 4
    found = {(kind, name): float(value) for kind, name, value in measured if float(value)}
    assert found.keys() == {("count", way), ("sum", way)}
    assert found["count", way] == 2
    assert 0 < found["sum", way] < took_s


async def test_a_refusal_is_counted_by_its_status() -> None:
    async with routed([Node()], [Node()]) as client:
        async with client.post("/v1/completions", json={"max_tokens": -1}) as response:
            assert response.status == 400
        assert await counts(client) == {"400": 1, "durations": 1}


async def test_a_turn_whose_client_leaves_at_the_last_event_is_remembered() -> None:
    prefills = [Node(), Node(), Node()]
    session = {"X-Session-ID": "s"}
    async with routed(prefills, [Node(holds=True)], rendezvous=False) as client:
        for number in range(1, 4):
            async with client.post(
                "/v1/completions", json={"prompt": "p", "stream": True}, headers=session
            ) as response:
                async for line in response.content:
                    if line == b"data: [DONE]\n":
                        break
                response.close()

            async def is_counted(number: int = number) -> bool:
                return (await counts(client)).get("200") == number

            await until(is_counted)
    assert sorted(node.num_asked for node in prefills) == [0, 0, 3]


async def test_an_answer_that_was_noted_is_logged_as_answered_although_its_handler_was_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvferry")

    async def answer(request: web.Request) -> web.StreamResponse:
        note_answered(request, 200)
        raise asyncio.CancelledError

    async def leave(request: web.Request) -> web.StreamResponse:
        raise asyncio.CancelledError

    kept: list[SpanRecord] = []
    for handler in (answer, leave):
        with pytest.raises(asyncio.CancelledError):
            await observed("x", kept.append)(make_mocked_request("POST", "/p"), handler)
    answered, left = logged(caplog)
    assert answered == "answered /p with 200"
    assert left.startswith("the client of /p disconnected")
    assert [[event["name"] for event in span.events] for span in kept] == [[], ["the client disconnected"]]


async def test_a_router_has_finished_with_the_end_of_its_last_request() -> None:
    pools = NodePool("prefill", ["http://127.0.0.1:9"]), NodePool("decode", ["http://127.0.0.1:9"])
    router = Router(
        *pools, answer_timeout_s=0.0, check_interval_s=60.0, check_timeout_s=5.0, decode_alone="never"
    )
    async with TestClient(TestServer(router.application())) as client, asyncio.timeout(DEADLINE_S):
        async with client.post("/v1/completions", json={"prompt": "p"}) as response:
            assert response.status == 503
        await router.finish(2 * DEADLINE_S)


async def test_a_load_that_failed_without_a_reason_is_noted_in_the_span_of_its_request() -> None:
    class Failing(Node):
        async def handle(self, request: web.Request) -> web.StreamResponse:
            return web.json_response({"choices": []}, headers={"X-KV-Transfer": "failed"})

    async with routed([Node()], [Failing()]) as client:
        headers = {"X-Request-Id": "r7"}
        async with client.post("/v1/completions", json={"prompt": "p"}, headers=headers) as response:
            assert response.status == 200
        told = await (await client.get("/page/explain", params={"request": "r7"})).json()
    assert f"handoff failed  reason {NO_REASON}" in " ".join(told["lines"])
