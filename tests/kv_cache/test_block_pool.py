from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvferry.runner_mixin.kv_cache import BlockHash, BlockPool, KVCacheBlock
from kvferry.transports.errors import KVTransferStateError

A, B, C, D = (BlockHash(contents) for contents in (b"a", b"b", b"c", b"d"))


def ids(blocks: Iterable[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(5)


def test_block_0_is_never_given_out(pool: BlockPool) -> None:
    assert pool.null_block.is_null
    assert ids(pool.get_new_blocks(4)) == [1, 2, 3, 4]
    assert pool.num_free_blocks == 0


def test_the_null_block_is_ignored_wherever_it_appears(pool: BlockPool) -> None:
    null = [pool.null_block]
    pool.touch(null)
    pool.pin(null)
    pool.unpin(null)
    pool.free_blocks(null)
    pool.cache_full_blocks(null, [A], 0)
    pool.evict_blocks([0])
    assert pool.get_cached_block(A, [0]) is None
    pool.check_integrity()


def test_a_pool_needs_a_null_block() -> None:
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockPool(0)


def test_usage_does_not_count_the_null_block(pool: BlockPool) -> None:
    assert pool.get_usage() == 0.0
    pool.get_new_blocks(1)
    assert pool.get_usage() == 0.25
    assert BlockPool(1).get_usage() == 0.0


def test_a_request_for_more_blocks_than_are_free_takes_none(pool: BlockPool) -> None:
    with pytest.raises(KVTransferStateError, match="cannot take 5 blocks: 4 are free"):
        pool.get_new_blocks(5)
    assert pool.num_free_blocks == 4


def test_a_block_is_free_when_its_last_holder_releases_it(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(1)
    pool.touch(blocks)
    pool.free_blocks(blocks)
    assert pool.num_free_blocks == 3
    pool.free_blocks(blocks)
    assert pool.num_free_blocks == 4


def test_a_block_is_not_freed_more_often_than_held(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    with pytest.raises(KVTransferStateError, match="block 1 is freed once too often"):
        pool.free_blocks(blocks)
    pool.check_integrity()


# -- the prefix cache --------------------------------------------------------------------------------


def test_a_block_is_found_by_contents_and_group(pool: BlockPool) -> None:
    one, other = pool.get_new_blocks(2)
    pool.cache_full_blocks([one], [A], group_id=0)
    assert pool.get_cached_block(A, [0]) == [one]
    assert pool.get_cached_block(A, [1]) is None
    assert pool.get_cached_block(A, [0, 1]) is None
    pool.cache_full_blocks([other], [A], group_id=1)
    assert pool.get_cached_block(A, [0, 1]) == [one, other]


def test_a_free_block_keeps_its_contents_until_it_is_taken(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(blocks, [A], 0)
    pool.free_blocks(blocks)
    assert pool.get_cached_block(A, [0]) == blocks
    pool.touch(blocks)
    assert ids(pool.get_new_blocks(3)) == [2, 3, 4]
    pool.free_blocks(blocks)
    assert pool.get_new_blocks(1) == blocks
    assert pool.get_cached_block(A, [0]) is None
    pool.check_integrity()


def test_the_least_recently_used_block_is_evicted_first_and_a_chain_from_its_tail(pool: BlockPool) -> None:
    older, newer = pool.get_new_blocks(2), pool.get_new_blocks(2)
    pool.cache_full_blocks(older, [A, D], 0)
    pool.cache_full_blocks(newer, [B, C], 0)
    pool.free_blocks(reversed(older))
    pool.free_blocks(reversed(newer))
    assert ids(pool.get_new_blocks(3)) == [2, 1, 4]
    assert pool.get_cached_block(B, [0]) == [newer[0]]
    assert pool.get_cached_block(C, [0]) is None


def test_a_hit_makes_a_block_recently_used(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(blocks, [A, B, C], 0)
    pool.free_blocks(blocks)
    pool.touch(blocks[:1])
    pool.free_blocks(blocks[:1])
    assert ids(pool.get_new_blocks(4)) == [4, 2, 3, 1]


@pytest.mark.parametrize("is_transfer", [False, True])
def test_blocks_without_cached_contents_are_taken_first(pool: BlockPool, is_transfer: bool) -> None:
    cached, tail = pool.get_new_blocks(1), pool.get_new_blocks(2)
    pool.cache_full_blocks(cached, [A], 0)
    if is_transfer:
        pool.pin(cached + tail)
    pool.free_blocks(reversed(cached + tail))
    if is_transfer:
        pool.unpin(reversed(cached + tail))
    assert ids(pool.get_new_blocks(3)) == [2, 3, 4]
    assert pool.get_cached_block(A, [0]) == cached
    pool.check_integrity()


def test_many_short_requests_do_not_evict_a_cached_prefix(pool: BlockPool) -> None:
    """The last block of each is never full and so never cached. The same block is taken again and again."""
    prefix = pool.get_new_blocks(1)
    pool.cache_full_blocks(prefix, [A], 0)
    pool.free_blocks(prefix)
    for _ in range(10):
        pool.free_blocks(pool.get_new_blocks(1))
    assert pool.get_cached_block(A, [0]) == prefix


def test_of_two_equal_blocks_the_first_stays_known(pool: BlockPool) -> None:
    first, second = pool.get_new_blocks(2)
    pool.cache_full_blocks([first], [A], 0)
    pool.cache_full_blocks([second], [A], 0)
    assert pool.get_cached_block(A, [0]) == [first]
    pool.free_blocks([second])
    assert pool.get_cached_block(A, [0]) == [first]
    pool.check_integrity()


def test_contents_do_not_change_while_known(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(blocks, [A], 0)
    pool.cache_full_blocks(blocks, [A], 0)
    with pytest.raises(KVTransferStateError, match="block 1: it is cached with other contents"):
        pool.cache_full_blocks(blocks, [B], 0)


def test_a_block_without_a_holder_has_no_contents_to_cache(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    with pytest.raises(KVTransferStateError, match="cannot cache block 1: it has no holder"):
        pool.cache_full_blocks(blocks, [A], 0)


def test_blocks_and_hashes_come_in_pairs(pool: BlockPool) -> None:
    with pytest.raises(ValueError, match="zip"):
        pool.cache_full_blocks(pool.get_new_blocks(1), [A, B], 0)


def test_with_caching_off_nothing_is_found() -> None:
    pool = BlockPool(3, enable_caching=False)
    pool.cache_full_blocks(pool.get_new_blocks(1), [A], 0)
    assert pool.get_cached_block(A, [0]) is None


def test_evicted_contents_are_not_found_and_their_holder_keeps_the_block(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(blocks, [A], 0)
    pool.evict_blocks([1, 2])
    assert pool.get_cached_block(A, [0]) is None
    assert pool.num_free_blocks == 3
    pool.check_integrity()


@pytest.mark.parametrize("block_id", [-1, 5])
def test_only_the_pools_own_blocks_can_be_evicted(pool: BlockPool, block_id: int) -> None:
    with pytest.raises(ValueError, match=f"cannot evict block {block_id}: the pool has 5 blocks"):
        pool.evict_blocks([block_id])


def test_the_cache_is_reset_only_while_no_block_is_held(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(blocks, [A, B], 0)
    assert not pool.reset_prefix_cache()
    assert pool.num_cached_blocks == 2
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert pool.num_cached_blocks == 0
    pool.check_integrity()


# -- transfers ---------------------------------------------------------------------------------------


def test_a_pinned_block_outlives_its_request(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(2)
    pool.pin(blocks)
    pool.free_blocks(blocks)
    assert ids(pool.get_new_blocks(2)) == [3, 4]
    assert pool.num_free_blocks == 0
    pool.unpin(blocks)
    assert pool.num_free_blocks == 2


def test_a_pinned_block_can_be_hit_and_shared(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(blocks, [A], 0)
    pool.pin(blocks)
    pool.free_blocks(blocks)
    assert pool.get_cached_block(A, [0]) == blocks
    pool.touch(blocks)
    pool.unpin(blocks)
    assert pool.num_free_blocks == 3
    pool.free_blocks(blocks)
    assert pool.num_free_blocks == 4


def test_a_pin_takes_a_free_block_out_of_the_queue(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    pool.pin(blocks)
    assert pool.num_free_blocks == 3
    pool.check_integrity()


def test_a_block_that_only_a_transfer_holds_cannot_be_freed(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(1)
    pool.pin(blocks)
    pool.free_blocks(blocks)
    with pytest.raises(KVTransferStateError, match="1 holders, of which 1 are transfers"):
        pool.free_blocks(blocks)
    assert pool.num_free_blocks == 3


def test_only_a_pinned_block_is_unpinned(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(1)
    with pytest.raises(KVTransferStateError, match="cannot unpin block 1: no transfer"):
        pool.unpin(blocks)
    assert blocks[0].ref_cnt == 1


# -- checking ----------------------------------------------------------------------------------------


def test_the_check_of_a_broken_pool_says_what_is_broken(pool: BlockPool) -> None:
    block = pool.get_new_blocks(1)[0]
    block.ref_cnt = 0
    with pytest.raises(KVTransferStateError, match="held or free, not both"):
        pool.check_integrity()
    block.ref_cnt, block.pin_cnt = 1, 2
    with pytest.raises(KVTransferStateError, match="more pins than holders"):
        pool.check_integrity()
