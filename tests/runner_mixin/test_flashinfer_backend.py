"""What the FlashInfer backend passes to FlashInfer, and, if there is a GPU, that the results agree with torch."""

from __future__ import annotations

import importlib.util
import sys
import types

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
from kvferry.runner_mixin.attention.flashinfer_backend import FlashInferBackend
from kvferry.runner_mixin.attention.torch_backend import TorchAttentionBackend

BLOCK = 16
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


def run(backend, step, params, device, dtype):
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


class StandIn:
    """FlashInfer's paged wrappers in plain torch, following the documentation of their arguments."""

    plans = 0

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"

    def _plan(self, qo_indptr, indptr, indices, last_page_len, heads, causal, options):
        type(self).plans += 1
        num_qo_heads, num_kv_heads, head_dim, page_size = heads
        self.heads, self.causal, self.options = (num_qo_heads, num_kv_heads, head_dim), causal, options
        self.rows = list(zip(qo_indptr.tolist(), qo_indptr[1:].tolist(), strict=False))
        bounds = zip(indptr.tolist(), indptr[1:].tolist(), last_page_len.tolist(), strict=False)
        self.pages = [(indices[a:b], (b - a - 1) * page_size + last) for a, b, last in bounds]
        assert indices.dtype == indptr.dtype == last_page_len.dtype == torch.int32

    def run(self, q, paged_kv_cache):
        assert q.shape[1:] == (self.heads[0], self.heads[2])
        out = torch.empty_like(q)
        for (first, last), (pages, length) in zip(self.rows, self.pages, strict=True):
            key, value = (paged_kv_cache[pages.long(), i].flatten(0, 1)[:length] for i in (0, 1))
            group = self.heads[0] // self.heads[1]
            key, value = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (key, value))
            out[first:last] = self._one(q[first:last].transpose(0, 1), key, value).transpose(0, 1)
        return out

    def _one(self, query, key, value):
        scores = query @ key.mT * self.options["sm_scale"]
        if cap := self.options["logits_soft_cap"]:
            scores = cap * torch.tanh(scores / cap)
        # The last query is at the last position.
        positions = torch.arange(query.shape[1])[:, None] + key.shape[1] - query.shape[1]
        left = positions - torch.arange(key.shape[1])
        hidden = (left < 0) & self.causal
        if self.options["window_left"] >= 0:
            hidden |= left > self.options["window_left"]
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value


class StandInPrefill(StandIn):
    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal=False,
        **options,
    ):
        heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._plan(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, heads, causal, options
        )


class StandInDecode(StandIn):
    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **options
    ):
        single = torch.arange(len(indptr), dtype=torch.int32)
        heads = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._plan(single, indptr, indices, last_page_len, heads, True, options)


@pytest.fixture
def stand_in(monkeypatch):
    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = type("Prefill", (StandInPrefill,), {})
    module.BatchDecodeWithPagedKVCacheWrapper = type("Decode", (StandInDecode,), {})
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return module


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("step", STEPS)
def test_flashinfer_gets_arguments_that_mean_what_torch_computes(stand_in, step, params):
    device = torch.device("cpu")
    ours = run(TorchAttentionBackend, step, params, device, torch.float32)
    theirs = run(FlashInferBackend, step, params, device, torch.float32)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
    # Planned once per step, however many layers run. The decode wrapper computes single tokens.
    planned = (
        stand_in.BatchPrefillWithPagedKVCacheWrapper.plans,
        stand_in.BatchDecodeWithPagedKVCacheWrapper.plans,
    )
    assert planned == ((0, 1) if step == "decode" else (1, 0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed")
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("step", STEPS)
def test_flashinfer_agrees_with_torch_on_a_gpu(step, params):
    device = torch.device("cuda")
    ours = run(TorchAttentionBackend, step, params, device, torch.float16)
    theirs = run(FlashInferBackend, step, params, device, torch.float16)
    torch.testing.assert_close(theirs, ours, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("step", STEPS)
def test_torch_computes_the_same_on_a_gpu(step, params):
    cpu = run(TorchAttentionBackend, step, params, torch.device("cpu"), torch.float32)
    cuda = run(TorchAttentionBackend, step, params, torch.device("cuda"), torch.float32)
    torch.testing.assert_close(cuda, cpu, rtol=1e-3, atol=1e-4)
