"""Pipeline parallelism: choose the layers that a stage keeps, and pass a step's hidden states on to the next stage.

Each stage runs the model's own forward pass, in which the layers of the other stages do nothing. So this module need not
know what a model does before, between and after its layers. Only the last stage's logits are valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from ....connector.config import AttentionLayerConfig, EngineConfig, ParallelConfig
from ....connector.kv_cache_specs import KVCacheConfig, KVCacheGroupSpec
from ....runner_mixin.binding import extract_layer_index
from ....transports.errors import ConfigurationError


def require_stages(config: PretrainedConfig, num_stages: int) -> None:
    """Check that a model's layers can be spread over `num_stages` stages.

    Raises:
        ConfigurationError: there are fewer layers than stages, or the engine cannot cut this kind of model.
    """
    if "layers" not in (config.base_model_pp_plan or {}):
        raise ConfigurationError(
            f"this engine cannot spread the layers of {config.model_type} models over several processes",
            key="pipeline_parallel_size",
            value=config.model_type,
        )
    if config.num_hidden_layers < num_stages:
        raise ConfigurationError(
            f"pipeline_parallel_size={num_stages}: this model has {config.num_hidden_layers} layers, and each stage "
            "needs at least one",
            key="pipeline_parallel_size",
            value=num_stages,
        )


def layers_of_stage(num_layers: int, parallel: ParallelConfig) -> range:
    """Return the layers that this rank's stage runs. The stages' numbers of layers differ by at most one."""
    first, end = (
        stage * num_layers // parallel.pipeline_parallel_size
        for stage in (parallel.pipeline_parallel_rank, parallel.pipeline_parallel_rank + 1)
    )
    return range(first, end)


def part_of_stage(
    config: EngineConfig, pool: KVCacheConfig, kept: range
) -> tuple[EngineConfig, KVCacheConfig]:
    """Return a stage's part of the configuration and of the pool: its layers, in the groups of the whole model.

    The groups stay those of the whole model because the block tables, which all stages share, have one list per group.

    Raises:
        ConfigurationError: a group has no layer on this stage, or a layer reads the cache of another stage's layer.
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
    """Say why these layers cannot be a stage; empty if they can."""
    for layer in layers:
        target = layer.kv_sharing_target
        if target and extract_layer_index(target) not in kept:
            return f"{layer.name} reads the cache of {target}"
    if not all(group.layer_names for group in groups):
        return "each stage needs layers of every kind that the model has, and one kind is missing"
    return ""


def cut_to_stage(model: PreTrainedModel, kept: range, parallel: ParallelConfig) -> None:
    """Drop the weights of the other stages' layers, in place.

    The forward pass then needs all stages: each waits for the hidden states of the stage before it.
    """
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
    """Replace a layer's input, which the dropped layers only passed on, by the previous stage's hidden states."""
    hidden = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
    torch.distributed.recv(hidden, rank)
    return (hidden, *inputs[1:])


def _send(hidden: torch.Tensor, rank: int) -> None:
    torch.distributed.send(hidden.contiguous(), rank)
