"""Describes a worker half's caches: where their bytes lie, and what must be equal on a peer."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from ...transports.errors import ConfigurationError
from ...transports.regions import MemoryKind, Pool, Segment
from ..kv_cache_specs import AttentionSpec, KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs
from ..planning.compatibility import DESCRIPTION_VERSION, digest
from ..planning.layout import KVLayout, LayerLayout, draft_layer_name, layer_layout_of_view
from ..planning.slots import WHOLE, Shard, SlotArray, head_array_of_view, slot_array_of_view

if TYPE_CHECKING:
    import torch

    from ..config import EngineConfig

NO_FIELDS: Mapping[str, str] = MappingProxyType({})

#: Of the digest that names a draft model.
_DRAFT_DIGITS = 16
#: PyTorch's device type → kind of memory.
_MEMORY_KINDS: Mapping[str, MemoryKind] = MappingProxyType({"cpu": "host", "cuda": "cuda"})


@dataclass(frozen=True)
class Registration:
    """The caches of one process.

    Attributes:
        pool: The memory that holds them.
        layout: Where each layer's pages lie in it.
        fields: What must be equal on both sides of a handoff, or should be; see `compatibility`.
    """

    pool: Pool
    layout: KVLayout
    fields: Mapping[str, str | int]


def describe_caches(
    config: EngineConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    arenas: Sequence[Segment],
    host_fields: Mapping[str, str] = NO_FIELDS,
    *,
    draft_fields: Mapping[str, str] = NO_FIELDS,
    is_packed: bool = False,
) -> Registration:
    """Describe caches by where their tensors really are.

    Args:
        kv_caches: Layer → its cache in logical order; see `KVConnectorBase.register_kv_caches`.
        arenas: Memory that the transport allocated; a cache elsewhere is served as foreign memory.
        host_fields: What else must be equal on a peer and only the engine knows, e.g. how its kernels pack a
            page.
        draft_fields: The same for the layers of a draft model, which are handed over only between nodes where
            it is equal.
        is_packed: Where tokens are inside a head's share of a page, only those kernels know.

    Raises:
        ConfigurationError: there is no cache, one is on a device that nothing serves, or one does not fit
            `kv_cache_config` or the model's number of heads.
    """
    specs = _specs_by_layer(kv_cache_config)
    caches = _caches_of(specs, kv_caches)
    segments = _segments(caches.values(), arenas)
    pool = Pool(segments)
    drafts = kv_cache_config.draft_layers
    draft = digest({"draft": config.model.identity.draft, **draft_fields})[:_DRAFT_DIGITS]
    layers = tuple(
        replace(
            _layer_layout(name, cache, specs[name], kv_cache_config.num_blocks, pool),
            name=draft_layer_name(draft, name) if name in drafts else name,
            shard=_shard(specs[name][1], config, is_draft=name in drafts),
            slots=_slots(cache, specs[name][1], kv_cache_config.num_blocks, is_packed=is_packed),
        )
        for name, cache in caches.items()
    )
    layout = KVLayout(kv_cache_config.num_blocks, pool.num_bytes, layers)
    # Draft layers are no part of the fields: a peer need not have them, and their names say what must be
    # equal.
    used = [spec for name, (_, spec) in specs.items() if name not in drafts]
    targets = [cache for name, cache in caches.items() if name not in drafts]
    cache_dtypes = _joined(map(_dtype_name, targets))
    fields = _fields(config, kv_cache_config, used, config.model.num_layers or len(targets), cache_dtypes)
    return Registration(pool, layout, {**host_fields, **fields})


def layout_name(layout: KVLayout) -> str:
    """Return `"uniform"` if each block is one run of bytes over all layers of its group, otherwise
    `"per-layer"`.
    """
    for group_index in {layer.group_index for layer in layout.layers}:
        pages = {
            (layer.base_offset + offset, num_bytes)
            for layer in layout.layers
            if layer.group_index == group_index
            for offset, num_bytes in layer.fragments
        }
        first = min(offset for offset, _ in pages)
        last = max(offset + num_bytes for offset, num_bytes in pages)
        if last - first != sum(num_bytes for _, num_bytes in pages):
            return "per-layer"
    return "uniform"


# -- layers ------------------------------------------------------------------------------------------


def _caches_of(specs: Container[str], kv_caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Select the caches of the layers in `specs`; see `describe_caches` for what is refused."""
    caches = {name: cache for name, cache in kv_caches.items() if name in specs}
    if not caches:
        raise ConfigurationError(f"no registered cache belongs to a group; registered: {sorted(kv_caches)}")
    for name, cache in caches.items():
        if cache.device.type not in _MEMORY_KINDS:
            raise ConfigurationError(
                f"cache of {name} is on {cache.device}; only main memory and that of CUDA devices can be served",
                key="device",
                value=str(cache.device),
            )
    return caches


def _specs_by_layer(kv_cache_config: KVCacheConfig) -> dict[str, tuple[int, KVCacheSpec]]:
    """Layer → (index of its group, its own spec)."""
    found = {}
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        for name in group.layer_names:
            own = spec.kv_cache_specs.get(name, spec) if isinstance(spec, UniformTypeKVCacheSpecs) else spec
            found[name] = (index, own)
    return found


def _layer_layout(
    name: str, cache: torch.Tensor, place: tuple[int, KVCacheSpec], num_blocks: int, pool: Pool
) -> LayerLayout:
    group_index, spec = place
    kernel_blocks_per_block, rest = divmod(cache.shape[0], num_blocks)
    if rest or not kernel_blocks_per_block:
        raise ConfigurationError(
            f"cache of {name} has {cache.shape[0]} kernel blocks for {num_blocks} blocks"
        )
    page_shape = ",".join(str(size) for size in (kernel_blocks_per_block, *cache.shape[1:]))
    return layer_layout_of_view(
        name,
        group_index=group_index,
        page_format=f"{_dtype_name(cache)}[{page_shape}]",
        data_offset=_pool_offset(pool, cache.data_ptr()),
        shape=tuple(cache.shape),
        strides=cache.stride(),
        itemsize=cache.element_size(),
        block_size=spec.block_size,
        kernel_blocks_per_block=kernel_blocks_per_block,
    )


def _shard(spec: KVCacheSpec, config: EngineConfig, *, is_draft: bool = False) -> Shard:
    """Say which heads, or which part of a state, this rank keeps.

    If the model has fewer heads than ranks, several ranks keep the same head. The spec does not say so;
    `num_kv_heads` of the model does. If it is not set, each rank counts as having heads of its own, so it
    fits only the rank of the same number on a node with the same number of ranks.

    Raises:
        ConfigurationError: this rank's number of heads does not fit the model's number of heads.
    """
    if isinstance(spec, AttentionSpec) and spec.use_mla:
        return WHOLE
    rank, num_ranks = config.parallel.tensor_parallel_rank, config.parallel.tensor_parallel_size
    if not isinstance(spec, AttentionSpec):
        return Shard(rank, 1, num_ranks)
    num, total = spec.num_kv_heads, config.model.num_draft_kv_heads if is_draft else config.model.num_kv_heads
    total = total or num_ranks * num
    is_split, is_replicated = (
        num * num_ranks == total,
        num == 1 and total < num_ranks and not num_ranks % total,
    )
    if not is_split and not is_replicated:
        raise ConfigurationError(
            f"num_kv_heads={total} of the model are not {num} on each of {num_ranks} ranks",
            key="num_kv_heads",
            value=total,
        )
    return Shard(rank * total // num_ranks, num, total)


def _slots(cache: torch.Tensor, spec: KVCacheSpec, num_blocks: int, *, is_packed: bool) -> SlotArray | None:
    """Say where each token's vectors lie, or each head's share of a page; None if the cache does not have a
    known shape.
    """
    if not isinstance(spec, AttentionSpec):
        return None
    shape, strides = tuple(cache.shape), cache.stride()
    itemsize, element = cache.element_size(), _dtype_name(cache)
    num_slots = spec.block_size * num_blocks // shape[0]
    num_heads = 1 if spec.use_mla else spec.num_kv_heads
    if shape[1:-1] == (num_heads, num_slots):
        return head_array_of_view(shape, strides, itemsize=itemsize, element=element, is_packed=is_packed)
    if spec.use_mla and shape[1:] == (num_slots, spec.head_size):
        shape = (shape[0], 1, num_slots, 1, spec.head_size)
        strides = (strides[0], 0, strides[1], 0, strides[2])
    if is_packed or shape[1:] != (1 if spec.use_mla else 2, num_slots, num_heads, spec.head_size):
        return None
    return slot_array_of_view(shape, strides, itemsize=itemsize, element=element)


# -- memory ------------------------------------------------------------------------------------------


def _segments(caches: Iterable[torch.Tensor], arenas: Sequence[Segment]) -> list[Segment]:
    """List the memory that holds the caches, each piece once, in the order in which the caches use it."""
    segments: dict[Segment, None] = {}
    for cache in caches:
        storage = cache.untyped_storage()
        memory = Segment(storage.data_ptr(), storage.nbytes(), _MEMORY_KINDS[cache.device.type])
        segments[next((arena for arena in arenas if _holds(arena, memory.address)), memory)] = None
    return list(segments)


def _pool_offset(pool: Pool, address: int) -> int:
    index, segment = next((i, s) for i, s in enumerate(pool.segments) if _holds(s, address))
    return pool.segment_offset(index) + address - segment.address


def _holds(segment: Segment, address: int) -> bool:
    return segment.address <= address < segment.address + segment.num_bytes


# -- what must be equal ------------------------------------------------------------------------------


def _fields(
    config: EngineConfig,
    kv_cache_config: KVCacheConfig,
    specs: Sequence[KVCacheSpec],
    num_layers: int,
    cache_dtypes: str,
) -> dict[str, str | int]:
    """Collect what layouts do not say, and what an error should report for the whole model rather than for
    one layer.
    """
    attention = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    identity = config.model.identity
    return {
        "protocol": DESCRIPTION_VERSION,
        "model": config.model.model,
        "configuration": identity.configuration,
        "weights": identity.weights,
        "adapters": identity.adapters,
        "dtype": config.model.dtype,
        "cache_dtype": cache_dtypes,
        "num_groups": len(kv_cache_config.target_groups),
        "num_layers": num_layers,
        "num_kv_heads": _joined(_shard(spec, config).total for spec in attention),
        "head_size": _joined(spec.head_size for spec in attention),
        "byte_order": sys.byteorder,
        "tokenizer": identity.tokenizer,
        "chat_template": identity.chat_template,
    }


def _joined(values: Iterable[object]) -> str:
    """Join the distinct values, in the order of their first appearance: `"16"`, or `"16, 32"` for a mixed
    model.
    """
    return ", ".join(dict.fromkeys(str(value) for value in values))


def _dtype_name(cache: torch.Tensor) -> str:
    return str(cache.dtype).removeprefix("torch.")
