"""The router puts the parts of an answer together to what one vLLM server would have sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvferry.lab.engine.default_model import default_model_folder
from kvferry.lab.prove.models import byte_tokenizer
from kvferry.router.answer.beginnings import StitchedBeginning, take_token_ids
from kvferry.router.answer.endings import Heard
from kvferry.router.http.sse import Event, events_of
from kvferry.router.nodes.states import Abilities

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
OFFER = {"remote_lease": "1"}


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
        """Return the end of a prompt with which vLLM primes its detokenizer: a few tokens that are whole
        characters.
        """
        for size in range(4, min(len(prompt) + 1, 24)):
            if "\ufffd" not in self._tokenizer.decode(prompt[-size:]):
                return prompt[-size:]
        return prompt

    def stream(
        self, prompt: list[int], tokens: list[int], max_tokens: int, *, usage: bool, per_event: int = 0
    ) -> bytes:
        """Write a stream.

        `per_event`: tokens per event, whose ids are asked for; 0: one, and they are not.
        """
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

    def _usage(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        total = len(prompt) + num_tokens
        return {"prompt_tokens": len(prompt), "total_tokens": total, "completion_tokens": num_tokens}


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
        assert asked["kv_transfer_params"] == {**OFFER, "continues": {"model": IDENTITY}}
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


def test_an_answer_that_is_too_long_for_a_server_is_not_continued_there() -> None:
    beginning = StitchedBeginning(1, IDENTITY, (65,) * 10, 8)
    assert not beginning.can_continue_at(Abilities(IDENTITY, vllm_max_model_len=17))
    assert beginning.can_continue_at(Abilities(IDENTITY, vllm_max_model_len=18))
    assert not beginning.can_continue_at(Abilities(vllm_max_model_len=18))
    assert not beginning.can_continue_at(Abilities("0123456789abcdef", vllm_max_model_len=18))
