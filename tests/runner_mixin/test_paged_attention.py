"""Attention over the paged cache equals attention over plain tensors, however the batch is split."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvferry.connector.kv_cache_specs import FullAttentionSpec
from kvferry.runner_mixin import (
    AttentionGroup,
    AttentionLayer,
    AttentionParams,
    ForwardContext,
    LookBack,
    StepBatch,
    build_attn_metadata,
    compute_slot_mapping,
    set_forward_context,
)
from kvferry.runner_mixin.attention.paged import make_tiles
from kvferry.runner_mixin.attention.torch_backend import TorchAttentionBackend, TorchMetadataBuilder

CPU = torch.device("cpu")
BLOCK = 4
PARAMS = AttentionParams(num_heads=6, num_kv_heads=2, head_size=8, scale=0.3)


def reference(query, key, value, params, causal=True):
    """Compute one request, all positions at once, one head after the other."""
    query, key, value = (x.double() for x in (query, key, value))
    length, heads = query.shape[:2]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if params.sliding_window is not None:
        hidden |= distance >= params.sliding_window
    if params.attention_chunk_size is not None:
        chunks = torch.arange(length) // params.attention_chunk_size
        hidden |= chunks[:, None] != chunks
    out = torch.empty_like(query)
    for head in range(heads):
        shared = head // (heads // key.shape[1])
        scores = query[:, head] @ key[:, shared].T * params.scale
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        out[:, head] = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value[:, shared]
    return out.float()


class Cache:
    """A paged cache and the block tables of some requests, blocks scattered over the pool."""

    def __init__(self, lengths, *, params=PARAMS, dtype=torch.float32):
        torch.manual_seed(7)
        width = -(-max(lengths) // BLOCK)
        ids = 1 + torch.randperm(width * len(lengths))
        self.table = ids.view(len(lengths), width).to(torch.int32)
        shape = TorchAttentionBackend.get_kv_cache_shape(
            1 + ids.numel(), BLOCK, params.num_kv_heads, params.head_size
        )
        # NaN shows if the former contents of a block are ever used.
        pool = torch.full(shape, float("nan"), dtype=dtype)
        pool[0] = 0
        self.params = params
        self.spec = FullAttentionSpec(BLOCK, params.num_kv_heads, params.head_size, dtype)
        self.layer = AttentionLayer("layers.0", params, TorchAttentionBackend)
        self.layer.kv_cache = [pool]
        self.data = [
            [
                torch.randn(n, heads, params.head_size)
                for heads in (params.num_heads, *[params.num_kv_heads] * 2)
            ]
            for n in lengths
        ]

    def step(self, work, *, causal=True):
        """Run `{request: (first, last)}` positions as one step. Returns their outputs by request."""
        requests, spans = list(work), list(work.values())
        batch = StepBatch.from_lens([b - a for a, b in spans], [a for a, _ in spans], CPU, causal=causal)
        table = self.table[requests]
        group = AttentionGroup(TorchAttentionBackend, (self.layer.name,), self.spec, 0)
        builder = TorchMetadataBuilder(group, BLOCK, CPU, torch.empty(0, dtype=torch.int8))
        metadata = build_attn_metadata([builder], batch, [table], [compute_slot_mapping(table, batch, BLOCK)])
        flat = [torch.cat([self.data[r][i][a:b] for r, (a, b) in work.items()]) for i in range(3)]
        # In memory, heads come before tokens, as in the tensors of real models.
        flat = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in flat]
        with set_forward_context(ForwardContext({self.layer.name: self.layer}, metadata)):
            out = self.layer.forward(*flat)
        return dict(zip(requests, out.split([b - a for a, b in spans]), strict=True))

    def check(self, request, out, first=0, **options):
        expected = reference(*self.data[request], self.params, **options)[first : first + len(out)]
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def whole(lengths):
    return {request: (0, length) for request, length in enumerate(lengths)}


LENGTHS = (1, 3, 4, 5, 8, 17)
VARIANTS = {
    "plain": PARAMS,
    "one head": replace(PARAMS, num_heads=1, num_kv_heads=1),
    "no groups": replace(PARAMS, num_kv_heads=6),
    "one kv head": replace(PARAMS, num_kv_heads=1),
    "window": replace(PARAMS, sliding_window=5),
    "window of one": replace(PARAMS, sliding_window=1),
    "wide window": replace(PARAMS, sliding_window=100),
    "chunks": replace(PARAMS, attention_chunk_size=8),
    "chunks across blocks": replace(PARAMS, attention_chunk_size=5),
    "chunks of one": replace(PARAMS, attention_chunk_size=1),
    "softcap": replace(PARAMS, softcap=0.5),
    "softcap, window": replace(PARAMS, softcap=2.0, sliding_window=6),
}
variants = pytest.mark.parametrize("params", VARIANTS.values(), ids=VARIANTS.keys())


@variants
def test_prompts_of_many_lengths_in_one_step(params):
    cache = Cache(LENGTHS, params=params)
    for request, out in cache.step(whole(LENGTHS)).items():
        cache.check(request, out)


@variants
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7])
def test_chunk_by_chunk_while_other_requests_decode(params, chunk):
    lengths = (23, 19)
    cache = Cache(lengths, params=params)
    cache.step({1: (0, 10)})
    decoding = 10
    for first in range(0, 23, chunk):
        work = {0: (first, min(first + chunk, 23))}
        if decoding < 19:
            work[1] = (decoding, decoding + 1)
        outs = cache.step(work)
        cache.check(0, outs[0], first)
        if 1 in outs:
            cache.check(1, outs[1], decoding)
        decoding += 1


def test_the_result_does_not_depend_on_other_requests_in_the_batch():
    lengths = (40, 37, 3, 22)
    last = {r: (n - 1, n) for r, n in enumerate(lengths)}
    cache = Cache(lengths)
    cache.step({r: (0, n - 1) for r, n in enumerate(lengths)})
    together = cache.step(last)
    for request, span in last.items():
        torch.testing.assert_close(cache.step({request: span})[request], together[request], rtol=0, atol=1e-6)


def test_blocks_outside_the_window_are_not_read():
    cache = Cache((30,), params=replace(PARAMS, sliding_window=6))
    cache.step({0: (0, 29)})
    # Token 29 sees 24 to 29, which are in blocks 6 and 7. The manager has replaced the others with the null
    # block.
    cache.table[0, :6] = 0
    cache.layer.kv_cache[0][0] = float("nan")
    cache.check(0, cache.step({0: (29, 30)})[0], 29)


def test_without_causality_a_token_sees_those_after_it():
    cache = Cache((9,))
    cache.check(0, cache.step({0: (0, 9)}, causal=False)[0], causal=False)


def test_a_cache_of_lower_precision():
    cache = Cache((9,), dtype=torch.bfloat16)
    out = cache.step({0: (0, 9)})[0]
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, reference(*cache.data[0], PARAMS), rtol=0.05, atol=0.05)


def test_half_precision_queries_keep_their_type():
    cache = Cache((9,), dtype=torch.bfloat16)
    cache.data[0] = [x.bfloat16() for x in cache.data[0]]
    assert cache.step({0: (0, 9)})[0].dtype == torch.bfloat16


def test_single_tokens_of_sequences_of_similar_length_make_one_tile(make_batch):
    lengths = [5, 6, 7, 8, 30, 100, 120]
    batch = make_batch([1] * 7 + [3], [n - 1 for n in lengths] + [2])
    table = torch.zeros(8, 30, dtype=torch.int32)
    group = AttentionGroup(TorchAttentionBackend, ("a",), FullAttentionSpec(BLOCK, 2, 8, torch.float32), 0)
    builder = TorchMetadataBuilder(group, BLOCK, CPU, torch.empty(0))
    metadata = build_attn_metadata([builder], batch, [table], [compute_slot_mapping(table, batch, BLOCK)])[
        "a"
    ]
    tiles = make_tiles(metadata.common, BLOCK, LookBack())
    assert [tile.num_reqs for tile in tiles] == [4, 1, 2, 1]
    assert metadata.tiles(LookBack()) is metadata.tiles(LookBack())
