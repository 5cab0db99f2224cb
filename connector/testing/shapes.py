"""What a model-free node is given: requests, steps, the shape of its caches, and its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from ..base import ContentItem, KVConnectorMetadata, ScheduledRequest
from ..config import CacheConfig, EngineConfig, KVRole, KVTransferConfig, ModelConfig
from ..kv_cache_specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor


@dataclass
class Request:
    """A request as an engine's scheduler holds it.

    Attributes:
        first_token_id: By default the prompt counts up from it.
        token_ids: The prompt, if it does not count up.
        answer_token_ids: The answer so far.
    """

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: Mapping[str, Any] | None = None
    num_computed_tokens: int = 0
    finish_reason: str | None = None
    first_token_id: int = 0
    cache_salt: str | None = None
    lora_id: str | None = None
    mm_features: Sequence[ContentItem] = ()
    prompt_embeds: torch.Tensor | None = None
    token_ids: Sequence[int] = ()
    answer_token_ids: Sequence[int] = ()

    @property
    def all_token_ids(self) -> Sequence[int]:
        return (*self.prompt_token_ids, *self.answer_token_ids)

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return self.token_ids or range(self.first_token_id, self.first_token_id + self.num_prompt_tokens)


@dataclass(frozen=True)
class ComputedRequest:
    """What one step computes of one request; see `ScheduledRequest` in `connector/base.py`."""

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Step:
    """A step of an engine; by default one that computes nothing."""

    kv_connector_metadata: KVConnectorMetadata | None = None
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    scheduled_requests: Sequence[ScheduledRequest] = ()

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(item.num_scheduled_tokens for item in self.scheduled_requests)


@dataclass(frozen=True)
class CacheShape:
    """A small pool of one group of equal layers.

    Attributes:
        num_kv_heads: Of all ranks together.
        num_ranks: Ranks of the node, which share the heads and have the same blocks.
        layout: `"uniform"` or `"per-layer"`, both in memory that the connector allocates; or `"foreign"`: per
            layer, in memory that the node allocates.
    """

    num_layers: int = 3
    num_blocks: int = 32
    block_size: int = 4
    num_kv_heads: int = 2
    head_size: int = 8
    dtype: torch.dtype = torch.float32
    num_ranks: int = 1
    layout: Literal["uniform", "per-layer", "foreign"] = "uniform"

    @property
    def of_one_rank(self) -> CacheShape:
        """The shape of each rank's caches."""
        return replace(self, num_kv_heads=self.num_kv_heads // self.num_ranks, num_ranks=1)

    @property
    def spec(self) -> FullAttentionSpec:
        return FullAttentionSpec(self.block_size, self.num_kv_heads, self.head_size, self.dtype)

    @property
    def logical_page(self) -> tuple[int, ...]:
        """Shape of one layer's page: key or value, slot, head, element."""
        return (2, self.block_size, self.num_kv_heads, self.head_size)

    def kv_cache_config(self) -> KVCacheConfig:
        names = tuple(f"model.layers.{index}.self_attn" for index in range(self.num_layers))
        size = self.num_blocks * self.spec.page_size_bytes
        tensors = tuple(KVCacheTensor(size, (name,)) for name in names)
        return KVCacheConfig(self.num_blocks, tensors, (KVCacheGroupSpec(names, self.spec),))


def engine_config(
    connector: str, *, role: KVRole = "kv_both", model: str = "tiny", block_size: int = 4, **transfer: Any
) -> EngineConfig:
    """Return a node's configuration; `transfer` are fields of `KVTransferConfig`."""
    return EngineConfig(
        model=ModelConfig(model=model, dtype="float32", max_model_len=128),
        cache=CacheConfig(block_size=block_size),
        kv_transfer=KVTransferConfig(kv_connector=connector, kv_role=role, **transfer),
    )
