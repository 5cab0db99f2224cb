"""The words for a KV cache that engine, connector and mixin share: specs, groups, tensors, configuration.

*Block*: `block_size` token slots. *Page*: one layer's bytes of one block. *Group*: layers that share one
block table. *Pool*: the memory of all blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import torch

    from .config import EngineConfig

__all__ = [
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "KVCacheTensor",
    "MambaSpec",
    "SlidingWindowSpec",
    "UniformTypeKVCacheSpecs",
]


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class KVCacheSpec:
    """How one layer's cache is laid out.

    Attributes:
        block_size: Tokens a block.
    """

    block_size: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of this layer."""
        raise NotImplementedError

    def max_memory_usage_bytes(self, config: EngineConfig) -> int:
        """Bytes that one request of maximum length occupies in this layer."""
        raise NotImplementedError

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """One spec for layers that share a group.

        Raises:
            ValueError: `specs` is empty or its members differ.
        """
        if not specs or any(spec != specs[0] for spec in specs[1:]):
            raise ValueError(f"layers of one group need equal specs, got {list(specs)}")
        return specs[0]


@dataclass(frozen=True)
class AttentionSpec(KVCacheSpec):
    """A layer that keeps keys and values.

    Attributes:
        num_kv_heads: Heads of keys and of values.
        head_size: Elements a head.
        dtype: Stored element type.
        use_mla: Keys and values are one latent vector, stored once.
    """

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    use_mla: bool = False

    @property
    def page_size_bytes(self) -> int:
        vectors = 1 if self.use_mla else 2
        return vectors * self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """Attends to everything before it.

    Attributes:
        sliding_window: The window of a windowed layer that is treated as full attention, else None.
        attention_chunk_size: The same for a chunked layer.
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def max_memory_usage_bytes(self, config: EngineConfig) -> int:
        return _ceil_div(config.model.max_model_len, self.block_size) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """As the base, but windows are ignored where only some layers have one, and must agree where several do."""
        if not specs:
            raise ValueError("layers of one group need equal specs, got none")
        windows = {spec.sliding_window for spec in specs} - {None}
        chunks = {spec.attention_chunk_size for spec in specs} - {None}
        if len(windows) > 1 or len(chunks) > 1:
            raise ValueError(f"layers of one group have different windows {windows} or chunks {chunks}")
        if windows and chunks:
            raise ValueError(f"one group cannot have a window {windows} and a chunk {chunks}")
        plain = [replace(spec, sliding_window=None, attention_chunk_size=None) for spec in specs]
        if any(spec != plain[0] for spec in plain[1:]):
            raise ValueError(f"layers of one group need equal specs, got {list(specs)}")
        return replace(
            plain[0], sliding_window=next(iter(windows), None), attention_chunk_size=next(iter(chunks), None)
        )


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """Attends to the last `sliding_window` tokens, itself included."""

    sliding_window: int = 0

    def __post_init__(self) -> None:
        if self.sliding_window <= 0:
            raise ValueError(f"sliding_window={self.sliding_window}: it must be positive")

    def max_memory_usage_bytes(self, config: EngineConfig) -> int:
        # While a chunk is prefilled, the window before it and the chunk itself are live; one more block
        # because a window need not begin at a block's first slot.
        live = self.sliding_window - 1 + config.scheduler.max_num_batched_tokens
        live = min(live, config.model.max_model_len)
        return (_ceil_div(live, self.block_size) + 1) * self.page_size_bytes


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Attends inside aligned chunks of `attention_chunk_size` tokens."""

    attention_chunk_size: int = 0

    def __post_init__(self) -> None:
        if self.attention_chunk_size <= 0:
            raise ValueError(f"attention_chunk_size={self.attention_chunk_size}: it must be positive")

    def max_memory_usage_bytes(self, config: EngineConfig) -> int:
        live = min(
            self.attention_chunk_size + config.scheduler.max_num_batched_tokens, config.model.max_model_len
        )
        return _ceil_div(live, self.block_size) * self.page_size_bytes


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """A recurrent layer: its state is opaque bytes, one page per request.

    Attributes:
        shapes: Shape of each state tensor, without the block axis.
        dtypes: Element type of each.
        page_size_padded: Page size in bytes when it is enlarged to match other layers', else None.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    page_size_padded: int | None = None

    @property
    def page_size_bytes(self) -> int:
        used = sum(
            prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )
        if self.page_size_padded is None:
            return used
        if self.page_size_padded < used:
            raise ValueError(
                f"page_size_padded={self.page_size_padded} is less than the state's {used} bytes"
            )
        return self.page_size_padded

    def max_memory_usage_bytes(self, config: EngineConfig) -> int:
        return self.page_size_bytes


@dataclass(frozen=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Bidirectional attention inside an encoder: nothing is kept."""

    def max_memory_usage_bytes(self, config: EngineConfig) -> int:
        return 0


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers of one type whose page sizes differ; they share one block table."""

    kv_cache_specs: Mapping[str, KVCacheSpec] = field(default_factory=dict)

    @property
    def page_size_bytes(self) -> int:
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    def max_memory_usage_bytes(self, config: EngineConfig) -> int:
        pages = max(
            _ceil_div(spec.max_memory_usage_bytes(config), spec.page_size_bytes)
            for spec in self.kv_cache_specs.values()
        )
        return pages * self.page_size_bytes


@dataclass(frozen=True)
class KVCacheTensor:
    """One piece of the pool: `size` bytes that the layers `shared_by` use, each in blocks of its own group."""

    size: int
    shared_by: tuple[str, ...]


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share one block table, and the spec they have in common."""

    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec


@dataclass(frozen=True)
class KVCacheConfig:
    """The pool: how many blocks, which tensors, which groups. Block 0 is the null block."""

    num_blocks: int
    kv_cache_tensors: tuple[KVCacheTensor, ...]
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]
