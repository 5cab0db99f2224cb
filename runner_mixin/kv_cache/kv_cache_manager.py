"""`KVCacheManager`: what an engine's scheduler asks for blocks.

One request's way through it
    `get_computed_blocks` (any number of times; changes nothing) → `allocate_slots` (every step, or once for an
    asynchronous load) → `cache_blocks` (after each step or load that *succeeded*) → … → `free`.

Nothing enters the prefix cache but through `cache_blocks`. So a block that is still being computed, or loaded from
another node, can never be another request's hit.

A transfer that reads or writes a request's blocks after its end takes a pin: `pin` → `free` → … → `unpin`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...connector.kv_cache_specs import KVCacheConfig
from .block_hash import BlockHash
from .free_queue import KVCacheBlock
from .metrics import PrefixCachingMetrics

__all__ = ["KVCacheBlocks", "KVCacheManager", "KVCacheRequest"]


class KVCacheRequest(Protocol):
    """What the manager reads of an engine's request. It changes nothing of it."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt, and what was generated."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are in the request's blocks; 0 before its first allocation."""

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """Hashes of the full blocks of the known tokens; see `get_request_block_hasher`."""


@dataclass(frozen=True)
class KVCacheBlocks:
    """Blocks of one request: one tuple per KV cache group, in token order."""

    blocks: tuple[tuple[KVCacheBlock, ...], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Block ids, one list per KV cache group."""
        return tuple([block.block_id for block in group] for group in self.blocks)


class KVCacheManager:
    """The block tables of all requests of a node, and its prefix cache.

    Args:
        kv_cache_config: The pool's blocks and groups.
        max_model_len: Longest sequence in tokens; no slots are given beyond it.
        enable_prefix_caching: Whether blocks are found again by content.
    """

    def __init__(
        self, kv_cache_config: KVCacheConfig, max_model_len: int, *, enable_prefix_caching: bool = True
    ) -> None:
        self.metrics = PrefixCachingMetrics()
        raise NotImplementedError

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, those of the prefix cache that no one uses included."""
        raise NotImplementedError

    @property
    def usage(self) -> float:
        """Share of the pool in use, 0 to 1. The null block does not count."""
        raise NotImplementedError

    def fits_empty_pool(self, num_tokens: int) -> bool:
        """Whether one request of so many tokens could ever be given its slots, were it alone."""
        raise NotImplementedError

    def get_computed_blocks(self, request: KVCacheRequest) -> tuple[KVCacheBlocks, int]:
        """The longest prefix that the cache holds, never all of the known tokens. Free of side effects.

        Returns:
            `(blocks, num_tokens)`: blocks per group, with the null block where a windowed group needs none;
            `num_tokens` is a multiple of the block size. The blocks are not held: hand them to
            `allocate_slots` before any other call changes the pool.
        """
        raise NotImplementedError

    def allocate_slots(
        self,
        request: KVCacheRequest,
        num_new_tokens: int,
        *,
        computed_blocks: KVCacheBlocks | None = None,
        num_external_tokens: int = 0,
    ) -> KVCacheBlocks | None:
        """Give the request slots for what is computed or loaded next. Nothing enters the prefix cache.

        Slots are there afterwards for `request.num_computed_tokens` + the tokens of `computed_blocks` +
        `num_external_tokens` + `num_new_tokens` tokens. Blocks that slid out of a group's window are freed.

        Args:
            num_new_tokens: Tokens that the next step computes; 0 for an asynchronous load.
            computed_blocks: What `get_computed_blocks` found, at the first allocation of a request.
            num_external_tokens: Tokens after these that the connector loads.

        Returns:
            The newly allocated blocks per group (without `computed_blocks`), or None when there are not enough
            free ones. Then the request is as it was, except for blocks that slid out of its window.

        Raises:
            ValueError: there is nothing to allocate for, or a number is negative.
            KVTransferStateError: `computed_blocks` for a request that has blocks.
        """
        raise NotImplementedError

    def cache_blocks(self, request: KVCacheRequest, num_computed_tokens: int) -> None:
        """Let others hit the request's full blocks among its first `num_computed_tokens` tokens.

        Call it after a step, or a load, that put their contents in place. Idempotent.

        Raises:
            KVTransferStateError: the request has no blocks, or fewer hashes or slots than full blocks.
        """
        raise NotImplementedError

    def free(self, request_id: str) -> None:
        """Drop the request's blocks; those that are cached can be hit until they are evicted.

        Harmless for a request that has none. Blocks that a transfer pinned stay until `unpin`.
        """
        raise NotImplementedError

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The request's block table, one list per group; 0 where a windowed group needs no block any more."""
        raise NotImplementedError

    def pin(self, request_id: str) -> None:
        """Hold the request's present blocks for a transfer: until `unpin` they are not reused, also after `free`.

        Those that are cached can still be hit and shared.

        Raises:
            KVTransferStateError: the request is pinned already, or has no blocks.
        """
        raise NotImplementedError

    def unpin(self, request_id: str) -> None:
        """End the transfer's hold.

        Raises:
            KVTransferStateError: the request is not pinned.
        """
        raise NotImplementedError

    @property
    def pinned_request_ids(self) -> frozenset[str]:
        """Requests whose blocks a transfer holds."""
        raise NotImplementedError

    def invalidate_blocks(self, block_ids: Iterable[int]) -> dict[str, int]:
        """The contents of these blocks are undefined: a load failed, and nothing writes there any more.

        They leave the prefix cache, and every request that has one is cut back to its longest valid prefix:
        the blocks behind it are freed, and allocated anew by the next `allocate_slots`.

        Returns:
            Request id → tokens of its valid prefix, for the requests that were cut. The scheduler lowers their
            `num_computed_tokens` to it where it is higher.
        """
        raise NotImplementedError

    def reset_prefix_cache(self) -> bool:
        """Forget all cached contents, e.g. after new weights. False, and nothing done, while blocks are in use."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Check every invariant of tables, reference counts and free queue; for tests and debugging.

        Raises:
            KVTransferStateError: one is broken; the message says which.
        """
        raise NotImplementedError
