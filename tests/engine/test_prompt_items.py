"""Prompts with vectors in place of tokens are computed, cached by content, and handed over."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.reference.engine.errors import InvalidRequestError
from kvferry.reference.engine.types import PromptItem
from kvferry.reference.engine.weights import load_model
from kvferry.reference.node.openai_request import parse_chat, parse_completion
from kvferry.web.errors import ApiError
from tests.support.answers import Answer
from tests.support.tiny_models import generate_greedily

HIDDEN = 64
#: Steps have 16 tokens, blocks 4. The first item spans two steps; two positions of the second one are plain tokens.
PROMPT = [7] * 43
FIRST, SECOND = (12, 9), (30, 6)
IS_EMBED = (True, True, False, True, True, False)


def vectors(seed: int, count: int) -> bytes:
    return np.random.default_rng(seed).normal(0, 0.3, (count, HIDDEN)).astype("<f4").tobytes()


def items(first: int = 1, second: int = 2) -> tuple[PromptItem, ...]:
    """Return both items, with contents drawn from seeds."""
    return (PromptItem(*FIRST, vectors(first, 9)), PromptItem(*SECOND, vectors(second, 4), IS_EMBED))


@pytest.fixture(scope="module")
def expected(tiny_model: Callable[[str], Path]) -> Callable[..., Answer]:
    """`(items, num_tokens)` → the answer of transformers to the same vectors."""
    model: Any = load_model(tiny_model("llama"), torch.float32, torch.device("cpu"), "eager")

    def answer(placed: Sequence[PromptItem], num_tokens: int) -> Answer:
        embedded = model.get_input_embeddings()(torch.tensor([PROMPT])).clone()
        for item in placed:
            rows = iter(np.frombuffer(item.vectors, "<f4").reshape(-1, HIDDEN))
            for position in range(item.length):
                if not item.is_embed or item.is_embed[position]:
                    embedded[0, item.offset + position] = torch.from_numpy(next(rows).copy())
        return generate_greedily(model, PROMPT, num_tokens, embedded=embedded)

    return answer


def test_vectors_take_the_place_of_tokens(make_node: Any, expected: Any) -> None:
    """A request without items runs at the same time, and steps begin inside an item."""
    node = make_node(enable_prefix_caching=False)
    node.add("plain", PROMPT, max_tokens=10)
    node.add("placed", PROMPT, max_tokens=10, items=items())
    node.run()
    assert node.tokens("placed") == expected(items(), 10)
    assert node.tokens("plain") == expected((), 10)
    assert node.tokens("placed") != node.tokens("plain")


@pytest.mark.parametrize(
    ("placed", "num_cached"),
    [
        pytest.param(items(), 40, id="the same: all but the last token's block"),
        pytest.param(items(second=9), 28, id="another second item: up to its first block"),
        pytest.param(items(first=9), 12, id="another first item: up to its first block"),
        pytest.param((), 12, id="tokens of the same ids"),
        pytest.param((items()[0], replace(items()[1], is_embed=IS_EMBED[::-1])), 28, id="other places"),
        pytest.param((replace(items()[0], offset=11), items()[1]), 8, id="one token earlier"),
    ],
)
def test_cached_blocks_are_found_by_their_contents(
    placed: tuple[PromptItem, ...], num_cached: int, make_node: Any, expected: Any
) -> None:
    node = make_node()
    node.add("a", PROMPT, max_tokens=1, items=items())
    node.run()
    node.add("b", PROMPT, max_tokens=6, items=placed)
    node.run()
    assert node.last("b").metrics.num_cached_tokens == num_cached
    assert node.tokens("b") == expected(placed, 6)


def test_items_whose_bytes_are_the_same_end_to_end_are_two_items(make_node: Any) -> None:
    """The last vector of one has the bytes of the other's `is_embed`, which says that the last token has no vector."""
    is_embed = (*[True] * 255, False)
    head = vectors(3, 255)
    node = make_node()
    node.add("a", [7] * 260, max_tokens=1, items=(PromptItem(2, 256, head + bytes(is_embed)),))
    node.run()
    node.add("b", [7] * 260, max_tokens=1, items=(PromptItem(2, 256, head, is_embed),))
    node.run()
    assert node.last("b").metrics.num_cached_tokens == 0


def test_a_prompt_with_items_is_handed_over(make_node: Any, expected: Any, drive: Any) -> None:
    prefill, decode = (make_node(connector="shm", role=role) for role in ("kv_producer", "kv_consumer"))
    prefill.add("a", PROMPT, max_tokens=1, items=items(), kv_transfer_params={"do_remote_decode": True})
    drive(prefill, until=lambda: prefill.is_over("a"))
    params = prefill.last("a").kv_transfer_params
    decode.add("a", PROMPT, max_tokens=10, items=items(), kv_transfer_params=params)
    drive(prefill, decode, until=lambda: not prefill.core.has_work and not decode.core.has_work)
    assert decode.tokens("a") == expected(items(), 10)
    assert decode.last("a").metrics.num_loaded_tokens == len(PROMPT)


@pytest.mark.parametrize(
    ("placed", "message"),
    [
        ((PromptItem(-1, 2, vectors(0, 2)),), "tokens -1 to 1"),
        ((PromptItem(40, 4, vectors(0, 4)),), "tokens 40 to 44"),
        ((PromptItem(3, 0, b""),), "tokens 3 to 3"),
        ((PromptItem(3, 3, vectors(0, 3)), PromptItem(5, 1, vectors(0, 1))), "item 1 .* between 6 and 43"),
        ((PromptItem(3, 3, vectors(0, 2)),), "512 bytes: 3 vectors of 64 float32 values need 768"),
        ((PromptItem(3, 3, vectors(0, 2), (True, False)),), "3 tokens, but is_embed has 2"),
        ((PromptItem(3, 3, vectors(0, 2), (True, False, False)),), "1 vectors"),
        ((PromptItem(3, 1, np.full(HIDDEN, np.nan, "<f4").tobytes()),), "not finite"),
    ],
)
def test_items_that_do_not_fit_are_refused(
    placed: tuple[PromptItem, ...], message: str, make_node: Any
) -> None:
    node = make_node()
    with pytest.raises(InvalidRequestError, match=message) as caught:
        node.add("a", PROMPT, items=placed)
    assert caught.value.param == "prompt_items"
    assert node.is_whole


def test_a_client_sends_vectors_in_base64() -> None:
    client = parse_completion({"prompt": PROMPT, "prompt_items": [as_json(item) for item in items()]})
    assert client.items == items()
    assert parse_completion({"prompt": "text"}).items == ()


def as_json(item: PromptItem) -> dict[str, Any]:
    return {
        "offset": item.offset,
        "length": item.length,
        "vectors": base64.b64encode(item.vectors).decode(),
        "is_embed": list(item.is_embed),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_items": "x"}, "must be a list"),
        ({"prompt_items": [7]}, r"\[0\] must be an object"),
        ({"prompt_items": [{"offset": 1, "length": 1}]}, r"\[0\] must be an object"),
        ({"prompt_items": [{**as_json(items()[0]), "mask": []}]}, r"\[0\] must be an object"),
        ({"prompt_items": [{**as_json(items()[0]), "offset": "1"}]}, "must be integers"),
        ({"prompt_items": [{**as_json(items()[0]), "length": True}]}, "must be integers"),
        (
            {"prompt_items": [{**as_json(items()[0]), "vectors": "?"}]},
            r"\[0\].vectors must be a base64 string",
        ),
        (
            {"prompt_items": [{**as_json(items()[0]), "vectors": 5}]},
            r"\[0\].vectors must be a base64 string",
        ),
        ({"prompt_items": [{**as_json(items()[0]), "is_embed": [1]}]}, "list of booleans"),
        ({"prompt": "text"}, "list of token ids"),
    ],
)
def test_malformed_items_are_refused(change: dict[str, Any], message: str) -> None:
    body = {"prompt": PROMPT, "prompt_items": [as_json(items()[0])]}
    with pytest.raises(ApiError, match=message) as caught:
        parse_completion({**body, **change})
    assert caught.value.param == "prompt_items"


def test_a_chat_cannot_contain_vectors() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "prompt_items": [as_json(items()[0])]}
    with pytest.raises(ApiError, match="prompt_items="):
        parse_chat(body)


def test_a_model_whose_layers_use_token_ids_takes_no_vectors(make_node: Any) -> None:
    with pytest.raises(InvalidRequestError, match="takes tokens only"):
        make_node("gemma3n").add("a", PROMPT, items=items())
