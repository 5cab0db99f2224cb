"""Conversations at the router: the next turn goes to the same prefill node, with the offer of the last answer."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from kvferry.router.nodes import UpstreamNode
from kvferry.router.sessions import MAX_OFFER_CHARS, Answer, Conversation, Sessions, take_offer
from tests.support.fake_nodes import routed
from tests.support.patience import DEADLINE_S

PROMPT_PARAMS = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_block_ids": [[3]]}
SESSION = {"X-Session-ID": "s1"}


def answer_params(number: int = 1) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "d",
        "remote_request_id": f"r{number}",
        "answer_lease_s": 60.0,
    }


@dataclass
class Prefill:
    """A node that makes offers.

    Attributes:
        asked: The `kv_transfer_params` of each request.
        refusal: The status of requests that are to load an answer; 200 answers them.
    """

    asked: list[dict[str, Any]] = field(default_factory=list)
    refusal: int = 200

    async def handle(self, request: web.Request) -> web.StreamResponse:
        params = (await request.json())["kv_transfer_params"]
        self.asked.append(params)
        if params["do_remote_prefill"] and self.refusal != 200:
            return web.json_response(
                {"error": {"message": "no", "code": "generation_failed"}}, status=self.refusal
            )
        loaded = "loaded" if params["do_remote_prefill"] else "none"
        return web.json_response({"kv_transfer_params": PROMPT_PARAMS}, headers={"X-KV-Transfer": loaded})


@dataclass
class Decode:
    """A node that offers its answers."""

    asked: list[dict[str, Any]] = field(default_factory=list)
    has_params_in_streams: bool = True
    heeds_wish: bool = True
    releases: list[dict[str, Any]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if asked := body["kv_transfer_params"].get("answer_of"):
            assert asked == "id7"
            return web.json_response({"kv_transfer_params": answer_params(len(self.asked))})
        self.asked.append(body["kv_transfer_params"])
        answer = {"choices": [{"text": 'a "kv_transfer_params": {} b'}], "kv_transfer_params": None}
        if not self.heeds_wish or body["kv_transfer_params"].get("offer_answer") is not False:
            answer["kv_transfer_params"] = answer_params(len(self.asked))  # type: ignore[assignment]
        if not body.get("stream"):
            return web.json_response(answer)
        if not self.has_params_in_streams:
            answer["kv_transfer_params"] = None
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        events = b"data: {}\n\ndata: " + json.dumps(answer).encode() + b"\n\ndata: [DONE]\n\n"
        for at in range(0, len(events), 50):  # an event may arrive in any pieces
            await response.write(events[at : at + 50])
        return response

    async def release(self, request: web.Request) -> web.StreamResponse:
        self.releases.append((await request.json())["kv_transfer_params"])
        return web.json_response({})


async def say(client: Any, text: object, *, headers: Any = SESSION, **more: Any) -> bytes:
    body = {"prompt": text, "max_tokens": 3, **more}
    async with client.post("/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200
        return bytes(await response.read())


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_turn_takes_the_answer_to_the_same_prefill_node(stream: bool) -> None:
    prefills, decode = [Prefill(), Prefill(), Prefill()], Decode()
    async with routed(prefills, [decode]) as client:
        for turn in range(3):
            answer = await say(client, f"turn {turn}", stream=stream)
            assert b"remote_engine_id" not in answer
            assert b'"kv_transfer_params": null' in answer
    (used,) = [node for node in prefills if node.asked]
    first, second, third = used.asked
    assert not first["do_remote_prefill"]
    for number, wish in ((1, second), (2, third)):
        assert {**answer_params(number), "do_remote_decode": True}.items() <= wish.items()
    assert len(decode.asked) == 3


async def test_the_router_asks_for_the_offer_of_a_streamed_answer() -> None:
    prefill, decode = Prefill(), Decode(has_params_in_streams=False)
    async with routed([prefill], [decode], asks_for_answers=True) as client:
        headers = {**SESSION, "X-Request-Id": "id7"}
        await say(client, "one", headers=headers, stream=True)
        await say(client, "two", headers=headers, stream=True)  # at once; the router waits for the offer
        async with asyncio.timeout(DEADLINE_S):
            while "kvferry_router_kept_answers 1.0" not in await (await client.get("/metrics")).text():
                pass  # the router still reads the answer to its second question
    assert answer_params().items() <= {**prefill.asked[1], "do_remote_decode": False}.items()


@pytest.mark.parametrize("refusal", [400, 500])
async def test_a_node_that_fails_for_an_answer_is_asked_again_without(refusal: int) -> None:
    prefill, decode = Prefill(refusal=refusal), Decode()
    async with routed([prefill], [decode]) as client:
        await say(client, "one")
        await say(client, "two")
        assert [wish["do_remote_prefill"] for wish in prefill.asked] == [False, True, False]
        metrics = await (await client.get("/metrics")).text()
    assert 'kvferry_router_answers_total{result="failed"} 1.0' in metrics


async def test_requests_of_no_conversation_do_not_make_nodes_hold_answers() -> None:
    prefill, decode = Prefill(), Decode()
    async with routed([prefill], [decode]) as client:
        await say(client, "one", headers={})
        await say(client, "two", headers={})
        await say(client, "three", n=2)
    assert [params.get("offer_answer") for params in decode.asked] == [False, False, False]
    assert decode.releases == []


MORE_PROMPTS = [{"prompt": ["a", "b"]}, {"prompt": ["a", "b"], "n": 2}, {"prompt": "a", "n": 2}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", MORE_PROMPTS)
async def test_an_offer_that_no_turn_can_use_is_not_asked_for_and_if_made_taken_out_and_released(
    body: dict[str, Any], stream: bool
) -> None:
    prefill, decode = Prefill(), Decode(heeds_wish=False)
    async with routed([prefill], [decode]) as client:
        # A session goes on with one answer, so several of them end it.
        answer = await say(client, body["prompt"], stream=stream, n=body.get("n", 1))
        num_offers = len(decode.asked)
        async with asyncio.timeout(DEADLINE_S):
            while len(decode.releases) < num_offers:
                await asyncio.sleep(0.01)
    assert all(params["offer_answer"] is False for params in decode.asked)
    for secret in (b"remote_engine_id", b"answer_lease_s"):
        assert secret not in answer
    assert sorted(params["remote_request_id"] for params in decode.releases) == [
        f"r{number + 1}" for number in range(num_offers)
    ]
    assert all(params["do_release"] for params in decode.releases)


def remembered(sessions: Sessions, key: bytes | None, number: int, prefill_url: str = "") -> Answer | None:
    answer = Answer.of(UpstreamNode("decode", "http://d"), answer_params(number))
    return sessions.remember(key, Conversation(prefill_url, answer))


def test_of_two_turns_at_the_same_time_the_later_answer_stays_and_the_other_is_of_no_use() -> None:
    sessions = Sessions()
    (first, _), (second, _) = (sessions.begin({}, SESSION) for _ in range(2))
    assert remembered(sessions, first, 1) is None
    unused = remembered(sessions, second, 2)
    assert unused is not None
    assert unused.params["remote_request_id"] == "r1"


def test_an_answer_of_a_request_that_belongs_to_no_conversation_is_of_no_use() -> None:
    assert remembered(sessions := Sessions(), None, 1) is not None
    assert len(sessions) == 0


class TestWhichConversation:
    def turn(self, sessions: Sessions, *texts: str, **headers: str) -> Any:
        messages = [{"role": "user", "content": text} for text in texts]
        return sessions.begin({"model": "m", "messages": messages}, headers)[1]

    def end(self, sessions: Sessions, *texts: str, number: int = 1, **headers: str) -> None:
        messages = [{"role": "user", "content": text} for text in texts]
        key, _ = sessions.begin({"model": "m", "messages": messages}, headers)
        remembered(sessions, key, number, f"http://p{number}")

    def test_a_chat_continues_the_longest_one_that_it_begins_with(self) -> None:
        sessions = Sessions()
        self.end(sessions, "a")
        self.end(sessions, "a", "b", "c", number=2)
        assert sessions.num_answers == 2
        longer = self.turn(sessions, "a", "b", "c", "d", "e")
        assert (longer.prefill_url, longer.take_answer().params["remote_request_id"]) == ("http://p2", "r2")
        assert longer.take_answer() is None
        assert sessions.num_answers == 1
        edited = self.turn(sessions, "a", "x", "c", "d", "e")
        assert edited.take_answer().params["remote_request_id"] == "r1"
        assert self.turn(sessions, "z", "b").take_answer() is None

    def test_callers_with_other_keys_never_share_one(self) -> None:
        sessions = Sessions()
        self.end(sessions, "a", Authorization="Bearer one")
        assert self.turn(sessions, "a", "b", "c", Authorization="Bearer two").take_answer() is None
        assert self.turn(sessions, "a", "b", "c", Authorization="Bearer one").take_answer() is not None

    def test_an_answer_whose_lease_has_run_out_is_not_sent(self) -> None:
        sessions = Sessions()
        key, _ = sessions.begin({"model": "m", "messages": [{"role": "user", "content": "a"}]}, {})
        answer = Answer.of(UpstreamNode("decode", "http://d"), {**answer_params(), "answer_lease_s": 0.0})
        sessions.remember(key, Conversation(answer=answer))
        assert sessions.num_answers == 0
        assert self.turn(sessions, "a", "b").take_answer() is None

    def test_only_so_many_are_remembered(self) -> None:
        sessions = Sessions(max_conversations=2)
        for text in "abc":
            self.end(sessions, text)
        assert len(sessions) == 2
        assert self.turn(sessions, "a", "b").take_answer() is None


@pytest.mark.parametrize("lease", ["1" + "0" * 400, "-1", "NaN", "Infinity", "true", '"9"', "[]", "1e300"])
def test_an_answer_with_a_lease_that_is_none_is_not_kept(lease: str) -> None:
    rest, params = take_offer(b'{"kv_transfer_params": {"answer_lease_s": ' + lease.encode() + b"}}")
    assert rest == b'{"kv_transfer_params": null}'
    assert params is not None
    answer = Answer.of(UpstreamNode("decode", "http://d"), params)
    assert answer.usable_until <= time.monotonic() + 1


def test_an_offer_that_is_too_long_is_taken_out_and_not_kept() -> None:
    offer = json.dumps({"answer_lease_s": 60, "remote_block_ids": "x" * MAX_OFFER_CHARS}).encode()
    taken = take_offer(b'{"kv_transfer_params":' + offer + b', "a": 1}')
    assert taken == (b'{"kv_transfer_params": null, "a": 1}', None)


@pytest.mark.parametrize("depth", [2_000, 200_000])
def test_params_that_are_nested_deep_are_no_offer(depth: int) -> None:
    payload = b'{"kv_transfer_params":' + b"[" * depth + b"]" * depth + b"}"
    assert take_offer(payload) == (payload, None)


def test_params_of_other_systems_reach_the_client() -> None:
    payload = json.dumps({"kv_transfer_params": {"remote_engine_id": "x"}}).encode()
    assert take_offer(payload) == (payload, None)
