"""Caches are bound to their layers, in order, and layers can share caches."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvferry.connector.config import AttentionLayerConfig
from kvferry.connector.kv_cache_specs import FullAttentionSpec, KVCacheGroupSpec
from kvferry.runner_mixin import (
    add_kv_sharing_layers_to_kv_cache_groups,
    bind_kv_cache,
    extract_layer_index,
    get_kv_sharing_layers,
    initialize_kv_cache_for_kv_sharing,
)
from kvferry.transports.errors import ConfigurationError, KVTransferStateError

SPEC = FullAttentionSpec(4, 1, 8, torch.float32)


def bind(names, **options):
    caches = {name: torch.full((1,), float(i)) for i, name in enumerate(names)}
    layers = {name: SimpleNamespace(kv_cache=[]) for name in names}
    runner: list[torch.Tensor] = []
    bind_kv_cache(caches, layers, runner, **options)
    assert all(layers[name].kv_cache == [caches[name]] for name in names)
    return [names[int(cache)] for cache in runner]


def test_caches_come_in_the_order_of_the_indices():
    assert bind(["layers.10.attn", "layers.2.attn", "layers.0.attn"]) == [
        "layers.0.attn",
        "layers.2.attn",
        "layers.10.attn",
    ]


def test_names_with_one_index_all_appear():
    names = ["encoder.layers.0.self_attn", "decoder.layers.0.cross_attn", "decoder.layers.0.self_attn"]
    assert sorted(bind(names)) == sorted(names)


def test_several_attention_modules_per_layer():
    names = ["layers.1.attn.0", "layers.0.attn.1", "layers.1.attn.1", "layers.0.attn.0"]
    assert bind(names, num_attn_module=2) == sorted(names)


def test_a_runner_is_bound_once():
    layer = SimpleNamespace(kv_cache=[])
    with pytest.raises(KVTransferStateError, match="bound already"):
        bind_kv_cache({"layers.0": torch.zeros(1)}, {"layers.0": layer}, [torch.zeros(1)])
    assert layer.kv_cache == []


def test_a_cache_without_a_layer_is_named():
    with pytest.raises(ConfigurationError, match=r"layers\.0"):
        bind_kv_cache({"layers.0": torch.zeros(1)}, {}, [])


@pytest.mark.parametrize("name", ["attn", "layers.1.attn.2", "layers.x.attn"])
def test_a_name_without_one_index_is_refused(name):
    with pytest.raises(ConfigurationError, match="needs one number"):
        extract_layer_index(name)


def test_a_module_beyond_the_last_is_refused():
    with pytest.raises(ConfigurationError, match="below 2"):
        extract_layer_index("layers.1.attn.2", num_attn_module=2)
    assert extract_layer_index("layers.3.attn", num_attn_module=2) == 6


@pytest.fixture
def groups():
    return KVCacheGroupSpec(("layers.0", "layers.1"), SPEC), KVCacheGroupSpec(("layers.2",), SPEC)


def test_sharing_layers_join_their_targets_group(groups):
    runner_only: set[str] = set()
    joined = add_kv_sharing_layers_to_kv_cache_groups(
        {"layers.3": "layers.1", "layers.4": "layers.2"}, groups, runner_only
    )
    assert [group.layer_names for group in joined] == [
        ("layers.0", "layers.1", "layers.3"),
        ("layers.2", "layers.4"),
    ]
    assert runner_only == {"layers.3", "layers.4"}
    again = add_kv_sharing_layers_to_kv_cache_groups({"layers.3": "layers.1"}, joined)
    assert again == joined


def test_a_target_without_a_cache_is_named(groups):
    with pytest.raises(ConfigurationError, match=r"'layers\.3' shares the cache of 'layers\.9'"):
        add_kv_sharing_layers_to_kv_cache_groups({"layers.3": "layers.9"}, groups)


def test_a_sharing_layer_has_the_same_tensor_as_its_target(groups):
    caches = {name: torch.zeros(1) for group in groups for name in group.layer_names}
    joined = initialize_kv_cache_for_kv_sharing({"layers.3": "layers.1"}, groups, caches)
    assert caches["layers.3"] is caches["layers.1"]
    assert "layers.3" in joined[0].layer_names


def test_a_target_without_a_tensor_changes_nothing(groups):
    caches: dict[str, torch.Tensor] = {}
    with pytest.raises(ConfigurationError, match=r"layers\.1"):
        initialize_kv_cache_for_kv_sharing({"layers.3": "layers.1"}, groups, caches)
    assert caches == {}


def test_sharing_layers_are_read_from_the_configuration(config):
    sharer = AttentionLayerConfig("layers.3.attn", 2, 8, kv_sharing_target="layers.0.attn")
    model = replace(config.model, layers=(*config.model.layers, sharer))
    assert get_kv_sharing_layers(config) == {}
    assert get_kv_sharing_layers(replace(config, model=model)) == {"layers.3.attn": "layers.0.attn"}
