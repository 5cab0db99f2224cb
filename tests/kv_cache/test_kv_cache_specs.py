from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvferry.connector.config import EngineConfig
from kvferry.connector.kv_cache_specs import (
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvferry.transports.errors import ConfigurationError

MakeConfig = Callable[..., EngineConfig]
PAGE = 2 * 4 * 2 * 8 * 4  # keys and values, tokens, heads, elements, bytes per element


def pages(spec: KVCacheSpec, config: EngineConfig) -> float:
    return spec.max_memory_usage_bytes(config) / spec.page_size_bytes


# -- pages -------------------------------------------------------------------------------------------


def test_a_page_is_one_blocks_keys_and_values(full: FullAttentionSpec) -> None:
    assert full.page_size_bytes == PAGE
    assert replace(full, dtype=torch.bfloat16).page_size_bytes == PAGE // 2


def test_a_latent_vector_is_stored_once(full: FullAttentionSpec) -> None:
    assert replace(full, use_mla=True).page_size_bytes == PAGE // 2


def test_a_state_is_one_page_and_may_be_padded() -> None:
    state = MambaSpec(16, shapes=((3, 5), (2,)), dtypes=(torch.float32, torch.bfloat16))
    assert state.page_size_bytes == 3 * 5 * 4 + 2 * 2
    padded = replace(state, page_size_padded=100)
    assert (padded.page_size_bytes, padded.state_size_bytes) == (100, 64)


def test_a_composite_page_is_one_of_each_member(full: FullAttentionSpec) -> None:
    spec = UniformTypeKVCacheSpecs(4, {"a": full, "b": replace(full, num_kv_heads=6)})
    assert spec.page_size_bytes == 4 * PAGE


# -- memory of the longest request -------------------------------------------------------------------


@pytest.mark.parametrize(("length", "expected"), [(1, 1), (4, 1), (5, 2), (64, 16)])
def test_full_attention_keeps_every_token(
    full: FullAttentionSpec, make_config: MakeConfig, length: int, expected: int
) -> None:
    assert pages(full, make_config(length)) == expected


def test_a_windowed_layer_keeps_its_window_and_one_chunk_of_prefill(
    windowed: Callable[[int], SlidingWindowSpec], make_config: MakeConfig
) -> None:
    # 8 - 1 tokens before a chunk of 16, and one more block because the tokens may begin inside a block.
    assert pages(windowed(8), make_config(1000, chunk=16)) == 6 + 1


def test_a_chunked_layer_keeps_one_attention_chunk_and_one_chunk_of_prefill(
    chunked: Callable[[int], ChunkedLocalAttentionSpec], make_config: MakeConfig
) -> None:
    assert pages(chunked(8), make_config(1000, chunk=16)) == 6 + 1


def test_a_window_never_keeps_more_than_full_attention(
    windowed: Callable[[int], SlidingWindowSpec],
    chunked: Callable[[int], ChunkedLocalAttentionSpec],
    make_config: MakeConfig,
) -> None:
    config = make_config(20, chunk=64)
    assert pages(windowed(512), config) == pages(chunked(512), config) == 5


def test_an_encoder_keeps_nothing(make_config: MakeConfig) -> None:
    assert EncoderOnlyAttentionSpec(4, 2, 8, torch.float32).max_memory_usage_bytes(make_config()) == 0


# -- merging -----------------------------------------------------------------------------------------


def test_equal_specs_merge_into_one(
    full: FullAttentionSpec, windowed: Callable[[int], SlidingWindowSpec]
) -> None:
    assert FullAttentionSpec.merge([full, full]) == full
    assert SlidingWindowSpec.merge([windowed(8), windowed(8)]) == windowed(8)


def test_a_recorded_window_is_kept_when_full_attention_specs_merge(full: FullAttentionSpec) -> None:
    narrow = replace(full, sliding_window=8)
    assert FullAttentionSpec.merge([full, narrow]) == narrow
    chunk = replace(full, attention_chunk_size=8)
    assert FullAttentionSpec.merge([chunk, full]) == chunk


def test_specs_that_differ_do_not_merge(
    full: FullAttentionSpec, windowed: Callable[[int], SlidingWindowSpec]
) -> None:
    for cls, specs in (
        (FullAttentionSpec, []),
        (FullAttentionSpec, [full, replace(full, head_size=16)]),
        (FullAttentionSpec, [full, windowed(8)]),
        (FullAttentionSpec, [replace(full, sliding_window=8), replace(full, sliding_window=4)]),
        (FullAttentionSpec, [replace(full, sliding_window=8), replace(full, attention_chunk_size=8)]),
        (SlidingWindowSpec, []),
        (SlidingWindowSpec, [windowed(8), windowed(4)]),
        (SlidingWindowSpec, [windowed(8), full]),
    ):
        with pytest.raises(ValueError, match="layers of one group"):
            cls.merge(specs)  # type: ignore[arg-type]


# -- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["block_size", "num_kv_heads", "head_size"])
def test_sizes_are_positive(full: FullAttentionSpec, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be positive, got 0"):
        replace(full, **{name: 0})


@pytest.mark.parametrize("cls", [SlidingWindowSpec, ChunkedLocalAttentionSpec])
def test_a_window_is_positive(cls: type[Any]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        cls(4, 2, 8, torch.float32)


def test_a_state_has_one_dtype_per_tensor() -> None:
    with pytest.raises(ConfigurationError, match="2 shapes, 1 dtypes"):
        MambaSpec(16, shapes=((1,), (1,)), dtypes=(torch.float32,))
    with pytest.raises(ConfigurationError, match="0 shapes"):
        MambaSpec(16)


def test_padding_cannot_shrink_a_state() -> None:
    with pytest.raises(ConfigurationError, match="page_size_padded=8 is too small: the state has 12 bytes"):
        MambaSpec(16, shapes=((3,),), dtypes=(torch.float32,), page_size_padded=8)


def test_the_members_of_a_composite_must_have_the_same_window(
    full: FullAttentionSpec, windowed: Callable[[int], SlidingWindowSpec]
) -> None:
    for members in (
        {},
        {"a": full, "b": windowed(8)},
        {"a": windowed(4), "b": windowed(8)},
        {"a": full, "b": replace(full, block_size=8)},
    ):
        with pytest.raises(ConfigurationError, match="cannot share a block table"):
            UniformTypeKVCacheSpecs(4, members)
