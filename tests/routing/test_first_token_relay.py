"""The router streams the prefill node's first token, once, and every decode node continues after it, or begins with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from tests.support.fake_nodes import routed
from tests.support.patience import DEADLINE_S

PARAMS = {"do_remote_prefill": True, "remote_lease": "1"}
#: What the nodes say that can be asked at once.
WHERE = {"remote_engine_id": "e", "remote_epoch": "5", "remote_addresses": ["shm:x"], "tp_size": 1}
WITH_PLACE = {**PARAMS, **WHERE, "rendezvous_supported": True, "prefill_chunk_tokens": 8}
REST = b'data: {"choices": [{"text": "rest"}]}\n\ndata: [DONE]\n\n'
MODEL = "0123456789abcdef"
#: Of nine tokens, by the router's estimate.
STREAM = {"prompt": "p" * 34, "stream": True, "temperature": 0}


def event(text: str, **fields: Any) -> bytes:
    return b"data: " + json.dumps({**fields, "choices": [{"text": text}]}).encode() + b"\n\n"


def ended(text: str) -> bytes:
    """Return the event of a token that is the whole answer."""
    return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": "stop"}]}).encode() + b"\n\n"


@dataclass
class Prefill:
    """A reference node whose first tokens are `1`, `2` and so on.

    Attributes:
        hold: What the next answers wait for.
    """

    is_all: bool = False
    params: dict[str, Any] = field(default_factory=lambda: PARAMS)
    hold: asyncio.Event | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        asked = self.asked[-1]["kv_transfer_params"]
        number = len(self.asked)
        if self.hold is not None:
            await self.hold.wait()
        first = {
            "token_id": number,
            "model": MODEL,
            "created": 5,
            "is_all": self.is_all,
            "chunks": [
                {"choices": [{"text": f"t{number}", **({"finish_reason": "stop"} if self.is_all else {})}]}
            ],
        }
        return web.json_response(
            {"object": "text_completion", "kv_transfer_params": self.params}
            | ({"first_token": first} if "want_first_token" in asked else {})
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

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text='kvferry_build_info{protocol="7",version="0"} 1.0\n')

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        return await self.answer(request)

    @property
    def given(self) -> list[Any]:
        """What the node was told of the answer, per request. None: it begins there."""
        told = [(body.get("kv_transfer_params") or {}).get("continues") or {} for body in self.asked]
        told = [{key: value for key, value in each.items() if key != "move_as"} for each in told]
        return [each if "token_ids" in each else None for each in told]

    @property
    def met(self) -> list[bool]:
        return ["rendezvous" in (body.get("kv_transfer_params") or {}) for body in self.asked]


async def stream_rest(request: web.Request) -> web.StreamResponse:
    return web.Response(body=REST, content_type="text/event-stream")


def streamed(*pieces: bytes, after: asyncio.Event | None = None) -> Callable[[web.Request], Any]:
    """Return what streams these pieces, as soon as an event has happened."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if after is not None:
            await after.wait()
        return web.Response(body=b"".join(pieces), content_type="text/event-stream")

    return answer


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
        (running,) = (await (await client.get("/page/state")).json())["in_flight"]
        assert 0 < running["first_token_ms"] <= running["total_ms"]
        may_answer.set()
        assert await response.read() == REST
    assert prefill.asked[0]["kv_transfer_params"]["want_first_token"] == {
        "max_tokens": 9,
        "include_usage": False,
    }
    assert decode.given == [{"token_ids": [1], "created": 5, "model": MODEL}]
    assert decode.asked[0]["max_tokens"] == 9
    assert not prefill.released.is_set()


async def test_a_second_decode_node_continues_after_the_token_that_was_sent() -> None:
    prefill, dying, well = Prefill(), Decode(die), Decode(stream_rest)
    async with routed([prefill], [dying, well]) as client:
        assert await ask(client) == (200, event("t1") + REST)
    assert len(prefill.asked) == 2
    assert dying.given == well.given == [{"token_ids": [1], "created": 5, "model": MODEL}]


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
        assert await ask(client) == (200, ended("t1") + b"data: [DONE]\n\n")
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


# -- both nodes at once ------------------------------------------------------------------------------


async def introduce(client: Any, prefill: Prefill, *decodes: Decode) -> None:
    """Let the router learn where the prefill node can be reached."""
    assert (await ask(client, n=2, prompt="hello"))[0] == 200
    for node in (prefill, *decodes):
        node.asked.clear()


async def count_of(client: Any, name: str) -> float:
    async with client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


async def test_a_decode_node_that_was_asked_at_once_begins_with_the_same_token() -> None:
    may_answer = asyncio.Event()
    may_answer.set()
    own = event("t1", created=6), event("t2", created=6), b"data: [DONE]\n\n"
    prefill, decode = Prefill(params=WITH_PLACE), Decode(streamed(*own, after=may_answer))
    async with asyncio.timeout(DEADLINE_S), routed([prefill], [decode]) as client:
        await introduce(client, prefill, decode)
        may_answer.clear()
        async with client.post("/v1/completions", json=STREAM) as response:
            assert await response.content.readany() == event("t1")
            may_answer.set()
            assert await response.read() == event("t2", created=5) + b"data: [DONE]\n\n"
        assert await count_of(client, "kvferry_router_first_tokens_total") == 1
    assert (decode.given, decode.met) == ([None], [True])
    assert len(prefill.asked) == 1
    assert not prefill.released.is_set()


@pytest.mark.parametrize("prompt", ["p" * 33, "", [7] * 8])
async def test_for_a_prompt_of_one_chunk_the_decode_node_is_asked_to_continue(prompt: Any) -> None:
    prefill, decode = Prefill(params=WITH_PLACE), Decode(stream_rest)
    async with routed([prefill], [decode]) as client:
        await introduce(client, prefill, decode)
        assert await ask(client, prompt=prompt) == (200, event("t1") + REST)
        assert await ask(client, prompt=prompt, n=2) == (200, REST)  # has no token to continue after
    assert (decode.given, decode.met) == (
        [{"token_ids": [1], "created": 5, "model": MODEL}, None],
        [False, True],
    )


async def test_a_decode_node_that_answers_first_begins_the_answer() -> None:
    prefill, decode = Prefill(params=WITH_PLACE), Decode(streamed(event("t1", created=6), REST))
    async with asyncio.timeout(DEADLINE_S), routed([prefill], [decode]) as client:
        await introduce(client, prefill, decode)
        prefill.hold = asyncio.Event()
        async with client.post("/v1/completions", json=STREAM) as response:
            assert (await response.content.readany()).startswith(event("t1", created=6))
            prefill.hold.set()
            await response.read()
        assert await count_of(client, "kvferry_router_first_tokens_total") == 0


async def test_a_whole_answer_comes_from_the_decode_node() -> None:
    prefill, decode = Prefill(params=WITH_PLACE), Decode(stream_rest)
    async with routed([prefill], [decode]) as client:
        await introduce(client, prefill, decode)

        async def answer(request: web.Request) -> web.StreamResponse:
            while len(prefill.asked) < 1:
                await asyncio.sleep(0.01)
            return web.json_response({"choices": [{"text": "whole"}]})

        decode.answer = answer
        assert await ask(client, stream=False) == (200, b'{"choices": [{"text": "whole"}]}')
    assert decode.met == [True]


@pytest.mark.parametrize("begin", [event("t9"), b"data: {}\n\ndata: half an ev"])
async def test_a_decode_node_that_chose_another_token_continues_after_the_clients(begin: bytes) -> None:
    sent = asyncio.Event()
    answers = iter([streamed(event("t9") + b"data: [DONE]\n\n"), streamed(begin, after=sent), stream_rest])

    async def answer(request: web.Request) -> web.StreamResponse:
        found: web.StreamResponse = await next(answers)(request)
        return found

    prefill, decode = Prefill(params=WITH_PLACE), Decode(answer)
    async with asyncio.timeout(DEADLINE_S), routed([prefill], [decode]) as client:
        await introduce(client, prefill, decode)
        async with client.post("/v1/completions", json=STREAM) as response:
            assert await response.content.readany() == event("t1")
            sent.set()
            assert await response.read() == REST
        assert await count_of(client, "kvferry_router_other_first_tokens_total") == 1
    assert decode.given == [None, {"token_ids": [1], "created": 5, "model": MODEL}]
    assert decode.met == [True, False]
    assert len(prefill.asked) == 1


async def test_a_decode_node_that_is_lost_after_the_first_token_is_replaced_by_one_that_continues() -> None:
    sent = asyncio.Event()
    sent.set()

    async def answer(request: web.Request) -> web.StreamResponse:
        await sent.wait()
        body = await request.json()
        return await (die if "rendezvous" in body["kv_transfer_params"] else stream_rest)(request)

    prefill, decodes = Prefill(params=WITH_PLACE), [Decode(answer), Decode(answer)]
    async with asyncio.timeout(DEADLINE_S), routed([prefill], decodes) as client:
        await introduce(client, prefill, *decodes)
        sent.clear()
        async with client.post("/v1/completions", json=STREAM) as response:
            assert await response.content.readany() == event("t1")
            sent.set()
            assert await response.read() == REST
    met, continued = sorted(decodes, key=lambda decode: decode.met, reverse=True)
    assert (met.met, met.given) == ([True], [None])
    assert (continued.met, continued.given) == ([False], [{"token_ids": [1], "created": 5, "model": MODEL}])
    assert len(prefill.asked) == 2


async def test_a_token_that_ends_the_answer_is_left_to_a_decode_node_that_was_asked_at_once() -> None:
    prefill, decode = Prefill(params=WITH_PLACE, is_all=True), Decode(stream_rest)
    async with routed([prefill], [decode]) as client:
        await introduce(client, prefill, decode)
        decode.answer = streamed(event("all"), b"data: [DONE]\n\n")
        assert await ask(client) == (200, event("all") + b"data: [DONE]\n\n")
        assert await ask(client, max_tokens=1) == (200, ended("t2") + b"data: [DONE]\n\n")
    assert decode.met == [True]


async def test_without_the_option_no_first_token_is_asked_for() -> None:
    prefill, decode = Prefill(), Decode(stream_rest)
    async with routed([prefill], [decode], first_token=False) as client:
        assert await ask(client) == (200, REST)
    assert "want_first_token" not in prefill.asked[0]["kv_transfer_params"]
