"""Two real engines: the decode node continues a prompt that it never computed."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

BLOCK_SIZE = 32
_names = (f"request-{number}" for number in count())


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(f"{num_tokens} {seed}").choices(range(3, 512), k=num_tokens)


def hand_over(pair: Any, tokens: list[int], max_tokens: int = 12) -> dict[str, Any]:
    prefill, decode = pair
    name = next(_names)
    params = prefill.ask(name, tokens, params={"do_remote_decode": True})["params"]
    return decode.ask(name, tokens, max_tokens, params)


@pytest.mark.parametrize("num_tokens", [5, 32, 33, 200, 800])
def test_tokens_equal_those_of_one_node(pair, num_tokens):
    tokens = prompt(num_tokens)
    handed_over = hand_over(pair, tokens)
    for node in pair:
        node.order("forget")
    alone = pair[0].ask(next(_names), tokens, 12)
    assert handed_over["tokens"] == alone["tokens"]
    assert handed_over["reason"] == "length"
