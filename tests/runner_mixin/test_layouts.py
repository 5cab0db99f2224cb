"""From a model's layers to attention over a pool: all layouts give the same results, and the connector
chooses one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvferry.connector.config import AttentionLayerConfig, CacheConfig
from kvferry.connector.kv_cache_specs import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, KVCacheTensor
from kvferry.runner_mixin import (
    AttentionLayer,
    AttentionParams,
    ForwardContext,
    build_attn_metadata,
    compute_slot_mapping,
    get_kv_cache_spec,
    init_attn_backend,
    init_kv_cache_for_connector,
    kv_transfer_group,
    set_forward_context,
)
from kvferry.runner_mixin.attention import selection
from kvferry.runner_mixin.attention.torch_backend import TorchAttentionBackend

CPU = torch.device("cpu")
BLOCKS = 24


class SmallBlocks(TorchAttentionBackend):
    """Supports blocks of 2 tokens. In memory, heads come before tokens."""

    @staticmethod
    def get_supported_kernel_block_sizes():
        return (2,)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension=False):
        return (1, 0, 2, 4, 3, 5) if include_num_layers_dimension else (0, 1, 3, 2, 4)


@pytest.fixture(autouse=True)
def backends(monkeypatch):
    known = {"TORCH": TorchAttentionBackend, "SMALL": SmallBlocks}
    monkeypatch.setattr(selection, "_BACKENDS", dict.fromkeys(known, "unused:unused"))
    monkeypatch.setattr(selection, "_load", lambda name, path: known[name.upper()])


def plan_pool(specs: dict[str, KVCacheSpec]) -> KVCacheConfig:
    """Make one group per spec. Tensor `i` is shared by the `i`-th layer of each group."""
    groups: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        groups.setdefault(spec, []).append(name)
    size = BLOCKS * next(iter(specs.values())).page_size_bytes
    depth = max(len(names) for names in groups.values())
    tensors = tuple(
        KVCacheTensor(size, tuple(names[i] for names in groups.values() if i < len(names)))
        for i in range(depth)
    )
    return KVCacheConfig(
        BLOCKS, tensors, tuple(KVCacheGroupSpec(tuple(names), spec) for spec, names in groups.items())
    )


class Model:
    """Attention layers over a pool, without the rest of a model."""

    def __init__(self, config, backend="TORCH"):
        self.config = replace(config, cache=CacheConfig(block_size=4, attention_backend=backend))
        self.cache_config = plan_pool(get_kv_cache_spec(self.config, torch.float32))
        setup = init_attn_backend(self.cache_config, self.config, CPU)
        self.layers = {
            layer.name: AttentionLayer(
                layer.name,
                AttentionParams(4, layer.num_kv_heads, layer.head_size, 0.3, layer.sliding_window),
                setup.attn_backends[layer.name],
                writes_cache=not layer.kv_sharing_target,
            )
            for layer in self.config.model.layers
        }
        self.caches: list[torch.Tensor] = []
        self.layout = init_kv_cache_for_connector(
            self.caches, self.layers, self.cache_config, setup, "auto", CPU
        )
        self.builders = setup.metadata_builders

    def run(self, make_batch, lengths=(13, 6), chunk=5):
        """Prefill some sequences chunk by chunk. Returns all outputs of all layers."""
        torch.manual_seed(5)
        data = [torch.randn(len(self.layers), 3, n, 4, 8) for n in lengths]
        for one in data:
            # Each layer gets the same queries, so results differ only because of the cached keys and values.
            one[:, 0] = one[0, 0]
        # Groups share the pool, so each needs its own blocks.
        ids = torch.randperm(BLOCKS - 1)[: len(self.cache_config.kv_cache_groups) * len(lengths) * 4] + 1
        tables = list(
            ids.view(len(self.cache_config.kv_cache_groups), len(lengths), 4).to(torch.int32).unbind()
        )
        outs = []
        for first in range(0, max(lengths), chunk):
            spans = {r: (first, min(first + chunk, n)) for r, n in enumerate(lengths) if first < n}
            batch = make_batch([b - a for a, b in spans.values()], [a for a, _ in spans.values()])
            rows = [table[list(spans)] for table in tables]
            slots = [compute_slot_mapping(table, batch, 4) for table in rows]
            metadata = build_attn_metadata(self.builders, batch, rows, slots)
            with set_forward_context(ForwardContext(self.layers, metadata)):
                for index, layer in enumerate(self.layers.values()):
                    query, key, value = torch.cat([data[r][index, :, a:b] for r, (a, b) in spans.items()], 1)
                    heads = layer.params.num_kv_heads
                    outs.append(layer.forward(query, key[:, :heads], value[:, :heads]))
        return torch.cat(outs)


@pytest.fixture
def hybrid(config):
    """Two layers with full attention, two with a window, and one that reads the first one's cache."""
    layers = [
        AttentionLayerConfig(f"layers.{i}", 2, 8, sliding_window=6 if i % 2 else None) for i in range(4)
    ]
    layers.append(AttentionLayerConfig("layers.4", 2, 8, kv_sharing_target="layers.0"))
    return replace(config, model=replace(config.model, layers=tuple(layers)))


@pytest.fixture
def preferring(connector):
    connector.cross_layers = True
    return connector


@pytest.mark.parametrize("backend", ["TORCH", "SMALL"])
@pytest.mark.parametrize("kind", ["one group", "several groups"])
def test_every_layout_computes_the_same(config, hybrid, make_connector, make_batch, backend, kind):
    config = config if kind == "one group" else hybrid
    expected = Model(config).run(make_batch)
    connector = make_connector()
    connector.cross_layers = True
    with kv_transfer_group(connector):
        uniform = Model(config, backend)
        assert uniform.layout == ("uniform" if kind == "one group" else "hybrid-uniform")
        assert all(cache.shape[2] == (2 if backend == "SMALL" else 4) for cache in uniform.caches)
        torch.testing.assert_close(uniform.run(make_batch), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(Model(config, backend).run(make_batch), expected, rtol=1e-5, atol=1e-6)


def test_a_sharing_layer_attends_to_its_targets_keys(hybrid, make_batch):
    model = Model(hybrid)
    assert model.layers["layers.4"].kv_cache[0] is model.layers["layers.0"].kv_cache[0]
    outs = model.run(make_batch, lengths=(5,)).view(5, 5, 4, 8)
    assert outs[4].equal(outs[0])
    assert not outs[2].equal(outs[0])


def test_one_group_is_registered_as_one_tensor(preferring, config):
    model = Model(config)
    assert model.layout == "uniform"
    cross_layers, backend = preferring.registered_cross_layers
    assert cross_layers.shape == (3, BLOCKS, 2, 4, 2, 8)
    assert backend is TorchAttentionBackend
    assert preferring.registered == {}
    assert [row.data_ptr() for row in cross_layers] == [cache.data_ptr() for cache in model.caches]


def test_several_groups_are_registered_as_views_of_one_buffer(preferring, hybrid):
    model = Model(hybrid)
    assert model.layout == "hybrid-uniform"
    assert preferring.registered_cross_layers is None
    assert all(model.layers[name].kv_cache[0] is cache for name, cache in preferring.registered.items())
    (pool,) = preferring.allocated
    pointers = {cache.untyped_storage().data_ptr() for cache in preferring.registered.values()}
    assert pointers == {pool.data_ptr()}


def test_a_connector_that_prefers_separate_layers_gets_them(connector, config):
    assert Model(config).layout == "per-layer"
    assert connector.registered.keys() == {layer.name for layer in config.model.layers}
    assert all(cache.is_contiguous() for cache in connector.registered.values())
    assert connector.registered_cross_layers is None


@pytest.mark.parametrize("cross_layers", [True, False])
def test_a_layer_that_reads_anothers_cache_is_not_registered(connector, hybrid, cross_layers):
    connector.cross_layers = cross_layers
    assert len(Model(hybrid).caches) == 5
    assert connector.registered.keys() == {f"layers.{i}" for i in range(4)}
