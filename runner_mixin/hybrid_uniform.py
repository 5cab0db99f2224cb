"""The uniform layout for several groups.

Groups of a hybrid model share one pool: a block belongs to one group at a time, and tensor `i` of the pool
holds the `i`-th layer of every group. The layout is block by block:

    block b: [tensor 0][tensor 1]…[tensor n - 1]

Whichever group owns block `b`, its layers lie one after another in it: one run of bytes. A group with fewer
layers than there are tensors uses the front of the run.

This applies exactly when
- the process has a connector that prefers cross-layer blocks;
- all tensors of the pool have the same size and all groups the same page size, so that a page of one group
  fits where another's was. Composite groups, whose layers differ in page size, are therefore excluded;
- no group has two layers in one tensor, so that a block's run contains each layer of its group once;
- the backend of each attention group puts blocks first and layers second in memory. Any other order would
  spread a block of one group over several blocks of another, and they would overwrite each other.

Otherwise the per-layer layout is used, which needs only whole pages.

A single group qualifies as well, but `use_uniform_kv_cache` is tried first, because one tensor tells a
connector more. Kernel blocks may differ between groups: `k` kernel blocks of all layers fill the same run of
bytes as the block that they are parts of. Recurrent layers take part with their opaque pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ..connector.kv_cache_specs import AttentionSpec, KVCacheSpec, UniformTypeKVCacheSpecs
from . import state
from .block_sizes import cached_groups
from .memory import allocate_pool
from .uniform import layers_stride_order, pool_bytes, tensor_indices
from .views import layers_view

if TYPE_CHECKING:
    from ..connector.kv_cache_specs import KVCacheConfig, KVCacheGroupSpec
    from .attention.backend import AttentionGroup


def use_hybrid_uniform_kv_cache(
    kv_cache_config: KVCacheConfig, attn_groups: Sequence[Sequence[AttentionGroup]], cache_dtype: str
) -> bool:
    """Return whether the pool of several groups can and should be laid out block by block; see the module.

    Args:
        kv_cache_config: Tensors and groups.
        attn_groups: For each KV cache group, its attention groups.
        cache_dtype: Name of the stored dtype, or `"auto"`.
    """
    if not state.has_kv_transfer_group() or not state.get_kv_transfer_group().prefer_cross_layer_blocks:
        return False
    tensors = kv_cache_config.kv_cache_tensors
    if not tensors or len({tensor.size for tensor in tensors}) != 1:
        return False
    groups = [group for _, group in cached_groups(kv_cache_config)]
    if any(isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs) for group in groups):
        return False
    if len({group.kv_cache_spec.page_size_bytes for group in groups}) != 1:
        return False
    if any(len(set(owners)) != len(owners) for owners in _owners(kv_cache_config)):
        return False
    return all(
        layers_stride_order(attention, cache_dtype)[:2] == (1, 0)
        for attentions in attn_groups
        for attention in attentions
    )


def allocate_hybrid_uniform_kv_caches(
    kv_cache_config: KVCacheConfig,
    attn_groups: Sequence[Sequence[AttentionGroup]],
    cache_dtype: str,
    device: torch.device,
    kernel_block_sizes: Sequence[int],
) -> dict[str, torch.Tensor]:
    """Allocate one contiguous zeroed buffer for all groups, block by block.

    Args:
        kv_cache_config: Groups for which `use_hybrid_uniform_kv_cache` holds.
        attn_groups: For each of them, its attention groups; empty for recurrent layers.
        cache_dtype: Name of the stored dtype, or `"auto"`.
        device: Where the pool is allocated.
        kernel_block_sizes: As `prepare_kernel_block_sizes` returns them.

    Returns:
        Layer name → cache in logical order, axis 0 being kernel blocks; for recurrent layers
        `(num_blocks, page_size_bytes)` int8. The views of one group's layers never overlap. Those of
        different groups do; the manager gives each block to one group at a time.

    Raises:
        ConfigurationError: tensors differ in size or are not whole pages. Nothing was allocated.
    """
    groups = list(cached_groups(kv_cache_config))
    page_size_bytes = groups[0][1].kv_cache_spec.page_size_bytes
    raw = allocate_pool(pool_bytes(kv_cache_config, page_size_bytes), device)
    tensor_of = tensor_indices(kv_cache_config)
    num_tensors = len(kv_cache_config.kv_cache_tensors)
    kv_caches: dict[str, torch.Tensor] = {}
    for (index, group), kernel_block_size in zip(groups, kernel_block_sizes, strict=True):
        layers = _group_view(
            raw, num_tensors, group.kv_cache_spec, attn_groups[index], kernel_block_size, cache_dtype
        )
        kv_caches.update((name, layers[tensor_of[name]]) for name in group.layer_names)
    return kv_caches


def _group_view(
    raw: torch.Tensor,
    num_tensors: int,
    spec: KVCacheSpec,
    attentions: Sequence[AttentionGroup],
    kernel_block_size: int,
    cache_dtype: str,
) -> torch.Tensor:
    """View the whole pool as one group's: `(num_tensors, num kernel blocks, …)`."""
    if not isinstance(spec, AttentionSpec):
        return raw.view(-1, num_tensors, spec.page_size_bytes).transpose(0, 1)
    return layers_view(raw, num_tensors, spec, attentions[0].backend, kernel_block_size, cache_dtype)


def _owners(kv_cache_config: KVCacheConfig) -> Iterator[list[int]]:
    """Yield, for each tensor, the groups of the layers that use it."""
    group_of = _group_of(kv_cache_config.kv_cache_groups)
    for tensor in kv_cache_config.kv_cache_tensors:
        yield [group_of[name] for name in tensor.shared_by]


def _group_of(groups: Sequence[KVCacheGroupSpec]) -> dict[str, int]:
    return {name: index for index, group in enumerate(groups) for name in group.layer_names}
