"""How large the pool is, and how long a sequence it can hold."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvferry.connector.config import EngineConfig
from kvferry.connector.kv_cache_specs import KVCacheConfig
from kvferry.runner_mixin.kv_cache.cache_config import get_kv_cache_config
from kvferry.runner_mixin.kv_caches import get_kv_cache_spec, resolve_kv_cache_dtype
from kvferry.runner_mixin.memory import MemorySnapshot, request_memory
from kvferry.transports.errors import ConfigurationError

__all__ = ["fit_max_model_len", "plan_pool"]


def plan_pool(config: EngineConfig, device: torch.device) -> KVCacheConfig:
    """Lay out the pool: as many blocks as were asked for, or as the node's share of the memory holds.

    Raises:
        ValueError: the share is not free.
    """
    specs = get_kv_cache_spec(config, resolve_kv_cache_dtype(config))
    if config.cache.num_blocks_override:
        available = config.cache.num_blocks_override * sum(spec.page_size_bytes for spec in specs.values())
    else:
        available = request_memory(MemorySnapshot.take(device), config.cache)
    return get_kv_cache_config(config, specs, available)


def fit_max_model_len(config: EngineConfig, pool: KVCacheConfig, *, may_shorten: bool) -> EngineConfig:
    """Make sure that one request of maximum length fits into the pool.

    Args:
        may_shorten: Lower `max_model_len` to what fits; otherwise it is the user's, and must fit.

    Raises:
        ConfigurationError: it does not fit; the message says how long a sequence would.
    """
    if _fits(config, pool):
        return config
    wanted = config.model.max_model_len
    longest = _longest_that_fits(config, pool)
    if not may_shorten or longest < 2:
        raise ConfigurationError(
            f"a pool of {pool.num_blocks} blocks does not hold one sequence of max_model_len={wanted} tokens, "
            f"but one of {longest}: give it more blocks or memory, or lower max_model_len",
            key="max_model_len",
            value=wanted,
        )
    return _with_max_model_len(config, longest)


def _fits(config: EngineConfig, pool: KVCacheConfig) -> bool:
    specs = [group.kv_cache_spec for group in pool.kv_cache_groups]
    num_blocks = sum(-(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes) for spec in specs)
    return num_blocks < pool.num_blocks  # the null block holds nothing


def _with_max_model_len(config: EngineConfig, max_model_len: int) -> EngineConfig:
    return replace(config, model=replace(config.model, max_model_len=max_model_len))


def _longest_that_fits(config: EngineConfig, pool: KVCacheConfig) -> int:
    fits, too_long = 0, config.model.max_model_len
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if _fits(_with_max_model_len(config, middle), pool):
            fits = middle
        else:
            too_long = middle
    return fits
