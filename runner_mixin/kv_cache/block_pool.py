"""The blocks of a node: who holds them, which contents they are known by, which one is taken next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ...transports.errors import KVTransferStateError
from .block_hash import BlockHash, BlockHashWithGroupId, make_block_hash_with_group_id
from .free_queue import FreeKVCacheBlockQueue, KVCacheBlock


class BlockPool:
    """Reference-counted blocks, and the prefix cache over them.

    A block is *held* (by block tables, by transfers) or *free*, never both. A free block that is cached keeps its
    contents until it is taken for something else. Blocks without cached contents are taken before those, the last
    freed first; then the cached ones, least recently used first. The null block is neither held nor free; every method
    ignores it where it stands in a table.

    Args:
        num_blocks: Blocks in the pool, the null block included.
        enable_caching: Whether contents are kept and found again.

    Raises:
        ValueError: there is not even a null block.
    """

    def __init__(self, num_blocks: int, *, enable_caching: bool = True) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: a pool needs at least the null block")
        self.enable_caching = enable_caching
        self.blocks: tuple[KVCacheBlock, ...] = tuple(KVCacheBlock(i) for i in range(num_blocks))
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self._free = FreeKVCacheBlockQueue(self.blocks[1:])
        self._cached: dict[BlockHashWithGroupId, KVCacheBlock] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken now, cached ones that no one holds included."""
        return self._free.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be hit."""
        return len(self._cached)

    def get_usage(self) -> float:
        """Share of the pool that is held, 0 to 1; 0 for a pool of the null block alone."""
        usable = len(self.blocks) - 1
        return 1.0 - self.num_free_blocks / usable if usable else 0.0

    # -- taking and giving back ----------------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take free blocks, one holder each. Contents that they cached are forgotten.

        Raises:
            KVTransferStateError: fewer are free, or the number is negative. None was taken.
        """
        taken = self._free.popleft_n(num_blocks)
        for block in taken:
            self._forget(block)
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Become one more holder of each block; a free one is not free any more."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self._free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Stop holding each block. One without holders is free: with cached contents it is taken last, else first.

        Args:
            ordered_blocks: The tail of a chain first. Cached ones are taken in this order, since a block is worth nothing
                to the prefix cache without those before it; the others in the opposite one.

        Raises:
            KVTransferStateError: a block has no holder but transfers. Those before it were freed.
        """
        worthless: list[KVCacheBlock] = []
        try:
            for block in self._let_go(ordered_blocks):
                if block.block_hash is None:
                    worthless.append(block)
                else:
                    self._free.append(block)
        finally:
            # Back in the order of their table: what was one run of the pool's memory is one for the next request, too.
            self._free.prepend_n(worthless[::-1])

    def _let_go(self, blocks: Iterable[KVCacheBlock]) -> Iterator[KVCacheBlock]:
        """Take a holder from each block, one after the other, and yield those that have none left."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt <= block.pin_cnt:
                raise KVTransferStateError(
                    f"block {block.block_id} is freed once too often:"
                    f" {block.ref_cnt} holders, of which {block.pin_cnt} are transfers"
                )
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                yield block

    def pin(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold each block for a transfer: not reused until `unpin`, yet as easily hit and shared as before."""
        for block in blocks:
            self.touch((block,))
            block.pin_cnt += not block.is_null

    def unpin(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """End a transfer's hold of each block; otherwise as `free_blocks`.

        Raises:
            KVTransferStateError: a block is not pinned. Those before it were unpinned.
        """
        self.free_blocks(self._unpinned(ordered_blocks))

    def _unpinned(self, blocks: Iterable[KVCacheBlock]) -> Iterator[KVCacheBlock]:
        """Take a pin, though not yet the holder that it is, from each block, one after the other."""
        for block in blocks:
            if block.is_null:
                continue
            if block.pin_cnt == 0:
                raise KVTransferStateError(f"block {block.block_id} is not pinned by a transfer")
            block.pin_cnt -= 1
            yield block

    # -- the prefix cache ----------------------------------------------------------------------------

    def cache_full_blocks(
        self, blocks: Sequence[KVCacheBlock], block_hashes: Sequence[BlockHash], group_id: int
    ) -> None:
        """Make the contents of blocks known. Does nothing with caching off.

        Of two blocks with equal contents the first stays the known one; the other remains uncached.

        Args:
            blocks: `(num_blocks,)` full blocks of one group, contents in place; null blocks are skipped.
            block_hashes: `(num_blocks,)` their hashes.

        Raises:
            KVTransferStateError: a block is known by other contents, or no one holds it. Those before it are known.
            ValueError: the lengths differ.
        """
        if not self.enable_caching:
            return
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                raise KVTransferStateError(f"block {block.block_id} cannot be cached: no one holds it")
            key = make_block_hash_with_group_id(block_hash, group_id)
            if block.block_hash not in (None, key):
                raise KVTransferStateError(f"block {block.block_id} is cached with other contents already")
            if key not in self._cached:
                self._cached[key] = block
                block.block_hash = key

    def get_cached_block(self, block_hash: BlockHash, group_ids: Iterable[int]) -> list[KVCacheBlock] | None:
        """The blocks with these contents, one per group; None when a group lacks them. Holds nothing."""
        found: list[KVCacheBlock] = []
        for group_id in group_ids:
            block = self._cached.get(make_block_hash_with_group_id(block_hash, group_id))
            if block is None:
                return None
            found.append(block)
        return found

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget what these blocks contain. Who holds them keeps them.

        Raises:
            ValueError: the pool has no block of that id. Those before it were evicted.
        """
        for block_id in block_ids:
            if not 0 <= block_id < len(self.blocks):
                raise ValueError(f"block {block_id} is not in a pool of {len(self.blocks)}")
            self._forget(self.blocks[block_id])

    def reset_prefix_cache(self) -> bool:
        """Forget all contents. Does nothing, and returns False, while a block is held."""
        if self.num_free_blocks != len(self.blocks) - 1:
            return False
        for block in tuple(self._cached.values()):
            self._forget(block)
        return True

    def _forget(self, block: KVCacheBlock) -> None:
        if block.block_hash is not None:
            del self._cached[block.block_hash]
            block.block_hash = None

    # -- checking ------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Check every invariant. O(number of blocks): for tests and debugging.

        Raises:
            KVTransferStateError: one is broken; the message says which.
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
