"""Every endpoint of the table goes the way that it names, through nodes that are stricter than vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvferry.router.answer.beginnings import FOLLOWED_PATHS
from kvferry.router.answer.bodies import prefill_body
from kvferry.router.answer.dialects import dialect_of
from kvferry.router.http.endpoints import ENDPOINTS, GENERATE, MESSAGES, RESPONSES
from tests.support.fake_nodes import routed

PATHS = tuple(endpoint.path for endpoint in ENDPOINTS if endpoint.way != "refused")
TOOL = {"type": "function", "name": "cross", "parameters": {"type": "object"}}
#: What is about the prompt, and about the answer, by endpoint.
PROMPTS: Mapping[str, dict[str, Any]] = {
    RESPONSES: {
        "model": "m",
        "input": [{"role": "user", "content": "p"}],
        "instructions": "i",
        "tools": [TOOL],
        "tool_choice": "auto",
        "reasoning": {"effort": "low"},
        "chat_template_kwargs": {"a": 1},
        "text": {"verbosity": "low"},
        "cache_salt": "s",
        "store": False,
    },
    MESSAGES: {
        "model": "m",
        "system": "s",
        "messages": [{"role": "user", "content": "p"}],
        "tools": [{"name": "cross", "input_schema": {}}],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
        "cache_salt": "s",
    },
    GENERATE: {"model": "m", "token_ids": [1, 2, 3], "features": None, "cache_salt": "s"},
}
ANSWERS: Mapping[str, dict[str, Any]] = {
    RESPONSES: {
        "max_output_tokens": 9,
        "top_p": 0.5,
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
        "temperature": 0.5,
    },
    MESSAGES: {"max_tokens": 2048, "top_k": 5, "stop_sequences": ["x"], "temperature": 0.5},
    GENERATE: {"sampling_params": {"max_tokens": 9, "temperature": 0.5, "n": 2, "seed": 3}},
}
LIMITS: Mapping[str, dict[str, Any]] = {
    RESPONSES: {"max_output_tokens": 1, "temperature": 0},
    MESSAGES: {"max_tokens": 1, "temperature": 0},
    GENERATE: {"sampling_params": {"max_tokens": 1, "temperature": 0}},
}
HANDED_OVER = tuple(PROMPTS)
#: Whole answers of nodes, which are the client's.
WHOLE: Mapping[str, dict[str, Any]] = {
    RESPONSES: {"id": "resp_1", "object": "response", "status": "completed", "output": []},
    MESSAGES: {"id": "msg_1", "type": "message", "content": [], "stop_reason": "end_turn"},
    GENERATE: {"request_id": "g", "choices": [{"index": 0, "token_ids": [5], "finish_reason": "stop"}]},
}


def event(content: Mapping[str, Any]) -> bytes:
    """Write an event as vLLM does at the endpoints whose events have names."""
    return f"event: {content['type']}\ndata: {json.dumps(content)}\n\n".encode()


#: Streams by endpoint: the first event, one with a part of the answer, and the last ones.
STREAMS: Mapping[str, tuple[bytes, bytes, bytes]] = {
    RESPONSES: (
        event({"type": "response.created", "response": {}, "sequence_number": 0}),
        event({"type": "response.output_text.delta", "delta": '"token_ids": [1]', "sequence_number": 1}),
        event({"type": "response.completed", "response": {"error": None}, "sequence_number": 2}),
    ),
    MESSAGES: (
        event({"type": "message_start", "message": {"stop_reason": None}}),
        event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}),
        event({"type": "message_delta", "delta": {"stop_reason": "end_turn"}})
        + event({"type": "message_stop"}),
    ),
    GENERATE: (
        b'data: {"choices": [{"index": 0, "token_ids": [5], "finish_reason": null}]}\n\n',
        b'data: {"choices": [{"index": 0, "token_ids": [6], "finish_reason": null}]}\n\n',
        b'data: {"choices": [{"index": 0, "token_ids": [7], "finish_reason": "length"}]}\n\ndata: [DONE]\n\n',
    ),
}


class StrictNode:
    """Answers each endpoint, and keeps what it was asked."""

    def __init__(self, paths: tuple[str, ...] = PATHS, num_events: int = 3) -> None:
        self.paths = tuple(path for path in paths if path != "/v1/completions")
        self.num_events = num_events
        self.asked: list[tuple[str, dict[str, Any], Mapping[str, str]]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append((request.path, body, request.headers.copy()))
        if request.path not in WHOLE:
            return web.json_response({"by": "one node", "body": body})
        allowed = (
            PROMPTS[request.path].keys() | ANSWERS[request.path].keys() | {"stream", "kv_transfer_params"}
        )
        if unknown := body.keys() - allowed:
            return web.json_response({"error": {"message": f"unknown: {sorted(unknown)}"}}, status=400)
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            return web.json_response({**WHOLE[request.path], "kv_transfer_params": {"remote_lease": "7"}})
        if not body.get("stream"):
            return web.json_response(WHOLE[request.path])
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        await stream.write(b"".join(STREAMS[request.path][: self.num_events]))
        return stream


# -- the bodies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", HANDED_OVER)
def test_a_prefill_node_receives_the_prompt_and_a_limit_of_one_token(path: str) -> None:
    body = {**PROMPTS[path], **ANSWERS[path], "stream": True}
    asked = prefill_body(body, dialect_of(path))
    assert asked.pop("kv_transfer_params")["do_remote_decode"] is True
    assert asked == {**PROMPTS[path], **LIMITS[path], "stream": False}


def test_a_prefill_node_need_not_end_a_named_call_in_one_token() -> None:
    body = {**PROMPTS[MESSAGES], "tool_choice": {"type": "tool", "name": "cross"}}
    assert prefill_body(body, dialect_of(MESSAGES))["tool_choice"] == {"type": "any"}


# -- through a router ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", HANDED_OVER)
async def test_a_whole_answer_is_handed_over(path: str) -> None:
    prefill, decode = StrictNode(), StrictNode()
    body = {**PROMPTS[path], **ANSWERS[path]}
    async with routed([prefill], [decode]) as client:
        headers = {"X-Request-Id": "mine"}
        async with client.post(path, json=body, headers=headers) as response:
            assert (response.status, await response.json()) == (200, WHOLE[path])
        metrics = await (await client.get("/metrics")).text()
    ((_, asked, sent),) = prefill.asked
    assert asked == {
        **prefill_body(body, dialect_of(path)),
        "kv_transfer_params": asked["kv_transfer_params"],
    }
    ((at, answered, also_sent),) = decode.asked
    # The others' ids inside vLLM have the header in them.
    named = {} if path in FOLLOWED_PATHS else {"client_request_id": "mine"}
    assert (at, answered) == (path, {**body, "kv_transfer_params": {"remote_lease": "7", **named}})
    assert (sent["X-Request-Id"], also_sent["X-Request-Id"]) == ("mine", "mine")
    assert 'kvferry_router_requests_total{status="200"} 1.0' in metrics


@pytest.mark.parametrize("path", HANDED_OVER)
async def test_a_stream_passes_byte_for_byte(path: str) -> None:
    body = {**PROMPTS[path], **ANSWERS[path], "stream": True}
    if path == GENERATE:
        body["sampling_params"] = {"max_tokens": 9}
    prefill, decode = StrictNode(), StrictNode()
    async with routed([prefill], [decode]) as client:
        async with client.post(path, json=body) as response:
            assert (response.status, await response.read()) == (200, b"".join(STREAMS[path]))
        nodes = (await (await client.get("/nodes")).json())["nodes"]
    assert [node["ejections"] for node in nodes] == [0, 0]


@pytest.mark.parametrize("path", HANDED_OVER)
async def test_a_stream_that_breaks_ends_with_an_error_in_the_endpoints_form(path: str) -> None:
    body = {**PROMPTS[path], **ANSWERS[path], "stream": True}
    async with routed([StrictNode()], [StrictNode(num_events=2)]) as client:
        async with client.post(path, json=body) as response:
            text = await response.read()
    begun = b"".join(STREAMS[path][:2])
    assert text.startswith(begun)
    lines = text[len(begun) :].decode().strip().split("\n")
    if path == GENERATE:
        assert lines[-1] == "data: [DONE]"
        assert "lost in the middle" in json.loads(lines[0].removeprefix("data: "))["error"]["message"]
        return
    assert lines[0] == "event: error"
    (said,) = [json.loads(line.removeprefix("data: ")) for line in lines[1:]]
    if path == MESSAGES:
        assert (said["type"], said["error"]["type"]) == ("error", "api_error")
        said = said["error"]
    else:
        assert (said["type"], said["sequence_number"], said["code"]) == ("error", 2, "server_error")
    assert "lost in the middle: the node ended it without its last event" in said["message"]


@pytest.mark.parametrize("path", [path for path in PATHS if path not in (*HANDED_OVER, *PATHS[:2])])
async def test_one_node_receives_what_needs_no_handoff_unchanged(path: str) -> None:
    prefill, decode = StrictNode(), StrictNode()
    body = {"model": "m", "input": ["x"], "stream": True, "any": {"b": [None, 1.5]}}
    async with routed([prefill], [decode]) as client:
        async with client.post(path, json=body, headers={"X-Request-Id": "mine"}) as response:
            assert (response.status, await response.json()) == (200, {"by": "one node", "body": body})
            assert response.headers["X-Request-Id"] == "mine"
    assert (prefill.asked, [asked[:2] for asked in decode.asked]) == ([], [(path, body)])


async def test_another_node_answers_what_one_could_not() -> None:
    class Stopping(StrictNode):
        async def handle(self, request: web.Request) -> web.StreamResponse:
            self.asked.append((request.path, {}, {}))
            return web.json_response({"error": {"message": "stopping"}}, status=503)

    stopping, decode = Stopping(), StrictNode()
    async with routed([StrictNode()], [stopping, decode]) as client:
        for _ in range(2):
            async with client.post("/tokenize", json={"prompt": "x"}) as response:
                assert response.status == 200
    assert (len(decode.asked), len(stopping.asked) > 0) == (2, True)


@pytest.mark.parametrize("endpoint", ENDPOINTS[2:], ids=lambda endpoint: endpoint.path)
async def test_an_endpoint_that_no_node_has_is_named_with_what_serves_it(endpoint: Any) -> None:
    assert not endpoint.is_of_reference
    path = endpoint.path.replace("{response_id}", "resp_1")
    body = {"input": "x", "messages": [], "token_ids": [1], "sampling_params": {}}
    async with routed([StrictNode(())], [StrictNode(())]) as client:
        for method in endpoint.methods:
            async with client.request(method, path, json=body) as response:
                assert response.status == 404
                error = (await response.json())["error"]
    if endpoint.way == "refused":
        assert "keeps no responses" in error["message"]
    else:
        assert path in error["message"]
        assert endpoint.served_by in error["message"]
        assert endpoint.needs in error["message"]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (RESPONSES, {"store": True}, "store"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"conversation": {"id": "conv_1"}}, "conversation"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"truncation": "auto"}, "truncation"),
    (RESPONSES, {"tools": [{"type": "web_search_preview"}]}, "tools"),
    (RESPONSES, {"tools": [TOOL, {"type": "mcp", "server_label": "l"}]}, "tools"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
    (MESSAGES, {"max_tokens": 0}, "max_tokens"),
    (GENERATE, {"sampling_params": {"max_tokens": 0}}, "max_tokens"),
    (GENERATE, {"sampling_params": 5}, "sampling_params"),
]


@pytest.mark.parametrize(("path", "fields", "name"), REFUSED)
async def test_what_the_router_cannot_serve_is_refused_by_name(
    path: str, fields: dict[str, Any], name: str
) -> None:
    prefill = StrictNode()
    async with routed([prefill], [StrictNode()]) as client:
        async with client.post(path, json={**PROMPTS[path], **ANSWERS[path], **fields}) as response:
            error = (await response.json())["error"]
    assert (response.status, prefill.asked) == (400, [])
    assert name in error["message"]
    if path == MESSAGES:
        assert error == {"type": "invalid_request_error", "message": error["message"]}
    else:
        assert error["param"] == name


async def test_nothing_is_stored_of_a_response() -> None:
    prefill, decode = StrictNode(), StrictNode()
    async with routed([prefill], [decode]) as client:
        for fields in ({}, {"store": None, "background": False, "truncation": "disabled"}):
            async with client.post(
                RESPONSES, json={"input": "x", **{k: v for k, v in fields.items() if k == "store"}}
            ) as response:
                assert response.status == 200
    assert [asked[1]["store"] for asked in (*prefill.asked, *decode.asked)] == [False] * 4


async def test_a_client_cannot_let_a_node_connect_to_an_address() -> None:
    own = {"kv_transfer_params": {"do_remote_prefill": True, "remote_addresses": ["tcp:10.0.0.1"]}}
    prefill, decode = StrictNode(), StrictNode()
    async with routed([prefill], [decode]) as client:
        for path, body in (
            (GENERATE, {"token_ids": [1], "sampling_params": {"extra_args": {**own, "a": 1}}, **own}),
            (RESPONSES, {"input": "x", **own}),
            (MESSAGES, {"messages": [], "max_tokens": 1, **own}),
            ("/tokenize", {"prompt": "x", **own}),
        ):
            async with client.post(path, json=body) as response:
                assert response.status == 200, await response.text()
    assert "10.0.0.1" not in str(prefill.asked + decode.asked)
    assert decode.asked[0][1]["sampling_params"] == {"extra_args": {"a": 1}}


#: Values that no field of an endpoint expects, or only some.
ODD = [None, True, 0, -1, 10**30, 1.5, "", "x", [], [None], [[]], [{}], {}, {"a": []}, [1, "x"], "\u0000"]


@pytest.mark.parametrize("path", [*HANDED_OVER, "/tokenize", "/v1/messages/count_tokens"])
async def test_no_odd_value_is_an_error_of_the_router(path: str) -> None:
    known = {**PROMPTS.get(path, {"model": "m", "input": "x", "prompt": "p"}), **ANSWERS.get(path, {})}
    names = [*known, "stream", "stream_options", "n", "kv_transfer_params", "truncation", "messages"]

    class Tolerant(StrictNode):
        async def handle(self, request: web.Request) -> web.StreamResponse:
            return web.json_response({"choices": [], "stop_reason": "end_turn", "object": "x"})

    statuses = set()
    async with routed([Tolerant()], [Tolerant()]) as client:
        for name in names:
            for value in ODD:
                async with client.post(path, json={**known, name: value}) as response:
                    assert response.status < 500, (name, value, await response.text())
                    statuses.add(response.status)
    assert statuses <= {200, 400, 404}


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
async def test_another_method_is_told_which_ones_are_allowed(endpoint: Any) -> None:
    async with routed([StrictNode()], [StrictNode()]) as client:
        async with client.put(endpoint.path.replace("{response_id}", "resp_1")) as response:
            said = await response.json()
    assert response.status == 405
    # aiohttp serves HEAD where there is GET.
    assert set(response.headers["Allow"].split(",")) - {"HEAD"} >= set(endpoint.methods)
    assert "Method Not Allowed" in said["error"]["message"]


async def test_a_body_of_another_type_is_refused_at_every_endpoint() -> None:
    async with routed([StrictNode()], [StrictNode()]) as client:
        for path in PATHS:
            async with client.post(path, data=b"{}", headers={"Content-Type": "text/plain"}) as response:
                assert (response.status, "error" in await response.json()) == (415, True), path


def test_the_documents_have_the_table() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "openai-api.md").read_text()
    for each in ENDPOINTS:
        called = "`, `".join(f"{method} {each.path}" for method in each.methods)
        assert f"\n| `{called}` | {each.served_by} | {each.way} |\n" in text


async def test_the_openapi_page_describes_every_endpoint() -> None:
    async with routed([StrictNode()], [StrictNode()]) as client:
        paths = (await (await client.get("/openapi.json")).json())["paths"]
        assert (await client.get("/docs")).status == 200
    for endpoint in ENDPOINTS:
        for method in endpoint.methods:
            operation = paths[endpoint.path][method.lower()]
            assert operation["summary"] == endpoint.summary
            if method == "POST" and endpoint.way != "refused":
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                assert schema["required"] == list(endpoint.required)
