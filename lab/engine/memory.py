"""Choose the size of the pool, and the longest sequence that it can hold."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch

from ...connector.config import EngineConfig
from ...connector.kv_cache_specs import KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs
from ...runner_mixin.kv_cache.cache_config import (
    get_kv_cache_config,
    get_max_concurrency_for_kv_cache_config,
    unify_kv_cache_configs,
)
from ...runner_mixin.kv_cache.grouping import is_kv_cache_page_size_uniform
from ...runner_mixin.kv_cache.memory_check import (
    check_enough_kv_cache_memory,
    estimate_max_model_len,
    max_memory_usage_bytes,
)
from ...runner_mixin.kv_caches import get_kv_cache_spec, resolve_kv_cache_dtype
from ...runner_mixin.memory import MemorySnapshot, request_memory

logger = logging.getLogger(__name__)

#: Tokens of the shortest useful sequence: a prompt and an answer of one token each.
_SHORTEST_SEQUENCE = 2


def plan_pool(
    config: EngineConfig, device: torch.device, *, may_shorten: bool
) -> tuple[EngineConfig, KVCacheConfig]:
    """Plan the pool: the number of blocks that the user set, or else as many as fit into the node's share of
    the memory.

    Args:
        may_shorten: Lower `max_model_len` to what the pool holds. If False, the user has set it, and it must
            fit.

    Returns:
        The configuration with its final `max_model_len`, and the pool.

    Raises:
        ValueError: the share of the memory is not free, or does not hold one sequence of maximum length; the
            message says how long a sequence it would hold.
    """
    specs = get_kv_cache_spec(config, resolve_kv_cache_dtype(config))
    if not _can_share_blocks(specs):
        logger.warning(
            "the layers' attention windows and page sizes differ, so their blocks cannot be shared; "
            "all layers keep the whole sequence"
        )
        config = replace(config, scheduler=replace(config.scheduler, enable_hybrid_kv_cache_manager=False))
    if config.cache.num_blocks_override:
        available = config.cache.num_blocks_override * sum(spec.page_size_bytes for spec in specs.values())
    else:
        available = request_memory(MemorySnapshot.take(device), config.cache)
    if may_shorten:
        longest = max(_SHORTEST_SEQUENCE, estimate_max_model_len(config, specs, available))
        config = replace(config, model=replace(config.model, max_model_len=longest))
    check_enough_kv_cache_memory(config, specs, available)
    # `unify_kv_cache_configs` can unify the plans of several ranks. Here all ranks have the same plan.
    (pool,) = unify_kv_cache_configs([get_kv_cache_config(config, specs, available)])
    logger.info(
        "%d blocks of %d tokens hold %.1f requests of %d tokens (%.1f MiB each) at once",
        pool.num_blocks - 1,
        config.cache.block_size,
        get_max_concurrency_for_kv_cache_config(config, pool),
        config.model.max_model_len,
        max_memory_usage_bytes(config, specs.values()) / 2**20,
    )
    return config, pool


def _can_share_blocks(specs: Mapping[str, KVCacheSpec]) -> bool:
    """Say whether all layers can use one block table, or blocks of one table have the right size for every
    layer.
    """
    return UniformTypeKVCacheSpecs.is_uniform_type(specs.values()) or is_kv_cache_page_size_uniform(specs)
