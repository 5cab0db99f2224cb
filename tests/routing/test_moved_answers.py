"""Another decode node goes on with a stream whose node was lost or drains: what it is asked, and what the
client gets.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import web

from kvferry.connector.p2p.params import STOPPED_TO_MOVE
from kvferry.router.answer.beginnings import COMPLETIONS, beginning_of, is_followed, take_token_ids
from kvferry.router.answer.moves import stop_of
from kvferry.router.answer.performance import MAX_MOVES
from kvferry.router.http.sse import Event
from kvferry.router.nodes.states import Abilities
from tests.support.fake_nodes import routed
from tests.support.patience import DEADLINE_S, until

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

CHECKS = {"check_interval_s": 0.02, "check_timeout_s": 10.0}
TEXT = [(f"t{number} ", 10 + number) for number in range(6)]
WHOLE = "".join(text for text, _ in TEXT)
OFFER = {"do_remote_prefill": True, "remote_lease": "2"}


@dataclass
class Decode:
    """A reference node that streams `TEXT`, from where it is told to go on.

    Attributes:
        dies_after: The number of tokens after which it is lost.
        gives_up: It says so instead of closing the connection.
        offers: It offers the cache of an answer that it stops.
        refuses: It answers requests to go on with 429.
        turns: It gives one token for each turn. None: it waits for none.
        may_begin: Set while it begins answers.
    """

    dies_after: int | None = None
    gives_up: dict[str, Any] | None = None
    identity: str = IDENTITY
    offers: bool = True
    refuses: bool = False
    turns: asyncio.Semaphore | None = None
    is_draining: bool = False
    may_begin: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[dict[str, Any]] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)
    released: list[dict[str, Any]] = field(default_factory=list)
    num_sent: int = 0

    def __post_init__(self) -> None:
        self.may_begin.set()

    async def health(self, request: web.Request) -> web.StreamResponse:
        if self.is_draining:
            return web.json_response({"status": "draining"}, status=503)
        return web.json_response({"status": "ok", "continues_answers": self.identity})

    async def release(self, request: web.Request) -> web.StreamResponse:
        self.released.append((await request.json())["kv_transfer_params"])
        return web.json_response({})

    async def lose(self) -> None:
        """What happens before the connection breaks."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params = body.get("kv_transfer_params") or {}
        if (name := params.get("move")) is not None:
            self.orders.append(name)
            return web.json_response({"status": "ok"})
        self.asked.append(body)
        known = params.get("continues") or {}
        assert not known or known["model"] == self.identity
        begin = len(known.get("token_ids", ()))
        if self.refuses and begin:
            return web.json_response({"error": {"message": "too many"}}, status=429)
        await self.may_begin.wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, (text, token_id) in enumerate(TEXT[begin:]):
            if number == self.dies_after:
                if self.gives_up is not None:
                    await response.write(Event.of(self.gives_up).raw)
                    break
                await self.lose()
                assert request.transport is not None
                request.transport.abort()
                return response
            if self.turns is not None:
                await self.turns.acquire()
            is_last = begin + number == len(TEXT) - 1
            is_stopped = known.get("move_as") in self.orders and not is_last
            reason = "length" if is_last else "moved" if is_stopped else None
            choice = {"index": 0, "text": text, "finish_reason": reason}
            choice |= {"token_ids": [token_id]} if body.get("return_token_ids") else {}
            offer = {"kv_transfer_params": OFFER if self.offers else None, "metrics": {}}
            content = {
                "created": known.get("created", 77),
                "choices": [choice],
                **(offer if is_stopped else {}),
            }
            await response.write(f"data: {json.dumps(content)}\n\n".encode())
            self.num_sent += 1
            await asyncio.sleep(0.01)  # events arrive one by one
            if is_stopped:
                break
        await response.write(b"data: [DONE]\n\n")
        return response

    def give(self, num_turns: int = 1000) -> None:
        assert self.turns is not None
        for _ in range(num_turns):
            self.turns.release()


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
    assert not [word for word in ("token_ids", "kv_transfer_params", '"moved"') if word in payload]
    assert payload.endswith("data: [DONE]\n\n")
    assert payload.count("[DONE]") == 1
    return "".join(one["error"]["message"] if "error" in one else one["choices"][0]["text"] for one in events)


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


# -- nodes that drain --------------------------------------------------------------------------------


@asynccontextmanager
async def answering(
    *nodes: Decode, prefill: Prefill | None = None, **options: Any
) -> AsyncIterator[tuple[Any, asyncio.Task[str], Decode, Decode]]:
    """Ask a router of two nodes that wait for their turns. Yields its client, the stream, the node that
    answers, and the other one.
    """
    for node in nodes:
        node.turns = asyncio.Semaphore(0)
    async with routed([prefill or Prefill()], nodes, **CHECKS, **options) as client:  # type: ignore[arg-type]
        asking = asyncio.create_task(streamed(client))
        await until(lambda: any(node.asked for node in nodes))
        left, other = sorted(nodes, key=lambda node: not node.asked)
        yield client, asking, left, other


@pytest.mark.parametrize("offers", [True, False], ids=["with its cache", "without an offer"])
async def test_an_answer_moves_from_a_node_that_drains(offers: bool) -> None:
    prefill = Prefill()
    async with answering(Decode(offers=offers), Decode(offers=offers), prefill=prefill) as asked:
        client, asking, left, other = asked
        left.give(2)
        await until(lambda: left.num_sent == 2)  # otherwise it may be told to stop before its second token
        left.is_draining = True
        await until(lambda: left.orders)
        left.give(1)
        await until(lambda: other.asked)
        other.give()
        assert await asking == WHOLE
        page = await (await client.get("/metrics")).text()
    assert "kvferry_router_stopped_answers_total 1.0" in page
    assert "kvferry_router_moved_answers_total 0.0" in page
    (again,), params = other.asked, other.asked[0]["kv_transfer_params"]
    assert again["prompt"] == "p"
    assert params["continues"]["token_ids"] == [token_id for _, token_id in TEXT[:3]]
    # The cache of the prompt alone comes from the prefill node.
    assert params["remote_lease"] == ("2" if offers else "1")
    assert len(prefill.asked) == (1 if offers else 2)


@pytest.mark.parametrize(
    ("identity", "options"),
    [("another model", {}), (IDENTITY, {"continue_answers": False})],
    ids=["no other node", "switched off"],
)
async def test_an_answer_that_cannot_move_stays(identity: str, options: dict[str, Any]) -> None:
    async with answering(Decode(), Decode(identity=identity), **options) as asked:
        client, asking, left, other = asked
        left.give(2)
        left.is_draining = True
        await until_state(client, "draining")
        left.give()
        assert await asking == WHOLE
    assert not left.orders
    assert not other.asked


async def until_state(client: Any, state: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while state not in [node["state"] for node in (await (await client.get("/nodes")).json())["nodes"]]:
            await asyncio.sleep(0.01)


async def test_an_answer_that_the_other_node_refuses_goes_back() -> None:
    async with answering(Decode(refuses=True), Decode(refuses=True)) as asked:
        _, asking, left, other = asked
        left.refuses = False
        left.give(1)
        await until(lambda: left.num_sent == 1)
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
    left, other = (Decode(turns=asyncio.Semaphore(0)) for _ in range(2))
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


# -- the end of what a server of vLLM sends ------------------------------------------------------------


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


def test_tokens_that_came_alone_are_told_from_a_joined_event() -> None:
    """Of any other token, a part of its text may be held back."""
    body = {"prompt": "p", "max_tokens": 9, "temperature": 0, "stream": True}
    beginning = beginning_of(body, COMPLETIONS, VLLM, first := vllm_event("a", [7]))
    assert beginning is not None
    beginning.add((7,), first)
    beginning.add((7, 7), vllm_event("aa", [7, 7]))
    assert (beginning.is_told_whole, beginning.num_tokens) == (True, 3)
    beginning.add((7, 8), vllm_event("a", [7, 8]))
    assert (beginning.is_told_whole, beginning.num_tokens) == (False, 3)
    beginning.add((9,), vllm_event("\u00e9", [9]))  # with 8, a whole character
    beginning.add((7, 9), vllm_event("a", [7, 9]))
    assert (beginning.is_told_whole, beginning.num_tokens) == (False, 6)
