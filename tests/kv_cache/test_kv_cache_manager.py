from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvferry.connector.kv_cache_specs import FullAttentionSpec
from kvferry.runner_mixin.kv_cache import KVCacheManager, init_none_hash, sha256
from kvferry.transports.errors import KVTransferStateError

MakeRequest = Callable[..., Any]
MakeManager = Callable[..., KVCacheManager]


@pytest.fixture
def manager(make_manager: MakeManager, full: FullAttentionSpec) -> KVCacheManager:
    """Ten usable blocks of 4 tokens, one group of full attention."""
    return make_manager(11, full)


def compute(manager: KVCacheManager, request: Any) -> int:
    """Run a whole request as a scheduler would. Returns the number of cached tokens."""
    blocks, num_hit = manager.get_computed_blocks(request)
    num_new = request.num_tokens - num_hit
    assert manager.allocate_slots(request, num_new, computed_blocks=blocks) is not None
    request.num_computed_tokens = request.num_tokens
    manager.cache_blocks(request, request.num_computed_tokens)
    return num_hit


# -- slots -------------------------------------------------------------------------------------------


def test_a_prompt_gets_just_the_blocks_it_needs(manager: KVCacheManager, make_request: MakeRequest) -> None:
    request = make_request("r", list(range(9)))
    added = manager.allocate_slots(request, 9)
    assert added is not None
    assert added.get_block_ids() == manager.get_block_ids("r") == ([1, 2, 3],)
    assert manager.num_free_blocks == 7
    assert manager.usage == pytest.approx(0.3)


def test_chunks_and_generated_tokens_extend_the_table(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    request = make_request("r", list(range(9)))
    manager.allocate_slots(request, 4)
    request.num_computed_tokens = 4
    added = manager.allocate_slots(request, 5)
    assert added is not None
    assert added.get_block_ids() == ([2, 3],)
    request.num_computed_tokens = 9
    for _ in range(3):
        request.append(7)
        added = manager.allocate_slots(request, 1)
        assert added is not None
        assert added.get_block_ids() == ([],)
        request.num_computed_tokens += 1
    request.append(7)
    manager.allocate_slots(request, 1)
    assert manager.get_block_ids("r") == ([1, 2, 3, 4],)


def test_without_enough_blocks_nothing_changes(manager: KVCacheManager, make_request: MakeRequest) -> None:
    first, second = make_request("a", list(range(20))), make_request("b", list(range(24)))
    manager.allocate_slots(first, 20)
    assert manager.allocate_slots(second, 24) is None
    assert manager.get_block_ids("b") == ([],)
    assert manager.num_free_blocks == 5
    manager.check_integrity()
    assert manager.allocate_slots(second, 20) is not None


def test_no_slots_are_given_beyond_the_maximum_length(
    make_manager: MakeManager, full: FullAttentionSpec, make_request: MakeRequest
) -> None:
    manager = make_manager(11, full, max_model_len=8)
    manager.allocate_slots(make_request("r", list(range(8))), 30)
    assert manager.get_block_ids("r") == ([1, 2],)


@pytest.mark.parametrize(("new", "external"), [(0, 0), (-1, 4), (4, -1)])
def test_an_allocation_for_no_tokens_is_an_error(
    manager: KVCacheManager, make_request: MakeRequest, new: int, external: int
) -> None:
    with pytest.raises(ValueError, match="cannot allocate slots"):
        manager.allocate_slots(make_request("r", [1]), new, num_external_tokens=external)
    assert manager.get_block_ids("r") == ([],)


def test_freeing_an_unknown_request_does_nothing(manager: KVCacheManager, make_request: MakeRequest) -> None:
    manager.free("unknown")
    manager.allocate_slots(make_request("r", [1]), 1)
    manager.free("r")
    manager.free("r")
    assert manager.num_free_blocks == 10


def test_a_model_without_cache_needs_no_blocks(make_manager: MakeManager, make_request: MakeRequest) -> None:
    manager = make_manager(1)
    request = make_request("r", list(range(9)))
    assert manager.get_computed_blocks(request)[1] == 0
    assert manager.allocate_slots(request, 9) is not None
    assert manager.get_block_ids("r") == ()
    manager.cache_blocks(request, 0)
    manager.free("r")
    manager.check_integrity()


# -- prefix cache ------------------------------------------------------------------------------------


def test_a_second_request_hits_the_common_blocks(manager: KVCacheManager, make_request: MakeRequest) -> None:
    assert compute(manager, make_request("a", [1] * 8 + [2] * 4)) == 0
    assert compute(manager, make_request("b", [1] * 8 + [3] * 4)) == 8
    assert manager.get_block_ids("a")[0][:2] == manager.get_block_ids("b")[0][:2]
    manager.check_integrity()


def test_the_last_token_is_always_computed(manager: KVCacheManager, make_request: MakeRequest) -> None:
    compute(manager, make_request("a", list(range(8))))
    assert manager.get_computed_blocks(make_request("b", list(range(8))))[1] == 4
    assert manager.get_computed_blocks(make_request("c", list(range(9))))[1] == 8


def test_looking_up_changes_nothing(manager: KVCacheManager, make_request: MakeRequest) -> None:
    compute(manager, make_request("a", list(range(8))))
    manager.free("a")
    before = manager.num_free_blocks
    for _ in range(3):
        assert manager.get_computed_blocks(make_request("b", list(range(9))))[1] == 8
    assert manager.num_free_blocks == before
    assert manager.metrics.hit_rate == 0.0


def test_a_finished_requests_blocks_are_hit_until_they_are_evicted(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    compute(manager, make_request("a", [1] * 12))
    manager.free("a")
    assert manager.num_free_blocks == 10
    # This takes nine of ten blocks, so the tail of the chain is evicted and its head stays.
    compute(manager, make_request("big", [9] * 36))
    assert manager.get_computed_blocks(make_request("b", [1] * 13))[1] == 4


def test_allocated_blocks_are_not_found_before_they_are_computed(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    request = make_request("a", list(range(12)))
    manager.allocate_slots(request, 8)
    assert manager.get_computed_blocks(make_request("b", list(range(12))))[1] == 0
    manager.cache_blocks(request, 7)
    assert manager.get_computed_blocks(make_request("b", list(range(12))))[1] == 4


def test_with_caching_off_nothing_is_found(
    make_manager: MakeManager, full: FullAttentionSpec, make_request: MakeRequest
) -> None:
    manager = make_manager(11, full, caching=False)
    compute(manager, make_request("a", list(range(8))))
    assert compute(manager, make_request("b", list(range(9)))) == 0


def test_hits_on_free_blocks_count_as_needed_blocks(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    compute(manager, make_request("a", [1] * 16))
    manager.free("a")
    manager.allocate_slots(make_request("held", [2] * 20), 20)
    request = make_request("b", [1] * 24)
    blocks, num_hit = manager.get_computed_blocks(request)
    assert num_hit == 16
    assert manager.allocate_slots(request, 8, computed_blocks=blocks) is None
    assert manager.allocate_slots(request, 4, computed_blocks=blocks) is not None
    manager.check_integrity()


def test_a_prefix_cannot_be_put_before_blocks(manager: KVCacheManager, make_request: MakeRequest) -> None:
    request = make_request("a", list(range(8)))
    manager.allocate_slots(request, 8)
    blocks, _ = manager.get_computed_blocks(request)
    with pytest.raises(KVTransferStateError, match="it has blocks already"):
        manager.allocate_slots(request, 1, computed_blocks=blocks)


def test_caching_needs_blocks_hashes_and_slots(manager: KVCacheManager, make_request: MakeRequest) -> None:
    request = make_request("a", list(range(8)))
    with pytest.raises(KVTransferStateError, match="has no blocks"):
        manager.cache_blocks(request, 4)
    manager.allocate_slots(request, 4)
    with pytest.raises(
        KVTransferStateError, match="cannot cache 2 blocks of request .*: it has 1 in group 0"
    ):
        manager.cache_blocks(request, 8)
    with pytest.raises(KVTransferStateError, match="cannot cache 3 full blocks .* 2 block hashes"):
        manager.cache_blocks(request, 12)


def test_requests_with_other_salts_or_adapters_share_nothing(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    compute(manager, make_request("a", [1] * 8, cache_salt="x"))
    assert manager.get_computed_blocks(make_request("b", [1] * 9))[1] == 0
    assert manager.get_computed_blocks(make_request("c", [1] * 9, lora_id="x"))[1] == 0
    assert manager.get_computed_blocks(make_request("d", [1] * 9, cache_salt="x"))[1] == 8


def test_two_nodes_with_one_seed_have_the_same_hashes(
    make_manager: MakeManager, full: FullAttentionSpec, make_request: MakeRequest
) -> None:
    init_none_hash(sha256, "seed")
    here = make_request("a", list(range(8)))
    init_none_hash(sha256, "seed")
    there = make_request("b", list(range(8)))
    assert here.block_hashes == there.block_hashes


def test_the_hit_rate_counts_a_request_when_it_is_admitted(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    compute(manager, make_request("a", [1] * 8))
    compute(manager, make_request("b", [1] * 12))
    assert manager.metrics.hit_rate == 8 / 20


def test_the_cache_is_reset_only_while_no_block_is_held(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    compute(manager, make_request("a", [1] * 8))
    assert not manager.reset_prefix_cache()
    manager.free("a")
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(make_request("b", [1] * 9))[1] == 0


# -- loads from another node -------------------------------------------------------------------------


def test_a_load_gets_blocks_for_the_tokens_that_are_not_cached(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    compute(manager, make_request("a", list(range(8))))
    request = make_request("b", list(range(20)))
    blocks, num_hit = manager.get_computed_blocks(request)
    added = manager.allocate_slots(request, 0, computed_blocks=blocks, num_external_tokens=12)
    assert added is not None
    assert (num_hit, added.get_block_ids()) == (8, ([3, 4, 5],))
    assert manager.get_block_ids("b") == ([1, 2, 3, 4, 5],)


def test_blocks_enter_the_cache_only_after_a_successful_load(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    request = make_request("a", list(range(12)))
    manager.allocate_slots(request, 0, num_external_tokens=12)
    assert manager.get_computed_blocks(make_request("b", list(range(12))))[1] == 0
    manager.cache_blocks(request, 12)
    assert manager.get_computed_blocks(make_request("b", list(range(12))))[1] == 8


def test_after_a_load_of_the_whole_prompt_the_last_token_has_a_slot(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    request = make_request("a", list(range(8)))
    manager.allocate_slots(request, 0, num_external_tokens=8)
    request.num_computed_tokens = 7
    added = manager.allocate_slots(request, 1)
    assert added is not None
    assert added.get_block_ids() == ([],)


def test_a_failed_load_cuts_the_request_to_the_tokens_that_arrived(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    request = make_request("a", list(range(16)))
    manager.allocate_slots(request, 0, num_external_tokens=16)
    assert manager.invalidate_blocks([3, 4]) == {"a": 8}
    assert manager.get_block_ids("a") == ([1, 2],)
    manager.cache_blocks(request, 8)
    request.num_computed_tokens = 8
    manager.allocate_slots(request, 8)
    manager.cache_blocks(request, 16)
    assert len(manager.get_block_ids("a")[0]) == 4
    assert manager.get_computed_blocks(make_request("b", list(range(17))))[1] == 16
    manager.check_integrity()


def test_other_requests_that_share_an_invalid_block_are_cut_as_well(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    compute(manager, make_request("a", [1] * 8))
    compute(manager, make_request("b", [1] * 12))
    compute(manager, make_request("other", [2] * 4))
    assert manager.invalidate_blocks([2]) == {"a": 4, "b": 4}
    assert manager.get_computed_blocks(make_request("c", [1] * 13))[1] == 4
    manager.check_integrity()


def test_invalid_blocks_that_no_request_holds_are_only_removed_from_the_cache(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    compute(manager, make_request("a", [1] * 8))
    manager.free("a")
    assert manager.invalidate_blocks([1]) == {}
    assert manager.invalidate_blocks([]) == {}
    assert manager.get_computed_blocks(make_request("b", [1] * 9))[1] == 0


def test_an_unknown_block_is_refused(manager: KVCacheManager, make_request: MakeRequest) -> None:
    with pytest.raises(ValueError, match="cannot evict block 11: the pool has 11 blocks"):
        manager.invalidate_blocks([11])


# -- transfers ---------------------------------------------------------------------------------------


def test_pinned_blocks_outlive_their_request(manager: KVCacheManager, make_request: MakeRequest) -> None:
    compute(manager, make_request("a", [1] * 12))
    manager.pin("a")
    manager.free("a")
    assert manager.pinned_request_ids == {"a"}
    assert manager.num_free_blocks == 7
    assert manager.allocate_slots(make_request("big", [2] * 32), 32) is None
    manager.unpin("a")
    assert manager.pinned_request_ids == frozenset()
    assert manager.num_free_blocks == 10
    manager.check_integrity()


def test_pinned_blocks_can_be_hit_and_shared(manager: KVCacheManager, make_request: MakeRequest) -> None:
    compute(manager, make_request("a", [1] * 12))
    manager.pin("a")
    manager.free("a")
    assert compute(manager, make_request("b", [1] * 13)) == 12
    manager.unpin("a")
    manager.check_integrity()
    manager.free("b")
    assert manager.num_free_blocks == 10


def test_a_request_can_be_pinned_and_unpinned_only_once(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    with pytest.raises(KVTransferStateError, match="'a' has no blocks"):
        manager.pin("a")
    manager.allocate_slots(make_request("a", [1] * 4), 4)
    manager.pin("a")
    with pytest.raises(KVTransferStateError, match="'a': it is pinned already"):
        manager.pin("a")
    manager.unpin("a")
    with pytest.raises(KVTransferStateError, match="'a': it is not pinned"):
        manager.unpin("a")
    manager.check_integrity()
