from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvferry.connector.config import EngineConfig
from kvferry.connector.kv_cache_specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvferry.runner_mixin.kv_cache import (
    get_kv_cache_config,
    get_max_concurrency_for_kv_cache_config,
    unify_kv_cache_configs,
)
from kvferry.transports.errors import ConfigurationError

Windowed = Callable[[int], SlidingWindowSpec]
MakeConfig = Callable[..., EngineConfig]


def layers(*specs: KVCacheSpec) -> dict[str, KVCacheSpec]:
    return {f"layers.{i}": spec for i, spec in enumerate(specs)}


# -- one rank ----------------------------------------------------------------------------------------


def test_a_model_without_a_cache_has_only_the_null_block(make_config: MakeConfig) -> None:
    assert get_kv_cache_config(make_config(), {}, 2**30) == KVCacheConfig(1, (), ())


def test_one_kind_has_one_tensor_per_layer(full: FullAttentionSpec, make_config: MakeConfig) -> None:
    page = full.page_size_bytes
    config = get_kv_cache_config(make_config(), layers(full, full), 10 * page + 1)
    assert config.num_blocks == 5
    assert config.kv_cache_tensors == (
        KVCacheTensor(5 * page, ("layers.0",)),
        KVCacheTensor(5 * page, ("layers.1",)),
    )
    assert config.kv_cache_groups == (KVCacheGroupSpec(("layers.0", "layers.1"), full),)


def test_different_pages_of_one_kind_have_tensors_of_their_own_size(
    full: FullAttentionSpec, make_config: MakeConfig
) -> None:
    page = full.page_size_bytes
    config = get_kv_cache_config(make_config(), layers(full, replace(full, num_kv_heads=4)), 9 * page)
    assert config.num_blocks == 3
    assert [tensor.size for tensor in config.kv_cache_tensors] == [3 * page, 6 * page]


def test_several_kinds_share_as_many_tensors_as_a_group_has_layers(
    full: FullAttentionSpec, windowed: Windowed, make_config: MakeConfig
) -> None:
    page = full.page_size_bytes
    narrow = windowed(8)
    config = get_kv_cache_config(make_config(), layers(narrow, narrow, full, narrow, narrow, full), 10 * page)
    assert config.num_blocks == 5
    assert config.kv_cache_tensors == (
        KVCacheTensor(5 * page, ("layers.0", "layers.1", "layers.2")),
        KVCacheTensor(5 * page, ("layers.3", "layers.4", "layers.5")),
    )


def test_padding_is_reported_with_the_share_that_it_wastes(
    full: FullAttentionSpec, windowed: Windowed, make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config = get_kv_cache_config(make_config(), layers(*[full] * 2, *[windowed(8)] * 3), 2**20)
    assert "1 padding layers waste 16.7 %" in caplog.text
    assert config.kv_cache_tensors[1].shared_by == ("layers.1", "layers.4")
    assert {name for tensor in config.kv_cache_tensors for name in tensor.shared_by} == {
        f"layers.{i}" for i in range(5)
    }


def test_layers_that_cannot_share_a_pool_are_an_error(
    full: FullAttentionSpec, windowed: Windowed, make_config: MakeConfig
) -> None:
    with pytest.raises(ValueError, match="the same page size"):
        get_kv_cache_config(make_config(), layers(full, replace(windowed(8), head_size=4)), 2**30)
    state = MambaSpec(4, shapes=((1,),), dtypes=(torch.float32,), page_size_padded=full.page_size_bytes)
    with pytest.raises(ValueError, match="set enable_hybrid_kv_cache_manager to True"):
        get_kv_cache_config(make_config(hybrid=False), layers(windowed(8), state), 2**30)


@pytest.mark.parametrize("num_pages", [-3, 0, 1])
def test_too_little_memory_for_a_pool_is_an_error(
    full: FullAttentionSpec, make_config: MakeConfig, num_pages: int
) -> None:
    with pytest.raises(ConfigurationError, match="a pool needs at least 2"):
        get_kv_cache_config(make_config(), layers(full), num_pages * full.page_size_bytes)


# -- several ranks -----------------------------------------------------------------------------------


def test_all_ranks_get_the_smallest_number_of_blocks(
    full: FullAttentionSpec, make_config: MakeConfig
) -> None:
    page = full.page_size_bytes
    big, small = (get_kv_cache_config(make_config(), layers(full), n * page) for n in (9, 6))
    unified = unify_kv_cache_configs([big, small])
    assert [config.num_blocks for config in unified] == [6, 6]
    assert [config.kv_cache_tensors[0].size for config in unified] == [6 * page, 6 * page]
    assert big.num_blocks == 9


def test_groups_come_in_the_first_ranks_order(full: FullAttentionSpec, windowed: Windowed) -> None:
    one, other = KVCacheGroupSpec(("a",), full), KVCacheGroupSpec(("b",), windowed(8))
    later = KVCacheGroupSpec(("d",), windowed(8)), KVCacheGroupSpec(("c",), full)
    unified = unify_kv_cache_configs([KVCacheConfig(4, (), (one, other)), KVCacheConfig(4, (), later)])
    assert unified[1].kv_cache_groups == (later[1], later[0])


def test_pipeline_stages_may_have_composite_groups_of_different_layers(full: FullAttentionSpec) -> None:
    wide = replace(full, num_kv_heads=4)
    configs = [
        KVCacheConfig(4, (), (KVCacheGroupSpec(tuple(members), UniformTypeKVCacheSpecs(4, members)),))
        for members in ({"a": full, "b": wide}, {"c": wide, "d": full})
    ]
    assert unify_kv_cache_configs(configs) == configs


def test_ranks_with_other_groups_are_an_error(full: FullAttentionSpec, windowed: Windowed) -> None:
    one, other = KVCacheGroupSpec(("a",), full), KVCacheGroupSpec(("b",), windowed(8))
    for groups in ((other,), (one, other), ()):
        with pytest.raises(ConfigurationError, match="ranks have different KV cache groups"):
            unify_kv_cache_configs([KVCacheConfig(4, (), (one,)), KVCacheConfig(4, (), groups)])
    with pytest.raises(ValueError, match="there are none; pass one per rank"):
        unify_kv_cache_configs([])


# -- concurrency -------------------------------------------------------------------------------------


def test_concurrency_is_in_requests_of_maximum_length(
    full: FullAttentionSpec, make_config: MakeConfig
) -> None:
    config = make_config(64, num_blocks_override=41)
    pool = get_kv_cache_config(config, layers(full, full), 0)
    assert get_max_concurrency_for_kv_cache_config(config, pool) == 2.5


def test_concurrency_counts_every_groups_blocks(
    full: FullAttentionSpec, windowed: Windowed, make_config: MakeConfig
) -> None:
    config = make_config(64, chunk=4, num_blocks_override=37)
    pool = get_kv_cache_config(config, layers(full, windowed(1)), 0)
    assert get_max_concurrency_for_kv_cache_config(config, pool) == 36 / (16 + 2)


def test_a_model_without_a_cache_has_unlimited_concurrency(make_config: MakeConfig) -> None:
    pool = get_kv_cache_config(make_config(), {}, 0)
    assert get_max_concurrency_for_kv_cache_config(make_config(), pool) == math.inf
