"""The blocks of a node: how many holders each has, which contents are cached, and which block is
taken next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ...transports.errors import KVTransferStateError
from .block_hash import BlockHash, BlockHashWithGroupId, make_block_hash_with_group_id
from .free_queue import FreeKVCacheBlockQueue, KVCacheBlock


class BlockPool:
    """Reference-counted blocks, and the prefix cache over them.

    A block is either *held* (by block tables and transfers) or *free*. A free block whose contents are cached
    keeps them until it is taken for something else. Free blocks without cached contents are taken first,
    starting with the last freed; then the cached ones, least recently used first. The null block is neither
    held nor free, and every method skips it.

    Args:
        num_blocks: Number of blocks in the pool, including the null block.
        enable_caching: Whether contents are kept and can be found again.

    Raises:
        ValueError: `num_blocks` is less than 1.
    """

    def __init__(self, num_blocks: int, *, enable_caching: bool = True) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks} is too small: a pool needs at least the null block")
        self.enable_caching = enable_caching
        self.blocks: tuple[KVCacheBlock, ...] = tuple(KVCacheBlock(i) for i in range(num_blocks))
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self._free = FreeKVCacheBlockQueue(self.blocks[1:])
        self._cached: dict[BlockHashWithGroupId, KVCacheBlock] = {}
        #: What entered the prefix cache (True) and left it, in this order. None: it is not recorded.
        self.changes: list[tuple[bool, BlockHashWithGroupId]] | None = None

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that can be taken now, including cached ones without a holder."""
        return self._free.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Number of blocks that the prefix cache can find."""
        return len(self._cached)

    def get_usage(self) -> float:
        """Return the share of the pool that is held, 0 to 1; 0 if there is only the null block."""
        usable = len(self.blocks) - 1
        return 1.0 - self.num_free_blocks / usable if usable else 0.0

    # -- taking and giving back ----------------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take free blocks, and give each one holder. Their cached contents are forgotten.

        Raises:
            KVTransferStateError: fewer blocks are free, or the number is negative. No block was taken.
        """
        taken = self._free.popleft_n(num_blocks)
        for block in taken:
            self._forget(block)
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add a holder to each block. A block that was free no longer is."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self._free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Remove a holder from each block. A block without holders is free.

        A free block with cached contents is taken after all others, and one without before all others.

        Args:
            ordered_blocks: The end of a table first. Blocks with cached contents are later taken in this
                order, because a block is of no use to the prefix cache without those before it. The others
                are taken in the opposite order.

        Raises:
            KVTransferStateError: a block has no holders other than transfers. Those before it were freed.
        """
        uncached: list[KVCacheBlock] = []
        try:
            for block in self._let_go(ordered_blocks):
                if block.block_hash is None:
                    uncached.append(block)
                else:
                    self._free.append(block)
        finally:
            # Put them back in the order of their table, so that one run of memory stays one run for the next
            # request.
            self._free.prepend_n(uncached[::-1])

    def _let_go(self, blocks: Iterable[KVCacheBlock]) -> Iterator[KVCacheBlock]:
        """Remove a holder from each block in turn, and yield the blocks that have none left."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt <= block.pin_cnt:
                raise KVTransferStateError(
                    f"block {block.block_id} is freed once too often: it has {block.ref_cnt} holders, of which "
                    f"{block.pin_cnt} are transfers"
                )
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                yield block

    def pin(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold each block for a transfer.

        It is not reused until `unpin`, but the prefix cache can still find and share it.
        """
        for block in blocks:
            self.touch((block,))
            block.pin_cnt += not block.is_null

    def unpin(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """End a transfer's hold on each block; otherwise like `free_blocks`.

        Raises:
            KVTransferStateError: a block is not pinned. Those before it were unpinned.
        """
        self.free_blocks(self._unpinned(ordered_blocks))

    def _unpinned(self, blocks: Iterable[KVCacheBlock]) -> Iterator[KVCacheBlock]:
        """Remove a pin from each block in turn and yield the block; the caller removes the holder that the
        pin was.
        """
        for block in blocks:
            if block.is_null:
                continue
            if block.pin_cnt == 0:
                raise KVTransferStateError(f"cannot unpin block {block.block_id}: no transfer has pinned it")
            block.pin_cnt -= 1
            yield block

    # -- the prefix cache ----------------------------------------------------------------------------

    def cache_full_blocks(
        self, blocks: Sequence[KVCacheBlock], block_hashes: Sequence[BlockHash], group_id: int
    ) -> None:
        """Put the contents of blocks into the prefix cache. Does nothing if caching is off.

        Of two blocks with equal contents, the first stays in the cache and the other remains uncached.

        Args:
            blocks: `(num_blocks,)` full blocks of one group, whose contents are in place; null blocks are
                skipped.
            block_hashes: `(num_blocks,)` hashes of these blocks.

        Raises:
            KVTransferStateError: a block is cached with other contents, or has no holder. Those before it are
                cached.
            ValueError: the lengths differ.
        """
        if not self.enable_caching:
            return
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                raise KVTransferStateError(f"cannot cache block {block.block_id}: it has no holder")
            key = make_block_hash_with_group_id(block_hash, group_id)
            if block.block_hash not in (None, key):
                raise KVTransferStateError(
                    f"cannot cache block {block.block_id}: it is cached with other contents already"
                )
            if key not in self._cached:
                self._cached[key] = block
                block.block_hash = key
                if self.changes is not None:
                    self.changes.append((True, key))

    def get_cached_block(self, block_hash: BlockHash, group_ids: Iterable[int]) -> list[KVCacheBlock] | None:
        """Return the blocks with these contents, one per group, or None if a group has none.

        Adds no holder.
        """
        found: list[KVCacheBlock] = []
        for group_id in group_ids:
            block = self._cached.get(make_block_hash_with_group_id(block_hash, group_id))
            if block is None:
                return None
            found.append(block)
        return found

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Remove these blocks' contents from the prefix cache. Holders keep the blocks.

        Raises:
            ValueError: the pool has no block with that id. Those before it were evicted.
        """
        for block_id in block_ids:
            if not 0 <= block_id < len(self.blocks):
                raise ValueError(f"cannot evict block {block_id}: the pool has {len(self.blocks)} blocks")
            self._forget(self.blocks[block_id])

    def reset_prefix_cache(self) -> bool:
        """Remove all contents from the prefix cache. Does nothing and returns False while a block is held."""
        if self.num_free_blocks != len(self.blocks) - 1:
            return False
        for block in tuple(self._cached.values()):
            self._forget(block)
        return True

    def _forget(self, block: KVCacheBlock) -> None:
        if block.block_hash is not None:
            del self._cached[block.block_hash]
            if self.changes is not None:
                self.changes.append((False, block.block_hash))
            block.block_hash = None

    # -- checking ------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Check every invariant. For tests and debugging: the cost is O(number of blocks).

        Raises:
            KVTransferStateError: an invariant is broken; the message says which.
        """
        free = self._free.get_all_free_blocks()
        _require(len(free) == self.num_free_blocks, f"{len(free)} free, {self.num_free_blocks} counted")
        free_ids = {block.block_id for block in free}
        _require(len(free_ids) == len(free), "a block is in the free queue twice")
        for block in self.blocks[1:]:
            _require(0 <= block.pin_cnt <= block.ref_cnt, f"more pins than holders: {block}")
            _require((block.ref_cnt == 0) == (block.block_id in free_ids), f"held or free, not both: {block}")
            if block.block_hash is not None:
                _require(self._cached.get(block.block_hash) is block, f"not found by its hash: {block}")
        for key, block in self._cached.items():
            _require(block.block_hash == key, f"found by a hash that it does not have: {block}")
        null = self.null_block
        _require(null.ref_cnt == null.pin_cnt == 0 and null.block_hash is None, f"null block used: {null}")
        _require(null.block_id not in free_ids, "the null block is free")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise KVTransferStateError(f"block pool is inconsistent: {what}")
