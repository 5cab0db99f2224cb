"""Two requests have the same digest exactly if they may use each other's blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kvferry.connector import FullAttentionSpec, ModelConfig, ModelIdentity
from kvferry.connector.identity.content import block_digests, content_digest
from kvferry.connector.testing import Request, engine_config


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


SPEC = FullAttentionSpec(4, 2, 8, torch.float32)
CONFIG = engine_config("shm")


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

    @pytest.mark.parametrize(
        "change",
        [
            {"first_token_id": 1},
            {"cache_salt": "s"},
            {"lora_id": "adapter"},
            {"mm_features": [Image()]},
            {"prompt_embeds": torch.zeros(10, 4)},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_whatever_the_request_brings_counts_in_every_block(self, change: dict[str, Any]) -> None:
        changed = block_digests(replace(BASE, **change), CONFIG, SPEC)
        assert not set(changed) & set(block_digests(BASE, CONFIG, SPEC))

    @pytest.mark.parametrize("other", [Image("dog"), Image(offset=1), Image(length=4)])
    def test_an_item_counts_with_its_contents_and_its_place(self, other: Image) -> None:
        one = block_digests(replace(BASE, mm_features=[Image()]), CONFIG, SPEC)
        assert not set(one) & set(block_digests(replace(BASE, mm_features=[other]), CONFIG, SPEC))

    def test_an_item_counts_only_from_its_block_on(self) -> None:
        late = block_digests(replace(BASE, mm_features=[Image(offset=5)]), CONFIG, SPEC)
        plain = block_digests(BASE, CONFIG, SPEC)
        assert (late[0] == plain[0], late[1] == plain[1]) == (True, False)

    @pytest.mark.parametrize(
        "identity",
        [ModelIdentity(**{part: "x"}) for part in ("weights", "configuration", "adapters")],
        ids=["weights", "configuration", "adapters"],
    )
    def test_the_model_counts(self, identity: ModelIdentity) -> None:
        other = replace(CONFIG, model=replace(CONFIG.model, identity=identity))
        assert not set(block_digests(BASE, other, SPEC)) & set(block_digests(BASE, CONFIG, SPEC))

    @pytest.mark.parametrize(
        "model", [ModelConfig("other", "float32", 128), ModelConfig("tiny", "float16", 128)]
    )
    def test_its_name_and_what_it_computes_with_count(self, model: ModelConfig) -> None:
        other = block_digests(BASE, replace(CONFIG, model=model), SPEC)
        assert not set(other) & set(block_digests(BASE, CONFIG, SPEC))

    @pytest.mark.parametrize("spec", [replace(SPEC, head_size=4), replace(SPEC, dtype=torch.float16)])
    def test_the_form_of_a_page_counts(self, spec: FullAttentionSpec) -> None:
        assert not set(block_digests(BASE, CONFIG, spec)) & set(block_digests(BASE, CONFIG, SPEC))

    def test_a_salt_is_not_an_adapter(self) -> None:
        salted, adapted = replace(BASE, cache_salt="x"), replace(BASE, lora_id="x")
        assert not set(block_digests(salted, CONFIG, SPEC)) & set(block_digests(adapted, CONFIG, SPEC))
