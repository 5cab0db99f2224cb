"""The block tables of one KV cache group, for each way in which a layer looks back."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
"""Whether the block at an index of a table holds what it should."""


class GroupManager(ABC):
    """The block tables of one group. Index `i` of a table holds tokens `[i * block_size, (i + 1) * block_size)`.

    Where a query can no longer look, the table has the null block.

    Args:
        spec: What the group's layers have in common.
        group_id: The group's place in the configuration.
        pool: Where blocks come from.
    """

    def __init__(self, spec: KVCacheSpec, group_id: int, pool: BlockPool) -> None:
        self.block_size = spec.block_size
        self.group_id = group_id
        self._pool = pool
        self._tables: dict[str, list[KVCacheBlock]] = {}
        self._num_cached: dict[str, int] = {}

    # -- how the group's layers look back ------------------------------------------------------------

    @abstractmethod
    def first_visible_token(self, position: int) -> int:
        """The oldest token that a query at `position`, or at any later one, looks at. Rises with `position`."""

    def num_blocks_for(self, num_tokens: int) -> int:
        """Length of the table of a sequence of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def longest_prefix(self, is_usable: IsUsable, max_blocks: int) -> int:
        """The most blocks, up to `max_blocks`, after which one can go on: all that is visible there is usable."""
        end = start = max_blocks
        while start > self._first_visible_block(end * self.block_size):
            start -= 1
            if not is_usable(start):
                # What is visible begins no later for a shorter prefix: none that contains this block will do.
                end = start
        return end

    def _first_visible_block(self, position: int) -> int:
        return self.first_visible_token(position) // self.block_size

    # -- one request's table -------------------------------------------------------------------------

    def table(self, request_id: str) -> Sequence[KVCacheBlock]:
        """The request's blocks, in token order; empty when it has none."""
        return self._tables.get(request_id, ())

    def num_blocks_to_take(
        self, request_id: str, hit: Sequence[KVCacheBlock], num_tokens: int, position: int
    ) -> int:
        """How many free blocks `extend` will use up, hits that no one holds included.

        Args:
            hit: Leading blocks from the prefix cache, for a request without a table.
            num_tokens: Tokens that need a slot.
            position: The first token that will be computed.
        """
        first_visible = self._first_visible_block(position)
        revived = sum(block.ref_cnt == 0 and not block.is_null for block in hit[first_visible:])
        present = max(len(self.table(request_id)), len(hit), first_visible)
        return revived + max(0, self.num_blocks_for(num_tokens) - present)

    def adopt(self, request_id: str, hit: Sequence[KVCacheBlock], position: int) -> None:
        """Start the table of a request from prefix cache hits; hold those that are visible from `position` on."""
        first_visible = min(self._first_visible_block(position), len(hit))
        visible = hit[first_visible:]
        self._pool.touch(visible)
        self._tables[request_id] = [self._pool.null_block] * first_visible + list(visible)
        self._num_cached[request_id] = len(hit)

    def extend(self, request_id: str, num_tokens: int, position: int) -> list[KVCacheBlock]:
        """Lengthen the table to `num_tokens` tokens and return what was added.

        Blocks that are not visible from `position` on are null: a load from another node may begin in mid-sequence.
        """
        table = self._tables[request_id]
        num_added = max(0, self.num_blocks_for(num_tokens) - len(table))
        num_null = min(num_added, max(0, self._first_visible_block(position) - len(table)))
        added = [self._pool.null_block] * num_null + self._pool.get_new_blocks(num_added - num_null)
        table += added
        return added

    def free_invisible(self, request_id: str, position: int) -> None:
        """Free the blocks before all that a query at `position`, or later, looks at."""
        table = self._tables.get(request_id, [])
        null = self._pool.null_block
        freed: list[KVCacheBlock] = []
        for i in reversed(range(min(self._first_visible_block(position), len(table)))):
            if table[i].is_null:
                break  # those before it went earlier
            freed.append(table[i])
            table[i] = null
        self._pool.free_blocks(freed)

    def cache(self, request_id: str, block_hashes: Sequence[BlockHash], num_blocks: int) -> None:
        """Put the request's first `num_blocks` blocks into the prefix cache, those that are not in it yet.

        Raises:
            KVTransferStateError: it has fewer blocks.
        """
        table = self.table(request_id)
        if num_blocks > len(table):
            raise KVTransferStateError(
                f"request {request_id!r} has {len(table)} blocks in group {self.group_id}, not {num_blocks}"
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
        """Free the request's blocks, the last first. Harmless when it has none."""
        self._pool.free_blocks(reversed(self._tables.pop(request_id, [])))
        self._num_cached.pop(request_id, None)


class FullAttentionManager(GroupManager):
    """Everything before a query is visible to it."""

    def first_visible_token(self, position: int) -> int:
        return 0

    def longest_prefix(self, is_usable: IsUsable, max_blocks: int) -> int:
        # As the base's, but from the left: most prompts miss early.
        return next((i for i in range(max_blocks) if not is_usable(i)), max_blocks)


class SlidingWindowManager(GroupManager):
    """The last `sliding_window` tokens are visible, the query's own included."""

    def __init__(self, spec: SlidingWindowSpec, group_id: int, pool: BlockPool) -> None:
        super().__init__(spec, group_id, pool)
        self._window = spec.sliding_window

    def first_visible_token(self, position: int) -> int:
        return max(0, position - self._window + 1)


class ChunkedLocalAttentionManager(GroupManager):
    """What comes before, in the query's own aligned chunk, is visible."""

    def __init__(self, spec: ChunkedLocalAttentionSpec, group_id: int, pool: BlockPool) -> None:
        super().__init__(spec, group_id, pool)
        self._chunk = spec.attention_chunk_size

    def first_visible_token(self, position: int) -> int:
        return position // self._chunk * self._chunk


class MambaManager(GroupManager):
    """A recurrent state: one block a request, which stands for all tokens so far.

    It is overwritten as the request goes on, so it is never cached, and there is no prefix to go on after.
    """

    def first_visible_token(self, position: int) -> int:
        return 0

    def num_blocks_for(self, num_tokens: int) -> int:
        return min(1, num_tokens)

    def longest_prefix(self, is_usable: IsUsable, max_blocks: int) -> int:
        return 0

    def cache(self, request_id: str, block_hashes: Sequence[BlockHash], num_blocks: int) -> None:
        """Nothing: the next token changes the state."""


def make_group_manager(group: KVCacheGroupSpec, group_id: int, pool: BlockPool) -> GroupManager:
    """The manager for a group's kind of layers.

    Raises:
        ConfigurationError: layers of this kind keep no cache that a block table could describe.
    """
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):  # members look back alike; only their page sizes differ
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
                f"group {group_id} ({', '.join(group.layer_names)}): no block tables for {type(spec).__name__}",
                key="kv_cache_groups",
                value=spec,
            )
