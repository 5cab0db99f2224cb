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


def test_blocks_outside_the_window_are_freed(
    make_manager: MakeManager, windowed: Windowed, make_request: MakeRequest
) -> None:
    manager = make_manager(20, windowed(4))
    request = make_request("r", list(range(20)))
    compute(manager, request, chunk=4)
    # The last chunk begins at token 16, whose window begins at 13.
    assert manager.get_block_ids("r") == ([0, 0, 0, 4, 5],)
    assert manager.num_free_blocks == 17


def test_a_window_that_begins_with_a_block_keeps_no_earlier_block(
    make_manager: MakeManager, windowed: Windowed, make_request: MakeRequest
) -> None:
    manager = make_manager(20, windowed(1))
    compute(manager, make_request("r", list(range(12))), chunk=4)
    assert manager.get_block_ids("r") == ([0, 0, 3],)


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


def test_a_block_at_the_edge_of_a_loaded_window_is_complete(
    make_manager: MakeManager, windowed: Windowed, make_request: MakeRequest
) -> None:
    # So a load must fill the whole block, although its own request sees only the block's last token.
    manager = make_manager(20, windowed(3))
    loaded = make_request("loaded", [1] * 18)
    assert manager.allocate_slots(loaded, 0, num_external_tokens=17) is not None
    manager.cache_blocks(loaded, 17)
    edge = manager.get_block_ids("loaded")[0][3]  # tokens 12 to 15; token 17 sees 15 to 17
    assert edge != 0
    blocks, num_hit = manager.get_computed_blocks(make_request("shorter", [1] * 17))
    assert (num_hit, blocks.get_block_ids()[0][-1]) == (16, edge)  # token 16 sees 14 to 16


def test_a_hole_in_the_window_shortens_the_hit(
    make_manager: MakeManager, windowed: Windowed, make_request: MakeRequest
) -> None:
    manager = make_manager(20, windowed(8))
    compute(manager, make_request("a", [1] * 20))
    manager.invalidate_blocks([4])
    # A prefix of 20 or 16 tokens would need block 3, whose contents are lost. One of 12 needs only blocks 1
    # and 2.
    assert manager.get_computed_blocks(make_request("b", [1] * 21))[1] == 12


# -- chunks ------------------------------------------------------------------------------------------


def test_blocks_of_earlier_chunks_are_freed(
    make_manager: MakeManager, chunked: Chunked, make_request: MakeRequest
) -> None:
    manager = make_manager(20, chunked(8))
    compute(manager, make_request("r", list(range(20))), chunk=4)
    assert manager.get_block_ids("r") == ([0, 0, 0, 0, 5],)


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


def test_a_chunk_that_begins_inside_a_block_keeps_that_block(
    make_manager: MakeManager, chunked: Chunked, make_request: MakeRequest
) -> None:
    manager = make_manager(20, chunked(6))
    compute(manager, make_request("r", list(range(16))), chunk=4)
    assert manager.get_block_ids("r") == ([0, 0, 0, 4],)  # chunks begin at 0, 6, 12
    manager.free("r")
    compute(manager, make_request("s", list(range(100, 112))), chunk=4)
    assert manager.get_block_ids("s")[0][0] == 0
    assert 0 not in manager.get_block_ids("s")[0][1:]  # queries from 8 on see token 6, in block 1


# -- several groups ----------------------------------------------------------------------------------


def test_groups_never_share_a_block(
    make_manager: MakeManager, full: FullAttentionSpec, windowed: Windowed, make_request: MakeRequest
) -> None:
    manager = make_manager(20, full, windowed(4), windowed(4))
    compute(manager, make_request("r", list(range(8))))
    ids = [i for group in manager.get_block_ids("r") for i in group]
    assert len(ids) == len(set(ids)) == 6


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


def test_one_groups_hit_is_not_taken_for_anothers_new_block(
    make_manager: MakeManager, full: FullAttentionSpec, windowed: Windowed, make_request: MakeRequest
) -> None:
    manager = make_manager(7, full, windowed(100))
    compute(manager, make_request("a", [1] * 8))
    manager.free("a")
    request = make_request("b", [1] * 12)
    blocks, num_hit = manager.get_computed_blocks(request)
    assert num_hit == 8
    assert manager.allocate_slots(request, 4, computed_blocks=blocks) is not None
    ids = [i for group in manager.get_block_ids("b") for i in group]
    assert sorted(ids) == [1, 2, 3, 4, 5, 6]
    manager.check_integrity()


def test_a_load_allocates_only_the_window_in_a_windowed_group(
    make_manager: MakeManager, full: FullAttentionSpec, windowed: Windowed, make_request: MakeRequest
) -> None:
    manager = make_manager(30, full, windowed(4))
    manager.allocate_slots(make_request("r", list(range(20))), 0, num_external_tokens=20)
    full_ids, window_ids = manager.get_block_ids("r")
    assert 0 not in full_ids
    # Token 19 is computed again. It sees tokens from 16 on.
    assert window_ids[:4] == [0, 0, 0, 0]
    assert window_ids[4] != 0


def test_the_recomputed_last_token_still_sees_its_whole_window(
    make_manager: MakeManager, windowed: Windowed, make_request: MakeRequest
) -> None:
    manager = make_manager(30, windowed(5))
    request = make_request("r", list(range(20)))
    manager.allocate_slots(request, 0, num_external_tokens=20)
    request.num_computed_tokens = 19
    manager.allocate_slots(request, 1)
    # Token 19 sees token 15, the last one of block 3, although token 20 will not.
    assert [block_id != 0 for block_id in manager.get_block_ids("r")[0]] == [False, False, False, True, True]


def test_a_failed_load_is_cut_to_a_prefix_that_every_group_can_continue(
    make_manager: MakeManager, full: FullAttentionSpec, windowed: Windowed, make_request: MakeRequest
) -> None:
    manager = make_manager(30, full, windowed(4))
    request = make_request("r", list(range(20)))
    manager.allocate_slots(request, 0, num_external_tokens=20)
    full_ids, _ = manager.get_block_ids("r")
    # 16 tokens of full attention arrived, but the windowed group never got the blocks before its window.
    assert manager.invalidate_blocks([full_ids[4]]) == {"r": 0}
    assert manager.get_block_ids("r") == ([], [])
    assert manager.allocate_slots(request, 20) is not None
    assert all(0 not in group for group in manager.get_block_ids("r"))
    manager.check_integrity()


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
