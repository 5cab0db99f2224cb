"""vLLM's configuration in kvferry's words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...transports.errors import ConfigurationError
from ...transports.registry import check_options
from ..config import (
    CacheConfig,
    EngineConfig,
    KVTransferConfig,
    ModelConfig,
    ModelIdentity,
    ParallelConfig,
)
from ..kv_cache_specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from ..p2p.options import ConnectorOptions
from ..p2p.params import DEFAULT_MAX_TOKENS, MOST_TOKENS
from .identity import model_name

if TYPE_CHECKING:
    import torch

#: Ways of spreading one request over ranks that this connector does not support.
_UNSUPPORTED_SIZES = (
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
)
#: Part of vLLM's configuration, option that must be off, and why.
_UNSUPPORTED_FLAGS = (
    ("cache_config", "calculate_kv_scales", "a peer that has other scales would misread the cache"),
)
#: Parts of the names of layers that only draft models have.
_DRAFT_ROOTS = frozenset({"draft_model", "mtp"})
#: vLLM's kinds of cache of which a request keeps all blocks, in the order of its block table, `block_size`
#: tokens per block.
_KINDS_THAT_KEEP_ALL = frozenset({"FullAttentionSpec", "TQFullAttentionSpec", "MLAAttentionSpec"})
#: These, and those that free blocks that no later token sees.
_KINDS = _KINDS_THAT_KEEP_ALL | {
    "SlidingWindowSpec",
    "SlidingWindowMLASpec",
    "ChunkedLocalAttentionSpec",
}


def connector_options(mapping: Mapping[str, Any]) -> ConnectorOptions:
    """Parse `kv_connector_extra_config`, and ask the transport whether it knows its options.

    Raises:
        ConfigurationError: a key is unknown, or has a value that is not allowed; the error names it.
        BackendUnavailableError: the transport cannot be loaded.
    """
    options = ConnectorOptions.from_mapping(mapping)
    check_options(options.transport, options.transport_options)
    return options


def engine_config(
    vllm_config: Any,
    pool: KVCacheConfig,
    tensor_parallel_rank: int = 0,
    pipeline_parallel_rank: int = 0,
    num_layers: int = 0,
    epoch: int = 0,
    identity: ModelIdentity | None = None,
) -> EngineConfig:
    """Translate the part of vLLM's configuration that a handoff depends on.

    Args:
        pool: The pool of one rank.
        num_layers: Layers that keep a cache, over all pipeline stages; 0 if there is one stage.
        identity: Digests of the model's files. Only a worker half needs it, because it talks to peers.

    Raises:
        ConfigurationError: a request's cache would be spread over ranks in a way that is not supported, or a
            peer could not rely on the cache.
    """
    _refuse_unsupported(vllm_config)
    parallel, model, transfer = (
        vllm_config.parallel_config,
        vllm_config.model_config,
        vllm_config.kv_transfer_config,
    )
    return EngineConfig(
        model=ModelConfig(
            getattr(getattr(model, "hf_config", None), "model_type", None) or model_name(model),
            _dtype_name(model.dtype),
            model.max_model_len,
            num_layers=num_layers,
            num_kv_heads=_num_kv_heads(model, parallel.tensor_parallel_size, _specs(pool, drafts=False)),
            num_draft_kv_heads=_num_kv_heads(
                getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None),
                parallel.tensor_parallel_size,
                _specs(pool, drafts=True),
            ),
            identity=identity or ModelIdentity(),
        ),
        cache=CacheConfig(block_size=vllm_config.cache_config.block_size),
        parallel=ParallelConfig(
            parallel.tensor_parallel_size,
            tensor_parallel_rank,
            getattr(parallel, "pipeline_parallel_size", 1),
            pipeline_parallel_rank,
            epoch,
        ),
        kv_transfer=KVTransferConfig(
            kv_connector=transfer.kv_connector,
            kv_role=transfer.kv_role,
            engine_id=transfer.engine_id,
            kv_load_failure_policy=transfer.kv_load_failure_policy,
        ),
    )


def kv_cache_config(config: Any, vllm_config: Any = None) -> KVCacheConfig:
    """Translate vLLM's pool: its blocks and the groups that are handed over.

    Where the bytes lie is read off the tensors.

    Args:
        vllm_config: It tells a draft model's layers from the others; without it there are none.

    Raises:
        ConfigurationError: a group's layers keep something that cannot be handed over.
    """
    groups = tuple(
        KVCacheGroupSpec(tuple(group.layer_names), _group_spec(group))
        for group in served_groups(config, vllm_config).values()
    )
    names = (name for group in groups for name in group.layer_names)
    return KVCacheConfig(config.num_blocks, (), groups, frozenset(draft_layers(vllm_config, names)))


def served_groups(config: Any, vllm_config: Any = None) -> dict[int, Any]:
    """Return the groups of vLLM's pool that are handed over, by their index.

    vLLM marks a group as not to be transferred if its contents can be made from those of another group. A
    group of a draft model is left out if it keeps something that cannot be handed over, because no answer
    depends on it.
    """
    return {
        index: group
        for index, group in enumerate(config.kv_cache_groups)
        if getattr(group, "enable_kv_transfer", True) and not _is_unknown_draft(group, vllm_config)
    }


def _is_unknown_draft(group: Any, vllm_config: Any) -> bool:
    names = group.layer_names
    if not names or len(draft_layers(vllm_config, names)) < len(names):
        return False
    try:
        _group_spec(group)
    except ConfigurationError:
        return True
    return False


def draft_layers(vllm_config: Any, names: Iterable[str]) -> list[str]:
    """Return those of the layers that belong to a draft model.

    vLLM adds them after the target model's layers: with higher numbers, or below a name of their own.
    """
    settings = getattr(vllm_config, "speculative_config", None)
    if getattr(settings, "draft_model_config", None) is None:
        return []
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()

    def is_draft(name: str) -> bool:
        parts = name.split(".")
        number = next((int(part) for part in parts if part.isdecimal()), 0)
        return number >= num_layers or not _DRAFT_ROOTS.isdisjoint(parts)

    return [name for name in names if is_draft(name)]


def require_whole_caches(config: Any, kv_caches: Mapping[str, torch.Tensor], vllm_config: Any = None) -> None:
    """Check that the tensors that vLLM registers contain everything that each layer keeps.

    Args:
        config: vLLM's pool.
        kv_caches: Layer → its cache.
        vllm_config: As in `kv_cache_config`.

    Raises:
        ConfigurationError: some of it is kept elsewhere, where it would not be handed over.
    """
    for name, page_size in _page_sizes(served_groups(config, vllm_config).values()).items():
        # Some versions of vLLM register a state as a list of tensors, which has no `nbytes`.
        needed, registered = config.num_blocks * page_size, getattr(kv_caches.get(name), "nbytes", 0)
        if registered < needed:
            raise ConfigurationError(
                f"layer {name} keeps {needed} bytes, of which vLLM registers {registered}"
            )


def host_fields(vllm_config: Any, layer_names: list[str]) -> dict[str, str]:
    """What must be equal on a peer although kvferry does not know what it means: vLLM's kernels and how they
    pack a page.

    Raises:
        ConfigurationError: it is not known how a page is packed.
    """
    import vllm

    layers = vllm_config.compilation_config.static_forward_context
    known = [layers[name] for name in layer_names if name in layers]
    backends = {layer.get_attn_backend().get_name() for layer in known if hasattr(layer, "get_attn_backend")}
    return {
        "engine": f"vllm {vllm.__version__}",
        "attention_backend": ", ".join(sorted(backends)),
        "packing": ", ".join(sorted(set(map(_packing, known)))),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
    }


def answer_fields(vllm_config: Any) -> dict[str, str | int]:
    """Return what decides an answer but not the cache of its prompt: how a token is chosen if the request
    does not say it.
    """
    model = vllm_config.model_config
    sampling = model.get_diff_sampling_param()
    default = int(sampling.get("max_tokens") or 0)
    # As vLLM's servers do it: the limit of a model's own file counts where a request has none, and one that
    # the operator gives counts always.
    overrides = getattr(model, "override_generation_config", None) or {}
    is_from_operator = getattr(model, "generation_config", "auto") not in ("auto", "vllm")
    most = default if is_from_operator else int(overrides.get("max_new_tokens") or 0)
    # vLLM ends answers at these, although they are no sampling parameters.
    generation: Mapping[str, Any] = getattr(model, "try_get_generation_config", dict)()
    return {
        "sampling": json.dumps(sampling, sort_keys=True),
        DEFAULT_MAX_TOKENS: default,
        MOST_TOKENS: most,
        "stop_tokens": json.dumps(generation.get("eos_token_id")),
        "logits_processors": str(getattr(model, "logits_processors", None) or ""),
    }


def can_continue_answers(vllm_config: Any) -> bool:
    """Whether another server can go on with an answer: the next token depends on nothing but the tokens so
    far.

    The other server takes the answer so far for a part of the prompt. Its penalties do not count that, and
    nothing is known of custom logits processors.
    """
    model = vllm_config.model_config
    sampling = model.get_diff_sampling_param()
    has_penalty = any(sampling.get(name) for name in ("presence_penalty", "frequency_penalty"))
    return not has_penalty and not getattr(model, "logits_processors", None)


def event_publisher(vllm_config: Any) -> dict[str, Any]:
    """Return where vLLM publishes its KV events, as a description says it; empty if a router could not
    connect there.
    """
    config = getattr(vllm_config, "kv_events_config", None)
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
        return {}
    parallel = vllm_config.parallel_config
    rank = getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0))
    port = _port_of(config.endpoint)
    replay_port = _port_of(config.replay_endpoint or "")
    if not port:
        return {}
    names = vllm_config.model_config.served_model_name or vllm_config.model_config.model
    return {
        # vLLM publishes at the next ports for further ranks.
        "port": port + rank,
        "replay_port": replay_port and replay_port + rank,
        "topic": config.topic,
        "models": [names] if isinstance(names, str) else list(names),
    }


def _port_of(endpoint: str) -> int:
    """Return the port at which vLLM listens for an endpoint; 0 if it listens at none, or at one that it
    draws.
    """
    is_listening = endpoint.startswith("tcp://") and ("*" in endpoint or "::" in endpoint)
    port = endpoint.rpartition(":")[2]
    return int(port) if is_listening and port.isdecimal() else 0


def state_fields(config: Any) -> dict[str, str]:
    """Return what must be equal on a peer for recurrent states, which are handed over as opaque bytes; empty
    without states.

    The order of a state's axes depends on the machine and on vLLM's settings, but its size does not.

    Args:
        config: vLLM's pool.
    """
    states = {
        " ".join(
            f"{_dtype_name(dtype)}{list(shape)}"
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
        for spec in _layer_specs(config.kv_cache_groups).values()
        if type(spec).__name__ == "MambaSpec"
    }
    return {"states": ", ".join(sorted(states))} if states else {}


def _page_sizes(groups: Iterable[Any]) -> dict[str, int]:
    """Return the bytes that each layer keeps per block, without padding."""
    specs = _layer_specs(groups)
    return {
        name: getattr(spec, "real_page_size_bytes", None) or spec.page_size_bytes
        for name, spec in specs.items()
    }


def _layer_specs(groups: Iterable[Any]) -> dict[str, Any]:
    """Return vLLM's spec of each layer."""
    specs: dict[str, Any] = {}
    for group in groups:
        spec = group.kv_cache_spec
        specs.update(getattr(spec, "kv_cache_specs", None) or dict.fromkeys(group.layer_names, spec))
    return specs


def _packing(layer: Any) -> str:
    """The instruction set for which CPU attention has ordered a layer's keys; vLLM before 0.29 knows it one
    level below.
    """
    packing = getattr(layer, "isa", "") or getattr(getattr(layer, "impl", None), "isa", "")
    if (
        not packing
        and hasattr(layer, "get_attn_backend")
        and layer.get_attn_backend().get_name() == "CPU_ATTN"
    ):
        raise ConfigurationError(
            "unknown order of the keys in vLLM's CPU attention: this vLLM does not report it"
        )
    return str(packing)


def _refuse_unsupported(vllm_config: Any) -> None:
    import vllm

    for key in _UNSUPPORTED_SIZES:
        if (size := getattr(vllm_config.parallel_config, key, 1)) != 1:
            raise ConfigurationError(f"{key}={size}: only 1 is supported", key=key, value=size)
    if getattr(vllm_config.model_config, "enable_sleep_mode", False) and not _tells_of_sleep():
        raise ConfigurationError(
            f"enable_sleep_mode is not supported with vLLM {vllm.__version__}: its workers do not tell connectors when "
            "the cache goes, and peers would go on reading it; use vLLM 0.33 or later, or leave out --enable-sleep-mode",
            key="enable_sleep_mode",
            value=True,
        )
    for part, key, why in _UNSUPPORTED_FLAGS:
        if getattr(getattr(vllm_config, part), key, False):
            raise ConfigurationError(f"{key} is not supported: {why}", key=key, value=True)


def _tells_of_sleep() -> bool:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return hasattr(KVConnectorBase_V1, "unregister_kv_caches")


def _num_kv_heads(model: Any, num_ranks: int, specs: Iterable[AttentionSpec]) -> int:
    """Return the KV heads per layer of a whole model, from vLLM's model configuration; 0 if layers differ
    from it.

    The number tells ranks that share one head from ranks that have one head each.
    """
    total: int = model.get_total_num_kv_heads() if hasattr(model, "get_total_num_kv_heads") else 0
    here = {spec.num_kv_heads for spec in specs}
    return total if here == {max(total // num_ranks, 1)} else 0


def _specs(pool: KVCacheConfig, *, drafts: bool) -> Iterator[AttentionSpec]:
    """Yield the specs of the draft model's attention layers, or of all others."""
    for group in pool.kv_cache_groups:
        spec = group.kv_cache_spec
        for name in group.layer_names:
            own = spec.kv_cache_specs.get(name) if isinstance(spec, UniformTypeKVCacheSpecs) else spec
            if isinstance(own, AttentionSpec) and (name in pool.draft_layers) == drafts:
                yield own


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _group_spec(group: Any) -> KVCacheSpec:
    if getattr(group, "host_resident", False):
        raise ConfigurationError(
            f"layers {group.layer_names} keep their cache in a pool of their own, which is not served"
        )
    spec = group.kv_cache_spec
    if (members := getattr(spec, "kv_cache_specs", None)) is not None:
        specs = {name: _layer_spec(name, member) for name, member in members.items()}
        return UniformTypeKVCacheSpecs(spec.block_size, specs)
    return _layer_spec(next(iter(group.layer_names), "(none on this rank)"), spec)


def _layer_spec(name: str, spec: Any) -> KVCacheSpec:
    kind = type(spec).__name__
    if kind == "MambaSpec":
        return MambaSpec(spec.block_size, tuple(spec.shapes), tuple(spec.dtypes), spec.page_size_padded)
    if kind not in _KINDS:
        raise ConfigurationError(f"layer {name} keeps a {kind}, of which blocks cannot be handed over")
    fields = {
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "dtype": spec.dtype,
        "use_mla": getattr(spec, "head_size_v", spec.head_size) == 0,
    }
    if kind in _KINDS_THAT_KEEP_ALL:
        return FullAttentionSpec(spec.block_size, **fields)
    if kind == "ChunkedLocalAttentionSpec":
        return ChunkedLocalAttentionSpec(
            spec.block_size, **fields, attention_chunk_size=spec.attention_chunk_size
        )
    # With some draft models a request keeps more than the window.
    window = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
    return SlidingWindowSpec(spec.block_size, **fields, sliding_window=window)
