"""Check that there is memory for one request of maximum length, and find the longest that fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ...connector.config import EngineConfig
from ...connector.kv_cache_specs import KVCacheSpec
from ...transports.errors import ConfigurationError
from .grouping import LayerSpecs, get_kv_cache_groups, num_blocks_per_request, pool_page_sizes

_GIB = 2**30


def max_memory_usage_bytes(config: EngineConfig, kv_cache_specs: Iterable[KVCacheSpec]) -> int:
    """Return how many bytes one request of maximum length occupies in all these layers together."""
    return sum(spec.max_memory_usage_bytes(config) for spec in kv_cache_specs)


def estimate_max_model_len(config: EngineConfig, kv_cache_spec: LayerSpecs, available_memory: int) -> int:
    """Return the longest request that a pool holds, up to `config.model.max_model_len` tokens; 0 if none
    fits.

    Uses a binary search over copies of the configuration.

    Args:
        available_memory: Bytes for the pool; ignored if `num_blocks_override` sets its size.
    """
    fits, too_long = 0, config.model.max_model_len + 1
    while too_long - fits > 1:
        length = (fits + too_long) // 2
        if _pool_holds(_with_max_model_len(config, length), kv_cache_spec, available_memory):
            fits = length
        else:
            too_long = length
    return fits


def check_enough_kv_cache_memory(
    config: EngineConfig, kv_cache_spec: LayerSpecs, available_memory: int
) -> None:
    """Check that a pool holds one request of `config.model.max_model_len` tokens, and the null block.

    Memory that padding layers waste counts as needed. A model that keeps no cache needs no memory.

    Args:
        available_memory: Bytes for the pool; ignored if `num_blocks_override` sets its size.

    Raises:
        ValueError: it does not. The message names what is needed, what is available, and the longest request
            that fits.
    """
    if _pool_holds(config, kv_cache_spec, available_memory):
        return
    groups = get_kv_cache_groups(config, kv_cache_spec)
    block_bytes = sum(pool_page_sizes(groups))
    needed_blocks = num_blocks_per_request(config, groups) + 1
    length = config.model.max_model_len
    longest = estimate_max_model_len(config, kv_cache_spec, available_memory)
    override = config.cache.num_blocks_override
    needs = f"{_gib(needed_blocks * block_bytes)} of KV cache ({needed_blocks} blocks)"
    if override:
        has, remedy = (
            f"num_blocks_override={override} makes {_gib(override * block_bytes)}",
            "num_blocks_override",
        )
    else:
        has, remedy = f"{_gib(available_memory)} are available", "memory_utilization"
    raise ConfigurationError(
        f"the KV cache is too small: one request of max_model_len={length} tokens needs {needs}, and {has}; the longest "
        f"that fits has {longest} tokens; raise {remedy} or lower max_model_len",
        key="max_model_len",
        value=length,
    )


def _pool_holds(config: EngineConfig, kv_cache_spec: LayerSpecs, available_memory: int) -> bool:
    groups = get_kv_cache_groups(config, kv_cache_spec)
    if not groups:
        return True
    num_blocks = config.cache.num_blocks_override or available_memory // sum(pool_page_sizes(groups))
    return num_blocks_per_request(config, groups) + 1 <= num_blocks


def _gib(num_bytes: int) -> str:
    gib = max(0, num_bytes) / _GIB
    return f"{gib:.2f} GiB" if gib == 0 or gib >= 0.1 else f"{gib:.2g} GiB"


def _with_max_model_len(config: EngineConfig, max_model_len: int) -> EngineConfig:
    return replace(config, model=replace(config.model, max_model_len=max_model_len))
