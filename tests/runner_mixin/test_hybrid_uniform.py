"""Several groups with the same page size in one pool: a block of any group is one run of bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvferry.connector.kv_cache_specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvferry.runner_mixin import (
    AttentionGroup,
    allocate_hybrid_uniform_kv_caches,
    use_hybrid_uniform_kv_cache,
)
from kvferry.runner_mixin.attention.torch_backend import TorchAttentionBackend

CPU = torch.device("cpu")
BLOCKS = 5
FULL = FullAttentionSpec(4, 2, 8, torch.float32)
WINDOW = SlidingWindowSpec(8, 1, 8, torch.float32, sliding_window=8)
MAMBA = MambaSpec(64, shapes=((5, 3),), dtypes=(torch.float32,), page_size_padded=FULL.page_size_bytes)
GROUPS = (
    KVCacheGroupSpec(("layers.0", "layers.1"), FULL),
    KVCacheGroupSpec(("layers.2", "layers.3"), WINDOW),
    KVCacheGroupSpec(("layers.4",), MAMBA),
)
SIZE = BLOCKS * FULL.page_size_bytes
HYBRID = KVCacheConfig(
    BLOCKS,
    (
        KVCacheTensor(SIZE, ("layers.0", "layers.2", "layers.4")),
        KVCacheTensor(SIZE, ("layers.1", "layers.3")),
    ),
    GROUPS,
)
ATTENTION = [
    [AttentionGroup(TorchAttentionBackend, group.layer_names, group.kv_cache_spec, index)]
    if isinstance(group.kv_cache_spec, (FullAttentionSpec, SlidingWindowSpec))
    else []
    for index, group in enumerate(GROUPS)
]


@pytest.fixture
def preferring(connector):
    connector.cross_layers = True
    return connector


def offsets(view, block, split, base):
    """Return the pool's byte offsets of one manager block of one layer."""
    found = set()
    for kernel in range(block * split, (block + 1) * split):
        part = view[kernel]
        positions = torch.zeros((), dtype=torch.int64)
        for axis, (size, stride) in enumerate(zip(part.shape, part.stride(), strict=True)):
            shape = [1] * part.ndim
            shape[axis] = size
            positions = positions + (torch.arange(size) * stride).view(shape)
        start = part.data_ptr() - base
        found.update((start + positions.flatten() * part.element_size()).tolist())
    return found


@pytest.mark.parametrize("kernel_block_sizes", [[4, 8, 64], [2, 8, 64], [4, 2, 64]])
def test_a_block_of_a_group_is_one_run(preferring, kernel_block_sizes):
    assert use_hybrid_uniform_kv_cache(HYBRID, ATTENTION, "auto")
    caches = allocate_hybrid_uniform_kv_caches(HYBRID, ATTENTION, "auto", CPU, kernel_block_sizes)
    (pool,) = preferring.allocated
    page = FULL.page_size_bytes
    for group, kernel_size in zip(GROUPS, kernel_block_sizes, strict=True):
        split = group.kv_cache_spec.block_size // kernel_size
        for block in range(BLOCKS):
            touched: set[int] = set()
            for name in group.layer_names:
                mine = offsets(caches[name], block, split, pool.data_ptr())
                assert not mine & touched
                touched |= mine
            itemsize = caches[group.layer_names[0]].element_size()
            first = block * 2 * page
            assert touched == set(range(first, first + len(group.layer_names) * page, itemsize))


def test_not_for_a_connector_that_does_not_prefer_it(connector):
    assert not use_hybrid_uniform_kv_cache(HYBRID, ATTENTION, "auto")


@pytest.mark.parametrize(
    "pool_config",
    [
        pytest.param(replace(HYBRID, kv_cache_tensors=()), id="no tensors"),
        pytest.param(
            replace(
                HYBRID,
                kv_cache_tensors=(
                    HYBRID.kv_cache_tensors[0],
                    replace(HYBRID.kv_cache_tensors[1], size=2 * SIZE),
                ),
            ),
            id="tensors of two sizes",
        ),
        pytest.param(
            replace(
                HYBRID,
                kv_cache_groups=(
                    GROUPS[0],
                    replace(GROUPS[1], kv_cache_spec=replace(WINDOW, num_kv_heads=2)),
                ),
            ),
            id="two page sizes",
        ),
        pytest.param(
            replace(
                HYBRID,
                kv_cache_groups=(
                    replace(GROUPS[0], kv_cache_spec=UniformTypeKVCacheSpecs(4, {"layers.0": FULL})),
                    *GROUPS[1:],
                ),
            ),
            id="a composite group",
        ),
        pytest.param(
            replace(
                HYBRID,
                kv_cache_tensors=(KVCacheTensor(SIZE, tuple(f"layers.{i}" for i in range(5))),),
            ),
            id="two layers of a group in one tensor",
        ),
    ],
)
def test_not_for_pools_of_another_kind(preferring, pool_config):
    assert not use_hybrid_uniform_kv_cache(pool_config, ATTENTION, "auto")


def test_not_for_a_backend_that_puts_layers_first(preferring):
    order = staticmethod(lambda include_num_layers_dimension=False: (0, 1, 2, 3, 4, 5))
    backend = type("LayersFirst", (TorchAttentionBackend,), {"get_kv_cache_stride_order": order})
    groups = [[replace(group, backend=backend) for group in attention] for attention in ATTENTION]
    assert not use_hybrid_uniform_kv_cache(HYBRID, groups, "auto")
