"""The block size that the attention kernels work with, which may be smaller than the manager's.

A manager's block may be divided into several *kernel blocks*: manager block `b` is kernel blocks
`b * n … b * n + n - 1`. A slot has the same number either way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..connector.kv_cache_specs import (
    AttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
)
from ..transports.errors import ConfigurationError
from .attention.backend import AttentionBackend, AttentionGroup, MultipleOf

if TYPE_CHECKING:
    import torch

    from ..connector.kv_cache_specs import KVCacheConfig, KVCacheGroupSpec


def layer_spec(group: KVCacheGroupSpec, layer_name: str) -> KVCacheSpec:
    """Return the spec of one layer of `group`: its own spec if the group's spec is composite.

    A layer that shares another's cache has no spec of its own; it gets the first member's.
    """
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.kv_cache_specs.get(layer_name, representative_spec(spec))
    return spec


def representative_spec(spec: KVCacheSpec) -> KVCacheSpec:
    """Return `spec`, or the first member of a composite one: all are of one type and block size."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return next(iter(spec.kv_cache_specs.values()))
    return spec


def cached_groups(kv_cache_config: KVCacheConfig) -> Iterator[tuple[int, KVCacheGroupSpec]]:
    """Yield index and group of all groups that keep a cache. Encoder-only groups do not."""
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if not isinstance(representative_spec(group.kv_cache_spec), EncoderOnlyAttentionSpec):
            yield index, group


def prepare_kernel_block_sizes(
    kv_cache_config: KVCacheConfig, attn_groups: Sequence[Sequence[AttentionGroup]]
) -> list[int]:
    """Choose the kernel block size of each group.

    Args:
        kv_cache_config: The groups.
        attn_groups: For each of them, its attention groups; empty for one without attention.

    Returns:
        One size in tokens per group that keeps a cache; encoder-only groups are left out. For attention it is
        the common size of the group's backends, for other groups the spec's own.

    Raises:
        ValueError: the backends of a group have no size in common.
    """
    sizes = []
    for index, group in cached_groups(kv_cache_config):
        spec = representative_spec(group.kv_cache_spec)
        if isinstance(spec, AttentionSpec):
            sizes.append(select_common_block_size(spec.block_size, attn_groups[index]))
        else:
            sizes.append(spec.block_size)
    return sizes


def select_common_block_size(kv_manager_block_size: int, attn_groups: Sequence[AttentionGroup]) -> int:
    """Choose the kernel block size that all backends of a group support.

    If all support the manager's block size, that is it. If not, it is the largest integer that some backend
    lists, that divides the manager's block size, and that all support.

    Args:
        kv_manager_block_size: Tokens per block of the manager.
        attn_groups: The group's attention groups.

    Raises:
        ValueError: there is no such size.
    """
    backends = [group.backend for group in attn_groups]
    if all(_supports(backend, kv_manager_block_size) for backend in backends):
        return kv_manager_block_size
    listed = {
        size
        for backend in backends
        for size in backend.get_supported_kernel_block_sizes()
        if isinstance(size, int) and kv_manager_block_size % size == 0
    }
    common = [size for size in listed if all(_supports(backend, size) for backend in backends)]
    if not common:
        offers = ", ".join(f"{b.get_name()}: {b.get_supported_kernel_block_sizes()}" for b in backends)
        raise ConfigurationError(
            f"no kernel block size divides block_size={kv_manager_block_size} and suits every backend ({offers})",
            key="block_size",
            value=kv_manager_block_size,
        )
    return max(common)


def expand_block_table(block_table: torch.Tensor, kernel_blocks_per_block: int) -> torch.Tensor:
    """Turn manager block ids `(num_reqs, num_blocks)` into kernel block ids `(num_reqs, num_blocks * n)`."""
    if kernel_blocks_per_block == 1:
        return block_table
    import torch

    parts = torch.arange(kernel_blocks_per_block, dtype=block_table.dtype, device=block_table.device)
    return (block_table.unsqueeze(-1) * kernel_blocks_per_block + parts).flatten(1)


def _supports(backend: type[AttentionBackend], block_size: int) -> bool:
    return any(
        block_size % size.base == 0 if isinstance(size, MultipleOf) else block_size == size
        for size in backend.get_supported_kernel_block_sizes()
    )
