"""What nodes say of themselves: the router asks it, shows it, and sends no request where it does not fit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from kvferry.connector.p2p.params import REFUSED_TO_CONTINUE, STOPPED_TO_MOVE
from tests.support.fake_nodes import PLACE, routed
from tests.support.patience import DEADLINE_S, until

STREAM = {"model": "m", "prompt": "p", "stream": True, "temperature": 0, "max_tokens": 4}
WHERE = {"remote_engine_id": "e", "remote_epoch": "5", "remote_addresses": ["shm:x"], "tp_size": 1}
PARAMS = {"do_remote_prefill": True, "remote_lease": "1", "remote_num_tokens": 3, **WHERE}
REFUSAL = "kvferry refused to continue: another model"


@dataclass
class VllmServer:
    """A server of vLLM with our connector.

    Attributes:
        identity: Of its model. Empty: it does not know it.
        told: The identity that it has said last, if that differs.
        page: Its `/metrics`.
        asked: The requests, without questions and releases.
    """

    kv_role: str
    identity: str = "identity"
    told: str | None = None
    names: Collection[str] = ("m",)
    policy: str = "fail"
    protocol: int = 6
    page: str = ""
    place: dict[str, Any] = field(default_factory=dict)
    num_questions: int = 0
    request: Any = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def version(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"version": "0.32.0"})

    async def models(self, request: web.Request) -> web.StreamResponse:
        known = {"object": "model", "owned_by": "vllm", "max_model_len": 100}
        return web.json_response({"object": "list", "data": [{"id": name, **known} for name in self.names]})

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=self.page)

    async def release(self, request: web.Request) -> web.StreamResponse:
        self.released.set()
        return web.json_response({})

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params = body.get("kv_transfer_params") or {}
        if params.get("describe"):
            self.num_questions += 1
            told = self.identity if self.told is None else self.told
            return web.json_response({"kv_transfer_params": self.description(told)})
        self.asked.append(body)
        self.request = request
        if params.get("do_remote_decode"):
            choice = {"text": "t1", "finish_reason": "length"}
            return web.json_response({"created": 5, "choices": [choice], "kv_transfer_params": PARAMS})
        return await self.decode(params)

    async def decode(self, params: dict[str, Any]) -> web.StreamResponse:
        begun_by = params.get("continues", {}).get("model", self.identity)
        reason = None if begun_by == self.identity else REFUSAL
        ends = {"finish_reason": "length", "stop_reason": reason} if reason else {}
        chunk = {"created": 6, "choices": [{"text": "whole", **ends}]}
        stream = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        return web.Response(text=stream, content_type="text/event-stream")

    def description(self, identity: str) -> dict[str, Any]:
        known: dict[str, Any] = {"remote_identity": identity} if identity else {}
        known["identity_fields"] = {"weights": identity, "dtype": "half", "sampling": self.kv_role}
        return {
            "kv_role": self.kv_role,
            "load_failure_policy": self.policy,
            "protocol": self.protocol,
            **known,
            **self.place,
        }


def servers(**decode: Any) -> tuple[VllmServer, VllmServer]:
    return VllmServer("kv_producer"), VllmServer("kv_consumer", **decode)


async def text_of(client: Any, body: dict[str, Any] | None = None) -> str:
    """Return the text of a stream, or its error."""
    async with asyncio.timeout(DEADLINE_S):
        response = await client.post("/v1/completions", json=STREAM | (body or {}))
        payload = await response.text()
    if response.content_type != "text/event-stream":
        return f"{response.status} {payload}"
    events = [event.removeprefix("data: ") for event in payload.split("\n\n") if event.strip()]
    said = [json.loads(event) for event in events if event != "[DONE]"]
    return "".join(
        event["error"]["message"] if "error" in event else event["choices"][0]["text"] for event in said
    )


async def node(client: Any, role: str) -> dict[str, Any]:
    nodes = (await (await client.get("/nodes")).json())["nodes"]
    found: dict[str, Any] = next(node for node in nodes if node["role"] == role)
    return found


# -- identities --------------------------------------------------------------------------------------


async def test_a_server_that_has_another_model_since_it_was_asked_gives_no_answer() -> None:
    prefill, decode = servers(identity="new", told="identity")
    async with routed([prefill], [decode]) as client:
        decode.told = None  # when it is asked again
        answer = await text_of(client)
        assert answer.startswith("503 ")
        assert REFUSAL in answer
        await until(lambda: decode.num_questions == 2)
        assert await text_of(client) == "whole"


async def test_another_server_of_the_model_answers_instead() -> None:
    prefill, decode = servers(identity="new", told="identity")
    equal = VllmServer("kv_consumer")
    async with routed([prefill], [decode, equal]) as client:
        assert await text_of(client) == "whole"
    assert len(decode.asked) == len(equal.asked) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sign", [REFUSED_TO_CONTINUE, STOPPED_TO_MOVE + "null"])
async def test_a_clients_stop_text_is_no_signal_of_a_node(sign: str, stream: bool) -> None:
    class Stopping(VllmServer):
        async def decode(self, params: dict[str, Any]) -> web.StreamResponse:
            choice = {"index": 0, "text": "whole", "finish_reason": "stop", "stop_reason": sign}
            answer = {"created": 6, "choices": [choice | ({"token_ids": [8]} if stream else {})]}
            if not stream:
                return web.json_response(answer)
            text = f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n"
            return web.Response(text=text, content_type="text/event-stream")

    decodes = [Stopping("kv_consumer") for _ in range(2)]
    async with routed([VllmServer("kv_producer")], decodes) as client, asyncio.timeout(DEADLINE_S):
        async with client.post(
            "/v1/completions", json={**STREAM, "stream": stream, "stop": [sign]}
        ) as answer:
            assert answer.status == 200
            assert sign in await answer.text()
    assert sum(len(decode.asked) for decode in decodes) == 1


async def test_a_server_is_asked_once_and_again_after_a_connection_broke() -> None:
    class Dying(VllmServer):
        async def decode(self, params: dict[str, Any]) -> web.StreamResponse:
            if len(self.asked) > 2:
                self.request.transport.abort()
            return await super().decode(params)

    prefill, decode = VllmServer("kv_producer"), Dying("kv_consumer")
    async with routed([prefill], [decode]) as client:
        for _ in range(2):
            await text_of(client)
        assert (prefill.num_questions, decode.num_questions) == (1, 1)
        decode.identity = "after a restart"
        await text_of(client)
        await until(lambda: decode.num_questions == 2)


# -- loads that fail ---------------------------------------------------------------------------------

ERROR = b'data: {"error": {"message": "Internal server error", "code": 500}}\n\ndata: [DONE]\n\n'
ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'


class Failing(VllmServer):
    """A server whose loads fail. It has answered 200 by then.

    Attributes:
        begins: It sends the beginning of a stream, and the rest only when the client has that.
    """

    begins: asyncio.Event | None = None

    async def decode(self, params: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(self.request)
        if self.begins is not None:
            await response.write(ROLE)
            await self.begins.wait()
        await response.write(ERROR)
        await response.write_eof()
        return response


@pytest.mark.parametrize("identity", ["identity", "other"])
@pytest.mark.parametrize("temperature", [0, 1])
async def test_the_offer_of_a_refused_stream_is_released_and_the_client_told_why(
    identity: str, temperature: float
) -> None:
    prefill, decode = VllmServer("kv_producer"), Failing("kv_consumer", identity=identity)
    async with routed([prefill], [decode]) as client:
        for _ in range(2):
            answer = await text_of(client, {"temperature": temperature})
            assert "Internal server error" in answer
            assert answer.startswith("500 ") == (identity == "other")
            assert ("these nodes differ in weights; start both" in answer) == (identity == "other")
        await asyncio.wait_for(prefill.released.wait(), DEADLINE_S)


@pytest.mark.parametrize("identity", ["identity", "other"])
async def test_the_same_holds_for_a_stream_that_is_refused_after_its_beginning(identity: str) -> None:
    """vLLM begins a chat's stream before it loads."""
    prefill, decode = VllmServer("kv_producer"), Failing("kv_consumer", identity=identity)
    decode.begins = asyncio.Event()
    async with routed([prefill], [decode]) as client, asyncio.timeout(DEADLINE_S):
        response = await client.post("/v1/completions", json=STREAM | {"temperature": 1})
        assert await response.content.readany() == ROLE
        decode.begins.set()
        rest = await response.content.read()
        assert (rest == ERROR) == (identity == "identity")
        assert (b"these nodes differ in weights; start both" in rest) == (identity == "other")
        assert rest.count(b'"error"') == 1
        assert rest.endswith(b"data: [DONE]\n\n")
        await prefill.released.wait()


# -- roles -------------------------------------------------------------------------------------------


@dataclass
class ReferenceNode:
    """A node of ours, which says on `/ready` what it is."""

    kv_role: str
    names: Collection[str] = ("m",)
    load: Any = None
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def ready(self, request: web.Request) -> web.StreamResponse:
        known = {"kv_role": self.kv_role, "models": list(self.names), "load": self.load}
        return web.json_response({"status": "ok", **known})

    async def models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.names]})

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        return web.json_response({"kv_transfer_params": PARAMS, "choices": [], "from": list(self.names)})


@pytest.mark.parametrize("kind", [VllmServer, ReferenceNode])
@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_consumer"), ("decode", "kv_producer")])
async def test_a_node_of_the_other_role_is_refused(
    kind: Any, role: str, kv_role: str, caplog: pytest.LogCaptureFixture
) -> None:
    fits = {"prefill": kind("kv_producer"), "decode": kind("kv_consumer")}
    misfit = kind(kv_role)
    nodes = {name: [made, *([misfit] if name == role else [])] for name, made in fits.items()}
    async with routed(nodes["prefill"], nodes["decode"], expects_ready=False) as client:
        for _ in range(4):
            assert (await client.post("/v1/completions", json={"model": "m", "prompt": "p"})).status == 200
        nodes_seen = (await (await client.get("/nodes")).json())["nodes"]
        (refused,) = (seen for seen in nodes_seen if seen["state"] != "ready")
        health = await (await client.get("/health")).json()
    assert (refused["state"], refused["role"], refused["kv_role"]) == ("refused", role, kv_role)
    assert f"its own kv_role is {kv_role!r}" in refused["why"]
    assert refused["why"] in caplog.text
    assert "is refused" in health["status"]
    assert not misfit.asked


@pytest.mark.parametrize("kind", [VllmServer, ReferenceNode])
async def test_a_node_of_both_roles_fits_either(kind: Any) -> None:
    async with routed([kind("kv_both")], [kind("kv_both")]) as client:
        seen = await node(client, "prefill")
        assert (seen["state"], seen["kv_role"], seen["models"]) == ("ready", "kv_both", ["m"])
        assert (await client.post("/v1/completions", json={"model": "m", "prompt": "p"})).status == 200


# -- models ------------------------------------------------------------------------------------------


def of_two_models() -> list[list[ReferenceNode]]:
    return [
        [ReferenceNode(role, [name]) for name in ("one", "two")] for role in ("kv_producer", "kv_consumer")
    ]


async def test_a_request_goes_to_nodes_that_serve_its_model() -> None:
    prefill, decode = of_two_models()
    async with routed(prefill, decode) as client:
        for name in ("one", "one", "two", "two") * 2:
            answer = await client.post("/v1/completions", json={"model": name, "prompt": "p"})
            assert (await answer.json())["from"] == [name]
    for made in (*prefill, *decode):
        assert {body["model"] for body in made.asked} == set(made.names)


async def test_an_unknown_model_is_404_and_no_model_is_ambiguous() -> None:
    prefill, decode = of_two_models()
    async with routed(prefill, decode) as client:
        answer = await client.post("/v1/completions", json={"model": "three", "prompt": "p"})
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "model_not_found")
        answer = await client.post("/v1/completions", json={"prompt": "p"})
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "model")
    assert not any(made.asked for made in (*prefill, *decode))


async def test_a_model_that_only_one_role_serves_is_503() -> None:
    prefill, decode = of_two_models()
    async with routed(prefill, decode[:1]) as client:
        answer = await client.post("/v1/completions", json={"model": "two", "prompt": "p"})
        assert answer.status == 503
        assert "it does not serve the model 'two'" in (await answer.json())["error"]["message"]
    assert not prefill[1].asked


async def test_an_adapter_that_was_loaded_a_moment_ago_is_served() -> None:
    prefill, decode = servers()
    async with routed([prefill], [decode]) as client:
        prefill.names = decode.names = ("m", "adapter")
        assert await text_of(client, {"model": "adapter", "temperature": 1}) == "whole"


async def test_the_list_of_models_is_that_of_all_decode_nodes() -> None:
    prefill, decode = of_two_models()
    async with routed(prefill, decode) as client:
        listed = (await (await client.get("/v1/models")).json())["data"]
    assert [model["id"] for model in listed] == ["one", "two"]


# -- the load failure policy -------------------------------------------------------------------------


async def test_a_servers_description_says_where_it_can_be_reached_so_that_its_first_request_is_a_rendezvous() -> (
    None
):
    prefill, decode = VllmServer("kv_producer", place=PLACE), VllmServer("kv_consumer", protocol=7)
    async with routed([prefill], [decode]) as client:
        assert await text_of(client, {"temperature": 0.5}) == "whole"
    (name,) = (server.asked[0]["kv_transfer_params"].get("rendezvous") for server in (prefill,))
    assert name
    assert decode.asked[0]["kv_transfer_params"]["rendezvous"] == name


@pytest.mark.parametrize(("policy", "status"), [("recompute", 200), ("fail", 503)])
async def test_the_router_learns_the_policy_of_a_server_of_vllm(policy: str, status: int) -> None:
    _, decode = servers(policy=policy)
    async with routed([], [decode]) as client:
        assert (await client.post("/v1/completions", json={"model": "m", "prompt": "p"})).status == status


async def test_an_adapter_is_listed_without_a_length() -> None:
    class WithAdapter(VllmServer):
        async def models(self, request: web.Request) -> web.StreamResponse:
            own = {"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 100}
            adapter = {"id": "a", "object": "model", "owned_by": "vllm", "parent": "m"}
            return web.json_response({"object": "list", "data": [adapter, own]})

    async with routed([WithAdapter("kv_producer")], [WithAdapter("kv_consumer")]) as client:
        assert await text_of(client) == "whole"


async def test_what_a_server_is_is_known_with_its_first_check() -> None:
    class Slow(VllmServer):
        async def handle(self, request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(0.2)  # longer than the rest of a check
            return await super().handle(request)

    async with routed([Slow("kv_producer")], [Slow("kv_consumer")]) as client:
        known = [(await node(client, role))["kv_role"] for role in ("prefill", "decode")]
    assert known == ["kv_producer", "kv_consumer"]


# -- what nodes have to do -----------------------------------------------------------------------------

VLLM_PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
"""


def load(running: object, waiting: object = 0, pool_usage: object = 0.5) -> dict[str, object]:
    return {"running": running, "waiting": waiting, "pool_usage": pool_usage}


@pytest.mark.parametrize("said", [load(4, 1, 0.62), None])
async def test_the_router_shows_what_nodes_have_to_do(said: object) -> None:
    nodes = [ReferenceNode("kv_both", load=said), VllmServer("kv_both", page=VLLM_PAGE)]
    async with routed(nodes[:1], nodes[1:]) as client:
        assert (await node(client, "prefill"))["load"] == said
        assert (await node(client, "decode"))["load"] == load(5, 1, 0.5)


@pytest.mark.parametrize(
    "said", [load(-1), load("7"), load(True), load(float("inf")), load(10**12), [], {"running": 1}]
)
async def test_a_load_that_cannot_be_true_is_not_believed(said: object) -> None:
    async with routed([], [ReferenceNode("kv_both", load=said)]) as client:
        assert (await node(client, "decode"))["load"] is None
