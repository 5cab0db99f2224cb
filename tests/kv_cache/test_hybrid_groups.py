"""Several groups in one pool: which blocks each group keeps, finds in the cache, and loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvferry.connector.kv_cache_specs import (
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvferry.runner_mixin.kv_cache import KVCacheManager
from kvferry.transports.errors import ConfigurationError

MakeRequest = Callable[..., Any]
MakeManager = Callable[..., KVCacheManager]
Windowed = Callable[[int], SlidingWindowSpec]
Chunked = Callable[[int], ChunkedLocalAttentionSpec]
STATE = MambaSpec(block_size=1000, shapes=((4, 8), (2,)), dtypes=(torch.float32, torch.float32))


def compute(manager: KVCacheManager, request: Any, *, chunk: int = 1000) -> int:
    blocks, num_hit = manager.get_computed_blocks(request)
    first: dict[str, Any] = {"computed_blocks": blocks}
    computed = num_hit
    while computed < request.num_tokens:
        num_new = min(chunk, request.num_tokens - computed)
        assert manager.allocate_slots(request, num_new, **first) is not None
        first, computed = {}, computed + num_new
        request.num_computed_tokens = computed
        manager.cache_blocks(request, computed)
    manager.check_integrity()
    return num_hit


# -- sliding windows ---------------------------------------------------------------------------------


def test_a_windowed_group_needs_only_its_window_to_hit(
    make_manager: MakeManager, windowed: Windowed, make_request: MakeRequest
) -> None:
    manager = make_manager(20, windowed(4))
    compute(manager, make_request("a", [1] * 20))
    manager.free("a")
    manager.invalidate_blocks([1, 2])
    request = make_request("b", [1] * 21)
    blocks, num_hit = manager.get_computed_blocks(request)
    assert (num_hit, blocks.get_block_ids()) == (20, ([0, 0, 0, 0, 5],))
    manager.allocate_slots(request, 1, computed_blocks=blocks)
    assert manager.get_block_ids("b")[0][:5] == [0, 0, 0, 0, 5]
    manager.check_integrity()


# -- chunks ------------------------------------------------------------------------------------------


def test_a_chunked_group_needs_only_its_own_chunk_to_hit(
    make_manager: MakeManager, chunked: Chunked, full: FullAttentionSpec, make_request: MakeRequest
) -> None:
    manager = make_manager(30, full, chunked(8))
    compute(manager, make_request("a", [1] * 20))
    table = manager.get_block_ids("a")[1]
    manager.free("a")
    manager.invalidate_blocks(table[:4])
    blocks, num_hit = manager.get_computed_blocks(make_request("b", [1] * 21))
    assert (num_hit, blocks.get_block_ids()[1]) == (20, [0, 0, 0, 0, table[4]])
    manager.invalidate_blocks(table[4:])
    # A prefix that ends with a chunk does not need that chunk.
    blocks, num_hit = manager.get_computed_blocks(make_request("b", [1] * 21))
    assert (num_hit, blocks.get_block_ids()[1]) == (16, [0, 0, 0, 0])


# -- several groups ----------------------------------------------------------------------------------


def test_a_hit_is_the_longest_prefix_that_every_group_has(
    make_manager: MakeManager, full: FullAttentionSpec, windowed: Windowed, make_request: MakeRequest
) -> None:
    manager = make_manager(30, full, windowed(4))
    compute(manager, make_request("a", [1] * 20))
    full_table, window_table = manager.get_block_ids("a")
    manager.free("a")
    assert manager.get_computed_blocks(make_request("b", [1] * 21))[1] == 20
    manager.invalidate_blocks([full_table[3]])  # full attention: at most 12 …
    assert manager.get_computed_blocks(make_request("b", [1] * 21))[1] == 12
    manager.invalidate_blocks([window_table[2]])  # … and the window of 12 begins in block 2
    assert manager.get_computed_blocks(make_request("b", [1] * 21))[1] == 8


# -- other kinds -------------------------------------------------------------------------------------


def test_a_recurrent_state_is_one_block_and_never_a_hit(
    make_manager: MakeManager, full: FullAttentionSpec, make_request: MakeRequest
) -> None:
    manager = make_manager(20, full, STATE)
    compute(manager, make_request("a", [1] * 12), chunk=4)
    assert [len(group) for group in manager.get_block_ids("a")] == [3, 1]
    manager.free("a")
    assert manager.get_computed_blocks(make_request("b", [1] * 13))[1] == 0


def test_a_state_is_loaded_or_lost_as_a_whole(
    make_manager: MakeManager, full: FullAttentionSpec, make_request: MakeRequest
) -> None:
    manager = make_manager(20, full, STATE)
    manager.allocate_slots(make_request("a", [1] * 12), 0, num_external_tokens=12)
    full_ids, state_ids = manager.get_block_ids("a")
    assert len(state_ids) == 1
    assert manager.invalidate_blocks([full_ids[2]]) == {"a": 0}
    assert manager.num_free_blocks == 19


def test_a_model_of_recurrent_layers_alone_works(
    make_manager: MakeManager, make_request: MakeRequest
) -> None:
    manager = make_manager(4, STATE)
    assert compute(manager, make_request("a", [1] * 12), chunk=5) == 0
    assert manager.get_block_ids("a") == ([1],)


def test_a_composite_group_is_managed_like_its_members(
    make_manager: MakeManager, windowed: Windowed, make_request: MakeRequest
) -> None:
    narrow = windowed(4)
    members = {"layers.0": narrow, "layers.1": replace(narrow, num_kv_heads=8)}
    manager = make_manager(20, UniformTypeKVCacheSpecs(narrow.block_size, members))
    compute(manager, make_request("r", list(range(20))), chunk=4)
    assert manager.get_block_ids("r")[0][:3] == [0, 0, 0]


def test_a_window_that_is_only_recorded_in_full_attention_frees_nothing(
    make_manager: MakeManager, full: FullAttentionSpec, make_request: MakeRequest
) -> None:
    manager = make_manager(20, replace(full, sliding_window=4))
    compute(manager, make_request("r", list(range(20))), chunk=4)
    assert 0 not in manager.get_block_ids("r")[0]


def test_groups_of_different_block_sizes_are_refused(
    make_manager: MakeManager, full: FullAttentionSpec
) -> None:
    with pytest.raises(ConfigurationError, match=r"the same block size, got \[4, 8\]"):
        make_manager(20, full, replace(full, block_size=8))


def test_a_group_without_a_cache_is_refused(make_manager: MakeManager) -> None:
    with pytest.raises(ConfigurationError, match="no block tables for EncoderOnlyAttentionSpec"):
        make_manager(20, EncoderOnlyAttentionSpec(4, 2, 8, torch.float32))
