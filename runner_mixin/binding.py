"""Give each layer its cache, and let layers share one."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..transports.errors import ConfigurationError, KVTransferStateError

if TYPE_CHECKING:
    import torch

    from ..connector.config import EngineConfig
    from ..connector.kv_cache_specs import KVCacheGroupSpec
    from .forward_context import LayerWithCache


def extract_layer_index(layer_name: str, num_attn_module: int = 1) -> int:
    """Parse a layer's index from its name, e.g. 3 from `model.layers.3.self_attn`.

    With several attention modules per decoder layer, `model.layers.3.attn.1` is `3 * num_attn_module + 1`.

    Raises:
        ConfigurationError: the name has no number, or more numbers than allowed.
    """
    numbers = [int(part) for part in layer_name.split(".") if re.fullmatch(r"[0-9]+", part)]
    if len(numbers) == 1:
        return numbers[0] * num_attn_module
    if len(numbers) == 2 and num_attn_module > 1 and numbers[1] < num_attn_module:
        return numbers[0] * num_attn_module + numbers[1]
    raise ConfigurationError(
        f"layer name {layer_name!r} needs one number between dots, its index"
        + (f", and one below {num_attn_module} for its module" if num_attn_module > 1 else ""),
        key="layers",
        value=layer_name,
    )


def bind_kv_cache(
    kv_caches: Mapping[str, torch.Tensor],
    forward_context: Mapping[str, LayerWithCache],
    runner_kv_caches: list[torch.Tensor],
    num_attn_module: int = 1,
) -> None:
    """Give the runner all caches in the order of its layers, and each layer its own cache.

    Args:
        kv_caches: Layer name → cache.
        forward_context: Layer name → layer; its `kv_cache` becomes `[cache]`.
        runner_kv_caches: The runner's list, empty; filled in the order of the layer indices. Layers with the
            same index, as in an encoder-decoder model, appear one after another.
        num_attn_module: Attention modules per decoder layer.

    Raises:
        KVTransferStateError: `runner_kv_caches` is not empty. Nothing was bound.
        ConfigurationError: a cache's layer has no index in its name, or is not in `forward_context`. Nothing
            was bound.
    """
    if runner_kv_caches:
        raise KVTransferStateError(
            f"cannot bind KV caches: the runner has {len(runner_kv_caches)} bound already; pass an empty list"
        )
    unknown = sorted(kv_caches.keys() - forward_context.keys())
    if unknown:
        raise ConfigurationError(
            f"cannot bind KV caches: no layer in the forward context is called {', '.join(unknown)}",
            key="layers",
        )
    ordered = sorted(kv_caches, key=lambda name: extract_layer_index(name, num_attn_module))
    runner_kv_caches.extend(kv_caches[name] for name in ordered)
    for name, kv_cache in kv_caches.items():
        forward_context[name].kv_cache = [kv_cache]


def get_kv_sharing_layers(config: EngineConfig) -> dict[str, str]:
    """Map each layer without a cache of its own to the layer whose cache it reads."""
    return {layer.name: layer.kv_sharing_target for layer in config.model.layers if layer.kv_sharing_target}


def add_kv_sharing_layers_to_kv_cache_groups(
    shared_layers: Mapping[str, str],
    groups: Sequence[KVCacheGroupSpec],
    runner_only_attn_layers: set[str] | None = None,
) -> tuple[KVCacheGroupSpec, ...]:
    """Add each layer that shares a cache to its target's group.

    Args:
        shared_layers: By layer without a cache of its own, its target: the layer whose cache it reads.
        groups: The groups without them.
        runner_only_attn_layers: If given, the layers that share are added to it: the runner knows them, the
            cache manager does not.

    Returns:
        The groups with them.

    Raises:
        ConfigurationError: a target is in no group.
    """
    members = {name: index for index, group in enumerate(groups) for name in group.layer_names}
    joining: list[list[str]] = [[] for _ in groups]
    for sharer, target in shared_layers.items():
        if target not in members:
            raise ConfigurationError(
                f"layer {sharer!r} shares the cache of {target!r}, which is in no group",
                key="kv_sharing_target",
            )
        if sharer not in members:
            joining[members[target]].append(sharer)
    if runner_only_attn_layers is not None:
        runner_only_attn_layers.update(shared_layers)
    return tuple(
        replace(group, layer_names=(*group.layer_names, *joins))
        for group, joins in zip(groups, joining, strict=True)
    )


def initialize_kv_cache_for_kv_sharing(
    shared_layers: Mapping[str, str],
    groups: Sequence[KVCacheGroupSpec],
    kv_caches: MutableMapping[str, torch.Tensor],
) -> tuple[KVCacheGroupSpec, ...]:
    """Add each layer that shares a cache to its target's group, and give it the same tensor.

    Args:
        shared_layers: By layer without a cache of its own, its target: the layer whose cache it reads.
        groups: The groups without them.
        kv_caches: Layer name → cache; the layers that share are added.

    Returns:
        The groups with them.

    Raises:
        ConfigurationError: a target is in no group, or has no cache. `kv_caches` is unchanged.
    """
    joined = add_kv_sharing_layers_to_kv_cache_groups(shared_layers, groups)
    missing = sorted(set(shared_layers.values()) - kv_caches.keys())
    if missing:
        raise ConfigurationError(
            f"layers without a cache cannot share one: {', '.join(missing)}", key="kv_sharing_target"
        )
    kv_caches.update({sharer: kv_caches[target] for sharer, target in shared_layers.items()})
    return joined
