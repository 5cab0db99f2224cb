"""The block manager of a scheduler: block hashes, free queue, block pool, block tables, groups and memory
checks.

These are engine parts beside the seam; the seam does not need them. Nothing else in `runner_mixin` imports
them, and they do not read the process's connector. An engine without a block manager of its own can use them,
as `examples/engine` does.
"""

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
from .block_pool import (
    BlockPool,
)
from .cache_config import (
    get_kv_cache_config,
    get_max_concurrency_for_kv_cache_config,
    unify_kv_cache_configs,
)
from .events import CacheEvents
from .free_queue import (
    FreeKVCacheBlockQueue,
    KVCacheBlock,
)
from .group_managers import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    GroupManager,
    MambaManager,
    SlidingWindowManager,
    make_group_manager,
)
from .grouping import (
    create_kv_cache_group_specs,
    get_kv_cache_groups,
    get_num_blocks,
    get_uniform_page_size,
    is_kv_cache_page_size_uniform,
    is_kv_cache_type_attention_free,
    is_kv_cache_type_uniform,
    num_blocks_per_request,
    padding_share,
    pool_page_sizes,
    unify_hybrid_kv_cache_specs,
)
from .kv_cache_manager import (
    KVCacheBlocks,
    KVCacheManager,
    KVCacheRequest,
)
from .memory_check import (
    check_enough_kv_cache_memory,
    estimate_max_model_len,
    max_memory_usage_bytes,
)
from .metrics import (
    PrefixCacheStats,
    PrefixCachingMetrics,
)

__all__ = [
    "BlockHash",
    "BlockHashWithGroupId",
    "BlockPool",
    "CacheEvents",
    "ChunkedLocalAttentionManager",
    "FreeKVCacheBlockQueue",
    "FullAttentionManager",
    "GroupManager",
    "HashFunction",
    "HashableRequest",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheManager",
    "KVCacheRequest",
    "MambaManager",
    "MultiModalFeature",
    "PrefixCacheStats",
    "PrefixCachingMetrics",
    "SlidingWindowManager",
    "check_enough_kv_cache_memory",
    "create_kv_cache_group_specs",
    "estimate_max_model_len",
    "generate_block_hash_extra_keys",
    "get_block_hash",
    "get_group_id",
    "get_kv_cache_config",
    "get_kv_cache_groups",
    "get_max_concurrency_for_kv_cache_config",
    "get_num_blocks",
    "get_request_block_hasher",
    "get_uniform_page_size",
    "hash_block_tokens",
    "init_none_hash",
    "is_kv_cache_page_size_uniform",
    "is_kv_cache_type_attention_free",
    "is_kv_cache_type_uniform",
    "make_block_hash_with_group_id",
    "make_group_manager",
    "max_memory_usage_bytes",
    "need_extra_keys",
    "none_hash",
    "num_blocks_per_request",
    "padding_share",
    "pool_page_sizes",
    "sha256",
    "unify_hybrid_kv_cache_specs",
    "unify_kv_cache_configs",
]
