"""Steps of attention over a pool of random numbers, with which one backend is compared with another."""

from __future__ import annotations

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

BLOCK = 16
#: The new tokens and the computed tokens of each request.
STEPS = {
    "prompts": ([20, 1, 33], [0, 0, 5]),
    "mixed": ([7, 1], [30, 47]),
    "decode": ([1, 1, 1], [15, 16, 60]),
}
PARAMS = {
    "plain": AttentionParams(4, 2, 64, 0.125),
    "window": AttentionParams(4, 2, 64, 0.125, sliding_window=9),
    "softcap": AttentionParams(4, 4, 64, 0.2, softcap=3.0),
}


def run_step(
    backend: type[AttentionBackend],
    step: str,
    params: AttentionParams,
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Run one step over a pool of random numbers. Returns its output on the CPU."""
    torch.manual_seed(3)
    new, computed = STEPS[step]
    batch = StepBatch.from_lens(new, computed, device)
    width = -(-batch.max_seq_len // BLOCK)
    table = (1 + torch.randperm(width * len(new))).view(len(new), width).to(torch.int32).to(device)
    cache_shape = backend.get_kv_cache_shape(
        1 + width * len(new), BLOCK, params.num_kv_heads, params.head_size
    )
    cache = torch.randn(cache_shape).to(device, dtype)
    query, key, value = (
        torch.randn(batch.num_tokens, heads, params.head_size).to(device, dtype)
        for heads in (params.num_heads, params.num_kv_heads, params.num_kv_heads)
    )
    spec = FullAttentionSpec(BLOCK, params.num_kv_heads, params.head_size, dtype)
    workspace = torch.empty(backend.get_workspace_bytes(), dtype=torch.int8, device=device)
    group = AttentionGroup(backend, ("layers.0",), spec, 0)
    builder = backend.get_builder_cls()(group, BLOCK, device, workspace)
    slots = compute_slot_mapping(table, batch, BLOCK)
    metadata = build_attn_metadata([builder], batch, [table], [slots])["layers.0"]
    backend.write_kv(key, value, cache, metadata)
    out = backend.attend(query, cache, metadata, params)
    assert backend.attend(query, cache, metadata, params).equal(out)
    return out.float().cpu()
