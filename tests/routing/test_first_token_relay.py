"""The router streams the prefill node's first token, once, and every decode node continues after it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from tests.support.fake_nodes import routed

DEADLINE_S = 20.0
PARAMS = {"do_remote_prefill": True, "remote_lease": "1"}
REST = b'data: {"choices": [{"text": "rest"}]}\n\ndata: [DONE]\n\n'
MODEL = "0123456789abcdef"
STREAM = {"prompt": "p", "stream": True, "temperature": 0}


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


@dataclass
class Prefill:
    """A reference node whose first tokens are `1`, `2` and so on."""

    is_all: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        number = len(self.asked)
        first = {
            "token_id": number,
            "model": MODEL,
            "created": 5,
            "is_all": self.is_all,
            "chunks": [{"choices": [{"text": f"t{number}"}]}],
        }
        return web.json_response(
            {"object": "text_completion", "kv_transfer_params": PARAMS, "first_token": first}
        )

    async def release(self, request: web.Request) -> web.StreamResponse:
        self.released.set()
        return web.json_response({})


@dataclass
class Decode:
    """A node that continues answers, or does not."""

    answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
    continues: bool = True
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(
            {"status": "ok", "continues_answers": MODEL if self.continues else "of another model"}
        )

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        return await self.answer(request)

    @property
    def given(self) -> list[Any]:
        return [body["kv_transfer_params"].get("first_token") for body in self.asked]


async def stream_rest(request: web.Request) -> web.StreamResponse:
    return web.Response(body=REST, content_type="text/event-stream")


async def die(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def refuse(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no such adapter"}}, status=404)


async def ask(client: Any, **fields: Any) -> tuple[int, bytes]:
    async with asyncio.timeout(DEADLINE_S), client.post("/v1/completions", json=STREAM | fields) as response:
        return response.status, await response.read()


async def test_the_client_has_the_first_token_before_the_decode_node_answers() -> None:
    may_answer = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        await may_answer.wait()
        return await stream_rest(request)

    prefill, decode = Prefill(), Decode(answer)
    async with (
        asyncio.timeout(DEADLINE_S),
        routed([prefill], [decode]) as client,
        client.post("/v1/completions", json={**STREAM, "max_tokens": 9}) as response,
    ):
        assert await response.content.readany() == event("t1")
        may_answer.set()
        assert await response.read() == REST
    assert prefill.asked[0]["kv_transfer_params"]["want_first_token"] == {
        "max_tokens": 9,
        "include_usage": False,
    }
    assert decode.given == [{"token_id": 1, "created": 5}]
    assert decode.asked[0]["max_tokens"] == 9
    assert not prefill.released.is_set()


async def test_a_second_decode_node_continues_after_the_token_that_was_sent() -> None:
    prefill, dying, well = Prefill(), Decode(die), Decode(stream_rest)
    async with routed([prefill], [dying, well]) as client:
        assert await ask(client) == (200, event("t1") + REST)
    assert len(prefill.asked) == 2
    assert dying.given == well.given == [{"token_id": 1, "created": 5}]


@pytest.mark.parametrize(
    ("answer", "why"), [(refuse, "no such adapter"), (die, "lost in the middle: no decode node")]
)
async def test_a_stream_that_cannot_be_continued_ends_with_an_error(answer: Any, why: str) -> None:
    prefill = Prefill()
    async with routed([prefill], [Decode(answer)]) as client:
        status, body = await ask(client)
        assert status == 200
        assert body.startswith(event("t1"))
        assert why in body.decode()
        assert body.endswith(b"data: [DONE]\n\n")
        await asyncio.wait_for(prefill.released.wait(), DEADLINE_S)


async def test_an_answer_of_one_token_needs_no_decode_node_and_the_offer_is_released() -> None:
    prefill, decode = Prefill(is_all=True), Decode(stream_rest)
    async with routed([prefill], [decode]) as client:
        assert await ask(client) == (200, event("t1") + b"data: [DONE]\n\n")
        await asyncio.wait_for(prefill.released.wait(), DEADLINE_S)
        status, body = await ask(client, stream=False)
        assert (status, json.loads(body)) == (200, {"object": "text_completion", "kv_transfer_params": None})
    assert decode.asked == []


async def test_a_decode_node_that_cannot_continue_chooses_the_first_token() -> None:
    prefill, decode = Prefill(), Decode(stream_rest, continues=False)
    async with routed([prefill], [decode]) as client:
        assert await ask(client) == (200, REST)
    assert decode.given == [None]


async def test_a_request_for_several_answers_is_left_to_the_decode_node() -> None:
    prefill = Prefill()
    async with routed([prefill], [Decode(stream_rest)]) as client:
        await ask(client, n=2)
    assert "want_first_token" not in prefill.asked[0]["kv_transfer_params"]


async def test_without_the_option_no_first_token_is_asked_for() -> None:
    prefill, decode = Prefill(), Decode(stream_rest)
    async with routed([prefill], [decode], first_token=False) as client:
        assert await ask(client) == (200, REST)
    assert "want_first_token" not in prefill.asked[0]["kv_transfer_params"]
