"""The block tables of one KV cache group; one class for each way in which layers look back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...connector.kv_cache_specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from ...transports.errors import ConfigurationError, KVTransferStateError
from .block_hash import BlockHash
from .block_pool import BlockPool
from .free_queue import KVCacheBlock

IsUsable = Callable[[int], bool]
"""Returns whether the block at an index of a table has the right contents."""


class GroupManager:
    """The block tables of one group.

    Index `i` of a table holds tokens `[i * block_size, (i + 1) * block_size)`.

    The table has the null block where no query can look any more.

    Args:
        spec: The spec that the group's layers have in common.
        group_id: Index of the group in the configuration.
        pool: The pool that blocks are taken from.
    """

    def __init__(self, spec: KVCacheSpec, group_id: int, pool: BlockPool) -> None:
        self.block_size = spec.block_size
        self.group_id = group_id
        self._spec = spec
        self._pool = pool
        self._tables: dict[str, list[KVCacheBlock]] = {}
        self._num_cached: dict[str, int] = {}

    # -- how the group's layers look back ------------------------------------------------------------

    def first_visible_token(self, position: int) -> int:
        """Return the oldest token that a query at `position` or later looks at.

        It never decreases as `position` grows.
        """
        return self._spec.first_visible_token(position)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the length of the table of a sequence of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def longest_prefix(self, is_usable: IsUsable, max_blocks: int) -> int:
        """Return the longest prefix after which computing can continue, in blocks, up to `max_blocks`.

        It can continue if every block that is visible at the prefix's end is usable.
        """
        end = start = max_blocks
        while start > self._first_visible_block(end * self.block_size):
            start -= 1
            if not is_usable(start):
                # For a shorter prefix, the first visible block is the same or earlier. So no prefix that
                # contains this block is usable, and the search continues with the prefix that ends before it.
                end = start
        return end

    def _first_visible_block(self, position: int) -> int:
        return self.first_visible_token(position) // self.block_size

    # -- one request's table -------------------------------------------------------------------------

    def table(self, request_id: str) -> Sequence[KVCacheBlock]:
        """Return the request's blocks, in token order; empty if it has none."""
        return self._tables.get(request_id, ())

    def num_blocks_to_take(
        self, request_id: str, hit: Sequence[KVCacheBlock], num_tokens: int, position: int
    ) -> int:
        """Return how many free blocks `adopt` and `extend` will take, including hits without a holder.

        Args:
            hit: Leading blocks from the prefix cache, for a request without a table.
            num_tokens: Number of tokens that need a slot.
            position: The first token that will be computed.
        """
        first_visible = self._first_visible_block(position)
        revived = sum(block.ref_cnt == 0 and not block.is_null for block in hit[first_visible:])
        present = max(len(self.table(request_id)), len(hit), first_visible)
        return revived + max(0, self.num_blocks_for(num_tokens) - present)

    def adopt(self, request_id: str, hit: Sequence[KVCacheBlock], position: int) -> None:
        """Start the table of a request with prefix cache hits, and hold those that are visible from
        `position` on.
        """
        first_visible = min(self._first_visible_block(position), len(hit))
        visible = hit[first_visible:]
        self._pool.touch(visible)
        self._tables[request_id] = [self._pool.null_block] * first_visible + list(visible)
        self._num_cached[request_id] = len(hit)

    def extend(self, request_id: str, num_tokens: int, position: int) -> list[KVCacheBlock]:
        """Extend the table to `num_tokens` tokens and return the added blocks.

        Blocks that are not visible from `position` on are null, because a load from another node may begin in
        the middle of the sequence.
        """
        table = self._tables[request_id]
        num_added = max(0, self.num_blocks_for(num_tokens) - len(table))
        num_null = min(num_added, max(0, self._first_visible_block(position) - len(table)))
        added = [self._pool.null_block] * num_null + self._pool.get_new_blocks(num_added - num_null)
        table += added
        return added

    def free_invisible(self, request_id: str, position: int) -> None:
        """Free the blocks that no query at `position` or later looks at."""
        table = self._tables.get(request_id, [])
        null = self._pool.null_block
        freed: list[KVCacheBlock] = []
        for i in reversed(range(min(self._first_visible_block(position), len(table)))):
            if table[i].is_null:
                break  # the blocks before it were freed earlier
            freed.append(table[i])
            table[i] = null
        self._pool.free_blocks(freed)

    def cache(self, request_id: str, block_hashes: Sequence[BlockHash], num_blocks: int) -> None:
        """Put the request's first `num_blocks` blocks into the prefix cache, unless they are in it already.

        Raises:
            KVTransferStateError: the request has fewer blocks.
        """
        table = self.table(request_id)
        if num_blocks > len(table):
            raise KVTransferStateError(
                f"cannot cache {num_blocks} blocks of request {request_id!r}: it has {len(table)} in group {self.group_id}"
            )
        start = self._num_cached[request_id]
        if start < num_blocks:
            self._pool.cache_full_blocks(
                table[start:num_blocks], block_hashes[start:num_blocks], self.group_id
            )
            self._num_cached[request_id] = num_blocks

    def truncate(self, request_id: str, num_blocks: int) -> None:
        """Free all but the first `num_blocks` blocks."""
        table = self._tables[request_id]
        self._pool.free_blocks(reversed(table[num_blocks:]))
        del table[num_blocks:]
        self._num_cached[request_id] = min(self._num_cached[request_id], num_blocks)

    def free(self, request_id: str) -> None:
        """Free the request's blocks, the last one first. Does nothing if it has none."""
        self._pool.free_blocks(reversed(self._tables.pop(request_id, [])))
        self._num_cached.pop(request_id, None)


class FullAttentionManager(GroupManager):
    """A query sees everything before it."""

    def longest_prefix(self, is_usable: IsUsable, max_blocks: int) -> int:
        # The same result as the base's, but searched from the left, because most prompts miss early.
        return next((i for i in range(max_blocks) if not is_usable(i)), max_blocks)


class SlidingWindowManager(GroupManager):
    """A query sees the last `sliding_window` tokens, including its own."""


class ChunkedLocalAttentionManager(GroupManager):
    """A query sees what comes before it in its own aligned chunk."""


class MambaManager(GroupManager):
    """A recurrent state: one block per request, which stands for all tokens so far.

    It is overwritten as the request continues. So it is never cached, and no prefix can be continued.
    """

    def num_blocks_for(self, num_tokens: int) -> int:
        return min(1, num_tokens)

    def longest_prefix(self, is_usable: IsUsable, max_blocks: int) -> int:
        return 0

    def cache(self, request_id: str, block_hashes: Sequence[BlockHash], num_blocks: int) -> None:
        """Do nothing: the next token changes the state."""


def make_group_manager(group: KVCacheGroupSpec, group_id: int, pool: BlockPool) -> GroupManager:
    """Make the manager for a group's kind of layers.

    Raises:
        ConfigurationError: layers of this kind have no block tables.
    """
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):  # all members look back alike; only their page sizes differ
        spec = next(iter(spec.kv_cache_specs.values()))
    match spec:
        case FullAttentionSpec():
            return FullAttentionManager(spec, group_id, pool)
        case SlidingWindowSpec():
            return SlidingWindowManager(spec, group_id, pool)
        case ChunkedLocalAttentionSpec():
            return ChunkedLocalAttentionManager(spec, group_id, pool)
        case MambaSpec():
            return MambaManager(spec, group_id, pool)
        case _:
            raise ConfigurationError(
                f"cannot manage group {group_id} ({', '.join(group.layer_names)}): there are no block tables for "
                f"{type(spec).__name__}",
                key="kv_cache_groups",
                value=spec,
            )
