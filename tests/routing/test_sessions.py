"""Conversations at the router: the next turn goes to the same prefill node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from kvferry.router.answer.sessions import Sessions, Turn
from tests.support.fake_nodes import routed

SESSION = {"X-Session-ID": "s1"}


@dataclass
class Node:
    """A node that records the prompts of its requests."""

    asked: list[Any] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body["prompt"])
        return web.json_response({"choices": [], "kv_transfer_params": {"remote_engine_id": "p"}})


async def test_the_turns_of_a_conversation_go_to_one_prefill_node() -> None:
    prefills = [Node() for _ in range(3)]
    async with routed(prefills, [Node()]) as client:
        for turn in range(4):
            body = {"prompt": f"turn {turn}"}
            async with client.post("/v1/completions", json=body, headers=SESSION) as response:
                assert response.status == 200
    (used,) = [node for node in prefills if node.asked]
    assert used.asked == [f"turn {turn}" for turn in range(4)]


class TestWhichConversation:
    def turn(self, sessions: Sessions, *texts: str, **headers: str) -> Turn:
        messages = [{"role": "user", "content": text} for text in texts]
        return sessions.begin({"model": "m", "messages": messages}, headers)

    def end(self, sessions: Sessions, *texts: str, url: str = "http://p1", **headers: str) -> None:
        sessions.remember(self.turn(sessions, *texts, **headers), url)

    def test_a_chat_continues_the_longest_one_that_it_begins_with(self) -> None:
        sessions = Sessions()
        self.end(sessions, "a")
        self.end(sessions, "a", "b", "c", url="http://p2")
        assert self.turn(sessions, "a", "b", "c", "d", "e").prefill_url == "http://p2"
        assert self.turn(sessions, "a", "x", "c", "d", "e").prefill_url == "http://p1"
        assert self.turn(sessions, "z", "b").prefill_url == ""

    def test_callers_with_other_keys_never_share_one(self) -> None:
        sessions = Sessions()
        self.end(sessions, "a", Authorization="Bearer one")
        assert not self.turn(sessions, "a", "b", "c", Authorization="Bearer two").prefill_url
        assert self.turn(sessions, "a", "b", "c", Authorization="Bearer one").prefill_url

    def test_only_so_many_are_remembered(self) -> None:
        sessions = Sessions(max_conversations=2)
        for text in "abc":
            self.end(sessions, text)
        assert len(sessions) == 2
        assert not self.turn(sessions, "a", "b").prefill_url

    def test_a_completion_without_a_session_belongs_to_none(self) -> None:
        sessions = Sessions()
        sessions.remember(sessions.begin({"prompt": "a"}, {}), "http://p1")
        assert len(sessions) == 0
