"""Caches of a runner that may have a connector: allocated as the connector prefers, bound, and registered
with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from . import state
from .hybrid_uniform import allocate_hybrid_uniform_kv_caches, use_hybrid_uniform_kv_cache
from .kv_caches import AttentionSetup, allocate_per_layer_kv_caches, share_and_bind
from .uniform import allocate_uniform_kv_caches, use_uniform_kv_cache

if TYPE_CHECKING:
    import torch

    from ..connector.kv_cache_specs import KVCacheConfig
    from .forward_context import LayerWithCache

#: How bytes lie in the pool; see `uniform.py`, `hybrid_uniform.py` and `kv_caches.py`.
KVCacheLayout = Literal["uniform", "hybrid-uniform", "per-layer"]


def init_kv_cache_for_connector(
    runner_kv_caches: list[torch.Tensor],
    forward_context: Mapping[str, LayerWithCache],
    kv_cache_config: KVCacheConfig,
    attention: AttentionSetup,
    cache_dtype: str,
    device: torch.device,
) -> KVCacheLayout:
    """Allocate the caches in the layout that the process's connector prefers, bind them, and register them.

    If the connector prefers cross-layer blocks and there is one group, `register_cross_layers_kv_cache` is
    called. If there are several groups that allow it, `register_kv_caches` is called with views into one
    block-major buffer. Otherwise it is called with separate caches. Layers that only read another's cache are
    not registered, so that their bytes cross once. Without a connector the layout is per layer.

    Args:
        runner_kv_caches: The runner's list, empty; filled in layer order.
        forward_context: Layer name → layer; its `kv_cache` is set.
        kv_cache_config: Tensors and groups.
        attention: As `init_attn_backend` made it.
        cache_dtype: Name of the stored dtype, or `"auto"`.
        device: Where the pool is allocated.

    Returns:
        The layout.

    Raises:
        ConfigurationError: a layer has no tensor, a tensor is not whole pages, or a layer is unknown.
        KVTransferStateError: caches are bound already.
    """
    kv_caches, layout = _allocate_and_register(kv_cache_config, attention, cache_dtype, device)
    share_and_bind(kv_caches, forward_context, runner_kv_caches, kv_cache_config, attention)
    return layout


def _allocate_and_register(
    kv_cache_config: KVCacheConfig, attention: AttentionSetup, cache_dtype: str, device: torch.device
) -> tuple[dict[str, torch.Tensor], KVCacheLayout]:
    groups, sizes = attention.attn_groups, attention.kernel_block_sizes
    if use_uniform_kv_cache(groups, cache_dtype):
        kv_caches, cross_layers, backend = allocate_uniform_kv_caches(
            kv_cache_config, groups, cache_dtype, device, sizes
        )
        state.get_kv_transfer_group().register_cross_layers_kv_cache(cross_layers, backend)
        return kv_caches, "uniform"
    layout: KVCacheLayout
    if use_hybrid_uniform_kv_cache(kv_cache_config, groups, cache_dtype):
        layout = "hybrid-uniform"
        kv_caches = allocate_hybrid_uniform_kv_caches(kv_cache_config, groups, cache_dtype, device, sizes)
    else:
        layout = "per-layer"
        kv_caches = allocate_per_layer_kv_caches(kv_cache_config, attention, device)
    if state.has_kv_transfer_group():
        state.get_kv_transfer_group().register_kv_caches(dict(kv_caches))
    return kv_caches, layout
