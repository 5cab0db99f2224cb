"""An answer that one engine stops goes on at another one, which loads its cache: token by token and score by
score one engine's.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support.answers import Answer

BLOCK = 16
NUM_TOKENS = 40
FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gemma4", "llama4")
NAME = "5" * 32


def prompt_of(num_tokens: int) -> list[int]:
    return [random.Random(num_tokens).randrange(256) for _ in range(num_tokens)]


def begin(node: Any, prompt: list[int], num_tokens: int, **asked: Any) -> None:
    """Step a node until it has answered this many tokens."""
    node.add("a", prompt, max_tokens=NUM_TOKENS, move_as=NAME, **asked)
    while "a" not in node.outputs or len(node.tokens("a")) < num_tokens:
        node.step()


def stopped(node: Any) -> Any:
    """Stop the answer of a node. Returns its last output."""
    node.move(NAME)
    node.step()
    assert node.is_over("a")
    return node.last("a")


def go_on(node: Any, other: Any, drive: Any, prompt: list[int], params: Any, **asked: Any) -> Answer:
    """Let a node go on with the answer of another one. Returns both parts."""
    before = other.tokens("a")
    node.add("a", prompt, max_tokens=NUM_TOKENS, kv_transfer_params=params, known_token_ids=before, **asked)
    drive(other, node, until=lambda: not other.core.has_work and not node.core.has_work)
    rest = node.tokens("a")
    assert list(rest[: len(before)]) == list(before)
    return Answer(rest, [*before.logprobs, *rest.logprobs])


@pytest.fixture
def make_pair(make_node: Any) -> Any:
    """Make two decode nodes, which know nothing of moves in advance."""

    def make(family: str, **settings: Any) -> tuple[Any, Any]:
        both = {
            "connector": "shm",
            "role": "kv_consumer",
            "block_size": BLOCK,
            "num_blocks": 60,
            "max_num_batched_tokens": 48,
            **settings,
        }
        return make_node(family, **both), make_node(family, **both)

    return make


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_tokens", [1, 17])
def test_the_answer_is_that_of_one_engine_and_nothing_is_computed_again(
    family: str, num_tokens: int, make_pair: Any, drive: Any, assert_same: Any
) -> None:
    prompt = prompt_of(61)
    first, second = make_pair(family)
    begin(first, prompt, num_tokens)
    last = stopped(first)
    assert (last.finish_reason, last.text_delta != "" or last.new_token_ids != ()) == ("moved", True)
    num_known = len(first.tokens("a"))
    assert num_known == num_tokens + 1
    answer = go_on(second, first, drive, prompt, last.kv_transfer_params)
    assert_same(answer, family, prompt, NUM_TOKENS)
    metrics = second.last("a").metrics
    # All but the last token, whose keys and values no node has computed.
    assert metrics.num_loaded_tokens == len(prompt) + num_known - 1
    assert metrics.transfer.error == ""
    assert first.is_whole
    assert second.is_whole


def test_a_seeded_answer_moves_twice(make_pair: Any, drive: Any, make_node: Any) -> None:
    asked = {"temperature": 0.9, "seed": 3, "top_p": 0.9}
    prompt = prompt_of(50)
    expected = make_node(block_size=BLOCK).answer(prompt, max_tokens=NUM_TOKENS, **asked)
    first, second = make_pair("llama")
    begin(first, prompt, 5, **asked)
    params, before = stopped(first).kv_transfer_params, first.tokens("a")
    second.add(
        "a",
        prompt,
        max_tokens=NUM_TOKENS,
        kv_transfer_params=params,
        known_token_ids=before,
        move_as=NAME,
        **asked,
    )
    drive(first, second, until=lambda: "a" in second.outputs and len(second.tokens("a")) > 12)
    params, known = stopped(second).kv_transfer_params, second.tokens("a")
    # It comes back to the first node, which has the beginning of it in its prefix cache.
    first.add("b", prompt, max_tokens=NUM_TOKENS, kv_transfer_params=params, known_token_ids=known, **asked)
    drive(first, second, until=lambda: not first.core.has_work and not second.core.has_work)
    assert list(first.tokens("b")) == list(expected)
    metrics = first.last("b").metrics
    assert metrics.num_cached_tokens == 48
    assert metrics.num_loaded_tokens == len(prompt) + len(known) - 1 - 48
    assert first.is_whole
    assert second.is_whole


def test_other_tokens_than_the_offered_ones_are_not_loaded(
    make_pair: Any, drive: Any, reference: Any
) -> None:
    prompt = prompt_of(40)
    first, second = make_pair("llama")
    begin(first, prompt, 9)
    params = stopped(first).kv_transfer_params
    known = [*first.tokens("a")]
    known[3] += 1
    second.add("a", prompt, max_tokens=NUM_TOKENS, kv_transfer_params=params, known_token_ids=known)
    drive(first, second, until=lambda: not first.core.has_work and not second.core.has_work)
    metrics = second.last("a").metrics
    assert metrics.num_loaded_tokens == 0
    assert "content" in metrics.transfer.error or "prompt" in metrics.transfer.error
    rest = second.tokens("a")[len(known) :]
    assert list(rest) == list(reference("llama", [*prompt, *known], NUM_TOKENS - len(known)))
    assert first.is_whole
    assert second.is_whole


def test_an_answer_of_a_node_without_a_connector_stops_without_an_offer(make_node: Any) -> None:
    node = make_node(block_size=BLOCK)
    begin(node, prompt_of(30), 3)
    last = stopped(node)
    assert (last.finish_reason, last.kv_transfer_params) == ("moved", None)
    assert node.is_whole
