"""Run the recurrent layers of transformers' models with states that lie in the pool.

The mixers of all model families in transformers keep their states through one interface, `cache_params`. Here each
request's tokens of a step are computed on their own, with a cache whose tensors are views of the request's page.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin, LinearAttentionLayer
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from ...connector.config import RecurrentLayerConfig
from ...connector.kv_cache_specs import MambaSpec
from ...runner_mixin.forward_context import get_forward_context
from ...runner_mixin.hooks import maybe_transfer_kv_layer
from ...runner_mixin.recurrent import StateMetadata
from ...runner_mixin.views import mamba_state_views
from ...transports.errors import ConfigurationError
from .errors import InvalidRequestError
from .types import GenerationRequest

#: Transformers' names for the kinds of layers that keep a state, instead of a KV cache or in addition to one.
RECURRENT_KINDS = frozenset({"linear_attention", "hybrid"})

#: A state's shape does not depend on the number of tokens, but mixers have a special path for a single token.
_PROBE_TOKENS = 2
#: The order in a page. The recurrent part comes first because its elements may be wider; so both parts are aligned.
_KINDS = ("recurrent_states", "conv_states")


def without_last_prompt_token(source: GenerationRequest) -> GenerationRequest:
    """Drop the prompt's last token from a request whose cache another node will load.

    The other node computes the prompt's last token itself, and a recurrent state cannot be rolled back by one token, so this
    node must not compute it. The single token of this node's answer then follows the shorter prompt, and is not used. For a
    prompt of one token, there is nothing to hand over.

    Raises:
        InvalidRequestError: the answer may have more than one token, which would advance the state.
    """
    if not (source.kv_transfer_params or {}).get("do_remote_decode"):
        return source
    if source.sampling.max_tokens != 1:
        raise InvalidRequestError(
            f"max_tokens={source.sampling.max_tokens}: this model has recurrent layers; with do_remote_decode it must be 1",
            param="max_tokens",
        )
    if len(source.prompt_token_ids) == 1:
        return replace(source, kv_transfer_params=None)
    return replace(source, prompt_token_ids=source.prompt_token_ids[:-1])


@dataclass(frozen=True)
class _StateTensor:
    """One tensor of a layer's state: transformers' kind and index of it, and its shape and type for one request."""

    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def find_mixers(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Return the model's recurrent layers by name, in the order in which they run."""
    takers = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "layer_idx") and "cache_params" in inspect.signature(module.forward).parameters
    }
    # In some families the block around a mixer also takes the cache, only to pass it on. Keep the innermost module.
    return {
        name: module
        for name, module in takers.items()
        if not any(other.startswith(f"{name}.") for other in takers)
    }


def recurrent_layers(config: PretrainedConfig, dtype: torch.dtype) -> tuple[RecurrentLayerConfig, ...]:
    """Describe the recurrent layers of a model. Each is run once without weights, to see which state it keeps.

    Args:
        dtype: Type of the weights.

    Raises:
        ConfigurationError: a recurrent layer keeps its state in a way that this engine does not support.
    """
    layer_types = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    kinds = [kind for kind in layer_types if kind in RECURRENT_KINDS]
    if not kinds:
        return ()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    mixers = find_mixers(model)
    if len(mixers) != len(kinds):
        raise ConfigurationError(
            f"this engine cannot run this {config.model_type} model: of its {len(kinds)} layers of kind {kinds[0]!r}, "
            f"only {len(mixers)} keep their state through transformers' `cache_params`",
            key="model",
            value=config.model_type,
        )
    return tuple(
        RecurrentLayerConfig(
            name,
            tuple(tensor.shape for tensor in tensors),
            tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
        )
        for name, tensors in ((name, _probe(mixer, model)) for name, mixer in mixers.items())
    )


@torch.inference_mode()
def _probe(mixer: torch.nn.Module, model: PreTrainedModel) -> tuple[_StateTensor, ...]:
    """Run a mixer on a few tokens, and describe the state that it keeps per request, in the order of a page."""
    config: PretrainedConfig = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    tokens = torch.zeros(1, _PROBE_TOKENS, config.hidden_size, dtype=model.dtype, device=model.device)
    mixer(tokens, cache_params=cache)
    layer = cache.layers[int(mixer.layer_idx)]  # type: ignore[arg-type]
    assert isinstance(layer, LinearAttentionCacheLayerMixin)
    return tuple(
        _StateTensor(kind, index, tuple(state.shape[1:]), state.dtype)
        for kind in _KINDS
        for index, state in getattr(layer, kind).items()
        if state is not None
    )


@dataclass
class RecurrentLayer:
    """One recurrent layer, which replaces its mixer's `forward`; see `install`.

    Attributes:
        spec: How a page holds the state.
        tensors: The tensors of the state, in the order of the page.
        compute: The mixer's own `forward`.
        kv_cache: Empty until the pool is bound, then the layer's pages, `(num_blocks, page_size_bytes)` int8.
        num_calls: The number of steps in which the model used the layer.
    """

    name: str
    spec: MambaSpec
    tensors: tuple[_StateTensor, ...]
    layer_idx: int
    compute: Callable[..., torch.Tensor]
    kv_cache: list[torch.Tensor] = field(default_factory=list)
    num_calls: int = 0

    @classmethod
    def install(
        cls, name: str, spec: MambaSpec, mixer: torch.nn.Module, model: PreTrainedModel
    ) -> RecurrentLayer:
        """Replace the `forward` of a mixer of `model`."""
        layer = cls(name, spec, _probe(mixer, model), int(mixer.layer_idx), mixer.forward)  # type: ignore[arg-type]
        mixer.forward = layer.forward
        return layer

    def forward(self, hidden_states: torch.Tensor, **ignored: Any) -> torch.Tensor:
        """Run each request's tokens, starting from the state in its page, and update that state in place.

        Args:
            hidden_states: `(1, num_tokens, hidden_size)`, the tokens of all requests one after the other.
            ignored: Transformers' own cache and mask, which this engine does not use.

        Returns:
            `(1, num_tokens, hidden_size)`.
        """
        self.num_calls += 1
        metadata = get_forward_context().state_metadata[self.name]
        with maybe_transfer_kv_layer(self.name):
            parts = [
                self.compute(hidden_states[:, start:end], cache_params=cache)
                for start, end, cache in self._requests(metadata)
            ]
        return torch.cat(parts, dim=1)

    def _requests(self, metadata: StateMetadata) -> Iterator[tuple[int, int, Cache]]:
        """Yield for each request where its tokens begin and end, and its state as a cache of transformers."""
        starts = metadata.batch.query_start_loc_cpu.tolist()
        num_computed = metadata.batch.num_computed_tokens_cpu.tolist()
        views = mamba_state_views(self.kv_cache[0], self.spec)
        for request, block_id in enumerate(metadata.block_ids):
            states = [view[block_id : block_id + 1] for view in views]
            yield starts[request], starts[request + 1], self._cache(states, num_computed[request] > 0)

    def _cache(self, states: list[torch.Tensor], is_started: bool) -> Cache:
        layer = LinearAttentionLayer(number_of_states=1 + max(tensor.index for tensor in self.tensors))
        for tensor, state in zip(self.tensors, states, strict=True):
            getattr(layer, tensor.kind)[tensor.index] = state
            getattr(layer, f"is_{tensor.kind}_initialized")[tensor.index] = True
            if tensor.kind == "conv_states":
                layer.conv_kernel_size[tensor.index] = state.shape[-1]
        layer.has_previous_state = dict.fromkeys(layer.has_previous_state, is_started)
        # A mixer looks its layer up by index, so put the layer at every index up to its own.
        return Cache(layers=[layer] * (self.layer_idx + 1))
