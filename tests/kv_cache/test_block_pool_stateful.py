"""Thousands of random steps on a block pool, each compared with a model made of plain lists and dicts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.runner_mixin.kv_cache import BlockHash, BlockPool, KVCacheBlock
from kvferry.transports.errors import KVTransferStateError

NUM_BLOCKS = 9
hashes = st.integers(0, 5).map(lambda i: BlockHash(bytes([i])))
group_ids = st.integers(0, 1)
indices = st.integers(0, 30)


class PoolAgainstModel(RuleBasedStateMachine):
    """The model: tables and transfers as lists of block ids, the free ones in order, contents by id."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.transfers: list[list[int]] = []
        self.free = list(range(1, NUM_BLOCKS))
        self.contents: dict[int, tuple[BlockHash, int]] = {}

    def blocks(self, ids: list[int]) -> list[KVCacheBlock]:
        return [self.pool.blocks[i] for i in ids]

    def holders(self) -> Counter[int]:
        return Counter(i for ids in self.tables + self.transfers for i in ids)

    def release(self, ids: list[int]) -> None:
        """Free the blocks that nothing else holds after a table or transfer left the model, uncached blocks
        first.
        """
        left = self.holders() + Counter(ids)
        freed = []
        for i in ids:
            left[i] -= 1
            if left[i] == 0:
                freed.append(i)
        uncached = [i for i in freed if i not in self.contents]
        cached = [i for i in freed if i in self.contents]
        self.free = uncached[::-1] + self.free + cached

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(KVTransferStateError):
                self.pool.get_new_blocks(count)
            return
        expected, self.free = self.free[:count], self.free[count:]
        assert [block.block_id for block in self.pool.get_new_blocks(count)] == expected
        for i in expected:
            self.contents.pop(i, None)
        self.tables.append(expected)

    @rule(block_hash=hashes, groups=st.sampled_from([[0], [1], [0, 1]]), index=indices)
    def hit(self, block_hash: BlockHash, groups: list[int], index: int) -> None:
        known = [i for g in groups for i, contents in self.contents.items() if contents == (block_hash, g)]
        found = self.pool.get_cached_block(block_hash, groups)
        if len(known) < len(groups):
            assert found is None
            return
        assert found is not None
        assert [block.block_id for block in found] == known
        self.pool.touch(found)
        self.free = [i for i in self.free if i not in known]
        if self.tables:
            self.tables[index % len(self.tables)] += known
        else:
            self.tables.append(known)

    @precondition(lambda self: self.tables)
    @rule(index=indices)
    def free_table(self, index: int) -> None:
        ids = self.tables.pop(index % len(self.tables))[::-1]
        self.pool.free_blocks(self.blocks(ids))
        self.release(ids)

    @precondition(lambda self: any(self.tables))
    @rule(index=indices, block_hash=hashes, group=group_ids)
    def cache(self, index: int, block_hash: BlockHash, group: int) -> None:
        held = [i for ids in self.tables for i in ids]
        chosen = held[index % len(held)]
        block = self.blocks([chosen])
        if self.contents.get(chosen, (block_hash, group)) != (block_hash, group):
            with pytest.raises(KVTransferStateError):
                self.pool.cache_full_blocks(block, [block_hash], group)
            return
        self.pool.cache_full_blocks(block, [block_hash], group)
        if (block_hash, group) not in self.contents.values():
            self.contents[chosen] = (block_hash, group)

    @precondition(lambda self: self.tables)
    @rule(index=indices)
    def start_transfer(self, index: int) -> None:
        ids = list(self.tables[index % len(self.tables)])
        self.pool.pin(self.blocks(ids))
        self.transfers.append(ids)

    @precondition(lambda self: self.transfers)
    @rule(index=indices)
    def end_transfer(self, index: int) -> None:
        ids = self.transfers.pop(index % len(self.transfers))[::-1]
        self.pool.unpin(self.blocks(ids))
        self.release(ids)

    @rule(ids=st.sets(st.integers(1, NUM_BLOCKS - 1), max_size=3))
    def evict(self, ids: set[int]) -> None:
        self.pool.evict_blocks(ids)
        for i in ids:
            self.contents.pop(i, None)

    @rule()
    def reset(self) -> None:
        unheld = len(self.free) == NUM_BLOCKS - 1
        assert self.pool.reset_prefix_cache() == unheld
        if unheld:
            self.contents.clear()

    @rule(block_id=st.integers(1, NUM_BLOCKS - 1))
    def misuse(self, block_id: int) -> None:
        """Freeing a block that no table holds, or unpinning one that no transfer holds, is refused without
        effect.
        """
        if not any(block_id in ids for ids in self.tables):
            with pytest.raises(KVTransferStateError):
                self.pool.free_blocks(self.blocks([block_id]))
        if not any(block_id in ids for ids in self.transfers):
            with pytest.raises(KVTransferStateError):
                self.pool.unpin(self.blocks([block_id]))

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity()
        holders, pins = self.holders(), Counter(i for ids in self.transfers for i in ids)
        for block in self.pool.blocks[1:]:
            assert (block.ref_cnt, block.pin_cnt) == (holders[block.block_id], pins[block.block_id])
            key = self.contents.get(block.block_id)
            assert (block.block_hash is None) == (key is None)
        assert sorted(self.free) == sorted(i for i in range(1, NUM_BLOCKS) if not holders[i])
        assert self.pool.num_free_blocks == len(self.free)
        assert self.pool.get_usage() == 1 - len(self.free) / (NUM_BLOCKS - 1)
        assert self.pool.num_cached_blocks == len(self.contents)

    def teardown(self) -> None:
        for ids in self.tables:
            self.pool.free_blocks(self.blocks(ids))
        for ids in self.transfers:
            self.pool.unpin(self.blocks(ids))
        assert self.pool.num_free_blocks == NUM_BLOCKS - 1
        self.pool.check_integrity()


TestPool = PoolAgainstModel.TestCase
TestPool.settings = settings(max_examples=50, stateful_step_count=60, deadline=None, derandomize=True)


@pytest.mark.slow
@pytest.mark.full
class TestPoolLonger(PoolAgainstModel.TestCase):
    settings = settings(max_examples=400, stateful_step_count=100, deadline=None, derandomize=True)
