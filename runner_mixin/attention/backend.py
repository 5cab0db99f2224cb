"""What an attention backend owes: a cache shape, its order in memory, and attention over a paged cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ...connector.config import PageOrder
    from ...connector.kv_cache_specs import KVCacheSpec
    from .metadata import AttentionMetadata, CommonAttentionMetadata


@dataclass(frozen=True)
class MultipleOf:
    """Every block size that `base` divides."""

    base: int


@dataclass(frozen=True)
class LookBack:
    """How far back a token sees.

    Attributes:
        sliding_window: As many tokens, itself included; None: all.
        attention_chunk_size: No further than to the begin of its aligned chunk of so many tokens; None: no chunks.
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None


@dataclass(frozen=True)
class AttentionParams:
    """One layer's attention.

    Attributes:
        num_heads: Query heads; a multiple of `num_kv_heads`.
        num_kv_heads: Heads of keys and of values.
        head_size: Elements a head.
        scale: Factor on the scores.
        sliding_window: Tokens that a token sees, itself included; None: all.
        softcap: Scores become `softcap * tanh(score / softcap)`; None: unchanged.
        attention_chunk_size: A token sees only its own aligned chunk of so many tokens; None: no chunks.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    attention_chunk_size: int | None = None

    @property
    def look_back(self) -> LookBack:
        """Which of these settings decide what is visible."""
        return LookBack(self.sliding_window, self.attention_chunk_size)


@dataclass(frozen=True)
class AttentionGroup:
    """Layers of one KV cache group that also share a backend and a spec.

    Attributes:
        backend: Their backend.
        layer_names: Their names.
        kv_cache_spec: How each of them is laid out.
        kv_cache_group_id: Index of their group in `KVCacheConfig.kv_cache_groups`.
    """

    backend: type[AttentionBackend]
    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec
    kv_cache_group_id: int


class MetadataBuilder(ABC):
    """Makes one group's metadata, once a step.

    Args:
        group: The layers it works for.
        kernel_block_size: Tokens a block of the cache as the backend sees it.
        device: Where the cache is.
        workspace: `(get_workspace_bytes(),)` int8 on `device`, shared with other builders.
    """

    def __init__(
        self, group: AttentionGroup, kernel_block_size: int, device: torch.device, workspace: torch.Tensor
    ) -> None:
        self.group = group
        self.kernel_block_size = kernel_block_size
        self.device = device
        self.workspace = workspace

    @abstractmethod
    def build(self, common: CommonAttentionMetadata) -> AttentionMetadata:
        """Make the step's metadata."""


class AttentionBackend(ABC):
    """Attention over a paged cache. Classes are used as they are, never instantiated.

    A cache has a *logical* shape, the same for every layout, and a *physical* one, the order in memory.
    Axis 0 of the logical shape is blocks.
    """

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """The name by which a user chooses it."""

    @staticmethod
    @abstractmethod
    def get_unavailable_reason(device: torch.device, dtype: torch.dtype) -> str:
        """Say why it cannot compute in `dtype` on `device`; empty when it can."""

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The logical shape of one layer's cache, axis 0 being blocks."""

    @staticmethod
    def get_page_order() -> PageOrder:
        """Whether a page has its tokens or its heads first in memory, as users choose it."""
        return "NHD"

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """The order in memory: axis `i` of the physical shape is axis `order[i]` of the logical one.

        Args:
            include_num_layers_dimension: The logical shape is that of all layers, `(num_layers, *shape)`.

        Raises:
            NotImplementedError: there is no layout with a layers dimension.
        """
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def get_supported_kernel_block_sizes() -> tuple[int | MultipleOf, ...]:
        """Block sizes that it can work with, in tokens."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        """What makes its metadata."""

    @staticmethod
    def get_workspace_bytes() -> int:
        """Scratch memory that its builders need; they share it."""
        return 0

    @staticmethod
    @abstractmethod
    def write_kv(
        key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> None:
        """Write this step's keys and values into their slots.

        Args:
            key: `(num_tokens, num_kv_heads, head_size)`.
            value: `(num_tokens, num_kv_heads, head_size)`.
            kv_cache: The layer's cache, logical order.
            metadata: As this backend's builder made it.
        """

    @staticmethod
    @abstractmethod
    def attend(
        query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, params: AttentionParams
    ) -> torch.Tensor:
        """Attend each token to its request's cache; this step's keys and values are already in it.

        Args:
            query: `(num_tokens, num_heads, head_size)`.
            kv_cache: The layer's cache, logical order.
            metadata: As this backend's builder made it.
            params: The layer's attention.

        Returns:
            `(num_tokens, num_heads, head_size)`, the query's dtype.
        """
