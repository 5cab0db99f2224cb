"""The router stitches a prefill's only token and a decode's answer into what one vLLM server would have sent."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvferry.prove.models import byte_tokenizer
from kvferry.reference.engine.default_model import default_model_folder
from kvferry.router.beginnings import (
    COMPLETIONS,
    Abilities,
    OtherTokenError,
    StitchedBeginning,
    is_possible,
    is_stitchable,
    take_token_ids,
)
from kvferry.router.endings import Heard
from kvferry.router.first_tokens import PassedToken, StitchedToken, first_token_of, is_expected
from kvferry.web.sse import Event, Filter, Splitter, events_of, passing

TOKENIZERS: dict[str, Tokenizer] = {
    "bytes": byte_tokenizer().backend_tokenizer,
    "SmolLM2": Tokenizer.from_file(str(default_model_folder() / "tokenizer.json")),
}
TEXTS = st.text(
    alphabet=st.sampled_from("ab .\n\u00e9\u4e2d\U0001f6a2\u200d\u0301\u05d0"), min_size=1, max_size=12
)
BODY: dict[str, Any] = {"prompt": "a", "temperature": 0, "max_tokens": 8, "stream": True}
BUILD = {"system_fingerprint": "vllm-1"}
IDENTITY = "fedcba9876543210"
OFFER = {"remote_lease": "1", "remote_identity": IDENTITY}


class Server:
    """Writes what a vLLM server writes that samples certain tokens."""

    def __init__(self, tokenizer: Tokenizer, created: int) -> None:
        self._tokenizer = tokenizer
        self._head = {"id": "cmpl-r", "object": "text_completion", "created": created, "model": "m"}

    def _pieces(
        self, prompt: list[int], tokens: list[int], max_tokens: int
    ) -> list[tuple[int, str, str | None]]:
        stream = DecodeStream(ids=self._start(prompt), skip_special_tokens=True)
        sent: list[tuple[int, str, str | None]] = []
        for number, token in enumerate(tokens, 1):
            is_eos = number == len(tokens)
            reason = "stop" if is_eos else "length" if number == max_tokens else None
            text = "" if is_eos else stream.step(self._tokenizer, token) or ""
            sent.append((token, text, reason))
            if reason:
                break
        return sent

    def _start(self, prompt: list[int]) -> list[int]:
        """Return the end of a prompt with which vLLM primes its detokenizer: a few tokens that are whole characters."""
        for size in range(4, min(len(prompt) + 1, 24)):
            if "\ufffd" not in self._tokenizer.decode(prompt[-size:]):
                return prompt[-size:]
        return prompt

    def stream(
        self, prompt: list[int], tokens: list[int], max_tokens: int, *, usage: bool, per_event: int = 0
    ) -> bytes:
        """Write a stream. `per_event`: tokens per event, whose ids are asked for; 0: one, and they are not."""
        sent = self._pieces(prompt, tokens, max_tokens)
        size = per_event or 1
        pieces = [sent[at : at + size] for at in range(0, len(sent), size)]
        chunks: list[dict[str, Any]] = [
            {
                **self._head,
                "choices": [
                    {
                        "index": 0,
                        "text": "".join(text for _, text, _ in piece),
                        "logprobs": None,
                        "finish_reason": piece[-1][2],
                        "stop_reason": None,
                        "prompt_token_ids": prompt if per_event and number == 0 else None,
                        "token_ids": [token for token, _, _ in piece] if per_event else None,
                    }
                ],
            }
            for number, piece in enumerate(pieces)
        ]
        if sent[-1][2] is not None:
            chunks[-1] |= {} if usage else BUILD
        if usage:
            chunks.append({**self._head, "choices": [], "usage": self._usage(prompt, len(sent)), **BUILD})
        written = [json.dumps(chunk, separators=(",", ":"), ensure_ascii=False) for chunk in chunks]
        return "".join(f"data: {line}\n\n" for line in [*written, "[DONE]"]).encode()

    def whole(self, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
        """Return the answer to a prefill."""
        ((token, text, reason),) = self._pieces(prompt, tokens, max_tokens=1)
        choice = {"index": 0, "text": text, "finish_reason": reason, "stop_reason": None}
        ids = {"token_ids": [token], "prompt_token_ids": prompt}
        return {
            **self._head,
            **BUILD,
            "choices": [choice | ids],
            "usage": self._usage(prompt, 1) | {"extra": None},
            "kv_transfer_params": OFFER,
        }

    def _usage(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        total = len(prompt) + num_tokens
        return {"prompt_tokens": len(prompt), "total_tokens": total, "completion_tokens": num_tokens}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=80, deadline=None)
@given(data=st.data(), prompt=TEXTS, answer=TEXTS, max_tokens=st.integers(1, 12), usage=st.booleans())
def test_a_stitched_stream_is_one_servers_byte_for_byte(
    name: str, data: Any, prompt: str, answer: str, max_tokens: int, usage: bool
) -> None:
    tokenizer = TOKENIZERS[name]
    prompt_ids, tokens = tokenizer.encode(prompt).ids, [*tokenizer.encode(answer).ids, 0]
    tokens = tokens[data.draw(st.integers(0, len(tokens) - 1)) :]
    body = {**BODY, "max_tokens": max_tokens, "stream_options": {"include_usage": usage}}
    one = Server(tokenizer, created=100)
    expected = one.stream(prompt_ids, tokens, max_tokens, usage=usage)

    first = first_token_of(body, COMPLETIONS, one.whole(prompt_ids, tokens))
    if first is None:
        # Only a token without a text of its own is left to the decode node.
        assert tokens[:1] != [0]
        assert DecodeStream(ids=prompt_ids, skip_special_tokens=True).step(tokenizer, tokens[0]) is None
        return
    assert expected.startswith(raw(first.events))
    if first.is_all:
        assert expected == raw(first.events) + b"data: [DONE]\n\n"
        return
    beginning = first.beginning()
    asked = beginning.decode_body(body, OFFER)
    assert asked["kv_transfer_params"] == {**OFFER, "continues": {"model": IDENTITY}}
    other = Server(tokenizer, created=101)
    rest = other.stream(asked["prompt"], tokens[1:], asked["max_tokens"], usage=usage)
    cut = data.draw(st.integers(0, len(rest)))
    assert raw(first.events) + through(beginning.continued(), rest[:cut], rest[cut:]) == expected

    # A decode node that was asked at the same time has chosen this token too.
    own = other.stream(prompt_ids, tokens, max_tokens, usage=usage)
    cut = data.draw(st.integers(0, len(own)))
    assert raw(first.events) + through(first.removed(), own[:cut], own[cut:]) == expected


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), prompt=TEXTS, answer=TEXTS, max_tokens=st.integers(1, 12), usage=st.booleans())
def test_a_stream_that_goes_on_elsewhere_is_one_servers(
    name: str, data: Any, prompt: str, answer: str, max_tokens: int, usage: bool
) -> None:
    """Wherever the servers are lost, and however many tokens a busy one puts into an event."""
    tokenizer = TOKENIZERS[name]
    prompt_ids, tokens = tokenizer.encode(prompt).ids, [*tokenizer.encode(answer).ids, 0]
    body = {**BODY, "max_tokens": max_tokens, "stream_options": {"include_usage": usage}}
    expected = Server(tokenizer, created=100).stream(prompt_ids, tokens, max_tokens, usage=usage)

    begun = StitchedBeginning(100, IDENTITY, tuple(prompt_ids), max_tokens)
    received: list[Event] = []
    for number in range(data.draw(st.integers(0, 3)) + 1):
        asked = begun.decode_body(body, OFFER)
        rest = tokens[len(asked["prompt"]) - len(prompt_ids) :]
        per_event = data.draw(st.integers(1, 3))
        written = Server(tokenizer, created=100 + number).stream(
            asked["prompt"], rest, asked["max_tokens"], usage=usage, per_event=per_event
        )
        events, change, heard = events_of(written), begun.continued(), Heard(1)
        events = events[: data.draw(st.integers(0, len(events)))] if number < 3 else events
        for each in events:
            event, token_ids = take_token_ids(each)
            received += () if event is None else change(event)
            begun.add(token_ids, each)
            heard.add(each)
        if heard.is_over:
            received += [event for event in events_of(expected) if not text_of(event)][-1:]
            break
    else:
        assert begun.num_tokens <= len(tokens)
        assert "".join(map(text_of, events_of(expected))).startswith("".join(map(text_of, received)))
        return
    assert "".join(map(text_of, received)) == "".join(map(text_of, events_of(expected)))
    usages = [event.content["usage"] for event in received if "usage" in event.content]
    assert usages in (
        [],
        [event.content["usage"] for event in events_of(expected) if "usage" in event.content],
    )
    assert {event.content["created"] for event in received if event.content} == {100}
    assert not any(b'token_ids":[' in event.raw for event in received)


def text_of(event: Event) -> str:
    choices = event.content.get("choices")
    return choices[0]["text"] if choices else ""


def raw(events: Iterable[Event]) -> bytes:
    return b"".join(event.raw for event in events)


def through(change: Filter, *pieces: bytes) -> bytes:
    """Send the pieces of a stream through a filter."""
    splitter = Splitter(1 << 20)
    return b"".join(raw(passing(change)(splitter.add(piece))) for piece in pieces) + raw(splitter.rest())


def stream_of(*texts: str, created: int = 6, **fields: Any) -> bytes:
    chunks = [{"created": created, "choices": [{"index": 0, "text": text, **fields}]} for text in texts]
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)


def texts_in(stream: bytes) -> list[str]:
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in stream.split(b"\n\n") if event]
    assert {chunk["created"] for chunk in chunks} == {5}
    return [chunk["choices"][0]["text"] for chunk in chunks]


@pytest.mark.parametrize(
    ("own", "left"),
    [
        pytest.param(stream_of("to", "ken", ""), ["ken", ""], id="the same token"),
        pytest.param(stream_of("to", "ken", routed_experts=None), ["ken"], id="a key of a newer vLLM"),
        pytest.param(
            stream_of("to", "ken").replace(b'{"created"', b'{"kv_transfer_params": null, "created"'),
            ["ken"],
            id="a key beside the choices, of a newer vLLM",
        ),
        pytest.param(stream_of("to", "ken", routed_experts=[1]), ["", "ken"], id="something new"),
        pytest.param(stream_of("token", "s"), ["ken", "s"], id="several tokens in one event"),
        pytest.param(stream_of("to", finish_reason="length"), [""], id="the end in the same event"),
    ],
)
def test_what_the_client_has_is_taken_out_of_a_decode_nodes_own_stream(own: bytes, left: list[str]) -> None:
    assert texts_in(through(passed("to").removed(), own)) == left


@pytest.mark.parametrize(
    "own",
    [
        pytest.param(stream_of("the", "n"), id="another text"),
        pytest.param(stream_of("t", "o"), id="a shorter text"),
        pytest.param(stream_of("token", token_ids=[1, 2]), id="token ids, of which the first may differ"),
        pytest.param(b'data: {"choices": []}\n\n', id="no choice"),
        pytest.param(b": comment\n\n", id="no JSON"),
    ],
)
def test_another_token_is_noticed_before_anything_is_passed_on(own: bytes) -> None:
    with pytest.raises(OtherTokenError):
        through(passed("to").removed(), own)


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        ["t"],
        [{}],
        [{"choices": []}],
        [{"choices": [{"text": ""}]}],
        [{"choices": [{"text": None}]}],
        [{"choices": [{"delta": {"role": "assistant"}}]}],
        [{"choices": [{"delta": {"content": ""}}]}],
        [{"choices": [{"text": "t"}, {"text": "u"}]}],
        [{"choices": [{"text": "t", "finish_reason": "stop"}]}],
        [{"choices": [{"text": "t"}]}, {"choices": [{"text": "u"}]}],
        [{"error": {"message": "m"}, "choices": [{"text": "t"}]}],
    ],
    ids=str,
)
def test_a_token_that_the_client_would_not_see_is_not_passed_on(chunks: list[Any]) -> None:
    """The decode node would continue after it, and its text would be missing."""
    passed_on = {"token_id": 1, "created": 5, "model": IDENTITY, "is_all": False}
    answer = {"object": "text_completion", "first_token": {**passed_on, "chunks": chunks}}
    assert first_token_of(BODY, COMPLETIONS, answer) is None
    answer["first_token"]["chunks"] = [{"choices": [{"index": 0, "text": "t", "finish_reason": None}]}]
    assert first_token_of(BODY, COMPLETIONS, answer) is not None


def test_the_error_of_a_load_is_passed_on() -> None:
    error = b'data: {"error": {"message": "lost"}}\n\n'
    assert through(passed("to").removed(), error) == error


def passed(text: str) -> PassedToken:
    return PassedToken(1, 5, "0123456789abcdef", tuple(events_of(stream_of(text, created=5))), is_all=False)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.5},
        {"temperature": None},
        {"stream": False},
        {"max_tokens": None},
        {"stop": ["x"]},
        {"logprobs": 0},
        {"echo": True},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"n": 2},
        {"min_tokens": 1},
        {"return_token_ids": True},
        {"structured_outputs": {"choice": ["a"]}},
        {"bad_words": ["x"]},
        {"some_new_field": 1},
        {"stream_options": {"continuous_usage_stats": True}},
    ],
    ids=str,
)
def test_a_request_that_could_differ_is_not_stitched(change: dict[str, Any]) -> None:
    assert is_stitchable(BODY, COMPLETIONS)
    assert not is_stitchable({**BODY, **change}, COMPLETIONS)
    assert not is_stitchable(BODY, "/v1/chat/completions")


def test_fields_that_a_prefill_node_does_not_receive_prevent_its_token() -> None:
    assert is_possible({"n": 1, "min_tokens": 0})
    for field, value in (("n", 2), ("best_of", 2), ("min_tokens", 3)):
        assert not is_possible({field: value})


def test_a_first_token_is_expected_only_where_it_can_be_passed_on() -> None:
    ours, vllm = Abilities(continues_answers="0123456789abcdef"), Abilities(IDENTITY, vllm_max_model_len=100)
    assert is_expected(BODY, COMPLETIONS, ours)
    assert is_expected({"messages": [], "seed": 1, "stream": True}, "/v1/chat/completions", ours)
    assert is_expected(BODY, COMPLETIONS, vllm)
    assert not is_expected(BODY, "/v1/chat/completions", vllm)
    assert not is_expected(BODY, COMPLETIONS, Abilities())
    assert not is_expected(BODY, COMPLETIONS, Abilities(vllm_max_model_len=100))
    for change in ({"stream": False}, {"temperature": 1}, {"n": 2}, {"logprobs": 0}, {"echo": True}):
        assert not is_expected({**BODY, **change}, COMPLETIONS, ours)
        assert not is_expected({**BODY, **change}, COMPLETIONS, vllm)


def test_a_token_that_follows_a_shortened_prompt_is_not_passed_on() -> None:
    """A server with recurrent states offers, and computes, the prompt without its last token."""
    answer = Server(TOKENIZERS["bytes"], created=1).whole([65] * 10, [66, 67, 0])
    for num_tokens, is_passed in ((10, True), (9, False)):
        params = {**OFFER, "remote_num_tokens": num_tokens}
        first = StitchedToken.of(BODY, {**answer, "kv_transfer_params": params})
        assert (first is not None) == is_passed


def test_an_answer_that_is_too_long_for_a_server_is_not_continued_there() -> None:
    server = Server(TOKENIZERS["bytes"], created=1)
    first = StitchedToken.of(BODY, server.whole([65] * 10, [66, 67, 0]))
    assert first is not None
    beginning = first.beginning()
    assert not beginning.can_continue_at(Abilities(IDENTITY, vllm_max_model_len=17))
    assert beginning.can_continue_at(Abilities(IDENTITY, vllm_max_model_len=18))
    assert not beginning.can_continue_at(Abilities(vllm_max_model_len=18))
    assert not beginning.can_continue_at(Abilities("0123456789abcdef", vllm_max_model_len=18))


def test_a_token_of_a_server_that_does_not_know_its_model_is_not_passed_on() -> None:
    answer = Server(TOKENIZERS["bytes"], created=1).whole([65] * 10, [66, 67, 0])
    assert StitchedToken.of(BODY, answer) is not None
    for params in ({"remote_lease": "1"}, {"remote_identity": ""}, {"remote_identity": 5}, None):
        assert StitchedToken.of(BODY, {**answer, "kv_transfer_params": params}) is None
