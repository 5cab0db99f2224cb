"""Register paged attention as an attention implementation of transformers.

No mask function is registered with it, so transformers builds no mask. The paged attention knows from the
step's metadata which tokens each token attends to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.configuration_utils import PretrainedConfig

from ...connector.config import AttentionLayerConfig
from ...runner_mixin.attention.backend import AttentionBackend, AttentionParams
from ...runner_mixin.forward_context import get_forward_context
from ...runner_mixin.hooks import maybe_transfer_kv_layer
from ...transports.errors import ConfigurationError

#: The implementation's name in transformers.
IMPLEMENTATION = "kvferry_paged"

#: Arguments that some models also pass. Ignoring them would silently give wrong answers.
_NOT_SUPPORTED = {"s_aux": "sinks", "position_bias": "a bias by position"}


@dataclass
class PagedLayer:
    """One attention layer's cache, and the backend that attends over it.

    A layer that shares another layer's cache writes nothing and transfers nothing: its owner does both.

    Attributes:
        kv_cache: Empty until the pool is bound, then one tensor.
        num_calls: The number of steps in which the model used the layer.
    """

    config: AttentionLayerConfig
    backend: type[AttentionBackend]
    kv_cache: list[torch.Tensor] = field(default_factory=list)
    num_calls: int = 0

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, softcap: float | None
    ) -> torch.Tensor:
        """Write the step's keys and values into the cache, unless another layer owns it, and attend over it.

        Args:
            query: `(num_tokens, num_heads, head_size)`, the tokens of all requests one after the other.
            key: `(num_tokens, num_kv_heads, head_size)`.
            value: `(num_tokens, num_kv_heads, head_size)`.

        Returns:
            `(num_tokens, num_heads, head_size)`.
        """
        self.num_calls += 1
        num_heads, head_size = query.shape[1:]
        window, chunk = self.config.sliding_window, self.config.attention_chunk_size
        params = AttentionParams(num_heads, key.shape[1], head_size, scale, window, softcap, chunk)
        metadata = get_forward_context().attn_metadata[self.config.name]
        if self.config.kv_sharing_target:
            return self.backend.attend(query, self.kv_cache[0], metadata, params)
        with maybe_transfer_kv_layer(self.config.name):
            self.backend.write_kv(key, value, self.kv_cache[0], metadata)
            return self.backend.attend(query, self.kv_cache[0], metadata, params)


def attention_layers(config: PretrainedConfig) -> tuple[AttentionLayerConfig, ...]:
    """Describe the attention layers of a decoder.

    Raises:
        ConfigurationError: this engine cannot run one of the layers; the message names it.
    """
    targets = _sharing_targets(config)
    try:
        return tuple(
            _attention_layer(config.per_layer_config[index], index, kind, targets.get(index, ""))
            for index, kind in enumerate(_layer_types(config))
        )
    except AttributeError as error:
        raise ConfigurationError(
            f"this engine cannot read the layers from the configuration of this {config.model_type} model: {error}",
            key="model",
            value=config.model_type,
        ) from error


def _attention_layer(config: PretrainedConfig, index: int, kind: str, target: str) -> AttentionLayerConfig:
    """Describe one layer, from the configuration of this layer."""
    num_heads: int = config.num_attention_heads
    return AttentionLayerConfig(
        _layer_name(index),
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        sliding_window=_window(config, index, kind),
        kv_sharing_target=target,
        attention_chunk_size=int(config.attention_chunk_size) if kind == "chunked_attention" else None,
    )


def _layer_name(index: int) -> str:
    return f"model.layers.{index}.self_attn"


def _layer_types(config: PretrainedConfig) -> list[str]:
    if kinds := getattr(config, "layer_types", None):
        return list(kinds)
    # Older configurations describe all layers at once. If they have a window, every layer has it.
    has_window = getattr(config, "sliding_window", None) is not None
    return ["sliding_attention" if has_window else "full_attention"] * config.num_hidden_layers


def _sharing_targets(config: PretrainedConfig) -> dict[int, str]:
    """Map each layer without a cache of its own to the layer whose cache it reads: the last of its kind that
    has one.
    """
    modes = getattr(config, "kv_sharing_modes", [])
    stores = {
        config.layer_types[index]: _layer_name(index) for index, mode in enumerate(modes) if mode == "store"
    }
    return {index: stores[config.layer_types[index]] for index, mode in enumerate(modes) if mode == "reuse"}


def _window(config: PretrainedConfig, index: int, kind: str) -> int | None:
    if kind in ("full_attention", "chunked_attention"):
        return None
    if kind == "sliding_attention":
        return int(config.sliding_window)
    raise ConfigurationError(
        f"layer {index} of this {config.model_type} model is of kind {kind!r}; "
        "this engine runs full, sliding-window and chunked attention",
        key="model",
        value=config.model_type,
    )


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute one layer's attention, with transformers' signature.

    Args:
        query: `(1, num_heads, num_tokens, head_size)`, the tokens of all requests one after the other.
        key: `(1, num_kv_heads, num_tokens, head_size)`.
        value: `(1, num_kv_heads, num_tokens, head_size)`.

    Returns:
        `(1, num_tokens, num_heads, head_size)`, and None instead of attention weights.
    """
    for name, meaning in _NOT_SUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ConfigurationError(f"this engine does not support attention with {meaning}", key="model")
    layer = get_forward_context().layers[_layer_name(int(module.layer_idx))]  # type: ignore[arg-type]
    assert isinstance(layer, PagedLayer)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return layer.forward(query, key, value, scale, softcap).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _paged_attention)
