"""Requests like an engine's, small specs, and a fixture that restores the process's hash seed after each
test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from kvferry.connector.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from kvferry.connector.kv_cache_specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from kvferry.runner_mixin.kv_cache import (
    BlockHash,
    KVCacheManager,
    MultiModalFeature,
    block_hash,
    get_request_block_hasher,
    sha256,
)

BLOCK_SIZE = 4


@dataclass
class Request:
    """The part of an engine's request that hashing and the block manager use."""

    request_id: str
    all_token_ids: list[int]
    block_size: int = BLOCK_SIZE
    lora_id: str | None = None
    cache_salt: str | None = None
    mm_features: Sequence[MultiModalFeature] = ()
    num_computed_tokens: int = 0
    block_hashes: list[BlockHash] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.append()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def append(self, *tokens: int) -> None:
        self.all_token_ids += tokens
        self.block_hashes += get_request_block_hasher(self.block_size, sha256)(self)


@pytest.fixture(scope="session")
def make_request() -> Callable[..., Request]:
    return Request


@pytest.fixture(autouse=True)
def _same_seed_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_hash, "_none_hash", block_hash.none_hash())


@pytest.fixture
def full() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=8, dtype=torch.float32)


@pytest.fixture
def windowed() -> Callable[[int], SlidingWindowSpec]:
    def make(window: int) -> SlidingWindowSpec:
        return SlidingWindowSpec(BLOCK_SIZE, 2, 8, torch.float32, sliding_window=window)

    return make


@pytest.fixture
def chunked() -> Callable[[int], ChunkedLocalAttentionSpec]:
    def make(chunk: int) -> ChunkedLocalAttentionSpec:
        return ChunkedLocalAttentionSpec(BLOCK_SIZE, 2, 8, torch.float32, attention_chunk_size=chunk)

    return make


@pytest.fixture
def make_manager() -> Callable[..., KVCacheManager]:
    """`(num_blocks, *specs)` → a manager with one group per spec."""

    def make(
        num_blocks: int, *specs: KVCacheSpec, max_model_len: int = 1000, caching: bool = True
    ) -> KVCacheManager:
        groups = tuple(KVCacheGroupSpec((f"layers.{i}",), spec) for i, spec in enumerate(specs))
        config = KVCacheConfig(num_blocks, (), groups)
        return KVCacheManager(config, max_model_len, enable_prefix_caching=caching)

    return make


@pytest.fixture
def make_config() -> Callable[..., EngineConfig]:
    def make(
        max_model_len: int = 64, *, chunk: int = 16, hybrid: bool = True, num_blocks_override: int = 0
    ) -> EngineConfig:
        return EngineConfig(
            model=ModelConfig(model="m", dtype="float32", max_model_len=max_model_len),
            cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks_override=num_blocks_override),
            scheduler=SchedulerConfig(max_num_batched_tokens=chunk, enable_hybrid_kv_cache_manager=hybrid),
        )

    return make
