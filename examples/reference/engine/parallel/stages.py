"""Pipeline parallelism: which layers a stage keeps, and how what they make of a step's tokens gets to the next stage.

Each stage runs the model's own forward, in which the layers of the other stages do nothing: what a model does before,
between and after its layers is its own business. Only the last stage's logits mean anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from kvferry.connector.config import AttentionLayerConfig, EngineConfig, ParallelConfig
from kvferry.connector.kv_cache_specs import KVCacheConfig, KVCacheGroupSpec
from kvferry.runner_mixin.binding import extract_layer_index
from kvferry.transports.errors import ConfigurationError

from ..recurrent import RECURRENT_KINDS


def require_stages(config: PretrainedConfig, num_stages: int) -> None:
    """Check that a model's layers can be spread over `num_stages` stages.

    Raises:
        ConfigurationError: there are fewer layers, or the model is of a kind that cannot be cut here.
    """
    is_recurrent = RECURRENT_KINDS & set(getattr(config, "layer_types", None) or ())
    if is_recurrent or "layers" not in (config.base_model_pp_plan or {}):
        raise ConfigurationError(
            f"this engine cannot spread the layers of {config.model_type} models over several processes",
            key="pipeline_parallel_size",
            value=config.model_type,
        )
    if config.num_hidden_layers < num_stages:
        raise ConfigurationError(
            f"pipeline_parallel_size={num_stages}: this model has {config.num_hidden_layers} layers, and each stage "
            "needs one",
            key="pipeline_parallel_size",
            value=num_stages,
        )


def layers_of_stage(num_layers: int, parallel: ParallelConfig) -> range:
    """The layers that this rank's stage runs; no stage has two more than another."""
    first, end = (
        stage * num_layers // parallel.pipeline_parallel_size
        for stage in (parallel.pipeline_parallel_rank, parallel.pipeline_parallel_rank + 1)
    )
    return range(first, end)


def part_of_stage(
    config: EngineConfig, pool: KVCacheConfig, kept: range
) -> tuple[EngineConfig, KVCacheConfig]:
    """A stage's part of the configuration and of the pool: its layers, in the groups of the whole model.

    Raises:
        ConfigurationError: a group of layers has none on this stage, or a layer reads the cache of another stage's.
    """

    def ours(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in names if extract_layer_index(name) in kept)

    layers = tuple(layer for layer in config.model.layers if ours([layer.name]))
    groups = tuple(replace(group, layer_names=ours(group.layer_names)) for group in pool.kv_cache_groups)
    if why := _misfit(layers, groups, kept):
        num_stages = config.parallel.pipeline_parallel_size
        raise ConfigurationError(
            f"pipeline_parallel_size={num_stages}: layers {kept.start} to {kept.stop - 1} cannot be a stage: {why}",
            key="pipeline_parallel_size",
            value=num_stages,
        )
    tensors = tuple(
        replace(tensor, shared_by=ours(tensor.shared_by))
        for tensor in pool.kv_cache_tensors
        if ours(tensor.shared_by)
    )
    num_layers = sum(len(group.layer_names) for group in pool.kv_cache_groups)
    return (
        replace(config, model=replace(config.model, layers=layers, num_layers=num_layers)),
        replace(pool, kv_cache_tensors=tensors, kv_cache_groups=groups),
    )


def _misfit(layers: Sequence[AttentionLayerConfig], groups: Sequence[KVCacheGroupSpec], kept: range) -> str:
    """Why these layers cannot be a stage; empty if they can."""
    for layer in layers:
        target = layer.kv_sharing_target
        if target and extract_layer_index(target) not in kept:
            return f"{layer.name} reads the cache of {target}"
    if not all(group.layer_names for group in groups):
        return "a kind of the model's layers is not among them, and each stage needs all kinds"
    return ""


def cut_to_stage(model: PreTrainedModel, kept: range, parallel: ParallelConfig) -> None:
    """Drop the weights of the other stages' layers, in place. Its forward then needs all stages, each after the one before."""
    layers: Any = model.get_decoder().layers  # type: ignore[no-untyped-call]
    for index, layer in enumerate(layers):
        if index not in kept:
            layer.to("meta").forward = _pass_on
    rank, distance = parallel.rank, parallel.tensor_parallel_size
    if parallel.pipeline_parallel_rank > 0:
        layers[kept[0]].register_forward_pre_hook(lambda _, inputs: _receive(inputs, rank - distance))
    if not parallel.is_last_stage:
        layers[kept[-1]].register_forward_hook(lambda _, __, hidden: _send(hidden, rank + distance))


def _pass_on(hidden: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return hidden


def _receive(inputs: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """Put what the stage before made of the step's tokens in the place of what was passed on here."""
    hidden = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
    torch.distributed.recv(hidden, rank)
    return (hidden, *inputs[1:])


def _send(hidden: torch.Tensor, rank: int) -> None:
    torch.distributed.send(hidden.contiguous(), rank)
