"""The uniform layout: one block of all layers is one run of bytes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from kvferry.connector.kv_cache_specs import KVCacheTensor, MambaSpec
from kvferry.runner_mixin import AttentionGroup, KVConnectorModelRunnerMixin
from kvferry.runner_mixin.attention.torch_backend import TorchAttentionBackend
from kvferry.transports.errors import ConfigurationError

CPU = torch.device("cpu")
use_uniform_kv_cache = KVConnectorModelRunnerMixin.use_uniform_kv_cache
allocate_uniform_kv_caches = KVConnectorModelRunnerMixin.allocate_uniform_kv_caches


@pytest.fixture
def group(kv_cache_config):
    (group,) = kv_cache_config.kv_cache_groups
    return AttentionGroup(TorchAttentionBackend, group.layer_names, group.kv_cache_spec, 0)


@pytest.fixture
def preferring(connector):
    connector.cross_layers = True
    return connector


def run_of(view, blocks):
    """Return the start and end address of some blocks of one layer, which must be one run of bytes."""
    part = view[blocks]
    itemsize = part.element_size()
    start = part.data_ptr()
    extent = sum((n - 1) * s for n, s in zip(part.shape, part.stride(), strict=True)) + 1
    assert extent == part.numel()
    return start, start + extent * itemsize


def test_used_when_everything_holds(preferring, group):
    assert use_uniform_kv_cache([[group]], "auto")


def test_not_without_a_connector(group):
    assert not use_uniform_kv_cache([[group]], "auto")


def test_not_for_a_connector_that_does_not_prefer_it(connector, group):
    assert not use_uniform_kv_cache([[group]], "auto")


@pytest.mark.parametrize("shape", [[], [[]], ["g", "g"], ["gg"]])
def test_not_unless_there_is_one_group_with_one_backend(preferring, group, shape):
    assert not use_uniform_kv_cache([[group for _ in names] for names in shape], "auto")


def test_not_for_layers_without_attention(preferring, group):
    mamba = MambaSpec(4, shapes=((4,),), dtypes=(torch.float32,))
    assert not use_uniform_kv_cache([[replace(group, kv_cache_spec=mamba)]], "auto")


def raising(error):
    def order(include_num_layers_dimension=False):
        raise error

    return order


@pytest.mark.parametrize(
    "order",
    [
        raising(NotImplementedError()),
        raising(AttributeError()),
        lambda include_num_layers_dimension=False: (0, 1, 2, 3, 4),
    ],
)
def test_not_without_an_order_for_layers(preferring, group, order):
    backend = type("Backend", (TorchAttentionBackend,), {"get_kv_cache_stride_order": staticmethod(order)})
    assert not use_uniform_kv_cache([[replace(group, backend=backend)]], "auto")


@pytest.mark.parametrize("kernel_block_size", [4, 2, 1])
def test_a_block_of_all_layers_is_one_run(preferring, kv_cache_config, group, kernel_block_size):
    views, cross_layers, backend = allocate_uniform_kv_caches(
        kv_cache_config, [[group]], "auto", CPU, [kernel_block_size]
    )
    assert backend is TorchAttentionBackend
    split = 4 // kernel_block_size
    assert cross_layers.shape == (3, 6 * split, 2, kernel_block_size, 2, 8)
    (pool,) = preferring.allocated
    block_bytes = 3 * group.kv_cache_spec.page_size_bytes
    for block in range(6):
        kernel_blocks = range(block * split, (block + 1) * split)
        runs = sorted(run_of(view, kernel) for view in views.values() for kernel in kernel_blocks)
        assert runs[0][0] == pool.data_ptr() + block * block_bytes
        assert runs[-1][1] == pool.data_ptr() + (block + 1) * block_bytes
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(runs))


def test_views_are_layers_of_the_tensor_in_the_configs_order(kv_cache_config, group):
    views, cross_layers, _ = allocate_uniform_kv_caches(kv_cache_config, [[group]], "auto", CPU, [4])
    assert not cross_layers.any()
    for index, name in enumerate(group.layer_names):
        views[name].fill_(index + 1)
    assert [cross_layers[i].unique().item() for i in range(3)] == [1, 2, 3]
    assert {view.untyped_storage().data_ptr() for view in views.values()} == {
        cross_layers.untyped_storage().data_ptr()
    }


def test_layers_that_share_a_tensor_get_the_same_view(kv_cache_config, group):
    size = kv_cache_config.kv_cache_tensors[0].size
    tensors = (
        KVCacheTensor(size, ("layers.0.attn", "layers.1.attn")),
        KVCacheTensor(size, ("layers.2.attn",)),
    )
    views, cross_layers, _ = allocate_uniform_kv_caches(
        replace(kv_cache_config, kv_cache_tensors=tensors), [[group]], "auto", CPU, [4]
    )
    assert cross_layers.shape[0] == 2
    assert views["layers.0.attn"].data_ptr() == views["layers.1.attn"].data_ptr()
    assert views["layers.2.attn"].data_ptr() == cross_layers[1].data_ptr()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((512, 1024), "equal size"), ((600, 600), "multiple of the page"), ((), "equal size")],
)
def test_unequal_or_broken_tensors_are_refused(preferring, kv_cache_config, group, sizes, message):
    tensors = tuple(KVCacheTensor(size, (f"layers.{i}.attn",)) for i, size in enumerate(sizes))
    with pytest.raises(ConfigurationError, match=message):
        allocate_uniform_kv_caches(
            replace(kv_cache_config, kv_cache_tensors=tensors), [[group]], "auto", CPU, [4]
        )
    assert preferring.allocated == []
