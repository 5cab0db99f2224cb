"""The null block, and calls that a pool refuses; `test_block_pool_stateful` has the rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.runner_mixin.kv_cache import BlockHash, BlockPool
from kvferry.transports.errors import KVTransferStateError

A, B = BlockHash(b"a"), BlockHash(b"b")


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(5)


def test_the_null_block_is_ignored_wherever_it_appears(pool: BlockPool) -> None:
    assert pool.null_block.is_null
    null = [pool.null_block]
    pool.touch(null)
    pool.pin(null)
    pool.unpin(null)
    pool.free_blocks(null)
    pool.cache_full_blocks(null, [A], 0)
    pool.evict_blocks([0])
    assert pool.get_cached_block(A, [0]) is None
    pool.check_integrity()
    assert BlockPool(1).get_usage() == 0.0


def test_with_caching_off_nothing_is_found() -> None:
    pool = BlockPool(3, enable_caching=False)
    pool.cache_full_blocks(pool.get_new_blocks(1), [A], 0)
    assert pool.get_cached_block(A, [0]) is None


def a_block_that_only_a_transfer_holds(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(1)
    pool.pin(blocks)
    pool.free_blocks(blocks)
    pool.free_blocks(blocks)


def a_block_with_other_contents(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(blocks, [A], 0)
    pool.cache_full_blocks(blocks, [B], 0)


def a_block_without_a_holder(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    pool.cache_full_blocks(blocks, [A], 0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda pool: BlockPool(0), ValueError, "num_blocks=0"),
        (lambda pool: pool.get_new_blocks(5), KVTransferStateError, "cannot take 5 blocks: 4 are free"),
        (
            lambda pool: pool.free_blocks([pool.get_new_blocks(1)[0]] * 2),
            KVTransferStateError,
            "block 1 is freed once too often",
        ),
        (a_block_that_only_a_transfer_holds, KVTransferStateError, "1 holders, of which 1 are transfers"),
        (
            lambda pool: pool.unpin(pool.get_new_blocks(1)),
            KVTransferStateError,
            "cannot unpin block 1: no transfer",
        ),
        (a_block_with_other_contents, KVTransferStateError, "block 1: it is cached with other contents"),
        (a_block_without_a_holder, KVTransferStateError, "cannot cache block 1: it has no holder"),
        (lambda pool: pool.cache_full_blocks(pool.get_new_blocks(1), [A, B], 0), ValueError, "zip"),
        (lambda pool: pool.evict_blocks([-1]), ValueError, "cannot evict block -1: the pool has 5 blocks"),
        (lambda pool: pool.evict_blocks([5]), ValueError, "cannot evict block 5: the pool has 5 blocks"),
    ],
)
def test_a_wrong_call_is_refused_and_leaves_the_pool_whole(
    pool: BlockPool, call: Callable[[BlockPool], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(pool)
    pool.check_integrity()


def test_the_check_of_a_broken_pool_says_what_is_broken(pool: BlockPool) -> None:
    block = pool.get_new_blocks(1)[0]
    block.ref_cnt = 0
    with pytest.raises(KVTransferStateError, match="held or free, not both"):
        pool.check_integrity()
    block.ref_cnt, block.pin_cnt = 1, 2
    with pytest.raises(KVTransferStateError, match="more pins than holders"):
        pool.check_integrity()
