"""Two requests have the same digest exactly if they may use each other's blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kvferry.connector.content import content_digest
from kvferry.connector.testing import Request


@dataclass(frozen=True)
class Image:
    identifier: str = "cat"
    offset: int = 2
    length: int = 3


BASE = Request("r", 10)


def test_it_does_not_depend_on_the_request() -> None:
    other = Request("s", 10, {"do_remote_decode": True}, 4, "stop")
    assert content_digest(other, 10) == content_digest(BASE, 10)
    assert len(content_digest(BASE, 10)) == 64


@pytest.mark.parametrize(
    "change",
    [
        {"first_token_id": 1},
        {"cache_salt": "s"},
        {"lora_id": "adapter"},
        {"mm_features": [Image()]},
        {"prompt_embeds": torch.zeros(10, 4)},
        {"num_prompt_tokens": 9},
    ],
    ids=lambda change: next(iter(change)),
)
def test_everything_that_the_cache_depends_on_counts(change: dict[str, Any]) -> None:
    assert content_digest(replace(BASE, **change), 10) != content_digest(BASE, 10)


@pytest.mark.parametrize("other", [Image("dog"), Image(offset=1), Image(length=4)])
def test_an_items_contents_and_position_count(other: Image) -> None:
    one = replace(BASE, mm_features=[Image()])
    assert content_digest(replace(BASE, mm_features=[other]), 10) != content_digest(one, 10)


def test_a_salt_is_not_an_adapter() -> None:
    salted, adapted = replace(BASE, cache_salt="x"), replace(BASE, lora_id="x")
    assert content_digest(salted, 10) != content_digest(adapted, 10)


def test_tokens_after_the_compared_ones_do_not_count() -> None:
    longer = replace(BASE, num_prompt_tokens=30, mm_features=[Image(offset=10)])
    assert content_digest(longer, 10) == content_digest(BASE, 10)
    assert content_digest(longer, 11) != content_digest(BASE, 11)


def test_vectors_count_as_far_as_they_are_within_the_compared_tokens() -> None:
    vectors = torch.arange(40.0).view(10, 4)
    other = vectors.clone()
    other[7] = 0
    one, another = replace(BASE, prompt_embeds=vectors), replace(BASE, prompt_embeds=other)
    assert content_digest(one, 7) == content_digest(another, 7)
    assert content_digest(one, 8) != content_digest(another, 8)
