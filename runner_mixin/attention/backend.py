"""The interface of attention backends: a cache shape, its order in memory, and attention over a paged
cache.
"""

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
    """Stands for every block size that is a multiple of `base`."""

    base: int


@dataclass(frozen=True)
class LookBack:
    """How far back a token sees.

    Attributes:
        sliding_window: Number of tokens that a token sees, including itself; None: all.
        attention_chunk_size: A token sees no further back than the start of its aligned chunk of this many
            tokens; None: no chunks.
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None


@dataclass(frozen=True)
class AttentionParams:
    """One layer's attention.

    Attributes:
        num_heads: Query heads; a multiple of `num_kv_heads`.
        num_kv_heads: Heads of keys and of values.
        head_size: Elements per head.
        scale: Factor on the scores.
        sliding_window: Number of tokens that a token sees, including itself; None: all.
        softcap: Scores become `softcap * tanh(score / softcap)`; None: unchanged.
        attention_chunk_size: A token sees only its own aligned chunk of this many tokens; None: no chunks.
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
        """The settings that decide what is visible."""
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
    """Makes one group's metadata, once per step.

    Args:
        group: The layers that it serves.
        kernel_block_size: Tokens per block of the cache as the backend sees it.
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
    """Attention over a paged cache. The classes themselves are used; they are never instantiated.

    A cache has a *logical* shape, which is the same for every layout, and a *physical* one, which is its
    order in memory. Axis 0 of the logical shape is blocks.
    """

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """Return the name by which a user chooses this backend."""

    @staticmethod
    @abstractmethod
    def get_unavailable_reason(device: torch.device, dtype: torch.dtype) -> str:
        """Return why this backend cannot compute in `dtype` on `device`; empty if it can."""

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the logical shape of one layer's cache; axis 0 is blocks."""

    @staticmethod
    def get_page_order() -> PageOrder:
        """Return the page order: whether tokens (NHD) or heads (HND) come first within a page."""
        return "NHD"

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Return the order in memory: axis `i` of the physical shape is axis `order[i]` of the logical one.

        Args:
            include_num_layers_dimension: Whether the logical shape is that of all layers, `(num_layers,
                *shape)`.

        Raises:
            NotImplementedError: this backend has no layout with a layers dimension.
        """
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def get_supported_kernel_block_sizes() -> tuple[int | MultipleOf, ...]:
        """Return the block sizes that this backend supports, in tokens."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        """Return the class of its metadata builders."""

    @staticmethod
    def get_workspace_bytes() -> int:
        """Return the size of the scratch memory that its builders share, in bytes."""
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
            kv_cache: The layer's cache, in logical order.
            metadata: As this backend's builder made it.
        """

    @staticmethod
    @abstractmethod
    def attend(
        query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, params: AttentionParams
    ) -> torch.Tensor:
        """Attend each token to its request's cache, which already contains this step's keys and values.

        Args:
            query: `(num_tokens, num_heads, head_size)`.
            kv_cache: The layer's cache, in logical order.
            metadata: As this backend's builder made it.
            params: The layer's attention.

        Returns:
            `(num_tokens, num_heads, head_size)`, the query's dtype.
        """
