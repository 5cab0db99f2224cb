"""Kernel block sizes: the manager's block size if possible, or the largest one that every backend
supports.
"""

from __future__ import annotations

import pytest
import torch

from kvferry.connector.kv_cache_specs import (
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)
from kvferry.runner_mixin import (
    AttentionGroup,
    MultipleOf,
    prepare_kernel_block_sizes,
    select_common_block_size,
)
from kvferry.runner_mixin.attention.torch_backend import TorchAttentionBackend
from kvferry.runner_mixin.block_sizes import expand_block_table

F32 = torch.float32


def group(*sizes, spec=None, index=0):
    class Backend(TorchAttentionBackend):
        @staticmethod
        def get_supported_kernel_block_sizes():
            return sizes

    return AttentionGroup(Backend, ("layers.0",), spec or FullAttentionSpec(32, 1, 8, F32), index)


@pytest.mark.parametrize(
    ("manager", "supported", "expected"),
    [
        (32, [(MultipleOf(1),)], 32),
        (32, [(16, 32)], 32),
        (32, [(16, 64)], 16),
        (64, [(16, 32), (MultipleOf(16),)], 32),
        (64, [(16, 32), (16,)], 16),
        (48, [(32, 16), (MultipleOf(8),)], 16),
        (64, [(16,), (MultipleOf(64),)], ValueError),
        (48, [(32,)], ValueError),
        (32, [(16,), (8,)], ValueError),
        (24, [(MultipleOf(16),)], ValueError),
    ],
)
def test_the_common_size(manager, supported, expected):
    groups = [group(*sizes) for sizes in supported]
    if expected is ValueError:
        with pytest.raises(ValueError, match=f"block_size={manager}"):
            select_common_block_size(manager, groups)
    else:
        assert select_common_block_size(manager, groups) == expected


def test_every_kind_of_group_gets_its_kernel_block_size():
    full = FullAttentionSpec(32, 1, 8, F32)
    mamba = MambaSpec(64, shapes=((4,),), dtypes=(F32,))
    composite = UniformTypeKVCacheSpecs(32, {"layers.1": full, "layers.2": FullAttentionSpec(32, 2, 8, F32)})
    specs = [EncoderOnlyAttentionSpec(32, 1, 8, F32), full, mamba, composite]
    config = KVCacheConfig(4, (), tuple(KVCacheGroupSpec((f"layers.{i}",), s) for i, s in enumerate(specs)))
    groups = [[group(32, index=0)], [group(16, index=1)], [], [group(8, 16, index=3)]]
    assert prepare_kernel_block_sizes(config, groups) == [16, 64, 16]


def test_the_kernel_blocks_of_a_block_are_adjacent():
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    assert expand_block_table(table, 1) is table
    assert expand_block_table(table, 2).tolist() == [[6, 7, 2, 3], [0, 1, 4, 5]]
