"""From the model's layers to caches in place: specs, backends, memory, views, binding.

    specs = get_kv_cache_spec(config, dtype)                    what each layer keeps
    kv_cache_config = …                                         how many blocks there are
    (runner_mixin.kv_cache) attention = init_attn_backend(kv_cache_config, config, device) kv_caches =
    init_kv_cache(runner_kv_caches, layers, kv_cache_config, attention, device)

For a runner with a connector, which may prefer another layout, `layouts.py` replaces the last line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..connector.kv_cache_specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from ..transports.errors import ConfigurationError
from .attention.backend import AttentionBackend, AttentionGroup, MetadataBuilder
from .attention.selection import select_attention_backend
from .binding import (
    add_kv_sharing_layers_to_kv_cache_groups,
    bind_kv_cache,
    get_kv_sharing_layers,
    initialize_kv_cache_for_kv_sharing,
)
from .block_sizes import cached_groups, layer_spec, prepare_kernel_block_sizes
from .memory import allocate_pool
from .recurrent import get_recurrent_specs
from .views import attention_view, pages_view

if TYPE_CHECKING:
    from ..connector.config import AttentionLayerConfig, EngineConfig
    from ..connector.kv_cache_specs import KVCacheConfig, KVCacheGroupSpec
    from .forward_context import LayerWithCache

#: Each tensor of the pool begins at a multiple of this, so that no page of memory holds parts of two tensors.
_ALIGNMENT_BYTES = 4096


@dataclass(frozen=True)
class AttentionSetup:
    """The attention of this rank: backends, groups and builders.

    Attributes:
        attn_backends: Layer name → backend.
        attn_groups: For each KV cache group, its attention groups: usually one; none without attention.
        kernel_block_sizes: As `prepare_kernel_block_sizes` returns them.
        metadata_builders: One per attention group that keeps a cache.
        shared_layers: By layer without a cache of its own, the layer whose cache it reads.
    """

    attn_backends: dict[str, type[AttentionBackend]]
    attn_groups: list[list[AttentionGroup]]
    kernel_block_sizes: list[int]
    metadata_builders: list[MetadataBuilder]
    shared_layers: dict[str, str]


def resolve_kv_cache_dtype(config: EngineConfig) -> torch.dtype:
    """Return the element type of the cache: `config.cache.cache_dtype`, or the model's type if that is
    `"auto"`.

    Raises:
        ConfigurationError: torch has no floating-point type of this name.
    """
    if config.cache.cache_dtype == "auto":
        return _floating_dtype("dtype", config.model.dtype)
    return _floating_dtype("cache_dtype", config.cache.cache_dtype)


def _floating_dtype(key: str, name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigurationError(
            f"{key}={name!r} is not a floating-point type of torch; use one such as 'bfloat16'",
            key=key,
            value=name,
        )
    return dtype


def get_kv_cache_spec(config: EngineConfig, kv_cache_dtype: torch.dtype) -> dict[str, KVCacheSpec]:
    """Return what each decoder layer keeps: everything, a window, its chunk, or a state.

    Layers of an encoder, and layers that read another's cache, keep nothing and are left out.

    Returns:
        Layer name → `SlidingWindowSpec` if the layer has a window, `ChunkedLocalAttentionSpec` if it has
        chunks, `MambaSpec` if it is recurrent, otherwise `FullAttentionSpec`.

    Raises:
        ConfigurationError: a recurrent layer's state does not fit a page of the attention layers.
    """
    specs: dict[str, KVCacheSpec] = {
        layer.name: _attention_spec(layer, config.cache.block_size, kv_cache_dtype)
        for layer in config.model.layers
        if layer.is_decoder and not layer.kv_sharing_target
    }
    return specs | get_recurrent_specs(config, specs)


def _attention_spec(layer: AttentionLayerConfig, block_size: int, dtype: torch.dtype) -> AttentionSpec:
    shape = (block_size, layer.num_kv_heads, layer.head_size, dtype)
    if layer.sliding_window is not None:
        return SlidingWindowSpec(*shape, sliding_window=layer.sliding_window)
    if layer.attention_chunk_size is not None:
        return ChunkedLocalAttentionSpec(*shape, attention_chunk_size=layer.attention_chunk_size)
    return FullAttentionSpec(*shape)


def init_attn_backend(
    kv_cache_config: KVCacheConfig, config: EngineConfig, device: torch.device
) -> AttentionSetup:
    """Choose the attention backend, and make one metadata builder per group.

    Layers of a composite group are divided into attention groups by spec, so that each builder serves
    layers of one shape. All builders that need a workspace share one.

    Raises:
        ConfigurationError: the backend is unknown, no kernel supports the block size, or a layer shares the
            cache of an unknown layer.
        BackendUnavailableError: the backend cannot work on `device`.
    """
    shared_layers = get_kv_sharing_layers(config)
    groups = add_kv_sharing_layers_to_kv_cache_groups(shared_layers, kv_cache_config.kv_cache_groups)
    backend = select_attention_backend(
        device,
        _floating_dtype("dtype", config.model.dtype),
        config.cache.attention_backend,
        config.cache.kv_cache_layout,
    )
    attn_groups = [_attention_groups(index, group, backend) for index, group in enumerate(groups)]
    kernel_block_sizes = prepare_kernel_block_sizes(kv_cache_config, attn_groups)
    workspace = torch.empty(backend.get_workspace_bytes(), dtype=torch.int8, device=device)
    return AttentionSetup(
        attn_backends={name: g.backend for gs in attn_groups for g in gs for name in g.layer_names},
        attn_groups=attn_groups,
        kernel_block_sizes=kernel_block_sizes,
        metadata_builders=[
            group.backend.get_builder_cls()(group, kernel_block_size, device, workspace)
            for (index, _), kernel_block_size in zip(
                cached_groups(kv_cache_config), kernel_block_sizes, strict=True
            )
            for group in attn_groups[index]
        ],
        shared_layers=shared_layers,
    )


def _attention_groups(
    index: int, group: KVCacheGroupSpec, backend: type[AttentionBackend]
) -> list[AttentionGroup]:
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name in group.layer_names:
        spec = layer_spec(group, name)
        if isinstance(spec, AttentionSpec):
            by_spec.setdefault(spec, []).append(name)
    return [AttentionGroup(backend, tuple(names), spec, index) for spec, names in by_spec.items()]


def _allocate_kv_cache(kv_cache_config: KVCacheConfig, device: torch.device) -> dict[str, torch.Tensor]:
    """Allocate one zeroed int8 tensor per tensor of the config, all in one contiguous piece of memory.

    Returns:
        Layer name → `(size,)` int8; layers that share a tensor have the same object.

    Raises:
        ConfigurationError: a layer of a group has no tensor. Nothing was allocated.
    """
    covered = {name for tensor in kv_cache_config.kv_cache_tensors for name in tensor.shared_by}
    missing = {name for _, group in cached_groups(kv_cache_config) for name in group.layer_names} - covered
    if missing:
        raise ConfigurationError(
            f"layers without a KV cache tensor: {', '.join(sorted(missing))}", key="kv_cache_tensors"
        )
    strides = [
        -(-tensor.size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for tensor in kv_cache_config.kv_cache_tensors
    ]
    if not strides:
        return {}
    memory = allocate_pool(sum(strides), device)
    raw: dict[str, torch.Tensor] = {}
    for tensor, piece in zip(kv_cache_config.kv_cache_tensors, torch.split(memory, strides), strict=True):
        raw.update(dict.fromkeys(tensor.shared_by, piece[: tensor.size]))
    return raw


def _reshape_kv_cache(
    kv_cache_config: KVCacheConfig,
    raw: Mapping[str, torch.Tensor],
    backends: Mapping[str, type[AttentionBackend]],
    kernel_block_sizes: Sequence[int],
) -> dict[str, torch.Tensor]:
    """View each layer's raw bytes as its cache.

    Args:
        kv_cache_config: Groups and specs.
        raw: Layer name → `(size,)` int8.
        backends: Layer name → backend, for attention layers.
        kernel_block_sizes: As `prepare_kernel_block_sizes` returns them.

    Returns:
        Layer name → cache in logical order, axis 0 being kernel blocks. For a layer without attention it is
        `(num_blocks, page_size_bytes)` int8, because its state is opaque; see `mamba_state_views`.

    Raises:
        ConfigurationError: a raw tensor is not a whole number of pages.
    """
    kv_caches = {}
    for (_, group), kernel_block_size in zip(cached_groups(kv_cache_config), kernel_block_sizes, strict=True):
        for name in group.layer_names:
            spec = layer_spec(group, name)
            pages = pages_view(raw[name], spec)
            if isinstance(spec, AttentionSpec):
                kv_caches[name] = attention_view(pages, spec, backends[name], kernel_block_size)
            else:
                kv_caches[name] = pages
    return kv_caches


def init_kv_cache(
    runner_kv_caches: list[torch.Tensor],
    forward_context: Mapping[str, LayerWithCache],
    kv_cache_config: KVCacheConfig,
    attention: AttentionSetup,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Allocate the caches layer by layer, view them, and bind them.

    Args:
        runner_kv_caches: The runner's list, empty; filled in layer order.
        forward_context: Layer name → layer; its `kv_cache` is set.
        kv_cache_config: Tensors and groups.
        attention: As `init_attn_backend` made it.
        device: Where the pool is allocated.

    Returns:
        Layer name → cache, for `WorkerHalf.register_kv_caches`.

    Raises:
        ConfigurationError: a layer has no tensor, a tensor is not whole pages, or a layer is unknown.
        KVTransferStateError: caches are bound already.
    """
    kv_caches = allocate_per_layer_kv_caches(kv_cache_config, attention, device)
    share_and_bind(kv_caches, forward_context, runner_kv_caches, kv_cache_config, attention)
    return kv_caches


def allocate_per_layer_kv_caches(
    kv_cache_config: KVCacheConfig, attention: AttentionSetup, device: torch.device
) -> dict[str, torch.Tensor]:
    """Allocate and view the caches layer by layer: `_allocate_kv_cache`, then `_reshape_kv_cache`."""
    raw = _allocate_kv_cache(kv_cache_config, device)
    return _reshape_kv_cache(kv_cache_config, raw, attention.attn_backends, attention.kernel_block_sizes)


def share_and_bind(
    kv_caches: dict[str, torch.Tensor],
    forward_context: Mapping[str, LayerWithCache],
    runner_kv_caches: list[torch.Tensor],
    kv_cache_config: KVCacheConfig,
    attention: AttentionSetup,
) -> None:
    """Add the layers that read another's cache to `kv_caches`, and bind all of them; see `bind_kv_cache`."""
    initialize_kv_cache_for_kv_sharing(attention.shared_layers, kv_cache_config.kv_cache_groups, kv_caches)
    bind_kv_cache(kv_caches, forward_context, runner_kv_caches)
