"""Views of the pool's bytes as caches."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from ..transports.errors import ConfigurationError

if TYPE_CHECKING:
    from ..connector.kv_cache_specs import AttentionSpec, KVCacheSpec, MambaSpec
    from .attention.backend import AttentionBackend


def pages_view(raw: torch.Tensor, spec: KVCacheSpec) -> torch.Tensor:
    """View one layer's raw bytes as `(num_blocks, page_size_bytes)` int8.

    Raises:
        ConfigurationError: their number is not a multiple of the page size.
    """
    if raw.numel() % spec.page_size_bytes:
        raise ConfigurationError(
            f"a KV cache tensor of {raw.numel()} bytes is not a multiple of the page of {spec.page_size_bytes} bytes",
            key="kv_cache_tensors",
        )
    return raw.view(-1, spec.page_size_bytes)


def attention_view(
    pages: torch.Tensor, spec: AttentionSpec, backend: type[AttentionBackend], kernel_block_size: int
) -> torch.Tensor:
    """View one layer's pages, `(num_blocks, page_size_bytes)` int8, as its cache in logical order."""
    num_kernel_blocks = pages.shape[0] * (spec.block_size // kernel_block_size)
    shape = backend.get_kv_cache_shape(
        num_kernel_blocks, kernel_block_size, spec.num_kv_heads, spec.head_size
    )
    return permuted_view(pages.flatten().view(spec.dtype), shape, backend.get_kv_cache_stride_order())


def layers_view(
    raw: torch.Tensor,
    num_layers: int,
    spec: AttentionSpec,
    backend: type[AttentionBackend],
    kernel_block_size: int,
    cache_dtype: str,
) -> torch.Tensor:
    """View the raw bytes of all layers as `(num_layers, *backend shape)`, in logical order."""
    num_blocks = raw.numel() // (num_layers * spec.page_size_bytes)
    shape = backend.get_kv_cache_shape(
        num_blocks * (spec.block_size // kernel_block_size),
        kernel_block_size,
        spec.num_kv_heads,
        spec.head_size,
        cache_dtype_str=cache_dtype,
    )
    order = backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    return permuted_view(raw.view(spec.dtype), (num_layers, *shape), order)


def permuted_view(flat: torch.Tensor, shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """View `flat` in the logical `shape`. In memory, axis `i` is the logical axis `order[i]`.

    Raises:
        ConfigurationError: `flat` and `shape` have different numbers of elements.
    """
    if flat.numel() != prod(shape):
        raise ConfigurationError(
            f"the attention backend does not store what the spec says: its cache of shape {tuple(shape)} has "
            f"{prod(shape)} elements, the pages have {flat.numel()}",
            key="attention_backend",
        )
    physical = flat.view([shape[axis] for axis in order])
    return physical.permute([order.index(axis) for axis in range(len(order))])


def mamba_state_views(pages: torch.Tensor, spec: MambaSpec) -> list[torch.Tensor]:
    """View a recurrent layer's opaque pages as its state tensors.

    Args:
        pages: `(num_blocks, page_size_bytes)` int8; a page is contiguous.

    Returns:
        For each state `(num_blocks, *shape)`, with the page stride of `pages`.
    """
    views, offset = [], 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        num_bytes = prod(shape) * dtype.itemsize
        views.append(pages[:, offset : offset + num_bytes].view(dtype).view(-1, *shape))
        offset += num_bytes
    return views
