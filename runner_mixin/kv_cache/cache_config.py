"""Plan a rank's pool from its layers and memory, and make the pools of all ranks alike."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from ...connector.config import EngineConfig
from ...connector.kv_cache_specs import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
)
from ...transports.errors import ConfigurationError
from .grouping import (
    LayerSpecs,
    get_kv_cache_groups,
    get_num_blocks,
    num_blocks_per_request,
    padding_share,
    pool_page_sizes,
)

logger = logging.getLogger(__name__)


def get_kv_cache_config(
    config: EngineConfig, kv_cache_spec: LayerSpecs, available_memory: int
) -> KVCacheConfig:
    """Plan the pool: groups, tensors, and as many blocks as the memory holds.

    A model that keeps no cache has one block, the null block, and no tensor. One group has one tensor per
    layer. Several groups share tensors: the i-th tensor is used by the i-th layer of each group.

    Args:
        kv_cache_spec: Layer name → its spec.
        available_memory: Bytes for the pool.

    Raises:
        ValueError: the layers cannot share a pool (see `get_kv_cache_groups`), or the memory is too small for
            the null block and one more.
    """
    groups = get_kv_cache_groups(config, kv_cache_spec)
    if not groups:
        return KVCacheConfig(num_blocks=1, kv_cache_tensors=(), kv_cache_groups=())
    pages = pool_page_sizes(groups)
    # The pages of a composite group differ in size; a block costs the sum of them.
    num_blocks = get_num_blocks(config, 1, available_memory, sum(pages))
    if num_blocks < 2:
        raise ConfigurationError(
            f"not enough memory for a KV cache: {available_memory} bytes hold {num_blocks} blocks of {sum(pages)} bytes, "
            "and a pool needs at least 2",
            key="available_memory",
            value=available_memory,
        )
    _report_padding(groups)
    tensors = tuple(
        KVCacheTensor(size=num_blocks * page, shared_by=_layers_at(groups, i)) for i, page in enumerate(pages)
    )
    return KVCacheConfig(num_blocks, tensors, groups)


def unify_kv_cache_configs(kv_cache_configs: Sequence[KVCacheConfig]) -> list[KVCacheConfig]:
    """Make the pools of all ranks fit one scheduler: groups in the first rank's order, and the smallest block
    count.

    Ranks may have different layers, as in a pipeline, but they have the same block tables.

    Returns:
        One configuration per rank, in order. The given ones are unchanged.

    Raises:
        ValueError: there is no rank, or the groups' specs differ between ranks.
    """
    if not kv_cache_configs:
        raise ValueError("cannot unify KV cache configurations: there are none; pass one per rank")
    num_blocks = min(config.num_blocks for config in kv_cache_configs)
    first = kv_cache_configs[0].kv_cache_groups
    return [
        replace(
            config,
            num_blocks=num_blocks,
            kv_cache_tensors=tuple(
                replace(tensor, size=tensor.size // config.num_blocks * num_blocks)
                for tensor in config.kv_cache_tensors
            ),
            kv_cache_groups=_in_order_of(first, config.kv_cache_groups),
        )
        for config in kv_cache_configs
    ]


def get_max_concurrency_for_kv_cache_config(config: EngineConfig, kv_cache_config: KVCacheConfig) -> float:
    """Return how many requests of maximum length the pool holds at once; infinite for a model that keeps no
    cache.

    The null block does not count.
    """
    per_request = num_blocks_per_request(config, kv_cache_config.kv_cache_groups)
    return (kv_cache_config.num_blocks - 1) / per_request if per_request else math.inf


def _layers_at(groups: Sequence[KVCacheGroupSpec], index: int) -> tuple[str, ...]:
    return tuple(group.layer_names[index] for group in groups if index < len(group.layer_names))


def _report_padding(groups: Sequence[KVCacheGroupSpec]) -> None:
    if not (waste := padding_share(groups)):
        return
    largest = max(len(group.layer_names) for group in groups)
    missing = sum(largest - len(group.layer_names) for group in groups)
    logger.warning(
        "%d groups of up to %d layers have different sizes: %d padding layers waste %.1f %% of the KV cache memory",
        len(groups),
        largest,
        missing,
        100 * waste,
    )


def _share_tables(spec: KVCacheSpec, other: KVCacheSpec) -> bool:
    if isinstance(spec, UniformTypeKVCacheSpecs) and isinstance(other, UniformTypeKVCacheSpecs):
        members = (*spec.kv_cache_specs.values(), *other.kv_cache_specs.values())
        return UniformTypeKVCacheSpecs.is_uniform_type(members)
    return spec == other


def _in_order_of(
    wanted: Sequence[KVCacheGroupSpec], groups: Sequence[KVCacheGroupSpec]
) -> tuple[KVCacheGroupSpec, ...]:
    """Return the groups, reordered so that their specs are in the order of `wanted`."""
    rest = list(groups)
    ordered: list[KVCacheGroupSpec] = []
    for group in wanted:
        match = next(
            (other for other in rest if _share_tables(group.kv_cache_spec, other.kv_cache_spec)), None
        )
        if match is None:
            break
        rest.remove(match)
        ordered.append(match)
    if rest or len(ordered) < len(wanted):
        raise ConfigurationError(
            "ranks have different KV cache groups:"
            f" {[g.kv_cache_spec for g in wanted]} and {[g.kv_cache_spec for g in groups]}",
            key="kv_cache_groups",
            value=tuple(groups),
        )
    return tuple(ordered)
