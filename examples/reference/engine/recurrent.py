"""Recurrent layers of transformers' models, over states that lie in the pool.

All mixers of transformers, of whichever family, keep their states through one interface, `cache_params`. Here each
request's share of a step gets a cache whose tensors are views of the request's page, and is computed by itself.
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

from kvferry.connector.config import RecurrentLayerConfig
from kvferry.connector.kv_cache_specs import MambaSpec
from kvferry.runner_mixin.forward_context import get_forward_context
from kvferry.runner_mixin.hooks import maybe_transfer_kv_layer
from kvferry.runner_mixin.recurrent import StateMetadata
from kvferry.runner_mixin.views import mamba_state_views
from kvferry.transports.errors import ConfigurationError

from .errors import InvalidRequestError
from .types import GenerationRequest

#: Kinds of layers, as transformers calls them, that keep a state instead of a cache or in addition to one.
RECURRENT_KINDS = frozenset({"linear_attention", "hybrid"})

#: The number of tokens does not change a state's shape, but mixers treat a single token in another way.
_PROBE_TOKENS = 2
#: The order in a page. The recurrent part, whose elements may be the wider ones, comes first, so that both are aligned.
_KINDS = ("recurrent_states", "conv_states")


def without_last_prompt_token(source: GenerationRequest) -> GenerationRequest:
    """Return the request to compute so that another node can continue a model with recurrent layers.

    The other node computes the prompt's last token itself, and a state cannot be rolled back by a token. So this node leaves
    that token out. The one token of its answer then follows the shorter prompt, and is not used. For a prompt of one token,
    there is nothing to hand over.

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
    """One tensor of a layer's state: which of transformers' it is, and how it looks for one request."""

    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def find_mixers(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """The model's recurrent layers by name, in the order in which they run."""
    takers = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "layer_idx") and "cache_params" in inspect.signature(module.forward).parameters
    }
    # In some families the block around a mixer takes the cache too, only to pass it on.
    return {
        name: module
        for name, module in takers.items()
        if not any(other.startswith(f"{name}.") for other in takers)
    }


def recurrent_layers(config: PretrainedConfig, dtype: torch.dtype) -> tuple[RecurrentLayerConfig, ...]:
    """Describe the recurrent layers of a model: each is tried without weights, to see what it keeps.

    Args:
        dtype: Of the weights.

    Raises:
        ConfigurationError: a recurrent layer keeps its state in a way that this engine does not know.
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
            f"{len(kinds)} layers of this {config.model_type} model are of kind {kinds[0]!r}, of which this engine "
            f"knows {len(mixers)} to keep their state as transformers' mixers do",
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
    """What a mixer keeps per request, in the order of a page."""
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
    """One recurrent layer, put in the place of its mixer's `forward`; see `install`.

    Attributes:
        spec: How a page holds the state.
        tensors: What the state consists of, in the order of the page.
        compute: The mixer's own `forward`.
        kv_cache: Empty until the pool is bound, then the layer's pages, `(num_blocks, page_size_bytes)` int8.
        num_calls: Steps in which the model used it.
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
        """Take over a mixer of `model`."""
        layer = cls(name, spec, _probe(mixer, model), int(mixer.layer_idx), mixer.forward)  # type: ignore[arg-type]
        mixer.forward = layer.forward
        return layer

    def forward(self, hidden_states: torch.Tensor, **ignored: Any) -> torch.Tensor:
        """Run each request's tokens from its state, and leave the state after them in its page.

        Args:
            hidden_states: `(1, num_tokens, hidden_size)`, the tokens of all requests one after the other.
            ignored: A cache and a mask, which are not this engine's.

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
        """For each request, where its tokens begin and end, and its state as transformers wants it."""
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
        # A mixer finds its layer by its number.
        return Cache(layers=[layer] * (self.layer_idx + 1))
