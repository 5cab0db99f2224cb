"""A decode node that drains stops its answers, and another one goes on: what both are asked, and what the
client gets.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from kvferry.connector.p2p.params import STOPPED_TO_MOVE
from kvferry.router.answer.beginnings import COMPLETIONS, beginning_of
from kvferry.router.answer.moves import stop_of
from kvferry.router.answer.performance import MAX_MOVES
from kvferry.router.http.sse import Event
from kvferry.router.nodes.states import Abilities
from tests.support.fake_nodes import routed
from tests.support.patience import DEADLINE_S, until

IDENTITY = "fedcba9876543210"
CHECKS = {"check_interval_s": 0.02, "check_timeout_s": 10.0}
TEXT = [(f"t{number} ", 10 + number) for number in range(6)]
WHOLE = "".join(text for text, _ in TEXT)
OFFER = {"do_remote_prefill": True, "remote_lease": "2"}


@dataclass
class Decode:
    """A reference node that streams `TEXT`, one token for each turn that it is given.

    Attributes:
        offers: It offers the cache of an answer that it stops.
        refuses: It answers requests to go on with 429.
        may_begin: Set while it begins answers.
    """

    identity: str = IDENTITY
    offers: bool = True
    refuses: bool = False
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    is_draining: bool = False
    may_begin: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[dict[str, Any]] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)
    released: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.may_begin.set()

    async def ready(self, request: web.Request) -> web.StreamResponse:
        if self.is_draining:
            return web.json_response({"status": "draining"}, status=503)
        return web.json_response({"status": "ok", "continues_answers": self.identity})

    async def release(self, request: web.Request) -> web.StreamResponse:
        self.released.append((await request.json())["kv_transfer_params"])
        return web.json_response({})

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if (name := body["kv_transfer_params"].get("move")) is not None:
            self.orders.append(name)
            return web.json_response({"status": "ok"})
        self.asked.append(body)
        known = body["kv_transfer_params"].get("continues", {})
        begin = len(known.get("token_ids", ()))
        if self.refuses and begin:
            return web.json_response({"error": {"message": "too many"}}, status=429)
        await self.may_begin.wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, (text, token_id) in enumerate(TEXT[begin:], begin):
            await self.turns.acquire()
            is_last = number == len(TEXT) - 1
            is_stopped = known.get("move_as") in self.orders and not is_last
            reason = "length" if is_last else "moved" if is_stopped else None
            choice = {"index": 0, "text": text, "finish_reason": reason}
            choice |= {"token_ids": [token_id]} if body.get("return_token_ids") else {}
            offer = (
                {"kv_transfer_params": OFFER if self.offers else None, "metrics": {}} if is_stopped else {}
            )
            written = json.dumps({"created": known.get("created", 77), "choices": [choice], **offer})
            await response.write(f"data: {written}\n\n".encode())
            if is_stopped:
                break
        await response.write(b"data: [DONE]\n\n")
        return response

    def give(self, num_turns: int = 1000) -> None:
        for _ in range(num_turns):
            self.turns.release()


@dataclass
class Prefill:
    """A node that offers, and remembers what it was asked."""

    asked: list[dict[str, Any]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        return web.json_response({"kv_transfer_params": {"do_remote_prefill": True, "remote_lease": "1"}})


async def streamed(client: Any) -> str:
    """Return the texts of a stream, or its error."""
    body = {"prompt": "p", "max_tokens": 6, "temperature": 0, "stream": True}
    async with asyncio.timeout(DEADLINE_S), client.post(COMPLETIONS, json=body) as response:
        payload = await response.text()
    events = [json.loads(line.removeprefix("data: ")) for line in payload.split("\n\n") if "{" in line]
    assert "token_ids" not in payload
    assert "kv_transfer_params" not in payload
    assert "moved" not in payload
    assert payload.count("[DONE]") == 1
    return "".join(one["error"]["message"] if "error" in one else one["choices"][0]["text"] for one in events)


async def metrics_of(client: Any) -> str:
    text: str = await (await client.get("/metrics")).text()
    return text


@pytest.mark.parametrize("offers", [True, False], ids=["with its cache", "without an offer"])
async def test_an_answer_moves_from_a_node_that_drains(offers: bool) -> None:
    prefill, nodes = Prefill(), [Decode(offers=offers), Decode(offers=offers)]
    async with routed([prefill], nodes, **CHECKS) as client:  # type: ignore[arg-type]
        asking = asyncio.create_task(streamed(client))
        await until(lambda: any(node.asked for node in nodes))
        left, other = sorted(nodes, key=lambda node: not node.asked)
        left.give(2)
        left.is_draining = True
        await until(lambda: left.orders)
        left.give(1)
        await until(lambda: other.asked)
        other.give()
        assert await asking == WHOLE
        page = await metrics_of(client)
    assert "kvferry_router_stopped_answers_total 1.0" in page
    assert "kvferry_router_moved_answers_total 0.0" in page
    (asked,), params = other.asked, other.asked[0]["kv_transfer_params"]
    assert asked["prompt"] == "p"
    assert params["continues"]["token_ids"] == [token_id for _, token_id in TEXT[:3]]
    # The cache of the prompt alone comes from the prefill node.
    assert params["remote_lease"] == ("2" if offers else "1")
    assert len(prefill.asked) == (1 if offers else 2)


async def test_an_answer_that_no_other_node_can_go_on_with_stays() -> None:
    nodes = [Decode(), Decode("another model")]
    async with routed([Prefill()], nodes, **CHECKS) as client:  # type: ignore[arg-type]
        while not nodes[0].asked:
            nodes[1].give()
            asking = asyncio.create_task(streamed(client))
            await until(lambda: sum(len(node.asked) for node in nodes))
            await asyncio.wait({asking}, timeout=0.2)
        nodes[0].give(2)
        nodes[0].is_draining = True
        await until_state(client, "draining")
        nodes[0].give()
        assert await asking == WHOLE
    assert not nodes[0].orders


async def until_state(client: Any, state: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while state not in [node["state"] for node in (await (await client.get("/nodes")).json())["nodes"]]:
            await asyncio.sleep(0.01)


async def test_an_answer_that_the_other_node_refuses_goes_back() -> None:
    nodes = [Decode(refuses=True), Decode(refuses=True)]
    async with routed([Prefill()], nodes, **CHECKS) as client:  # type: ignore[arg-type]
        asking = asyncio.create_task(streamed(client))
        await until(lambda: any(node.asked for node in nodes))
        left, other = sorted(nodes, key=lambda node: not node.asked)
        left.refuses = False
        left.give(1)
        left.is_draining = True
        await until(lambda: left.orders)
        left.give()
        assert await asking == WHOLE
    assert len(left.asked) == 2
    assert len(other.asked) == 1
    again = left.asked[1]["kv_transfer_params"]
    assert again["continues"]["token_ids"] == [TEXT[0][1], TEXT[1][1]]
    assert "remote_lease" not in again  # it has the cache itself
    assert [params["remote_lease"] for params in left.released] == ["2"]


async def test_a_few_answers_move_at_a_time() -> None:
    left, other = Decode(), Decode()
    other.is_draining = True
    async with routed([Prefill()], [left, other], expects_ready=False, **CHECKS) as client:  # type: ignore[arg-type]
        asking = [asyncio.create_task(streamed(client)) for _ in range(2 * MAX_MOVES)]
        await until(lambda: len(left.asked) == len(asking))
        left.give(len(asking))
        other.may_begin.clear()
        other.is_draining = False
        await until_state(client, "ready")
        left.is_draining = True
        await until(lambda: len(left.orders) == MAX_MOVES)
        left.give(len(asking))
        await until(lambda: len(other.asked) == MAX_MOVES)
        assert len(left.orders) == MAX_MOVES
        other.may_begin.set()
        await until(lambda: len(left.orders) == len(asking))
        left.give(len(asking))
        other.give()
        assert await asyncio.gather(*asking) == [WHOLE] * len(asking)


async def test_answers_are_not_moved_if_they_are_not_to_be_continued() -> None:
    nodes = [Decode(), Decode()]
    async with routed([Prefill()], nodes, continue_answers=False, **CHECKS) as client:  # type: ignore[arg-type]
        asking = asyncio.create_task(streamed(client))
        await until(lambda: any(node.asked for node in nodes))
        left, other = sorted(nodes, key=lambda node: not node.asked)
        left.give(2)
        left.is_draining = True
        await until_state(client, "draining")
        left.give()
        assert await asking == WHOLE
    assert not left.orders
    assert not other.asked


# -- the end of what a server of vLLM sends ------------------------------------------------------------

VLLM = Abilities(IDENTITY, 100, frozenset({"m"}))


def vllm_event(text: str, token_ids: list[int], **more: Any) -> Event:
    choice = {"index": 0, "text": text, "finish_reason": None, "stop_reason": None, "token_ids": token_ids}
    return Event.of({"id": "c", "created": 5, "prompt_token_ids": [1, 2], "choices": [{**choice, **more}]})


def test_a_server_of_vllm_says_in_its_stop_reason_what_it_offers() -> None:
    reason = STOPPED_TO_MOVE + json.dumps(OFFER)
    stop = stop_of(vllm_event("a", [7], finish_reason="length", stop_reason=reason))
    assert stop is not None
    assert stop.params == OFFER
    assert stop.event.raw == vllm_event("a", [7]).raw
    nothing = stop_of(vllm_event("a", [7], finish_reason="length", stop_reason=f"{STOPPED_TO_MOVE}null"))
    assert nothing is not None
    assert nothing.params is None


@pytest.mark.parametrize(
    "event",
    [
        vllm_event("moved", [7]),
        vllm_event('"moved"', [7], finish_reason="length"),
        vllm_event(STOPPED_TO_MOVE, [7]),
        vllm_event("a", [7], finish_reason="stop", stop_reason="moved"),
        vllm_event("a", [7], finish_reason="stop", stop_reason=STOPPED_TO_MOVE + "null"),
        Event(b"data: [DONE]\n\n"),
    ],
    ids=range(6),
)
def test_other_events_say_nothing_of_a_stop(event: Event) -> None:
    assert stop_of(event) is None


def test_a_cache_is_of_no_use_if_the_next_server_is_told_fewer_tokens() -> None:
    """The text of a part of a character is held back, so the next server chooses its token again."""
    body = {"prompt": "p", "max_tokens": 9, "temperature": 0, "stream": True}
    first = vllm_event("a", [7])
    beginning = beginning_of(body, COMPLETIONS, VLLM, first)
    assert beginning is not None
    beginning.add((7,), first)
    assert beginning.is_told_whole
    beginning.add((8,), vllm_event("", [8]))
    assert not beginning.is_told_whole
