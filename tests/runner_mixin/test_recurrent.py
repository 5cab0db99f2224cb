"""What recurrent layers store, and which page belongs to which request."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvferry.connector.config import (
    AttentionLayerConfig,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RecurrentLayerConfig,
)
from kvferry.connector.kv_cache_specs import FullAttentionSpec, MambaSpec
from kvferry.runner_mixin import StepBatch, build_state_metadata, get_kv_cache_spec
from kvferry.runner_mixin.kv_cache import get_kv_cache_config
from kvferry.transports.errors import ConfigurationError

CPU = torch.device("cpu")
ATTENTION = AttentionLayerConfig("layers.0.self_attn", num_kv_heads=2, head_size=8)
#: 3 * 5 * 4 + 7 * 2 bytes.
STATE = RecurrentLayerConfig("layers.1.mamba", ((3, 5), (7,)), ("float32", "bfloat16"))


def config_of(
    *recurrent: RecurrentLayerConfig, attention: tuple[AttentionLayerConfig, ...] = (ATTENTION,)
) -> EngineConfig:
    return EngineConfig(
        ModelConfig("m", "float32", max_model_len=64, layers=attention, recurrent_layers=recurrent),
        CacheConfig(block_size=4, num_blocks_override=10),
    )


def test_a_states_page_is_as_large_as_that_of_an_attention_layer() -> None:
    specs = get_kv_cache_spec(config_of(STATE), torch.float32)
    attention, state = specs["layers.0.self_attn"], specs["layers.1.mamba"]
    assert isinstance(attention, FullAttentionSpec)
    assert isinstance(state, MambaSpec)
    assert (state.shapes, state.dtypes) == (((3, 5), (7,)), (torch.float32, torch.bfloat16))
    assert state.state_size_bytes == 74
    assert state.page_size_bytes == attention.page_size_bytes == 2 * 4 * 2 * 8 * 4


def test_the_error_for_a_state_larger_than_a_page_names_a_sufficient_block_size() -> None:
    config = config_of(replace(STATE, state_shapes=((321,), (1,))))
    with pytest.raises(ConfigurationError, match="1286 bytes.*use block_size=11 or more") as caught:
        get_kv_cache_spec(config, torch.float32)
    assert caught.value.key == "block_size"
    larger = replace(config, cache=CacheConfig(block_size=11))
    assert get_kv_cache_spec(larger, torch.float32)["layers.1.mamba"].page_size_bytes == 11 * 128


def test_each_request_has_one_page_and_layers_of_a_group_share_the_metadata() -> None:
    config = config_of(STATE, replace(STATE, name="layers.2.mamba"), attention=())
    pool = get_kv_cache_config(config, get_kv_cache_spec(config, torch.float32), available_memory=0)
    batch = StepBatch.from_lens([3, 1], [0, 9], CPU)
    metadata = build_state_metadata(pool, batch, [torch.tensor([[5, 0], [2, 0]], dtype=torch.int32)])
    assert metadata["layers.1.mamba"].block_ids == (5, 2)
    assert metadata["layers.1.mamba"] is metadata["layers.2.mamba"]
    assert metadata["layers.1.mamba"].batch is batch
