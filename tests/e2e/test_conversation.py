"""Conversations through the router: from the second turn on, the prefill node computes only what is new."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.support.answers import Answer
from tests.support.client import Client, assert_answers_like, completion_body, streamed_answer, wait_until

NUM_ANSWER = 20


@pytest.fixture(scope="module")
def fleet(start_fleet: Callable[..., Any], tiny_single: Client, tiny_single_arguments: Sequence[str]) -> Any:
    options = ("offer_answer=true", "answer_lease_s=300")
    given = [word for option in options for word in ("--connector-option", option)]
    return start_fleet(tiny_single, *tiny_single_arguments, *given)


def message(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def num_computed(node: Client) -> float:
    """Return the prompt tokens that a node has computed."""
    prompt, cached, loaded = (
        node.metric(f"kvferry_engine_{name}_tokens_total") for name in ("prompt", "cached", "loaded")
    )
    return prompt - cached - loaded


def say(router: Client, tokens: Sequence[int], session: str, *, stream: bool) -> Answer:
    """Take a turn; return the answer. The client sees nothing of the offer."""
    # A stream that asked for them would not begin with the prefill node's token.
    scores = {} if stream else {"logprobs": 0}
    body = completion_body(tokens, {"max_tokens": NUM_ANSWER, "ignore_eos": True, "stream": stream, **scores})
    with router.requesting("/v1/completions", body, {"X-Session-ID": session}) as response:
        assert response.status == 200
        raw = response.read().decode()
    assert "remote_" not in raw
    pieces = [line.removeprefix("data: ") for line in raw.splitlines() if line.strip()]
    events = [json.loads(piece) for piece in pieces if piece != "[DONE]"]
    return streamed_answer(events)


@pytest.mark.parametrize("stream", [False, True])
def test_in_five_turns_the_prefill_node_computes_only_new_messages(fleet: Any, stream: bool) -> None:
    tokens: list[int] = []
    for turn, length in enumerate((70, 9, 21, 5, 40)):
        tokens += message(turn + 10 * stream, length)
        before = num_computed(fleet.prefill)
        answer = say(fleet.router, tokens, f"session {stream}", stream=stream)
        # No node has computed the last token of an answer: it was sampled, and nothing followed it.
        assert num_computed(fleet.prefill) - before == length + (turn > 0)
        assert_answers_like(fleet.single, tokens, answer, NUM_ANSWER, ignore_eos=True)
        tokens += answer
    page = fleet.router.get("/metrics")[1].decode()
    assert f'kvferry_router_answers_total{{result="loaded"}} {4.0 * (1 + stream)}' in page
    assert 'kvferry_router_answers_total{result="failed"} 0.0' in page


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_several_answers_leave_no_offers(fleet: Any, stream: bool) -> None:
    """They belong to no conversation. Each offer would hold blocks of the decode node for five minutes."""
    before = fleet.decode.metric("kvferry_engine_offered_answers")
    for fields in ({"prompt": ["one two three", "four five six"]}, {"prompt": "seven eight", "n": 2}):
        body = {"temperature": 0, "max_tokens": 4, "stream": stream, **fields}
        with fleet.router.requesting("/v1/completions", body, {"X-Session-ID": "several"}) as response:
            assert response.status == 200
            raw = response.read().decode()
        assert "remote_" not in raw
        assert "answer_lease_s" not in raw
    assert fleet.decode.metric("kvferry_engine_offered_answers") <= before


def test_a_decode_node_that_drains_does_not_wait_for_the_next_turn(fleet: Any) -> None:
    """Its lease would run for minutes. The next turn computes what the node had offered."""
    say(fleet.router, message(99, 30), "last", stream=False)
    assert fleet.decode.metric("kvferry_engine_offered_answers") >= 1
    wait_until(lambda: fleet.prefill.is_whole())
    fleet.decode.process.terminate()
    assert fleet.decode.process.wait(15.0) == 0
