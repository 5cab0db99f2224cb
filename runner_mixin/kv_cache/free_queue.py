"""Blocks, and the queue of free ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ...transports.errors import KVTransferStateError
from .block_hash import BlockHashWithGroupId


@dataclass(eq=False, slots=True)
class KVCacheBlock:
    """A pool's record of one block. The pool owns it; others only read it.

    Attributes:
        block_id: Index of the block in the pool.
        ref_cnt: Number of holders: block tables of requests, and transfers.
        pin_cnt: Number of holders that are transfers.
        block_hash: The block's key in the prefix cache; None while it is not cached.
        is_null: Whether this is block 0, which stands for "no block" and is never held, cached or
            transferred.
    """

    block_id: int
    ref_cnt: int = 0
    pin_cnt: int = 0
    block_hash: BlockHashWithGroupId | None = None
    is_null: bool = False
    prev_free_block: KVCacheBlock | None = field(default=None, repr=False)
    next_free_block: KVCacheBlock | None = field(default=None, repr=False)


class FreeKVCacheBlockQueue:
    """Free blocks in the order in which they are taken.

    A doubly linked list through the blocks themselves, between a sentinel head and a sentinel tail. Each
    operation is O(1) per block, at any position, and allocates only the list that it returns.

    Args:
        blocks: The blocks that are free at first, in order.

    Raises:
        KVTransferStateError: a block is in a queue already. The ones before it are in this one.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        self._head = KVCacheBlock(block_id=-1)
        self._tail = KVCacheBlock(block_id=-1)
        self._head.next_free_block = self._tail
        self._tail.prev_free_block = self._head
        self.append_n(blocks)

    def popleft(self) -> KVCacheBlock:
        """Take the first block.

        Raises:
            KVTransferStateError: the queue is empty.
        """
        block = self._head.next_free_block
        if block is None or block is self._tail:
            raise KVTransferStateError("cannot take a block: the free queue is empty")
        self.remove(block)
        return block

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the first `n` blocks, in order.

        Raises:
            KVTransferStateError: `n` is negative or more than the number of free blocks. No block was taken.
        """
        if not 0 <= n <= self.num_free_blocks:
            raise KVTransferStateError(f"cannot take {n} blocks: {self.num_free_blocks} are free")
        blocks: list[KVCacheBlock] = []
        block = self._head.next_free_block
        while len(blocks) < n:
            assert block is not None
            blocks.append(block)
            after = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = after
        assert block is not None
        self._head.next_free_block = block
        block.prev_free_block = self._head
        self.num_free_blocks -= n
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        """Remove a block, wherever it is in the queue.

        Raises:
            KVTransferStateError: the block is not free. Nothing changed.
        """
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise KVTransferStateError(f"cannot remove block {block.block_id}: it is not in the free queue")
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Add a block at the end: it is taken after all blocks that are free now.

        Raises:
            KVTransferStateError: the block is in the queue already. Nothing changed.
        """
        last = self._tail.prev_free_block
        assert last is not None
        self._insert(block, last, self._tail)

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add blocks at the end, in order.

        Raises:
            KVTransferStateError: a block is in the queue already. The ones before it were appended.
        """
        for block in blocks:
            self.append(block)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add blocks at the front, in order: they are taken before all blocks that are free now.

        Raises:
            KVTransferStateError: a block is in the queue already. The ones after it were prepended.
        """
        for block in reversed(blocks):
            first = self._head.next_free_block
            assert first is not None
            self._insert(block, self._head, first)

    def _insert(self, block: KVCacheBlock, before: KVCacheBlock, after: KVCacheBlock) -> None:
        if block.prev_free_block is not None or block.next_free_block is not None:
            raise KVTransferStateError(f"cannot free block {block.block_id}: it is in the free queue already")
        block.prev_free_block, block.next_free_block = before, after
        before.next_free_block = after.prev_free_block = block
        self.num_free_blocks += 1

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Return all free blocks, in the order in which they will be taken."""
        return list(self)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next_free_block
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free_block
