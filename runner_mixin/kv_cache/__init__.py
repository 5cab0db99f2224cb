"""KV cache management: block hashes, free queue, block pool, groups and memory checks."""

from __future__ import annotations

from .block_hash import (
    BlockHash,
    BlockHashWithGroupId,
    HashableRequest,
    HashFunction,
    MultiModalFeature,
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    hash_block_tokens,
    init_none_hash,
    make_block_hash_with_group_id,
    need_extra_keys,
    none_hash,
    sha256,
)
from .free_queue import FreeKVCacheBlockQueue, KVCacheBlock
from .kv_cache_manager import KVCacheBlocks, KVCacheManager, KVCacheRequest
from .metrics import PrefixCacheStats, PrefixCachingMetrics

__all__ = [
    "BlockHash",
    "BlockHashWithGroupId",
    "FreeKVCacheBlockQueue",
    "HashFunction",
    "HashableRequest",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheManager",
    "KVCacheRequest",
    "MultiModalFeature",
    "PrefixCacheStats",
    "PrefixCachingMetrics",
    "generate_block_hash_extra_keys",
    "get_block_hash",
    "get_group_id",
    "get_request_block_hasher",
    "hash_block_tokens",
    "init_none_hash",
    "make_block_hash_with_group_id",
    "need_extra_keys",
    "none_hash",
    "sha256",
]
