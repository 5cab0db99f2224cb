"""Which layers a pipeline stage runs, which part of the pool it keeps, and which models cannot be split into stages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from kvferry.connector.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from kvferry.connector.kv_cache_specs import KVCacheConfig
from kvferry.lab.engine.attention import attention_layers
from kvferry.lab.engine.core import EngineCore
from kvferry.lab.engine.memory import plan_pool
from kvferry.lab.engine.parallel.stages import cut_to_stage, layers_of_stage, part_of_stage
from kvferry.lab.engine.settings import EngineSettings
from kvferry.lab.engine.weights import load_model
from kvferry.transports.errors import ConfigurationError

TinyModel = Callable[[str], Path]
CPU = torch.device("cpu")


def stage_of(rank: int, num_stages: int) -> ParallelConfig:
    return ParallelConfig(pipeline_parallel_size=num_stages, pipeline_parallel_rank=rank)


def planned(folder: Path, parallel: ParallelConfig) -> tuple[EngineConfig, KVCacheConfig]:
    """Return the whole model's configuration and pool."""
    layers = attention_layers(AutoConfig.from_pretrained(folder))
    model = ModelConfig("tiny", "float32", 16, layers)
    config = EngineConfig(model, CacheConfig(4, num_blocks_override=16), parallel=parallel)
    return plan_pool(config, CPU, may_shorten=False)


@pytest.mark.parametrize(("num_layers", "num_stages"), [(3, 2), (30, 4), (5, 5)])
def test_each_layer_is_on_one_stage_in_order_and_no_stage_has_two_more_than_another(
    num_layers: int, num_stages: int
) -> None:
    stages = [layers_of_stage(num_layers, stage_of(rank, num_stages)) for rank in range(num_stages)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_each_stage_keeps_its_layers_of_every_group_of_the_pool(family: str, tiny_model: TinyModel) -> None:
    whole, pool = planned(tiny_model(family), stage_of(0, 2))
    stages = [
        part_of_stage(*planned(tiny_model(family), stage_of(rank, 2)), kept)
        for rank, kept in enumerate(
            layers_of_stage(len(whole.model.layers), stage_of(rank, 2)) for rank in range(2)
        )
    ]
    assert [layer for config, _ in stages for layer in config.model.layers] == list(whole.model.layers)
    assert {config.model.num_layers for config, _ in stages} == {len(whole.model.layers)}
    for index, group in enumerate(pool.kv_cache_groups):
        parts = [part.kv_cache_groups[index] for _, part in stages]
        assert {part.kv_cache_spec for part in parts} == {group.kv_cache_spec}
        assert sorted(name for part in parts for name in part.layer_names) == sorted(group.layer_names)
    assert {part.num_blocks for _, part in stages} == {pool.num_blocks}
    for config, part in stages:
        tensors = [name for tensor in part.kv_cache_tensors for name in tensor.shared_by]
        assert sorted(tensors) == sorted(layer.name for layer in config.model.layers)


def test_the_weights_of_other_stages_are_dropped(tiny_model: TinyModel) -> None:
    model: Any = load_model(tiny_model("llama"), torch.float32, CPU, "eager")
    cut_to_stage(model, range(1), stage_of(0, 2))
    first, *others = model.model.layers
    assert {weight.device for weight in first.parameters()} == {CPU}
    assert {weight.device.type for layer in others for weight in layer.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("family", "num_stages", "why"),
    [
        ("gemma2", 4, "each stage needs layers of every kind"),
        ("gemma3n", 2, r"layers.4.self_attn reads the cache of model.layers.2.self_attn"),
    ],
)
def test_a_stage_without_some_kind_of_the_models_layers_is_refused(
    family: str, num_stages: int, why: str, tiny_model: TinyModel
) -> None:
    last = stage_of(num_stages - 1, num_stages)
    config, pool = planned(tiny_model(family), last)
    kept = layers_of_stage(len(config.model.layers), last)
    with pytest.raises(ConfigurationError, match=why) as error:
        part_of_stage(config, pool, kept)
    assert (error.value.key, error.value.value) == ("pipeline_parallel_size", num_stages)


@pytest.mark.parametrize(
    ("family", "num_stages", "why"),
    [
        ("llama", 4, "pipeline_parallel_size=4: this model has 3 layers"),
    ],
)
def test_a_model_with_too_few_layers_or_a_state_is_refused_before_any_process_starts(
    family: str, num_stages: int, why: str, tiny_model: TinyModel
) -> None:
    with pytest.raises(ConfigurationError, match=why) as error:
        EngineCore(EngineSettings(str(tiny_model(family)), block_size=16, pipeline_parallel_size=num_stages))
    assert error.value.key == "pipeline_parallel_size"


def test_stages_are_only_for_the_cpu() -> None:
    with pytest.raises(ConfigurationError, match="pipeline_parallel_size=2 is for the CPU"):
        EngineSettings(pipeline_parallel_size=2, device="cuda")
