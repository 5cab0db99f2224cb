"""Attention over blocks that were handed over gives the same result as over the producer's own values."""

from __future__ import annotations

import time

import pytest
import torch

from kvferry.connector.kv_cache_specs import FullAttentionSpec
from kvferry.runner_mixin import (
    AttentionGroup,
    AttentionParams,
    StepBatch,
    build_attn_metadata,
    compute_slot_mapping,
)
from kvferry.runner_mixin.attention.backend import AttentionBackend
from kvferry.runner_mixin.attention.flashinfer_backend import FlashInferBackend
from kvferry.runner_mixin.attention.torch_backend import TorchAttentionBackend
from tests.support.gpu_memory import DEADLINE_S, StartChild
from tests.support.gpu_offers import LOADED, SHAPE, load_order, make_worker, offered_values

BACKENDS: dict[str, type[AttentionBackend]] = {
    "TORCH": TorchAttentionBackend,
    "FLASHINFER": FlashInferBackend,
}
PARAMS = AttentionParams(4 * SHAPE.num_kv_heads, SHAPE.num_kv_heads, SHAPE.head_size, SHAPE.head_size**-0.5)
NUM_TOKENS = len(LOADED) * SHAPE.block_size


def attend(
    backend: type[AttentionBackend], cache: torch.Tensor, blocks: tuple[int, ...], num_new: int
) -> torch.Tensor:
    """Compute the attention of the last `num_new` tokens over all tokens in `blocks`."""
    device = cache.device
    batch = StepBatch.from_lens([num_new], [NUM_TOKENS - num_new], device)
    table = torch.tensor([blocks], dtype=torch.int32, device=device)
    spec = FullAttentionSpec(SHAPE.block_size, PARAMS.num_kv_heads, PARAMS.head_size, cache.dtype)
    workspace = torch.empty(backend.get_workspace_bytes(), dtype=torch.int8, device=device)
    group = AttentionGroup(backend, ("layers.0",), spec, 0)
    builder = backend.get_builder_cls()(group, SHAPE.block_size, device, workspace)
    slots = compute_slot_mapping(table, batch, SHAPE.block_size)
    metadata = build_attn_metadata([builder], batch, [table], [slots])["layers.0"]
    generator = torch.Generator().manual_seed(7)
    query = torch.randn(num_new, PARAMS.num_heads, PARAMS.head_size, generator=generator)
    return backend.attend(query.to(device, cache.dtype), cache, metadata, PARAMS).float().cpu()


# FlashInfer compiles a kernel for each value of `num_new`, once per machine, for about a minute.
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_new", [pytest.param(1, id="decode"), pytest.param(9, id="prompt")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_reads_the_blocks_of_a_uniform_pool(
    backend: str, num_new: int, torch_device: torch.device, start_child: StartChild
) -> None:
    if reason := BACKENDS[backend].get_unavailable_reason(torch_device, SHAPE.dtype):
        pytest.skip(reason)
    _, told = start_child("offer.py", str(torch_device), "auto", "uniform")
    worker, cache = make_worker("consumer", "auto", "uniform", torch_device)
    try:
        worker.submit(load_order(told))
        deadline = time.monotonic() + DEADLINE_S
        while "d" not in worker.get_finished()[1]:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert worker.take_load_errors() == {}
        for layer in (0, SHAPE.num_layers - 1):
            found = attend(BACKENDS[backend], cache[layer], LOADED, num_new)
            own = offered_values(layer).to(torch_device)
            expected = attend(TorchAttentionBackend, own, tuple(range(len(LOADED))), num_new)
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=2e-3)
    finally:
        worker.shutdown()
