"""From the model's layers to bound caches, layer by layer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvferry.connector.config import AttentionLayerConfig, CacheConfig
from kvferry.connector.kv_cache_specs import (
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvferry.runner_mixin import (
    get_kv_cache_spec,
    init_attn_backend,
    init_kv_cache,
    mamba_state_views,
    resolve_kv_cache_dtype,
)
from kvferry.runner_mixin.attention import selection
from kvferry.runner_mixin.attention.torch_backend import TorchAttentionBackend
from kvferry.runner_mixin.kv_caches import _allocate_kv_cache, _reshape_kv_cache
from kvferry.transports.errors import ConfigurationError

CPU = torch.device("cpu")
F32 = torch.float32


class HeadsFirst(TorchAttentionBackend):
    """Supports blocks of 2 tokens, with heads before tokens in memory. Needs scratch memory."""

    @staticmethod
    def get_supported_kernel_block_sizes():
        return (2,)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension=False):
        return (1, 0, 2, 4, 3, 5) if include_num_layers_dimension else (0, 1, 3, 2, 4)

    @staticmethod
    def get_workspace_bytes():
        return 64


@pytest.fixture
def heads_first(config, monkeypatch):
    """A configuration that uses `HeadsFirst`."""
    monkeypatch.setitem(selection._BACKENDS, "HEADS_FIRST", "unused:HeadsFirst")
    monkeypatch.setattr(selection, "_load", lambda name, path: HeadsFirst)
    return replace(config, cache=CacheConfig(block_size=4, attention_backend="HEADS_FIRST"))


def with_layers(config, *layers):
    return replace(config, model=replace(config.model, layers=layers))


def layers_of(*names):
    return {name: SimpleNamespace(kv_cache=[]) for name in names}


def test_specs_of_decoder_layers(config):
    config = with_layers(
        config,
        AttentionLayerConfig("layers.0", 2, 8),
        AttentionLayerConfig("layers.1", 2, 8, sliding_window=16),
        AttentionLayerConfig("encoder.layers.0", 2, 8, is_decoder=False),
        AttentionLayerConfig("layers.2", 2, 8, kv_sharing_target="layers.0"),
        AttentionLayerConfig("layers.3", 2, 8, attention_chunk_size=32),
    )
    assert get_kv_cache_spec(config, torch.bfloat16) == {
        "layers.0": FullAttentionSpec(4, 2, 8, torch.bfloat16),
        "layers.1": SlidingWindowSpec(4, 2, 8, torch.bfloat16, sliding_window=16),
        "layers.3": ChunkedLocalAttentionSpec(4, 2, 8, torch.bfloat16, attention_chunk_size=32),
    }


def test_the_cache_dtype_is_the_models_unless_it_is_set(config):
    assert resolve_kv_cache_dtype(config) is F32
    stored = replace(config, cache=CacheConfig(cache_dtype="float16"))
    assert resolve_kv_cache_dtype(stored) is torch.float16


@pytest.mark.parametrize("name", ["fp7", "int8", "nn"])
def test_a_dtype_that_torch_lacks_is_named(config, name):
    with pytest.raises(ConfigurationError, match=f"cache_dtype='{name}'"):
        resolve_kv_cache_dtype(replace(config, cache=CacheConfig(cache_dtype=name)))
    with pytest.raises(ConfigurationError, match=f"^dtype='{name}'"):
        resolve_kv_cache_dtype(replace(config, model=replace(config.model, dtype=name)))


def test_each_group_has_one_backend_and_one_builder(config, kv_cache_config):
    setup = init_attn_backend(kv_cache_config, config, CPU)
    assert set(setup.attn_backends.values()) == {TorchAttentionBackend}
    assert len(setup.attn_groups) == len(setup.metadata_builders) == 1
    assert setup.kernel_block_sizes == [4]
    assert setup.metadata_builders[0].group is setup.attn_groups[0][0]


def test_builders_share_one_workspace(heads_first):
    specs = [FullAttentionSpec(4, 2, 8, F32), SlidingWindowSpec(4, 2, 8, F32, sliding_window=8)]
    groups = tuple(KVCacheGroupSpec((f"layers.{i}",), spec) for i, spec in enumerate(specs))
    setup = init_attn_backend(KVCacheConfig(4, (), groups), heads_first, CPU)
    first, second = setup.metadata_builders
    assert first.workspace is second.workspace
    assert first.workspace.numel() == 64
    assert (first.kernel_block_size, second.kernel_block_size) == (2, 2)


def test_a_composite_group_has_a_builder_for_each_shape_and_others_none(config):
    small, large = FullAttentionSpec(4, 1, 8, F32), FullAttentionSpec(4, 2, 8, F32)
    composite = UniformTypeKVCacheSpecs(4, {"layers.0": small, "layers.1": large, "layers.2": small})
    mamba = MambaSpec(16, shapes=((4,),), dtypes=(F32,))
    groups = (
        KVCacheGroupSpec(("layers.0", "layers.1", "layers.2"), composite),
        KVCacheGroupSpec(("layers.3",), mamba),
        KVCacheGroupSpec(("encoder.layers.0",), EncoderOnlyAttentionSpec(4, 1, 8, F32)),
    )
    setup = init_attn_backend(KVCacheConfig(4, (), groups), config, CPU)
    assert [[group.layer_names for group in groups] for groups in setup.attn_groups] == [
        [("layers.0", "layers.2"), ("layers.1",)],
        [],
        [("encoder.layers.0",)],
    ]
    assert [b.group.kv_cache_group_id for b in setup.metadata_builders] == [0, 0]
    assert "layers.3" not in setup.attn_backends


def test_all_tensors_are_cut_from_one_piece_of_memory(connector, kv_cache_config):
    raw = _allocate_kv_cache(kv_cache_config, CPU)
    (pool,) = connector.allocated
    assert {tensor.untyped_storage().data_ptr() for tensor in raw.values()} == {pool.data_ptr()}
    assert all((tensor.data_ptr() - pool.data_ptr()) % 4096 == 0 for tensor in raw.values())
    assert all(tensor.dtype == torch.int8 and not tensor.any() for tensor in raw.values())
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.numel()) for tensor in raw.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_layers_that_share_a_tensor_have_the_same_bytes(kv_cache_config):
    size = kv_cache_config.kv_cache_tensors[0].size
    names = kv_cache_config.kv_cache_groups[0].layer_names
    raw = _allocate_kv_cache(replace(kv_cache_config, kv_cache_tensors=(KVCacheTensor(size, names),)), CPU)
    assert raw[names[0]] is raw[names[1]] is raw[names[2]]


def test_a_layer_without_a_tensor_is_named(connector, kv_cache_config):
    short = replace(kv_cache_config, kv_cache_tensors=kv_cache_config.kv_cache_tensors[:2])
    with pytest.raises(ConfigurationError, match=r"layers\.2\.attn"):
        _allocate_kv_cache(short, CPU)
    assert connector.allocated == []


def test_a_cache_is_seen_in_logical_order(heads_first, kv_cache_config):
    setup = init_attn_backend(kv_cache_config, heads_first, CPU)
    raw = _allocate_kv_cache(kv_cache_config, CPU)
    caches = _reshape_kv_cache(kv_cache_config, raw, setup.attn_backends, setup.kernel_block_sizes)
    for name, cache in caches.items():
        assert cache.data_ptr() == raw[name].data_ptr()
        # 6 blocks of 4 tokens are 12 kernel blocks of 2. Heads come before tokens in memory.
        assert cache.shape == (12, 2, 2, 2, 8)
        assert cache.stride() == (64, 32, 8, 16, 1)
        assert cache.dtype == F32


def test_a_size_that_is_not_a_multiple_of_the_page_is_refused(config, kv_cache_config):
    setup = init_attn_backend(kv_cache_config, config, CPU)
    raw = {name: torch.zeros(100, dtype=torch.int8) for name in setup.attn_backends}
    with pytest.raises(ConfigurationError, match="100 bytes is not a multiple of the page of 512 bytes"):
        _reshape_kv_cache(kv_cache_config, raw, setup.attn_backends, setup.kernel_block_sizes)


def test_a_backend_that_does_not_store_what_the_spec_says_is_refused(config):
    latent = FullAttentionSpec(4, 1, 8, F32, use_mla=True)
    cache_config = KVCacheConfig(
        2,
        (KVCacheTensor(2 * latent.page_size_bytes, ("layers.0",)),),
        (KVCacheGroupSpec(("layers.0",), latent),),
    )
    setup = init_attn_backend(cache_config, config, CPU)
    with pytest.raises(ConfigurationError, match="does not store what the spec says"):
        init_kv_cache([], layers_of("layers.0"), cache_config, setup, CPU)


def test_caches_are_bound_in_order(config, kv_cache_config):
    layers, runner = layers_of(*kv_cache_config.kv_cache_groups[0].layer_names), []
    setup = init_attn_backend(kv_cache_config, config, CPU)
    caches = init_kv_cache(runner, layers, kv_cache_config, setup, CPU)
    assert [cache.data_ptr() for cache in runner] == [caches[name].data_ptr() for name in sorted(caches)]
    assert all(layers[name].kv_cache[0] is caches[name] for name in caches)


def test_a_layer_reads_the_cache_of_another(config, kv_cache_config):
    sharer = AttentionLayerConfig("layers.3.attn", 2, 8, kv_sharing_target="layers.1.attn")
    config = with_layers(config, *config.model.layers, sharer)
    setup = init_attn_backend(kv_cache_config, config, CPU)
    layers = layers_of(*setup.attn_backends)
    runner: list[torch.Tensor] = []
    init_kv_cache(runner, layers, kv_cache_config, setup, CPU)
    assert layers["layers.3.attn"].kv_cache[0] is layers["layers.1.attn"].kv_cache[0]
    assert len(runner) == 4
    assert "layers.3.attn" in setup.metadata_builders[0].group.layer_names


def test_a_recurrent_layer_keeps_opaque_pages(config):
    spec = MambaSpec(64, shapes=((3, 2), (5,)), dtypes=(torch.float32, torch.bfloat16), page_size_padded=40)
    cache_config = KVCacheConfig(
        3, (KVCacheTensor(120, ("layers.0",)),), (KVCacheGroupSpec(("layers.0",), spec),)
    )
    setup = init_attn_backend(cache_config, config, CPU)
    layers = layers_of("layers.0")
    init_kv_cache([], layers, cache_config, setup, CPU)
    (pages,) = layers["layers.0"].kv_cache
    assert pages.shape == (3, 40)
    first, second = mamba_state_views(pages, spec)
    assert (first.shape, second.shape) == ((3, 3, 2), (3, 5))
    first[1], second[1] = 1.0, 2.0
    assert pages[1, :24].view(torch.float32).eq(1).all()
    assert pages[1, 24:34].view(torch.bfloat16).eq(2).all()
    assert not pages[0].any()
    assert not pages[2].any()
