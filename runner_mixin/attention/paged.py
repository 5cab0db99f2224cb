"""Attention over a paged cache in plain torch, for any device.

A step's requests are divided into *tiles*. Each tile takes one gather and one call of torch's attention.
Requests with one new token share a tile with others of similar length, so that padding at most doubles the
work. A request with several new tokens is a tile of its own. A tile gathers only blocks that its tokens can
see.

Which tokens see which depends on the batch and on how far the layer looks back. So tiles are made once per
step, and layers that look back alike share them. A request's result does not depend on the other requests of
its step. It does not depend on how its prompt was divided into steps either, except for the rounding of
torch's matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from .backend import AttentionParams, LookBack
    from .metadata import CommonAttentionMetadata

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tile:
    """Requests whose attention is computed together: several with one token, or one with several.

    Attributes:
        tokens: `(num_rows,)` int64: their tokens in the step's flat run; `num_rows = num_reqs * query_len`.
        num_reqs: Number of requests.
        block_ids: `(num_reqs * num_blocks,)` int64: the kernel blocks to gather; padded with the null block.
        visible: `(num_reqs, 1, query_len, num_slots)` bool, `num_slots = num_blocks * block_size`.
        padding: Two `(num_padding,)` int64: request and slot of the gathered slots that hold no token of the
            request.
    """

    tokens: torch.Tensor
    num_reqs: int
    block_ids: torch.Tensor
    visible: torch.Tensor
    padding: tuple[torch.Tensor, torch.Tensor]


def write_kv_to_slots(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write keys and values, each `(num_tokens, num_kv_heads, head_size)`, into their slots.

    Args:
        kv_cache: `(num_blocks, 2, block_size, num_kv_heads, head_size)`, any strides.
        slot_mapping: `(num_tokens,)` int64, all different.
    """
    block_size = kv_cache.shape[2]
    where = (slot_mapping // block_size, slot_mapping % block_size)
    kv_cache[:, 0].index_put_(where, key.to(kv_cache.dtype))
    kv_cache[:, 1].index_put_(where, value.to(kv_cache.dtype))


def make_tiles(common: CommonAttentionMetadata, block_size: int, look_back: LookBack) -> tuple[Tile, ...]:
    """Divide a step into tiles.

    Args:
        common: The step's batch.
        block_size: Tokens per kernel block.
        look_back: How far back a token sees.
    """
    query_lens = common.query_start_loc_cpu.diff().numpy()
    seq_lens = common.seq_lens_cpu.numpy().astype(np.int64)
    first = _first_visible(common.num_computed_tokens_cpu.numpy(), look_back) // block_size
    num_blocks = -(-seq_lens // block_size) - first
    return tuple(
        _make_tile(common, requests, first[requests], num_blocks[requests], block_size, look_back)
        for requests in _tile_requests(query_lens, num_blocks)
    )


def _first_visible(num_computed_tokens: npt.NDArray[np.int32], look_back: LookBack) -> Int64Array:
    """Return, per request, the first position that any of its tokens sees."""
    first_new = num_computed_tokens.astype(np.int64)
    first = np.zeros_like(first_new)
    if look_back.sliding_window is not None:
        first = np.maximum(first, first_new - look_back.sliding_window + 1)
    if look_back.attention_chunk_size is not None:
        first = np.maximum(first, first_new - first_new % look_back.attention_chunk_size)
    return first


def _tile_requests(query_lens: npt.NDArray[np.int32], num_blocks: Int64Array) -> list[Int64Array]:
    """Choose the requests of each tile.

    Those with one token are grouped by their number of blocks, in powers of two.
    """
    single = np.flatnonzero(query_lens == 1)
    sizes = np.ceil(np.log2(num_blocks[single]))
    decodes = [single[sizes == size] for size in np.unique(sizes)]
    prefills = np.flatnonzero(query_lens > 1)
    return [*decodes, *np.split(prefills, len(prefills))] if len(prefills) else decodes


def _make_tile(
    common: CommonAttentionMetadata,
    requests: Int64Array,
    first_block: Int64Array,
    num_blocks: Int64Array,
    block_size: int,
    look_back: LookBack,
) -> Tile:
    """Make the tile of `requests`, which all have the same number of new tokens."""
    device = common.block_table.device
    starts = common.query_start_loc_cpu.numpy().astype(np.int64)
    query_len = int(starts[requests[0] + 1] - starts[requests[0]])
    computed = common.num_computed_tokens_cpu.numpy()[requests]
    seq_lens = common.seq_lens_cpu.numpy()[requests]
    width = int(num_blocks.max())

    # (num_reqs, num_slots): the position that each gathered slot holds.
    key_positions = first_block[:, None] * block_size + np.arange(width * block_size)
    query_positions = computed[:, None] + np.arange(query_len)
    holds_token = key_positions < seq_lens[:, None]
    visible = _visible(query_positions, key_positions, common.causal, look_back) & holds_token[:, None]

    tokens = (starts[requests][:, None] + np.arange(query_len)).ravel()
    request, slot = (torch.from_numpy(index).to(device) for index in np.nonzero(~holds_token))
    return Tile(
        tokens=torch.from_numpy(tokens).to(device),
        num_reqs=len(requests),
        block_ids=_block_ids(common.block_table, requests, first_block, num_blocks),
        visible=torch.from_numpy(visible[:, None]).to(device),
        padding=(request, slot),
    )


def _block_ids(
    block_table: torch.Tensor, requests: Int64Array, first_block: Int64Array, num_blocks: Int64Array
) -> torch.Tensor:
    """Select `num_blocks` entries of each request's row, starting at `first_block`; pad to the longest with
    block 0.
    """
    index = np.arange(num_blocks.max())
    is_padding = index >= num_blocks[:, None]
    # Padding may lie past the end of the table.
    columns = np.where(is_padding, 0, first_block[:, None] + index)
    rows, cols, padding = (
        torch.from_numpy(array).to(block_table.device) for array in (requests[:, None], columns, is_padding)
    )
    return block_table[rows, cols].to(torch.int64).masked_fill(padding, 0).flatten()


def _visible(
    query_positions: Int64Array, key_positions: Int64Array, causal: bool, look_back: LookBack
) -> npt.NDArray[np.bool_]:
    """Return which keys each query sees, `(num_reqs, query_len, num_slots)`."""
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    visible = distance >= 0 if causal else np.ones_like(distance, dtype=bool)
    if look_back.sliding_window is not None:
        visible &= distance < look_back.sliding_window
    if look_back.attention_chunk_size is not None:
        chunk = look_back.attention_chunk_size
        visible &= query_positions[:, :, None] // chunk == key_positions[:, None, :] // chunk
    return visible


def attend_tile(
    query: torch.Tensor, kv_cache: torch.Tensor, tile: Tile, params: AttentionParams
) -> torch.Tensor:
    """Attend a tile's tokens to their caches.

    Args:
        query: `(num_rows, num_heads, head_size)`, the tile's tokens.
        kv_cache: `(num_blocks, 2, block_size, num_kv_heads, head_size)`, any strides.

    Returns:
        `(num_rows, num_heads, head_size)`.
    """
    key = _gather(kv_cache[:, 0], tile).to(query.dtype)
    value = _gather(kv_cache[:, 1], tile).to(query.dtype)
    # Query heads of one group share keys. They become rows of the query, or keys are broadcast; keys are
    # never copied.
    rows = query.reshape(tile.num_reqs, -1, params.num_kv_heads, _group_size(params), params.head_size)
    if rows.shape[1] == 1:
        out = _attention(rows[:, 0], key, value, tile.visible, params)
    else:
        grouped = rows[0].permute(1, 2, 0, 3)
        spread = (params.num_kv_heads, grouped.shape[1], -1, -1)
        keys, values = (cached[0].unsqueeze(1).expand(spread) for cached in (key, value))
        out = _attention(grouped, keys, values, tile.visible, params).permute(2, 0, 1, 3)
    return out.reshape(query.shape)


def _group_size(params: AttentionParams) -> int:
    return params.num_heads // params.num_kv_heads


def _gather(cache: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Gather keys or values, `(num_reqs, num_kv_heads, num_slots, head_size)`."""
    gathered = cache.index_select(0, tile.block_ids)
    gathered = gathered.view(tile.num_reqs, -1, *cache.shape[2:])
    # A stale value may be infinite or NaN, and would make the whole sum NaN even with a weight of zero.
    gathered[tile.padding] = 0
    return gathered.transpose(1, 2)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    params: AttentionParams,
) -> torch.Tensor:
    if params.softcap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=params.scale)
    scores = (query @ key.transpose(-1, -2)).float() * params.scale
    scores = params.softcap * torch.tanh(scores / params.softcap)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return weights.to(value.dtype) @ value


def attend(
    query: torch.Tensor, kv_cache: torch.Tensor, tiles: Sequence[Tile], params: AttentionParams
) -> torch.Tensor:
    """Attend all tokens of a step, `(num_tokens, num_heads, head_size)`, tile by tile."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for tile in tiles:
        out[tile.tokens] = attend_tile(query[tile.tokens], kv_cache, tile, params)
    return out
