"""Which layers share a block table, and what a block of all groups' pool costs."""

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
"""Layer name → the layer's spec, in the order in which the layers run."""


# -- what kind of model it is ------------------------------------------------------------------------


def is_kv_cache_type_attention_free(kv_cache_spec: LayerSpecs) -> bool:
    """Whether no layer keeps anything: there is none, or all belong to an encoder."""
    return not _layers_with_cache(kv_cache_spec)


def is_kv_cache_type_uniform(kv_cache_spec: LayerSpecs) -> bool:
    """Whether all layers can be one group with one spec. True when there are none."""
    if not kv_cache_spec:
        return True
    try:
        _merge(list(kv_cache_spec.values()))
    except ValueError:
        return False
    return True


def is_kv_cache_page_size_uniform(kv_cache_spec: LayerSpecs) -> bool:
    """Whether there are layers, and a page of each has the same number of bytes."""
    return len({spec.page_size_bytes for spec in kv_cache_spec.values()}) == 1


def get_uniform_page_size(kv_cache_spec: LayerSpecs) -> int:
    """Bytes of a page of every layer.

    Raises:
        ValueError: there are no layers, or their pages differ.
    """
    sizes = {spec.page_size_bytes for spec in kv_cache_spec.values()}
    if not is_kv_cache_page_size_uniform(kv_cache_spec):
        raise ConfigurationError(
            f"layers that share the pool need one page size in bytes, got {sorted(sizes)}",
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
        ValueError: a list is empty, or its layers' specs cannot be one.
    """
    return tuple(
        KVCacheGroupSpec(tuple(names), _merge([kv_cache_spec[name] for name in names]))
        for names in grouped_layer_names
    )


def get_kv_cache_groups(config: EngineConfig, kv_cache_spec: LayerSpecs) -> tuple[KVCacheGroupSpec, ...]:
    """Divide a model's layers into groups; encoder layers are in none.

    One spec for all: one group. One way of looking back with different pages: one group, of a composite spec.
    Several with equal pages: groups of (nearly) equal layer count, so that the i-th layers of all groups can share
    a piece of the pool.

    Raises:
        ValueError: layers look back in several ways and their pages differ in size, or the hybrid manager is off
            and they cannot all be treated as full attention.
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
    """Treat windowed and chunked layers as full attention, which keeps more than they need, in one group.

    Raises:
        ValueError: that does not make all layers one kind: another kind is among them.
    """
    if is_kv_cache_type_uniform(kv_cache_spec):
        return dict(kv_cache_spec)
    unified = {name: _as_full_attention(spec) for name, spec in kv_cache_spec.items()}
    if not UniformTypeKVCacheSpecs.is_uniform_type(unified.values()):
        kinds = sorted({type(spec).__name__ for spec in kv_cache_spec.values()})
        raise ConfigurationError(
            f"layers of kinds {', '.join(kinds)} cannot all be treated as full attention;"
            " enable_hybrid_kv_cache_manager is off",
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
        raise ValueError("a group needs a layer")
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
    """Layers of one spec a group, and no group more than a few layers smaller than the largest.

    A group's missing layers are padding: their share of every block is never used. The smallest kind sets the
    size, as models repeat a pattern (five windowed, one full). Where the kinds are almost equally many, the largest
    does: a few padded layers cost less than twice the block tables.
    """
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name, spec in kv_cache_spec.items():
        by_spec.setdefault(spec, []).append(name)
    counts = [len(names) for names in by_spec.values()]
    group_size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    grouped: list[list[str]] = []
    for names in by_spec.values():
        num_groups = -(-len(names) // group_size)
        # Interleaved, so that each part of the model has layers of every group.
        grouped += [names[i::num_groups] for i in range(num_groups)]
    return grouped


# -- what blocks cost --------------------------------------------------------------------------------


def padding_share(groups: Sequence[KVCacheGroupSpec]) -> float:
    """Share of the pool that belongs to no layer, because groups have different layer counts; 0 to 1."""
    slots = len(groups) * max((len(group.layer_names) for group in groups), default=0)
    layers = sum(len(group.layer_names) for group in groups)
    return 1.0 - layers / slots if slots else 0.0


def pool_page_sizes(groups: Sequence[KVCacheGroupSpec]) -> list[int]:
    """Bytes of one block in each of the pool's tensors, the i-th being that of the i-th layer of each group."""
    if not groups:
        return []
    largest = max(groups, key=lambda group: len(group.layer_names))
    spec = largest.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return [spec.kv_cache_specs[name].page_size_bytes for name in largest.layer_names]
    return [spec.page_size_bytes] * len(largest.layer_names)


def num_blocks_per_request(config: EngineConfig, groups: Sequence[KVCacheGroupSpec]) -> int:
    """Most blocks that one request of `config.model.max_model_len` tokens holds at once."""
    return sum(
        -(-group.kv_cache_spec.max_memory_usage_bytes(config) // group.kv_cache_spec.page_size_bytes)
        for group in groups
    )


def get_num_blocks(config: EngineConfig, num_layers: int, available_memory: int, page_size: int) -> int:
    """How many blocks the pool has: `config.cache.num_blocks_override`, or else as many as fit; never negative.

    Args:
        num_layers: Tensors of the pool.
        available_memory: Bytes for all of them.
        page_size: Bytes of a block in one of them.
    """
    num_blocks = max(0, available_memory // page_size // num_layers)
    override = config.cache.num_blocks_override
    if override:
        logger.info("the pool has %d blocks by num_blocks_override; %d would fit", override, num_blocks)
        return override
    return num_blocks
