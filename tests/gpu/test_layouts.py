"""The pool's layouts in GPU memory: where the bytes of a block lie, and that attention reads what was
written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from kvferry.connector.base import WorkerHalf
from kvferry.connector.kv_cache_specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from kvferry.runner_mixin import allocate_uniform_kv_caches, kv_transfer_group, use_uniform_kv_cache
from kvferry.runner_mixin.attention.backend import AttentionGroup
from kvferry.runner_mixin.attention.torch_backend import TorchAttentionBackend

NUM_LAYERS, NUM_BLOCKS, BLOCK = 3, 6, 4
SPEC = FullAttentionSpec(BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float16)
NAMES = tuple(f"layers.{index}" for index in range(NUM_LAYERS))
POOL = KVCacheConfig(
    NUM_BLOCKS,
    tuple(KVCacheTensor(NUM_BLOCKS * SPEC.page_size_bytes, (name,)) for name in NAMES),
    (KVCacheGroupSpec(NAMES, SPEC),),
)
GROUP = AttentionGroup(TorchAttentionBackend, NAMES, SPEC, 0)


class OnDevice(WorkerHalf):
    """A worker half that accepts a pool on any device."""

    prefer_cross_layer_blocks = True

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None: ...
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize("kernel_block_size", [4, 2])
def test_a_block_of_all_layers_is_one_run(kernel_block_size: int, torch_device: torch.device) -> None:
    connector = OnDevice()
    device = torch_device
    with kv_transfer_group(connector):
        assert use_uniform_kv_cache([[GROUP]], "auto")
        views, cross_layers, _ = allocate_uniform_kv_caches(
            POOL, [[GROUP]], "auto", device, [kernel_block_size]
        )
    assert cross_layers.device.type == device.type
    raw = cross_layers.untyped_storage()
    block_bytes = NUM_LAYERS * SPEC.page_size_bytes
    assert raw.nbytes() == NUM_BLOCKS * block_bytes
    for view in views.values():
        view[2 * BLOCK // kernel_block_size : 3 * BLOCK // kernel_block_size] = 1.0
    written = torch.tensor([], dtype=torch.float16, device=device).set_(raw).cpu().nonzero()
    per_block = block_bytes // SPEC.dtype.itemsize
    assert written.flatten().tolist() == list(range(2 * per_block, 3 * per_block))
