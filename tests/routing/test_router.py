"""The router with fake nodes that use vLLM's protocol and behave as each test needs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from kvferry.router.http.json_body import MAX_DEPTH
from kvferry.router.nodes.pool import NodePool
from kvferry.router.nodes.states import Health, NodeState
from tests.support.fake_nodes import routed
from tests.support.patience import DEADLINE_S

PARAMS = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_block_ids": [[3, 4]],
    "remote_host": "h",
}
EVENTS = b'data: {"choices": [{"text": "one"}]}\n\ndata: {"choices": [{"text": " two"}]}\n\ndata: [DONE]\n\n'


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class FakeNode:
    """A node that answers as the test says, and records its requests."""

    answer: Answer
    bodies: list[dict[str, Any]] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.request_ids.append(request.headers["X-Request-Id"])
        return await self.answer(request)


async def offer(request: web.Request) -> web.StreamResponse:
    return web.json_response({"choices": [{"text": "x"}], "kv_transfer_params": PARAMS})


async def refuse(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no such thing"}}, status=400)


async def fail(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "out of luck"}}, status=500)


async def answer_whole(request: web.Request) -> web.StreamResponse:
    return web.json_response({"choices": [{"text": "one two"}]})


async def answer_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(EVENTS)
    return response


async def die_at_once(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def die_before_the_first_byte(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return await die_at_once(request)


async def ask(
    prefill: Sequence[FakeNode], decode: Sequence[FakeNode], times: int = 1, **fields: Any
) -> list[tuple[int, bytes]]:
    """Send the same request several times. Returns the status and body of each answer."""
    answers = []
    async with routed(prefill, decode) as client:
        for _ in range(times):
            body = {"prompt": "p", "max_tokens": 9, **fields}
            async with client.post("/v1/completions", json=body, headers={"X-Request-Id": "r7"}) as response:
                answers.append((response.status, await response.read()))
    return answers


async def test_a_nodes_cookie_for_one_client_is_not_sent_for_another() -> None:
    cookies = []

    async def set_cookie(request: web.Request) -> web.StreamResponse:
        cookies.append(request.headers.get("Cookie"))
        response = web.json_response({"choices": [{"text": "one two"}]})
        response.set_cookie("name", "first client's")
        return response

    # By its name, because a browser's rules keep no cookies of addresses.
    async with routed([FakeNode(offer)], [FakeNode(set_cookie)], host="localhost") as client:
        for _ in range(2):
            async with client.post("/v1/completions", json={"prompt": "p"}) as response:
                assert response.status == 200
    assert cookies == [None, None]


async def test_the_prefill_node_is_asked_for_one_token_and_to_keep_the_blocks() -> None:
    prefill, decode = FakeNode(offer), FakeNode(answer_whole)
    await ask(
        [prefill],
        [decode],
        max_completion_tokens=9,
        stream=False,
        stop="x",
        n=3,
    )
    (body,) = prefill.bodies
    assert len(body["kv_transfer_params"].pop("release_as")) == 32
    assert body == {
        "prompt": "p",
        "max_tokens": 1,
        "stream": False,
        "temperature": 0,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


async def test_the_decode_node_gets_the_clients_request_with_the_prefill_nodes_params() -> None:
    prefill, decode = FakeNode(offer), FakeNode(answer_whole)
    assert await ask([prefill], [decode], temperature=0.5) == [(200, b'{"choices": [{"text": "one two"}]}')]
    assert decode.bodies == [
        {
            "prompt": "p",
            "max_tokens": 9,
            "temperature": 0.5,
            "kv_transfer_params": PARAMS,
        }
    ]
    assert prefill.request_ids == decode.request_ids == ["r7"]


@pytest.mark.parametrize("params", [None, [1]], ids=str)
@pytest.mark.parametrize(("told", "num_computed_again"), [("loaded", 0), ("none", 1), ("failed", 1)])
async def test_what_a_decode_node_loads_without_an_offer_is_not_counted_as_computed_again(
    told: str, num_computed_again: int, params: object
) -> None:
    """Nodes that share a store make no offers. What is no object is none."""

    async def offer_nothing(request: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [{"text": "x"}], "kv_transfer_params": params})

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [{"text": "one"}]}, headers={"X-KV-Transfer": told})

    decode = FakeNode(answer)
    async with routed([FakeNode(offer_nothing)], [decode]) as client:
        async with client.post("/v1/completions", json={"prompt": "p", "max_tokens": 9}) as response:
            assert (response.status, response.headers["X-KV-Transfer"]) == (200, told)
        async with client.get("/metrics") as response:
            assert f"kvferry_router_without_handoff_total {num_computed_again}.0" in await response.text()
    assert "kv_transfer_params" not in decode.bodies[0]


async def test_a_stream_passes_unchanged() -> None:
    assert await ask([FakeNode(offer)], [FakeNode(answer_stream)], stream=True) == [(200, EVENTS)]


async def test_a_refusal_goes_to_the_client_and_no_other_node_is_asked() -> None:
    other, decode = FakeNode(offer), FakeNode(answer_whole)
    ((status, body),) = await ask([FakeNode(refuse), other], [decode])
    assert (status, json.loads(body)["error"]["message"]) == (400, "no such thing")
    assert not other.bodies
    assert not decode.bodies


@pytest.mark.parametrize("answer", [fail, die_at_once])
async def test_another_prefill_node_takes_over(answer: Answer) -> None:
    broken, other = FakeNode(answer), FakeNode(offer)
    assert (await ask([broken, other], [FakeNode(answer_whole)]))[0][0] == 200
    assert len(broken.bodies) == len(other.bodies) == 1


@pytest.mark.parametrize("answer", [die_at_once, die_before_the_first_byte])
async def test_another_decode_node_takes_over_with_a_new_prefill(answer: Answer) -> None:
    prefill, broken, other = FakeNode(offer), FakeNode(answer), FakeNode(answer_stream)
    assert await ask([prefill], [broken, other], stream=True) == [(200, EVENTS)]
    assert len(prefill.bodies) == 2
    assert len(broken.bodies) == len(other.bodies) == 1


async def test_the_decode_nodes_own_failure_is_the_clients_answer() -> None:
    other = FakeNode(answer_whole)
    ((status, body),) = await ask([FakeNode(offer)], [FakeNode(fail), other])
    assert (status, json.loads(body)["error"]["message"]) == (500, "out of luck")
    assert not other.bodies


async def test_equal_nodes_take_turns() -> None:
    prefill = [FakeNode(offer) for _ in range(2)]
    decode = [FakeNode(answer_whole) for _ in range(3)]
    await ask(prefill, decode, times=6)
    assert [len(node.bodies) for node in prefill] == [3, 3]
    assert [len(node.bodies) for node in decode] == [2, 2, 2]


async def test_a_node_is_tried_before_its_first_health_check() -> None:
    pool = NodePool("decode", ["http://unknown", "http://known"])
    unknown, known = pool.nodes
    known.note(Health(NodeState.READY))
    assert pool.usable({}, {}) == [known, unknown]
    for node in pool.nodes:
        node.note(Health(NodeState.GONE, "no more"))
    assert pool.usable({}, {}) == []
    assert "no decode node" in str(await pool.no_node({}, {}))


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"max_tokens": "x"},
        {"stream": 1},
        {"n": 0},
        {"stream": True, "stream_options": {"include_usage": "yes"}},
        {"stream_options": {"include_usage": True}},
        {"best_of": 0},
    ],
    ids=str,
)
async def test_a_request_that_the_decode_node_would_refuse_is_refused_before_the_prefill(
    fields: dict[str, Any],
) -> None:
    prefill = FakeNode(offer)
    ((status, _),) = await ask([prefill], [FakeNode(answer_whole)], **fields)
    assert status == 400
    assert not prefill.bodies


async def abort(request: web.Request) -> web.StreamResponse:
    """Answer as a vLLM server that is stopping: the status is 200, and there is no token."""
    choice = {"index": 0, "text": "", "finish_reason": "abort", "token_ids": []}
    answer = json.dumps({"choices": [choice], "kv_transfer_params": None}).encode()
    if not (await request.json())["stream"]:
        return web.Response(body=answer, content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: " + answer + b"\n\ndata: [DONE]\n\n")
    return response


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_a_stopping_vllm_server_aborts_is_answered_by_another_node(
    stream: bool,
) -> None:
    prefill, decode = FakeNode(offer), FakeNode(answer_stream if stream else answer_whole)
    for is_prefill in (True, False):
        stopping = FakeNode(abort)
        prefills, decodes = ([stopping, prefill], [decode]) if is_prefill else ([prefill], [stopping, decode])
        async with routed(prefills, decodes) as client:
            for _ in range(3):
                async with client.post("/v1/completions", json={"prompt": "p", "stream": stream}) as response:
                    assert response.status == 200
                    assert "abort" not in await response.text()
        assert stopping.bodies
    assert all(body["kv_transfer_params"] == PARAMS for body in decode.bodies)


async def engine_ended(request: web.Request) -> web.StreamResponse:
    """Answer as a server of vLLM whose engine has ended."""
    message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    return web.json_response({"error": error}, status=500)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_engine_ends_is_answered_by_another_node(stream: bool) -> None:
    stopping, decode = FakeNode(engine_ended), FakeNode(answer_stream if stream else answer_whole)
    async with routed([FakeNode(offer)], [stopping, decode]) as client:
        for _ in range(3):
            async with client.post("/v1/completions", json={"prompt": "p", "stream": stream}) as response:
                assert response.status == 200
                assert "EngineCore" not in await response.text()
    assert stopping.bodies


@pytest.mark.parametrize(
    ("answer", "why"), [(engine_ended, "EngineCore"), (die_at_once, "Server disconnected")]
)
async def test_a_request_that_ends_nodes_is_not_tried_at_a_fourth_one(answer: Answer, why: str) -> None:
    decodes = [FakeNode(answer) for _ in range(5)]
    async with routed([FakeNode(offer)], decodes) as client:
        async with client.post("/v1/completions", json={"prompt": "p"}) as response:
            assert response.status == 503
            message = (await response.json())["error"]["message"]
    assert "3 nodes were lost while they had this request: no other one gets it" in message
    assert message.count(why) == sum(len(node.bodies) for node in decodes) == 3


JSON = {"Content-Type": "application/json"}
HALF_PAIRS = ["\ud800", "a \udfff b", ["a", "\ud800"], [1, {"x": "\ud83d"}]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", HALF_PAIRS)
async def test_half_of_a_surrogate_pair_is_refused_with_the_name_of_its_field(
    value: object, stream: bool
) -> None:
    prefill = FakeNode(offer)
    async with routed([prefill], [FakeNode(answer_whole)]) as client:
        for name in ("prompt", "suffix"):
            async with client.post(
                "/v1/completions", json={"prompt": "p", name: value, "stream": stream}
            ) as response:
                assert response.status == 400
                error = (await response.json())["error"]
            assert (error["param"], "surrogate pair" in error["message"]) == (name, True)
        async with client.post(
            "/v1/completions", data=b'{"prompt": "\\ud83d\\ude00"}', headers=JSON
        ) as response:
            assert response.status == 200
    assert [body["prompt"] for body in prefill.bodies] == ["\U0001f600"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_field_that_is_nested_too_deep_is_refused_by_its_name(stream: bool) -> None:
    """Python reads more levels of JSON than the router could write for its nodes."""
    prefill = FakeNode(offer)
    async with routed([prefill], [FakeNode(answer_stream if stream else answer_whole)]) as client:
        for depth in (MAX_DEPTH, 500, 900, *range(950, 1000)):
            raw = b'{"prompt": "p", "stream": %s, "deep": ' % str(stream).lower().encode()
            raw += b"[" * depth + b"]" * depth + b"}"
            async with client.post("/v1/completions", data=raw, headers=JSON) as response:
                assert response.status == 400
                error = (await response.json())["error"]
            # From some depth on, which depends on Python, no field can be read.
            is_readable = depth <= 900 or "is not valid JSON" not in error["message"]
            if is_readable:
                assert (error["param"], "nested too deep" in error["message"]) == ("deep", True)
        assert not prefill.bodies
        possible = {"prompt": "p", "stream": stream, "deep": json.loads("[" * 127 + "]" * 127)}
        async with client.post("/v1/completions", json=possible) as response:
            assert response.status == 200
    assert prefill.bodies[0]["deep"] == possible["deep"]


async def test_a_list_of_prompts_ends_with_its_first_error_and_aborts_the_others() -> None:
    slow_is_asked, slow_is_aborted = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if (await request.json())["prompt"] == "bad":
            await slow_is_asked.wait()
            return await refuse(request)
        slow_is_asked.set()
        try:
            return await asyncio.Event().wait()  # type: ignore[return-value]
        finally:
            slow_is_aborted.set()

    async with asyncio.timeout(DEADLINE_S), routed([FakeNode(offer)], [FakeNode(answer)]) as client:
        async with client.post("/v1/completions", json={"prompt": ["slow", "bad"]}) as response:
            assert response.status == 400
        await slow_is_aborted.wait()


async def test_a_stream_of_several_answers_ends_with_the_usage_of_all_of_them() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        num = len((await request.json())["prompt"])
        usage = {"prompt_tokens": num, "completion_tokens": 1, "total_tokens": num + 1}
        events = ({"choices": [{"index": 0, "text": "x"}]}, {"choices": [], "usage": usage})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return web.Response(text=f"{text}data: [DONE]\n\n", content_type="text/event-stream")

    body = {"prompt": ["p", "ppp"], "stream": True, "stream_options": {"include_usage": True}}
    async with routed([FakeNode(offer)], [FakeNode(answer)]) as client:
        async with client.post("/v1/completions", json=body) as response:
            *events, last, done = (await response.text()).split("\n\n")[:-1]
    assert done == "data: [DONE]"
    said = json.loads(last.removeprefix("data: "))
    assert said["usage"] == {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    assert said["choices"] == []
    assert not any("usage" in event for event in events)
