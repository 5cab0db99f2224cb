"""How large the pool is, and how long a sequence it can hold."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvferry.connector.config import EngineConfig
from kvferry.connector.kv_cache_specs import KVCacheConfig
from kvferry.runner_mixin.kv_cache.cache_config import get_kv_cache_config
from kvferry.runner_mixin.kv_cache.memory_check import (
    check_enough_kv_cache_memory,
    estimate_max_model_len,
)
from kvferry.runner_mixin.kv_caches import get_kv_cache_spec, resolve_kv_cache_dtype
from kvferry.runner_mixin.memory import MemorySnapshot, request_memory

__all__ = ["plan_pool"]

#: A prompt and an answer of one token each.
_SHORTEST_SEQUENCE = 2


def plan_pool(
    config: EngineConfig, device: torch.device, *, may_shorten: bool
) -> tuple[EngineConfig, KVCacheConfig]:
    """Lay out the pool: as many blocks as were asked for, or as the node's share of the memory holds.

    Args:
        may_shorten: Lower `max_model_len` to what the pool holds; otherwise it is the user's, and must fit.

    Returns:
        The configuration, with `max_model_len` settled, and the pool.

    Raises:
        ValueError: the share is not free, or does not hold one sequence of maximum length; the message says how
            long a sequence it would hold.
    """
    specs = get_kv_cache_spec(config, resolve_kv_cache_dtype(config))
    if config.cache.num_blocks_override:
        available = config.cache.num_blocks_override * sum(spec.page_size_bytes for spec in specs.values())
    else:
        available = request_memory(MemorySnapshot.take(device), config.cache)
    if may_shorten:
        longest = max(_SHORTEST_SEQUENCE, estimate_max_model_len(config, specs, available))
        config = replace(config, model=replace(config.model, max_model_len=longest))
    check_enough_kv_cache_memory(config, specs, available)
    return config, get_kv_cache_config(config, specs, available)
