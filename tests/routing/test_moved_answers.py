"""Another decode node goes on with a stream whose node was lost: what it is asked, and what the
client gets.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import web

from kvferry.router.answer.beginnings import COMPLETIONS, beginning_of, is_followed, take_token_ids
from kvferry.router.http.sse import Event
from kvferry.router.nodes.states import Abilities
from tests.support.fake_nodes import routed
from tests.support.patience import DEADLINE_S

CHATS = "/v1/chat/completions"
IDENTITY = "fedcba9876543210"
VLLM = Abilities(IDENTITY, 100, frozenset({"m"}))
OURS = Abilities(IDENTITY)
GREEDY = {"prompt": "p", "max_tokens": 9, "temperature": 0, "stream": True}
CHAT = {"messages": [{"role": "user", "content": "p"}], "stream": True}


def event(content: dict[str, Any]) -> Event:
    return Event.of(content)


# -- which answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"temperature": 0.7},
        {"temperature": None},
        {"model": "m"},
        {"stop_token_ids": [3]},
        {"top_p": 0.5},
    ],
    ids=str,
)
def test_a_stream_whose_next_token_depends_on_the_tokens_alone_is_followed(change: dict[str, Any]) -> None:
    assert is_followed({**GREEDY, **change}, COMPLETIONS, VLLM)
    assert is_followed({**GREEDY, **change}, COMPLETIONS, OURS)
    assert is_followed({**CHAT, **change}, CHATS, VLLM)
    assert is_followed({**CHAT, **change}, CHATS, OURS)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},  # vLLM would start its generator anew
        {"stop": ["x"]},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"structured_outputs": {"regex": "a"}},
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function"}]},
        {"bad_words": ["x"]},
        {"some_new_field": 1},
        {"return_token_ids": True},
        {"model": "an adapter"},
        {"min_tokens": 3},
        {"echo": True},
    ],
    ids=str,
)
def test_what_a_server_of_vllm_counts_by_itself_is_not_followed(change: dict[str, Any]) -> None:
    assert not is_followed({**GREEDY, **change}, COMPLETIONS, VLLM)
    assert not is_followed({**CHAT, **change}, CHATS, VLLM)


@pytest.mark.parametrize("change", [{"stream": False}, {"n": 2}, {"logprobs": 1}], ids=str)
def test_answers_that_no_node_can_go_on_with(change: dict[str, Any]) -> None:
    assert not is_followed({**GREEDY, **change}, COMPLETIONS, VLLM)
    assert not is_followed({**GREEDY, **change}, COMPLETIONS, OURS)
    assert not is_followed(GREEDY, COMPLETIONS, Abilities())


# -- ids of tokens -----------------------------------------------------------------------------------


def test_the_client_gets_the_events_that_it_would_have_got_without_ids() -> None:
    for raw, passed, token_ids in (
        (b'data: {"choices":[{"text":"a","token_ids":[5,6]}]}', b'data: {"choices":[{"text":"a","token_ids":null}]}', (5, 6)),
        (b'data: {"choices": [{"text": "a", "token_ids": [5]}]}', b'data: {"choices": [{"text": "a"}]}', (5,)),
        (b'data: {"prompt_token_ids":[1,2],"choices":[]}', b'data: {"prompt_token_ids":null,"choices":[]}', ()),
        (b'data: {"text":"\\"token_ids\\":[7]"}', b'data: {"text":"\\"token_ids\\":[7]"}', ()),
        (b'data: {"choices":[{"delta":{},"finish_reason":null,"token_ids":[5]}]}', None, (5,)),
    ):  # fmt: skip
        found, ids = take_token_ids(Event(raw))
        assert (None if found is None else found.raw, ids) == (passed, token_ids)
        kept, ids = take_token_ids(Event(raw), keep=True)
        assert kept is not None
        assert (kept.raw, ids) == (raw, token_ids)


# -- chats of vLLM -----------------------------------------------------------------------------------


def chunk(text: str | None, token_ids: list[int], **more: Any) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": token_ids}
    return {
        "id": "chatcmpl-r",
        "object": "chat.completion.chunk",
        "created": 5,
        "model": "m",
        "choices": [choice | more],
    }


def begun_chat(body: dict[str, Any]) -> Any:
    first = {**chunk("", []), "prompt_token_ids": [1, 2, 3]}
    beginning = beginning_of(body, CHATS, VLLM, event(first))
    assert beginning is not None
    beginning.add((), event(first))
    return beginning


def test_a_chat_goes_on_as_a_completion_and_stays_a_chat() -> None:
    body = {**CHAT, "temperature": 0, "top_k": 5, "chat_template_kwargs": {"a": 1}}
    beginning = begun_chat(body)
    for text, token_id in (("Hello", 7), (" wor", 8)):
        beginning.add((token_id,), event(chunk(text, [token_id])))
    asked = beginning.decode_body(body, {"remote_lease": "1"})
    assert (beginning.path, asked["prompt"], asked["max_tokens"]) == (COMPLETIONS, [1, 2, 3, 7, 8], 95)
    assert asked["kv_transfer_params"] == {"remote_lease": "1", "continues": {"model": IDENTITY}}
    assert asked.keys() == {"prompt", "max_tokens", "kv_transfer_params", "stream", "temperature", "top_k"}

    change = beginning.continued()
    head = {"id": "cmpl-r", "object": "text_completion", "created": 6, "model": "m"}
    choice = {
        "index": 0,
        "text": "ld",
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
        "token_ids": None,
    }
    (found,) = change(event({**head, "choices": [choice]}))
    assert found.content == chunk("ld", []) | {
        "choices": [{**chunk("ld", [])["choices"][0], "token_ids": None}]
    }
    (last,) = change(event({**head, "choices": [{**choice, "text": "", "finish_reason": "stop"}]}))
    assert last.content["choices"][0]["delta"] == {}
    assert last.content["choices"][0]["finish_reason"] == "stop"
    (usage,) = change(event({**head, "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}))
    assert usage.content["usage"] == {"prompt_tokens": 3, "completion_tokens": 4}
    assert usage.content["object"] == "chat.completion.chunk"


@pytest.mark.parametrize("delta", [{"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}], ids=str)
def test_a_chat_with_more_than_text_does_not_go_on(delta: dict[str, Any]) -> None:
    beginning = begun_chat(CHAT)
    assert beginning.can_continue_at(VLLM)
    beginning.add((7,), event(chunk(None, [7], delta=delta)))
    assert not beginning.can_continue_at(VLLM)


@pytest.mark.parametrize(
    ("body", "limits", "most"),
    [
        ({**GREEDY, "max_tokens": 50}, {"vllm_most_tokens": 6}, 6),
        ({**GREEDY, "max_tokens": 5}, {"vllm_most_tokens": 6}, 5),
        ({**GREEDY, "max_tokens": 50}, {"vllm_default_max_tokens": 6}, 50),
        (CHAT, {"vllm_default_max_tokens": 6}, 6),
        (CHAT, {"vllm_default_max_tokens": 7, "vllm_most_tokens": 6}, 6),
        ({**CHAT, "max_tokens": 8}, {"vllm_default_max_tokens": 6}, 8),
    ],
    ids=str,
)
def test_an_answer_that_moves_keeps_the_limits_of_its_server(
    body: dict[str, Any], limits: dict[str, int], most: int
) -> None:
    """Each server begins to count anew, so the next one is asked for no more than what is left."""
    is_chat = "messages" in body
    head = {**chunk("", []), "prompt_token_ids": [1, 2, 3]}
    first = head if is_chat else {"created": 5, "choices": [{"prompt_token_ids": [1, 2, 3], "text": ""}]}
    server = replace(VLLM, **limits)
    beginning = beginning_of(body, CHATS if is_chat else COMPLETIONS, server, event(first))
    assert beginning is not None
    beginning.add((7,), event(chunk("a", [7]) if is_chat else {"choices": [{"text": "a"}]}))
    assert beginning.can_continue_at(server)
    assert beginning.decode_body(body, None)["max_tokens"] == most - 1


def test_a_chat_keeps_the_limit_that_the_client_gave() -> None:
    for limit in ({"max_tokens": 9}, {"max_completion_tokens": 9}):
        beginning = begun_chat({**CHAT, **limit})
        beginning.add((7,), event(chunk("x", [7])))
        assert beginning.decode_body(CHAT, None)["max_tokens"] == 8


# -- the router --------------------------------------------------------------------------------------

TEXT = [(f"t{number} ", 10 + number) for number in range(6)]


@dataclass
class Decode:
    """A reference node that streams `TEXT`, from where it is told to go on.

    Attributes:
        dies_after: The number of tokens after which it is lost.
        gives_up: It says so instead of closing the connection.
    """

    dies_after: int | None = None
    gives_up: dict[str, Any] | None = None
    identity: str = IDENTITY
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok", "continues_answers": self.identity})

    async def lose(self) -> None:
        """What happens before the connection breaks."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        known = (body.get("kv_transfer_params") or {}).get("continues") or {}
        assert not known or known["model"] == self.identity
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        begin = len(known.get("token_ids", ()))
        for number, (text, token_id) in enumerate(TEXT[begin:]):
            if number == self.dies_after:
                if self.gives_up is not None:
                    await response.write(Event.of(self.gives_up).raw + b"data: [DONE]\n\n")
                    return response
                await self.lose()
                assert request.transport is not None
                request.transport.abort()
                return response
            is_last = begin + number == len(TEXT) - 1
            reason = "length" if is_last else None
            choice = {"index": 0, "text": text, "finish_reason": reason, "token_ids": [token_id]}
            written = json.dumps({"created": known.get("created", 77), "choices": [choice]})
            await response.write(f"data: {written}\n\n".encode())
            await asyncio.sleep(0.01)
        await response.write(b"data: [DONE]\n\n")
        return response


@dataclass
class Prefill:
    """A node that offers, and remembers what it was asked."""

    asked: list[dict[str, Any]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        return web.json_response({"kv_transfer_params": {"do_remote_prefill": True, "remote_lease": "1"}})


async def streamed(client: Any, **fields: Any) -> str:
    """Return the texts of a stream, or its error."""
    body = {**GREEDY, "max_tokens": 6, **fields}
    async with asyncio.timeout(DEADLINE_S), client.post(COMPLETIONS, json=body) as response:
        payload = await response.text()
    events = [json.loads(line.removeprefix("data: ")) for line in payload.split("\n\n") if "{" in line]
    assert not any("token_ids" in str(one) for one in events)
    assert payload.endswith("data: [DONE]\n\n")
    return "".join(one["error"]["message"] if "error" in one else one["choices"][0]["text"] for one in events)


WHOLE = "".join(text for text, _ in TEXT)
ERROR = {"error": {"message": "the engine died", "code": 500}}
ABORT = {"created": 77, "choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}


@pytest.mark.parametrize("gives_up", [None, ERROR, ABORT], ids=["lost", "error", "aborted"])
@pytest.mark.parametrize("after", [1, 3, 5])
async def test_the_client_sees_no_difference(after: int, gives_up: dict[str, Any] | None) -> None:
    prefill, lost, well = Prefill(), Decode(after, gives_up), Decode()
    async with routed([prefill], [lost, well]) as client:
        assert await streamed(client) == WHOLE
        page = await (await client.get("/metrics")).text()
    assert "kvferry_router_moved_answers_total 1.0" in page
    (asked,) = well.asked
    known = asked["kv_transfer_params"]["continues"]
    assert len(known.pop("move_as")) == 32
    assert known == {
        "token_ids": [token_id for _, token_id in TEXT[:after]],
        "created": 77,
        "model": IDENTITY,
    }
    assert asked["kv_transfer_params"]["remote_lease"] == "1"  # it loads the prompt from another offer
    assert len(prefill.asked) == 2


async def test_a_request_that_a_node_fails_before_its_first_token_is_not_repeated() -> None:
    """A load that failed under the policy `fail` would fail at the next node as well."""
    async with routed([Prefill()], [Decode(0, ERROR)] * 2) as client:
        assert await streamed(client) == "the engine died"


FRAME = {"created": 77, "choices": [{"index": 0, "text": "", "finish_reason": None}]}
CHAT_FRAME = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 0}}


@dataclass
class Stopping(Decode):
    """A server of vLLM that is stopped before the first token: its stream ends well, with nothing in it."""

    frame: tuple[dict[str, Any], ...] = ()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        raw = b"".join(Event.of(each).raw for each in self.frame) + b"data: [DONE]\n\n"
        return web.Response(body=raw, content_type="text/event-stream")


@pytest.mark.parametrize(
    "frame", [(), (FRAME,), (USAGE,), (FRAME, USAGE)], ids=["", "frame", "usage", "both"]
)
async def test_an_answer_without_a_token_is_given_by_another_node(frame: tuple[dict[str, Any], ...]) -> None:
    stopping, well = Stopping(frame=frame), Decode()
    async with routed([Prefill()], [stopping, well]) as client:
        assert await streamed(client) == WHOLE
        assert await streamed(client) == WHOLE
    assert stopping.asked


@pytest.mark.parametrize("frame", [(), (FRAME,), (CHAT_FRAME,), (USAGE,)], ids=["", "frame", "chat", "usage"])
async def test_an_answer_without_a_token_is_never_given_to_a_client(
    frame: tuple[dict[str, Any], ...],
) -> None:
    body = {"prompt": "p", "stream": True, "temperature": 1.0}
    async with routed([Prefill()], [Stopping(frame=frame)]) as client:
        async with asyncio.timeout(DEADLINE_S), client.post(COMPLETIONS, json=body) as response:
            payload = await response.text()
    assert '"error"' in payload


async def test_an_answer_moves_as_often_as_there_are_nodes() -> None:
    nodes = [Decode(2), Decode(2), Decode()]
    async with routed([Prefill()], nodes) as client:
        assert await streamed(client) == WHOLE
    assert sorted(
        len((one.asked[0]["kv_transfer_params"]["continues"]).get("token_ids", ())) for one in nodes
    ) == [0, 2, 4]


@pytest.mark.parametrize(
    ("others", "options"),
    [([], {}), ([Decode(identity="another")], {}), ([Decode()], {"continue_answers": False})],
    ids=["no other node", "another model", "switched off"],
)
async def test_an_answer_that_cannot_go_on_ends_with_an_error(
    others: list[Decode], options: dict[str, bool]
) -> None:
    async with routed([Prefill()], [Decode(2), *others], **options) as client:
        for _ in range(2):
            found = await streamed(client)
            if found != WHOLE:
                break
    assert found.startswith("t0 t1 the answer was lost in the middle")


@dataclass
class Restarted(Decode):
    """A node that is lost after two tokens of each answer, and starts again.

    Attributes:
        before_loss: Awaited before it is lost.
        num_checks: Health checks since it was lost: the first one finds it gone.
    """

    before_loss: Callable[[], Awaitable[None]] | None = None
    num_checks: int = 2
    num_losses: int = 0

    async def health(self, request: web.Request) -> web.StreamResponse:
        self.num_checks += 1
        if self.num_checks == 1:
            return web.json_response({"status": "dead"}, status=503)
        return await super().health(request)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        try:
            return await super().handle(request)
        finally:
            self.num_losses += 1
            self.num_checks = 0

    async def lose(self) -> None:
        if self.before_loss is not None:
            await self.before_loss()


def two_that_restart(dies_after: int) -> list[Restarted]:
    """Make two nodes, of which one is lost only after the other one is back."""

    async def until_back() -> None:
        async with asyncio.timeout(DEADLINE_S):
            while any(node.num_losses and node.num_checks < 3 for node in nodes):
                await asyncio.sleep(0.01)

    nodes = [Restarted(dies_after, before_loss=until_back) for _ in range(2)]
    return nodes


async def test_an_answer_goes_on_at_a_node_that_was_lost_and_is_back() -> None:
    nodes = two_that_restart(dies_after=2)
    async with routed([Prefill()], nodes, check_interval_s=0.02) as client:
        assert await streamed(client) == WHOLE
    assert sorted(len(node.asked) for node in nodes) == [1, 2]


async def test_a_request_that_ends_each_node_is_not_asked_of_those_that_come_back() -> None:
    nodes = two_that_restart(dies_after=0)
    async with routed([Prefill()], nodes, check_interval_s=0.02) as client:
        async with asyncio.timeout(DEADLINE_S), client.post(COMPLETIONS, json=GREEDY) as response:
            assert response.status == 503
    assert [len(node.asked) for node in nodes] == [1, 1]


# -- whole answers -----------------------------------------------------------------------------------


@dataclass
class Whole:
    """A node that gives whole answers.

    Attributes:
        cut_at: The connection is cut after so many bytes of the body. None: it is not.
    """

    cut_at: int | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        body = json.dumps({"choices": [{"index": 0, "text": WHOLE, "finish_reason": "length"}]}).encode()
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = len(body)
        if self.cut_at != 0:
            await response.prepare(request)
            await response.write(body[: self.cut_at])
        if self.cut_at is not None:
            assert request.transport is not None
            await asyncio.sleep(0.05)  # what was written has left
            request.transport.abort()
        return response


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"n": 2, "seed": 3, "logprobs": 1}], ids=str)
@pytest.mark.parametrize("cut_at", [0, 20], ids=["before the answer", "in the middle of the answer"])
async def test_a_whole_answer_is_given_again_from_its_beginning(cut_at: int, fields: dict[str, Any]) -> None:
    prefill, lost, well = Prefill(), Whole(cut_at), Whole()
    body = {"prompt": "p", "max_tokens": 6, **fields}
    async with routed([prefill], [lost, well]) as client:
        async with asyncio.timeout(DEADLINE_S), client.post(COMPLETIONS, json=body) as response:
            found = await response.json()
        page = await (await client.get("/metrics")).text()
    assert [choice["text"] for choice in found["choices"]] == [WHOLE]
    assert len(prefill.asked) == 2
    # The second node chooses all tokens itself, by what the client has asked for.
    assert well.asked == [lost.asked[0]]
    assert "kvferry_router_moved_answers_total 0.0" in page
