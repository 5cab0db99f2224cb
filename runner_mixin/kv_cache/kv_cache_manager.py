"""`KVCacheManager`: allocates blocks for an engine's scheduler.

Order of calls for one request
    `get_computed_blocks` (any number of times; has no side effects) → `allocate_slots` (every step, or once
    for an asynchronous load) → `cache_blocks` (after each step or load that *succeeded*) → … → `free`.

Only `cache_blocks` puts blocks into the prefix cache. So another request can never hit a block that is still
being computed or loaded from another node.

A transfer that reads or writes a request's blocks after the request's end takes a pin: `pin` → `free` → … →
`unpin`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from ...connector.kv_cache_specs import KVCacheConfig, MambaSpec
from ...transports.errors import ConfigurationError, KVTransferStateError
from .block_hash import BlockHash, BlockHashWithGroupId
from .block_pool import BlockPool
from .free_queue import KVCacheBlock
from .group_managers import GroupManager, IsUsable, make_group_manager
from .metrics import PrefixCacheStats, PrefixCachingMetrics


class KVCacheRequest(Protocol):
    """The part of an engine's request that the manager reads. The manager changes nothing in it."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int:
        """Number of known tokens: the prompt and the generated ones."""

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose keys and values are in the request's blocks; 0 before its first
        allocation.
        """

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """Hashes of the full blocks of the known tokens; see `get_request_block_hasher`."""


@dataclass(frozen=True)
class KVCacheBlocks:
    """Blocks of one request: one tuple per KV cache group, in token order."""

    blocks: tuple[tuple[KVCacheBlock, ...], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Return the block ids, one list per KV cache group; 0 is the null block."""
        return tuple([block.block_id for block in group] for group in self.blocks)


class KVCacheManager:
    """The block tables of all requests of a node, and its prefix cache.

    Only the scheduler's thread may use it.

    Args:
        kv_cache_config: The pool's blocks and groups.
        max_model_len: Longest sequence in tokens; no slots are allocated beyond it.
        enable_prefix_caching: Whether blocks can be found again by content.

    Raises:
        ConfigurationError: groups other than Mamba groups differ in block size, or a group keeps no cache.
    """

    def __init__(
        self, kv_cache_config: KVCacheConfig, max_model_len: int, *, enable_prefix_caching: bool = True
    ) -> None:
        self.metrics = PrefixCachingMetrics()
        self.block_size = _common_block_size(kv_cache_config)
        self._max_model_len = max_model_len
        self._pool = BlockPool(kv_cache_config.num_blocks, enable_caching=enable_prefix_caching)
        self._groups: tuple[GroupManager, ...] = tuple(
            make_group_manager(group, group_id, self._pool)
            for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        )
        self._request_ids: set[str] = set()
        self._pinned: dict[str, list[KVCacheBlock]] = {}

    # -- figures -------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that can be allocated now, including cached blocks without a holder."""
        return self._pool.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of the pool that is in use, 0 to 1. The null block does not count."""
        return self._pool.get_usage()

    @property
    def pinned_request_ids(self) -> frozenset[str]:
        """Ids of the requests whose blocks a transfer holds."""
        return frozenset(self._pinned)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the request's block table, one list per group; 0 where a group with a window needs no block
        any more.

        The lists are copies. They are empty if the request has no blocks.
        """
        return tuple([block.block_id for block in group.table(request_id)] for group in self._groups)

    # -- one request ---------------------------------------------------------------------------------

    def get_computed_blocks(self, request: KVCacheRequest) -> tuple[KVCacheBlocks, int]:
        """Return the longest cached prefix, which never includes all known tokens. Has no side effects.

        Returns:
            `(blocks, num_tokens)`: blocks per group, with the null block where a group with a window needs
            none;
            `num_tokens` is a multiple of the block size. The blocks are not held: pass them to
            `allocate_slots` before any other call changes the pool.
        """
        no_blocks = KVCacheBlocks(tuple(() for _ in self._groups))
        if not self._pool.enable_caching:
            return no_blocks, 0
        hashes = request.block_hashes
        # The last token is always computed, because its logits give the next token.
        max_blocks = min(len(hashes), (request.num_tokens - 1) // self.block_size)
        tables = [_CachedTable(self._pool, hashes, group.group_id) for group in self._groups]
        num_blocks = _longest_common_prefix(self._groups, [table.has for table in tables], max_blocks)
        blocks = tuple(table.blocks(num_blocks) for table in tables)
        if all(block.is_null for table in blocks for block in table):
            return no_blocks, 0  # no group looks back that far, so nothing was found; that is not a hit
        return KVCacheBlocks(blocks), num_blocks * self.block_size

    def allocate_slots(
        self,
        request: KVCacheRequest,
        num_new_tokens: int,
        *,
        computed_blocks: KVCacheBlocks | None = None,
        num_external_tokens: int = 0,
    ) -> KVCacheBlocks | None:
        """Allocate slots for the tokens that are computed or loaded next. Nothing enters the prefix cache.

        Afterwards the request has slots for `request.num_computed_tokens` + the tokens of `computed_blocks` +
        `num_external_tokens` + `num_new_tokens` tokens. Blocks that are no longer in a group's window are
        freed.

        Args:
            num_new_tokens: Number of tokens that the next step computes; 0 for an asynchronous load.
            computed_blocks: The result of `get_computed_blocks`, at the first allocation of a request.
            num_external_tokens: Number of tokens after these that the connector loads.

        Returns:
            The added blocks per group, without `computed_blocks`. None if too few blocks are free; then the
            request is unchanged, except that blocks that are no longer in its window were freed.

        Raises:
            ValueError: no token needs a slot, or a number is negative. Nothing changed.
            KVTransferStateError: `computed_blocks` is given for a request that has blocks. Nothing changed.
        """
        _require_tokens(num_new_tokens, num_external_tokens)
        hits = self._hits(request.request_id, computed_blocks)
        num_local = max((len(hit) for hit in hits), default=0) * self.block_size
        num_computed = request.num_computed_tokens + num_local + num_external_tokens
        num_slots = min(num_computed + num_new_tokens, self._max_model_len)
        # Even if all known tokens are loaded, the last one is computed again and looks back from its
        # position.
        position = max(0, min(num_computed, request.num_tokens - 1))
        if not self._make_room(request.request_id, hits, num_slots, position):
            return None
        if request.request_id not in self._request_ids:
            self._admit(request, hits, num_local, position)
        added = (tuple(g.extend(request.request_id, num_slots, position)) for g in self._groups)
        return KVCacheBlocks(tuple(added))

    def cache_blocks(self, request: KVCacheRequest, num_computed_tokens: int) -> None:
        """Put the full blocks of the request's first `num_computed_tokens` tokens into the prefix cache.

        Call this after a step or a load put their contents in place. Idempotent.

        Raises:
            KVTransferStateError: the request has no blocks, or fewer hashes or slots than full blocks.
        """
        self._require_blocks(request.request_id)
        if not self._pool.enable_caching:
            return
        num_full = num_computed_tokens // self.block_size
        hashes = request.block_hashes
        if len(hashes) < num_full:
            raise KVTransferStateError(
                f"cannot cache {num_full} full blocks of request {request.request_id!r}: it has {len(hashes)} block hashes"
            )
        for group in self._groups:
            group.cache(request.request_id, hashes, num_full)

    def free(self, request_id: str) -> None:
        """Free the request's blocks. Cached ones can be hit until they are evicted.

        Does nothing for a request without blocks. Blocks that a transfer pinned stay until `unpin`.
        """
        for group in self._groups:
            group.free(request_id)
        self._request_ids.discard(request_id)

    # -- transfers -----------------------------------------------------------------------------------

    def pin(self, request_id: str) -> None:
        """Hold the request's current blocks for a transfer.

        They are not reused until `unpin`, even after `free`.

        Cached blocks can still be hit and shared.

        Raises:
            KVTransferStateError: the request is pinned already, or has no blocks. Nothing changed.
        """
        self._require_blocks(request_id)
        if request_id in self._pinned:
            raise KVTransferStateError(f"cannot pin request {request_id!r}: it is pinned already")
        held = [block for group in self._groups for block in group.table(request_id)]
        self._pool.pin(held)
        self._pinned[request_id] = held

    def unpin(self, request_id: str) -> None:
        """End the transfer's hold on the request's blocks.

        Raises:
            KVTransferStateError: the request is not pinned.
        """
        held = self._pinned.pop(request_id, None)
        if held is None:
            raise KVTransferStateError(f"cannot unpin request {request_id!r}: it is not pinned")
        self._pool.unpin(reversed(held))

    def invalidate_blocks(self, block_ids: Iterable[int]) -> dict[str, int]:
        """Discard blocks whose contents are undefined, because a load failed and nothing writes there any
        more.

        The blocks leave the prefix cache. Every request that has one of them is truncated to its longest
        valid prefix: the blocks after it are freed, and the next `allocate_slots` allocates new ones.

        Returns:
            For each request that was truncated, the number of tokens of its valid prefix. If its
            `num_computed_tokens` is higher, the scheduler lowers it to that number.

        Raises:
            ValueError: the pool has no block with that id. No request was truncated.
        """
        invalid = set(block_ids)
        self._pool.evict_blocks(invalid)
        cut: dict[str, int] = {}
        for request_id in self._request_ids if invalid else ():
            tables = [_HeldTable(group.table(request_id), invalid) for group in self._groups]
            if not any(table.has_invalid for table in tables):
                continue
            max_blocks = min(table.num_before_invalid for table in tables)
            num_blocks = _longest_common_prefix(self._groups, [table.has for table in tables], max_blocks)
            for group in self._groups:
                group.truncate(request_id, group.num_blocks_for(num_blocks * self.block_size))
            cut[request_id] = num_blocks * self.block_size
        return cut

    def record_changes(self) -> list[tuple[bool, BlockHashWithGroupId]]:
        """Record from now on what enters the prefix cache (True) and leaves it.

        The caller empties the list that this returns.
        """
        self._pool.changes = []
        return self._pool.changes

    # -- the whole pool ------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Forget all cached contents, for example after new weights.

        Does nothing and returns False while blocks are in use.
        """
        done = self._pool.reset_prefix_cache()
        if done:
            self.metrics.reset()
        return done

    def check_integrity(self) -> None:
        """Check every invariant of tables, reference counts and free queue; for tests and debugging.

        Raises:
            KVTransferStateError: an invariant is broken; the message says which.
        """
        self._pool.check_integrity()
        tables = (g.table(request_id) for g in self._groups for request_id in self._request_ids)
        pins = Counter(block for held in self._pinned.values() for block in held)
        holders = Counter(block for table in tables for block in table) + pins
        for block in self._pool.blocks[1:]:
            if (block.ref_cnt, block.pin_cnt) != (holders[block], pins[block]):
                raise KVTransferStateError(
                    f"block manager is inconsistent: {block} should have {holders[block]} holders, of which {pins[block]} "
                    "are transfers"
                )

    def _hits(
        self, request_id: str, computed_blocks: KVCacheBlocks | None
    ) -> Sequence[Sequence[KVCacheBlock]]:
        if computed_blocks is None:
            return [()] * len(self._groups)
        if request_id in self._request_ids:
            raise KVTransferStateError(
                f"cannot use computed_blocks for request {request_id!r}: it has blocks already"
            )
        return computed_blocks.blocks

    def _make_room(
        self, request_id: str, hits: Sequence[Sequence[KVCacheBlock]], num_slots: int, position: int
    ) -> bool:
        """Free blocks that are no longer in the request's windows; return whether enough blocks are free
        after that.
        """
        num_needed = 0
        for group, hit in zip(self._groups, hits, strict=True):
            group.free_invisible(request_id, position)
            num_needed += group.num_blocks_to_take(request_id, hit, num_slots, position)
        return num_needed <= self._pool.num_free_blocks

    def _admit(
        self, request: KVCacheRequest, hits: Sequence[Sequence[KVCacheBlock]], num_local: int, position: int
    ) -> None:
        # Hold all hits before any block is taken, because a block that is taken could be another group's hit.
        for group, hit in zip(self._groups, hits, strict=True):
            group.adopt(request.request_id, hit, position)
        self._request_ids.add(request.request_id)
        self.metrics.observe(PrefixCacheStats(requests=1, queries=request.num_tokens, hits=num_local))

    def _require_blocks(self, request_id: str) -> None:
        if request_id not in self._request_ids:
            raise KVTransferStateError(f"request {request_id!r} has no blocks; call allocate_slots first")


class _CachedTable:
    """The table that a request would have if all its blocks were in the prefix cache."""

    def __init__(self, pool: BlockPool, hashes: Sequence[BlockHash], group_id: int) -> None:
        self._pool = pool
        self._hashes = hashes
        self._group_ids = (group_id,)
        self._found: dict[int, KVCacheBlock] = {}

    def has(self, index: int) -> bool:
        found = self._pool.get_cached_block(self._hashes[index], self._group_ids)
        if found is None:
            return False
        self._found[index] = found[0]
        return True

    def blocks(self, num_blocks: int) -> tuple[KVCacheBlock, ...]:
        """Return the first `num_blocks` blocks; the null block where `has` was not called or returned
        False.
        """
        return tuple(self._found.get(i, self._pool.null_block) for i in range(num_blocks))


class _HeldTable:
    """A request's table, of which some blocks are invalid."""

    def __init__(self, table: Sequence[KVCacheBlock], invalid: AbstractSet[int]) -> None:
        self._table = table
        self._invalid = invalid
        bad = (i for i, block in enumerate(table) if not block.is_null and block.block_id in invalid)
        self.num_before_invalid = next(bad, len(table))
        self.has_invalid = self.num_before_invalid < len(table)

    def has(self, index: int) -> bool:
        block = self._table[index]
        return not block.is_null and block.block_id not in self._invalid


def _require_tokens(num_new_tokens: int, num_external_tokens: int) -> None:
    if min(num_new_tokens, num_external_tokens) < 0 or num_new_tokens + num_external_tokens == 0:
        raise ValueError(
            f"cannot allocate slots for {num_new_tokens=} and {num_external_tokens=}: their sum must be positive, and "
            "neither may be negative"
        )


def _longest_common_prefix(
    groups: Sequence[GroupManager], are_usable: Sequence[IsUsable], max_blocks: int
) -> int:
    """Return the longest prefix after which every group can continue, in blocks, up to `max_blocks`."""
    while True:
        num_blocks = max_blocks
        for group, is_usable in zip(groups, are_usable, strict=True):
            num_blocks = group.longest_prefix(is_usable, num_blocks)
        if num_blocks == max_blocks:
            return num_blocks
        max_blocks = num_blocks


def _common_block_size(config: KVCacheConfig) -> int:
    """Return the number of tokens per block, for hashing and for hits."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    sizes = {spec.block_size for spec in specs if not isinstance(spec, MambaSpec)}
    sizes = sizes or {spec.block_size for spec in specs} or {1}
    if len(sizes) > 1:
        raise ConfigurationError(
            f"groups that share a pool need the same block size, got {sorted(sizes)}",
            key="block_size",
            value=sizes,
        )
    return sizes.pop()
