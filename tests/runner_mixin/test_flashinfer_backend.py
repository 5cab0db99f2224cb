"""What the FlashInfer backend passes to FlashInfer.

`tests/gpu` compares the results of the real package with torch's.
"""

from __future__ import annotations

import sys
import types

import pytest
import torch

from kvferry.runner_mixin.attention.flashinfer_backend import FlashInferBackend
from kvferry.runner_mixin.attention.torch_backend import TorchAttentionBackend
from tests.support.attention_steps import PARAMS, STEPS, run_step


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
    ours = run_step(TorchAttentionBackend, step, params, device, torch.float32)
    theirs = run_step(FlashInferBackend, step, params, device, torch.float32)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
    # Planned once per step, however many layers run. The decode wrapper computes single tokens.
    planned = (
        stand_in.BatchPrefillWithPagedKVCacheWrapper.plans,
        stand_in.BatchDecodeWithPagedKVCacheWrapper.plans,
    )
    assert planned == ((0, 1) if step == "decode" else (1, 0))
