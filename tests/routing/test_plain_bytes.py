"""Bytes that only carry more of an answer reach the client unparsed, and it makes no difference how much of a
stream does: the client gets the same bytes, and another node is told the same tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kvferry.router.answer import exchange as does
from kvferry.router.answer.beginnings import ReferenceBeginning, StitchedBeginning
from kvferry.router.answer.exchange import MAX_UNREAD_BYTES, Actions, Begun, Exchange
from kvferry.router.answer.plain import PlainBytes
from kvferry.router.http.endpoints import CHATS, COMPLETIONS, MESSAGES
from kvferry.router.http.sse import DONE, Event

WORDS = [
    "a",
    " ferry",
    '"error"',
    "[DONE]",
    '"usage":{',
    "\\n\\n",
    "é",
    '"finish_reason":"stop"',
    "data: x",
    "",
]


def event(content: Mapping[str, Any], *, spaces: bool) -> bytes:
    text = json.dumps(content) if spaces else json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    return f"data: {text}\n\n".encode()


def stream_of(drawn: random.Random, path: str) -> list[bytes]:
    """Draw a stream as nodes write them, with what may come between its tokens."""
    spaces, with_ids, with_usage = (drawn.random() < 0.5 for _ in range(3))
    raw, num = list[bytes](), drawn.randint(2, 12)
    for number in range(num):
        text, is_last = drawn.choice(WORDS), number == num - 1
        piece = {"delta": {"content": text} if text else {}} if path == CHATS else {"text": text}
        choice: dict[str, Any] = {"index": 0, **piece, "finish_reason": "length" if is_last else None}
        if with_ids:
            choice["token_ids"] = [number] * drawn.randint(0, 2) or None
        content: dict[str, Any] = {"id": "x", "created": 1, "choices": [choice]}
        if with_usage:
            content["usage"] = {"prompt_tokens": drawn.choice([3, -3]), "completion_tokens": number}
        raw.append(event(content, spaces=spaces))
        if drawn.random() < 0.2:
            raw.append(b": still here\n\n")
    if drawn.random() < 0.5:
        raw.append(
            event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": num}}, spaces=spaces)
        )
    if drawn.random() < 0.2:
        raw.insert(drawn.randrange(len(raw)), event({"error": {"message": "bad"}}, spaces=spaces))
    return [*raw, DONE.raw]


def begun(path: str, body: Mapping[str, Any], first: bytes, kind: str) -> tuple[Exchange, Actions]:
    """Return an exchange whose decode node has sent its first event."""
    exchange = Exchange(path, body, {"X-Request-Id": "r"})
    exchange.begin()
    exchange.placed_at(object())  # type: ignore[arg-type]
    beginning = {
        "none": None,
        "reference": ReferenceBeginning(1, "m"),
        "vllm": StitchedBeginning(1, "m", (1, 2), 100),
    }[kind]
    actions = exchange.decode_answered(
        Begun(200, {}, True, b"", [Event(first)], "unknown", beginning=beginning)
    )
    return exchange, actions


def sent(actions: Actions) -> bytes:
    events = [each for action in actions if isinstance(action, does.Send) for each in action.events]
    return b"".join(each.raw for each in events)


def played(exchange: Exchange, actions: Actions, chunks: Sequence[bytes], *, may_pass: bool) -> bytes:
    client = sent(actions)
    for chunk in chunks:
        if exchange.state is not does.State.DECODING:
            break  # another node would go on
        if may_pass and (passed := exchange.passed(chunk)) is not None:
            client += passed[0]
            continue
        events = [Event(each + b"\n\n") for each in chunk.split(b"\n\n")[:-1]]
        client += sent(exchange.events_arrived(events))
    return client


@pytest.mark.parametrize("kind", ["none", "reference", "vllm"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_it_makes_no_difference_whether_bytes_are_passed_on(path: str, kind: str) -> None:
    for seed in range(400):
        drawn = random.Random(seed)
        first, *rest = stream_of(drawn, path)
        chunks = list[bytes]()
        while rest:
            num = drawn.randint(1, 3)
            chunks.append(b"".join(rest[:num]))
            del rest[:num]
        body = {"stream": True, **drawn.choice([{}, {"return_token_ids": True}])}
        one, other = (begun(path, body, first, kind) for _ in range(2))
        expected = played(*one, chunks, may_pass=False)
        assert played(*other, chunks, may_pass=True) == expected, seed
        found = [(each.state, each.sent.is_complete, each.sent.beginning) for each, *_ in (one, other)]
        assert found[0] == found[1], seed
        assert vars(one[0]._heard) == vars(other[0]._heard), seed


def test_most_bytes_are_passed_on() -> None:
    """Of servers of vLLM and of reference nodes."""
    for spaces in (False, True):
        choice = {"index": 0, "text": " ferry", "logprobs": None, "finish_reason": None, "token_ids": [7]}
        usage = {"prompt_tokens": 512, "total_tokens": 513, "completion_tokens": 1}
        for more in ({}, {"usage": None}, {"usage": usage}):
            raw = event({"id": "x", "choices": [choice], **more}, spaces=spaces)
            assert PlainBytes().count(raw * 3) == 3


@pytest.mark.parametrize(
    "content",
    [
        {"choices": []},
        {"choices": [{"text": "a", "finish_reason": "stop"}]},
        {"choices": [{"text": "a", "finish_reason": "abort"}]},
        {"choices": [{"text": "a"}], "usage": {"prompt_tokens": -1}},
        {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 10**12}},
        {
            "choices": [{"text": "a"}],
            "usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 9}},
        },
        {"choices": [{"text": "a", "token_ids": [10**30]}]},
        {"choices": [{"text": "a", "token_ids": ["x"]}]},
        {"choices": [{"text": "a", "prompt_token_ids": [1]}]},
        {"error": {"message": "a"}},
        {"choices": [{"text": "a", "finish_reason": "moved"}]},
        {"choices": [{"text": "a"}], "metrics": {"num_cached_tokens": 1}},
    ],
)
def test_an_event_that_may_say_something_is_looked_at(content: Mapping[str, Any]) -> None:
    for spaces in (False, True):
        assert PlainBytes().count(event(content, spaces=spaces)) == 0


def test_the_last_event_of_an_endpoint_with_named_events_is_looked_at() -> None:
    exchange = Exchange(MESSAGES, {"stream": True}, {"X-Request-Id": "r"})
    piece = b'event: content_block_delta\ndata: {"type": "content_block_delta"}\n\n'
    assert exchange._plain.count(piece) == 1
    assert exchange._plain.count(b'event: message_stop\ndata: {"type": "message_stop"}\n\n') == 0


def test_what_waits_to_be_read_is_bounded() -> None:
    raw = event({"choices": [{"text": "a", "finish_reason": None, "token_ids": [7]}]}, spaces=False)
    exchange, _ = begun(COMPLETIONS, {"stream": True}, raw, "vllm")
    num = 3 * MAX_UNREAD_BYTES // len(raw)
    for _ in range(num):
        assert exchange.passed(raw) is not None
    assert exchange.sent._num_unread <= MAX_UNREAD_BYTES
    assert exchange.sent.beginning is not None
    assert exchange.sent.beginning.num_tokens == num + 1


@pytest.mark.parametrize("hides_ids", [True, False])
def test_an_event_like_the_one_before_is_as_plain_as_that(hides_ids: bool) -> None:
    """And one that only looks like it is looked at."""
    plain = PlainBytes(hides_ids=hides_ids)
    form = '{"id":"x","choices":[{"index":0,"text":"%s","token_ids":[7],"finish_reason":null}]}'
    for text in ("a", "", "b" * 500, "é", "\\n", 'c"', '\\"finish_reason\\":\\"stop', "d\\", "data: [DONE]"):
        raw = b"data: " + (form % text).encode() + b"\n\n"
        expected = raw.replace(b"[7]", b"null") if hides_ids else raw
        assert PlainBytes(hides_ids=hides_ids).passed(raw) in (None, (expected, 1)), text
        assert plain.passed(raw) in (None, (expected, 1)), text
    assert plain.passed(b"data: " + (form % 'x","finish_reason":"stop').encode() + b"\n\n") is None
    one = b"data: " + (form % "x").encode() + b"\n\n"
    assert plain.passed(one) is not None
    assert plain._frame[0], "so that the next one is compared with it"
    assert plain.passed(one + DONE.raw + one) is None
