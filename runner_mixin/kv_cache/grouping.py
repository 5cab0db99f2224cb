"""Divide layers into groups that share a block table, and compute what a block of the pool costs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from ...connector.config import EngineConfig
from ...connector.kv_cache_specs import (
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from ...transports.errors import ConfigurationError

logger = logging.getLogger(__name__)

LayerSpecs = Mapping[str, KVCacheSpec]
"""Maps layer names to specs, in the order in which the layers run."""


# -- what kind of model it is ------------------------------------------------------------------------


def is_kv_cache_type_attention_free(kv_cache_spec: LayerSpecs) -> bool:
    """Return whether no layer keeps anything: there are no layers, or all belong to an encoder."""
    return not _layers_with_cache(kv_cache_spec)


def is_kv_cache_type_uniform(kv_cache_spec: LayerSpecs) -> bool:
    """Return whether all layers can be one group with one spec. True if there are none."""
    if not kv_cache_spec:
        return True
    try:
        _merge(list(kv_cache_spec.values()))
    except ValueError:
        return False
    return True


def is_kv_cache_page_size_uniform(kv_cache_spec: LayerSpecs) -> bool:
    """Return whether there are layers, and all have the same page size in bytes."""
    return len({spec.page_size_bytes for spec in kv_cache_spec.values()}) == 1


def get_uniform_page_size(kv_cache_spec: LayerSpecs) -> int:
    """Return the page size of all layers, in bytes.

    Raises:
        ValueError: there are no layers, or their page sizes differ.
    """
    sizes = {spec.page_size_bytes for spec in kv_cache_spec.values()}
    if not is_kv_cache_page_size_uniform(kv_cache_spec):
        raise ConfigurationError(
            f"layers that share the pool need the same page size in bytes, got {sorted(sizes)}",
            key="kv_cache_spec",
            value=sizes,
        )
    return sizes.pop()


# -- groups ------------------------------------------------------------------------------------------


def create_kv_cache_group_specs(
    kv_cache_spec: LayerSpecs, grouped_layer_names: Sequence[Sequence[str]]
) -> tuple[KVCacheGroupSpec, ...]:
    """Make a group of each list of layers, with the spec that they have in common.

    Raises:
        ValueError: a list is empty, or its layers' specs cannot be merged.
    """
    return tuple(
        KVCacheGroupSpec(tuple(names), _merge([kv_cache_spec[name] for name in names]))
        for names in grouped_layer_names
    )


def get_kv_cache_groups(config: EngineConfig, kv_cache_spec: LayerSpecs) -> tuple[KVCacheGroupSpec, ...]:
    """Divide a model's layers into groups; encoder layers are in no group.

    - If all layers have the same spec, there is one group.
    - If all look back alike but their page sizes differ, there is one group with a composite spec.
    - If they look back in several ways and all page sizes are equal, there are several groups with nearly the
      same number of layers, so that the i-th layers of all groups can share a piece of the pool.

    Raises:
        ValueError: layers look back in several ways and their page sizes differ, or the hybrid manager is off
            and the layers cannot all be treated as full attention.
    """
    if is_kv_cache_type_attention_free(kv_cache_spec):
        return ()
    specs = _layers_with_cache(kv_cache_spec)
    if not config.scheduler.enable_hybrid_kv_cache_manager:
        specs = unify_hybrid_kv_cache_specs(specs)
    if is_kv_cache_type_uniform(specs):
        return create_kv_cache_group_specs(specs, [list(specs)])
    if UniformTypeKVCacheSpecs.is_uniform_type(specs.values()):
        block_size = next(iter(specs.values())).block_size
        return (KVCacheGroupSpec(tuple(specs), UniformTypeKVCacheSpecs(block_size, specs)),)
    get_uniform_page_size(specs)
    return create_kv_cache_group_specs(specs, _equal_groups(specs))


def unify_hybrid_kv_cache_specs(kv_cache_spec: LayerSpecs) -> dict[str, KVCacheSpec]:
    """Treat layers with windows and chunks as full attention, in one group. It keeps more than they need.

    Raises:
        ValueError: the layers are still of several kinds.
    """
    if is_kv_cache_type_uniform(kv_cache_spec):
        return dict(kv_cache_spec)
    unified = {name: _as_full_attention(spec) for name, spec in kv_cache_spec.items()}
    if not UniformTypeKVCacheSpecs.is_uniform_type(unified.values()):
        kinds = sorted({type(spec).__name__ for spec in kv_cache_spec.values()})
        raise ConfigurationError(
            f"cannot put all layers into one group: {', '.join(kinds)} cannot all be treated as full attention; set "
            "enable_hybrid_kv_cache_manager to True",
            key="enable_hybrid_kv_cache_manager",
            value=False,
        )
    return unified


def _layers_with_cache(kv_cache_spec: LayerSpecs) -> dict[str, KVCacheSpec]:
    return {
        name: spec for name, spec in kv_cache_spec.items() if not isinstance(spec, EncoderOnlyAttentionSpec)
    }


def _merge(specs: Sequence[KVCacheSpec]) -> KVCacheSpec:
    if not specs:
        raise ValueError("cannot make a KV cache group without layers")
    return type(specs[0]).merge(specs)


def _as_full_attention(spec: KVCacheSpec) -> KVCacheSpec:
    if not isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return spec
    return FullAttentionSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
        use_mla=spec.use_mla,
        sliding_window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None,
        attention_chunk_size=spec.attention_chunk_size
        if isinstance(spec, ChunkedLocalAttentionSpec)
        else None,
    )


def _equal_groups(kv_cache_spec: LayerSpecs) -> list[list[str]]:
    """Divide layers into groups by spec, all of nearly the same number of layers.

    A group's missing layers are padding: their share of every block is never used. The spec with the fewest
    layers sets the group size, because models repeat a pattern, such as five layers with a window and one
    without. If all specs have almost the same number of layers, the largest number sets it: a few padding
    layers cost less than twice as many block tables.
    """
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name, spec in kv_cache_spec.items():
        by_spec.setdefault(spec, []).append(name)
    counts = [len(names) for names in by_spec.values()]
    group_size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    grouped: list[list[str]] = []
    for names in by_spec.values():
        num_groups = -(-len(names) // group_size)
        # Interleave the layers, so that every part of the model has layers of every group.
        grouped += [names[i::num_groups] for i in range(num_groups)]
    return grouped


# -- what blocks cost --------------------------------------------------------------------------------


def padding_share(groups: Sequence[KVCacheGroupSpec]) -> float:
    """Return the share of the pool that is padding because groups have different numbers of layers; 0
    to 1.
    """
    slots = len(groups) * max((len(group.layer_names) for group in groups), default=0)
    layers = sum(len(group.layer_names) for group in groups)
    return 1.0 - layers / slots if slots else 0.0


def pool_page_sizes(groups: Sequence[KVCacheGroupSpec]) -> list[int]:
    """Return the bytes per block of each of the pool's tensors.

    The i-th tensor is that of each group's i-th layer.
    """
    if not groups:
        return []
    largest = max(groups, key=lambda group: len(group.layer_names))
    spec = largest.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return [spec.kv_cache_specs[name].page_size_bytes for name in largest.layer_names]
    return [spec.page_size_bytes] * len(largest.layer_names)


def num_blocks_per_request(config: EngineConfig, groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return the most blocks that one request of `config.model.max_model_len` tokens holds at once."""
    return sum(
        -(-group.kv_cache_spec.max_memory_usage_bytes(config) // group.kv_cache_spec.page_size_bytes)
        for group in groups
    )


def get_num_blocks(config: EngineConfig, num_layers: int, available_memory: int, page_size: int) -> int:
    """Return the number of blocks: `config.cache.num_blocks_override`, or as many as fit if it is not set.

    Args:
        num_layers: Number of the pool's tensors.
        available_memory: Bytes for all tensors together.
        page_size: Bytes per block in one tensor.
    """
    num_blocks = max(0, available_memory // page_size // num_layers)
    override = config.cache.num_blocks_override
    if override:
        logger.debug(
            "the pool has %d blocks, as num_blocks_override says; %d would fit", override, num_blocks
        )
        return override
    return num_blocks
