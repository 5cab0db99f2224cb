"""Two requests have the same digest exactly if they may use each other's blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kvferry.connector import FullAttentionSpec, ModelIdentity
from kvferry.connector.identity.content import block_digests, content_digest
from kvferry.connector.testing import Request, engine_config


@dataclass(frozen=True)
class Image:
    identifier: str = "cat"
    offset: int = 2
    length: int = 3


BASE = Request("r", 10)
SPEC = FullAttentionSpec(4, 2, 8, torch.float32)
CONFIG = engine_config("shm")
#: Changes of the request, of which no two may have the same digest.
UNLIKE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tokens": ({}, {"first_token_id": 1}),
    "salt": ({}, {"cache_salt": "s"}),
    "adapter": ({}, {"lora_id": "adapter"}),
    "salt or adapter": ({"cache_salt": "x"}, {"lora_id": "x"}),
    "vectors": ({}, {"prompt_embeds": torch.zeros(10, 4)}),
    "item": ({}, {"mm_features": [Image()]}),
    **{
        f"item's {name}": ({"mm_features": [Image()]}, {"mm_features": [Image(**{name: value})]})
        for name, value in {"identifier": "dog", "offset": 1, "length": 4}.items()
    },
}


def test_it_does_not_depend_on_the_request() -> None:
    other = Request("s", 10, {"do_remote_decode": True}, 4, "stop")
    assert content_digest(other, 10) == content_digest(BASE, 10)
    assert len(content_digest(BASE, 10)) == 64


@pytest.mark.parametrize(("one", "other"), UNLIKE.values(), ids=UNLIKE)
def test_everything_that_the_cache_depends_on_counts(one: dict[str, Any], other: dict[str, Any]) -> None:
    """In the digest of the prompt, and in those of each of its blocks."""
    first, second = replace(BASE, **one), replace(BASE, **other)
    assert content_digest(first, 10) != content_digest(second, 10)
    assert not set(block_digests(first, CONFIG, SPEC)) & set(block_digests(second, CONFIG, SPEC))


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


class TestBlocks:
    """What names a block in a store."""

    def test_there_is_one_digest_per_whole_block_whatever_the_request(self) -> None:
        digests = block_digests(BASE, CONFIG, SPEC)
        assert len(digests) == len(set(digests)) == 2
        assert {len(digest) for digest in digests} == {64}
        assert block_digests(Request("s", 11, {"do_remote_decode": True}, 4, "stop"), CONFIG, SPEC) == digests
        assert block_digests(replace(BASE, num_prompt_tokens=3), CONFIG, SPEC) == []

    def test_a_longer_prompt_has_the_same_first_digests(self) -> None:
        shorter, longer = (replace(BASE, num_prompt_tokens=count) for count in (8, 12))
        assert block_digests(longer, CONFIG, SPEC)[:2] == block_digests(shorter, CONFIG, SPEC)

    def test_an_item_counts_only_from_its_block_on(self) -> None:
        late = block_digests(replace(BASE, mm_features=[Image(offset=5)]), CONFIG, SPEC)
        plain = block_digests(BASE, CONFIG, SPEC)
        assert (late[0] == plain[0], late[1] == plain[1]) == (True, False)

    @pytest.mark.parametrize(
        ("model", "spec"),
        [
            *(({"identity": ModelIdentity(**{part: "x"})}, {}) for part in ("weights", "configuration")),
            ({"identity": ModelIdentity(adapters="x")}, {}),
            ({"model": "other"}, {}),
            ({"dtype": "float16"}, {}),
            ({}, {"head_size": 4}),
            ({}, {"dtype": torch.float16}),
        ],
    )
    def test_the_model_and_the_form_of_a_page_count(
        self, model: dict[str, Any], spec: dict[str, Any]
    ) -> None:
        config = replace(CONFIG, model=replace(CONFIG.model, **model))
        other = block_digests(BASE, config, replace(SPEC, **spec))
        assert not set(other) & set(block_digests(BASE, CONFIG, SPEC))
