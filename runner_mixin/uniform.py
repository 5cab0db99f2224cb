"""The uniform layout: all layers in one buffer, so that one block of all of them is one run of bytes.

per layer   layer 0: [block 0][block 1]…   layer 1: [block 0][block 1]…
uniform     block 0: [layer 0][layer 1]…   block 1: [layer 0][layer 1]…
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..connector.kv_cache_specs import AttentionSpec
from ..transports.errors import ConfigurationError
from . import state
from .memory import allocate_pool
from .views import layers_view

if TYPE_CHECKING:
    import torch

    from ..connector.kv_cache_specs import KVCacheConfig
    from .attention.backend import AttentionBackend, AttentionGroup


def use_uniform_kv_cache(attn_groups: Sequence[Sequence[AttentionGroup]], cache_dtype: str) -> bool:
    """Return whether the cache can and should be one buffer for all layers.

    It can and should if the process has a connector that prefers cross-layer blocks, there is one group with
    one attention backend, its layers keep keys and values, and the backend has an order in memory with a
    layers dimension. For several groups see `use_hybrid_uniform_kv_cache`.

    Args:
        attn_groups: For each KV cache group, its attention groups.
        cache_dtype: Name of the stored dtype, or `"auto"`.
    """
    if not state.has_kv_transfer_group() or not state.get_kv_transfer_group().prefer_cross_layer_blocks:
        return False
    if len(attn_groups) != 1 or len(attn_groups[0]) != 1:
        return False
    return bool(layers_stride_order(attn_groups[0][0], cache_dtype))


def layers_stride_order(group: AttentionGroup, cache_dtype: str) -> tuple[int, ...]:
    """Return the backend's order in memory with a layers dimension, or an empty tuple if it has none."""
    spec = group.kv_cache_spec
    if not isinstance(spec, AttentionSpec):
        return ()
    try:
        shape = group.backend.get_kv_cache_shape(
            1, spec.block_size, spec.num_kv_heads, spec.head_size, cache_dtype_str=cache_dtype
        )
        order = group.backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    except (AttributeError, NotImplementedError):
        return ()
    return order if len(order) == len(shape) + 1 else ()


def allocate_uniform_kv_caches(
    kv_cache_config: KVCacheConfig,
    attn_groups: Sequence[Sequence[AttentionGroup]],
    cache_dtype: str,
    device: torch.device,
    kernel_block_sizes: Sequence[int],
) -> tuple[dict[str, torch.Tensor], torch.Tensor, type[AttentionBackend]]:
    """Allocate one contiguous zeroed buffer for all layers of the only group.

    If blocks come first in memory, block `b` of all layers is one run of bytes. This stays true if kernel
    blocks are smaller than the manager's; there are only more of them.

    Args:
        kv_cache_config: One group, tensors of equal size.
        attn_groups: One group with one attention group (see `use_uniform_kv_cache`).
        cache_dtype: Name of the stored dtype, or `"auto"`.
        device: Where the pool is allocated.
        kernel_block_sizes: The kernel block size of the only group.

    Returns:
        `({layer name: view}, cross_layer_tensor, backend)`. The tensor is `(num_layers, *backend shape)` in
        logical order; its layer `i` is tensor `i` of the config. Each view is one layer of it, and layers
        that share a tensor have the same view.

    Raises:
        ConfigurationError: tensors differ in size or are not whole pages. Nothing was allocated.
    """
    (group,) = attn_groups[0]
    (kernel_block_size,) = kernel_block_sizes
    spec = group.kv_cache_spec
    if not isinstance(spec, AttentionSpec):
        raise ConfigurationError(f"the uniform layout needs attention layers, got {type(spec).__name__}")
    total = pool_bytes(kv_cache_config, spec.page_size_bytes)
    num_layers = len(kv_cache_config.kv_cache_tensors)
    cross_layers = layers_view(
        allocate_pool(total, device), num_layers, spec, group.backend, kernel_block_size, cache_dtype
    )
    views = {name: cross_layers[index] for name, index in tensor_indices(kv_cache_config).items()}
    return views, cross_layers, group.backend


def tensor_indices(kv_cache_config: KVCacheConfig) -> dict[str, int]:
    """Map each layer name to the index of its tensor in `kv_cache_config.kv_cache_tensors`."""
    return {
        name: index
        for index, tensor in enumerate(kv_cache_config.kv_cache_tensors)
        for name in tensor.shared_by
    }


def pool_bytes(kv_cache_config: KVCacheConfig, page_size_bytes: int) -> int:
    """Return the size of a pool of equal tensors.

    Raises:
        ConfigurationError: there is no tensor, tensors differ in size, or their size is not a multiple of the
            page size.
    """
    sizes = {tensor.size for tensor in kv_cache_config.kv_cache_tensors}
    if len(sizes) != 1:
        raise ConfigurationError(
            f"the uniform layout needs tensors of equal size, got {sorted(sizes)}", key="kv_cache_tensors"
        )
    (size,) = sizes
    if size <= 0 or size % page_size_bytes:
        raise ConfigurationError(
            f"a KV cache tensor of {size} bytes is not a multiple of the page of {page_size_bytes} bytes",
            key="kv_cache_tensors",
            value=size,
        )
    return size * len(kv_cache_config.kv_cache_tensors)
