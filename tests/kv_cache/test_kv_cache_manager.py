"""What a prefix cache finds, and calls that a manager refuses; `test_contents_stateful` has the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvferry.connector.kv_cache_specs import FullAttentionSpec
from kvferry.runner_mixin.kv_cache import KVCacheManager
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


def test_no_slots_are_given_beyond_the_maximum_length(
    make_manager: MakeManager, full: FullAttentionSpec, make_request: MakeRequest
) -> None:
    manager = make_manager(11, full, max_model_len=8)
    manager.allocate_slots(make_request("r", list(range(8))), 30)
    assert manager.get_block_ids("r") == ([1, 2],)


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


def test_a_finished_requests_blocks_are_hit_until_they_are_evicted(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    compute(manager, make_request("a", [1] * 12))
    manager.free("a")
    assert manager.num_free_blocks == 10
    # This takes nine of ten blocks, so the tail of the chain is evicted and its head stays.
    compute(manager, make_request("big", [9] * 36))
    assert manager.get_computed_blocks(make_request("b", [1] * 13))[1] == 4


def test_with_caching_off_nothing_is_found(
    make_manager: MakeManager, full: FullAttentionSpec, make_request: MakeRequest
) -> None:
    manager = make_manager(11, full, caching=False)
    compute(manager, make_request("a", list(range(8))))
    assert compute(manager, make_request("b", list(range(9)))) == 0


def test_the_hit_rate_counts_a_request_when_it_is_admitted(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    compute(manager, make_request("a", [1] * 8))
    compute(manager, make_request("b", [1] * 12))
    assert manager.metrics.hit_rate == 8 / 20


# -- loads from another node -------------------------------------------------------------------------


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


def pinned_twice(manager: KVCacheManager, request: Any) -> None:
    manager.allocate_slots(request, 4)
    manager.pin("r")
    manager.pin("r")


def unpinned_twice(manager: KVCacheManager, request: Any) -> None:
    manager.allocate_slots(request, 4)
    manager.pin("r")
    manager.unpin("r")
    manager.unpin("r")


def a_prefix_before_blocks(manager: KVCacheManager, request: Any) -> None:
    manager.allocate_slots(request, 8)
    manager.allocate_slots(request, 1, computed_blocks=manager.get_computed_blocks(request)[0])


def cached_after_four_slots(num_tokens: int) -> Callable[[KVCacheManager, Any], None]:
    def call(manager: KVCacheManager, request: Any) -> None:
        manager.allocate_slots(request, 4)
        manager.cache_blocks(request, num_tokens)

    return call


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda manager, r: manager.allocate_slots(r, 0), ValueError, "cannot allocate slots"),
        (
            lambda manager, r: manager.allocate_slots(r, -1, num_external_tokens=4),
            ValueError,
            "cannot allocate slots",
        ),
        (
            lambda manager, r: manager.allocate_slots(r, 4, num_external_tokens=-1),
            ValueError,
            "cannot allocate slots",
        ),
        (a_prefix_before_blocks, KVTransferStateError, "it has blocks already"),
        (lambda manager, r: manager.cache_blocks(r, 4), KVTransferStateError, "has no blocks"),
        (
            cached_after_four_slots(8),
            KVTransferStateError,
            "cannot cache 2 blocks of request .*: it has 1 in group 0",
        ),
        (
            cached_after_four_slots(12),
            KVTransferStateError,
            "cannot cache 3 full blocks .* 2 block hashes",
        ),
        (
            lambda manager, r: manager.invalidate_blocks([11]),
            ValueError,
            "cannot evict block 11: the pool has 11 blocks",
        ),
        (lambda manager, r: manager.pin("r"), KVTransferStateError, "'r' has no blocks"),
        (pinned_twice, KVTransferStateError, "'r': it is pinned already"),
        (unpinned_twice, KVTransferStateError, "'r': it is not pinned"),
    ],
)
def test_a_wrong_call_is_refused_and_leaves_the_manager_whole(
    manager: KVCacheManager,
    make_request: MakeRequest,
    call: Callable[[KVCacheManager, Any], object],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        call(manager, make_request("r", list(range(8))))
    manager.check_integrity()
    manager.free("r")
    manager.free("r")  # a request without blocks has nothing to free
