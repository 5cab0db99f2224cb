"""How a KV cache is described to engine, connector and mixin: specs, groups, tensors, configuration.

*Block*: `block_size` token slots. *Page*: one layer's bytes of one block. *Group*: layers that share one
block table. *Pool*: the memory of all blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Self

from ..transports.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from .config import EngineConfig


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _require_positive(key: str, value: int) -> None:
    if value <= 0:
        raise ConfigurationError(f"{key} must be positive, got {value}", key=key, value=value)


@dataclass(frozen=True)
class KVCacheSpec:
    """How one layer's cache is laid out.

    Attributes:
        block_size: Tokens per block.
    """

    block_size: int

    def __post_init__(self) -> None:
        _require_positive("block_size", self.block_size)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of this layer."""
        raise NotImplementedError

    def max_memory_usage_bytes(self, config: EngineConfig) -> int:
        """Return the most bytes that one request of `config.model.max_model_len` tokens occupies in this
        layer, in whole pages.

        Prefill runs in chunks of at most `config.scheduler.max_num_batched_tokens` tokens.
        """
        raise NotImplementedError

    def first_visible_token(self, position: int) -> int:
        """Return the oldest token that a query at `position` or later looks at.

        It never decreases as `position` grows.
        """
        return 0

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """Return the one spec of layers that share a group.

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
        head_size: Elements per head.
        dtype: Stored element type.
        use_mla: Keys and values are one latent vector, stored once.
    """

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    use_mla: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("num_kv_heads", self.num_kv_heads)
        _require_positive("head_size", self.head_size)

    @property
    def page_size_bytes(self) -> int:
        vectors = 1 if self.use_mla else 2
        return vectors * self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize

    def _whole_sequence_bytes(self, config: EngineConfig) -> int:
        return _ceil_div(config.model.max_model_len, self.block_size) * self.page_size_bytes

    def _recent_tokens_bytes(self, config: EngineConfig, num_before: int) -> int:
        """Return the bytes for a chunk of prefill and the `num_before` tokens before it."""
        live = num_before + config.scheduler.max_num_batched_tokens
        # One more block, because the live tokens need not begin at a block's first slot.
        pages = _ceil_div(live, self.block_size) + 1
        return min(pages * self.page_size_bytes, self._whole_sequence_bytes(config))


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """Each token attends to all tokens before it.

    Attributes:
        sliding_window: The window of a windowed layer that is treated as full attention; None for other
            layers.
        attention_chunk_size: The chunk of a chunked layer, likewise.
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def max_memory_usage_bytes(self, config: EngineConfig) -> int:
        return self._whole_sequence_bytes(config)

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """Return the one spec of a group.

        A window or chunk that only some layers have is kept: it does not affect the layout.

        Raises:
            ValueError: `specs` is empty, or its members differ otherwise, have different windows or chunks,
                or both a window and a chunk.
        """
        if not specs or any(type(spec) is not cls for spec in specs):
            raise ValueError(f"layers of one group need specs of one kind, got {list(specs)}")
        windows = {spec.sliding_window for spec in specs} - {None}
        chunks = {spec.attention_chunk_size for spec in specs} - {None}
        if len(windows) + len(chunks) > 1:
            raise ValueError(f"layers of one group have different windows {windows} or chunks {chunks}")
        plain = [replace(spec, sliding_window=None, attention_chunk_size=None) for spec in specs]
        if any(spec != plain[0] for spec in plain[1:]):
            raise ValueError(f"layers of one group need equal specs, got {list(specs)}")
        return replace(
            plain[0], sliding_window=next(iter(windows), None), attention_chunk_size=next(iter(chunks), None)
        )


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """Each token attends to the last `sliding_window` tokens, itself included."""

    sliding_window: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("sliding_window", self.sliding_window)

    def first_visible_token(self, position: int) -> int:
        return max(0, position - self.sliding_window + 1)

    def max_memory_usage_bytes(self, config: EngineConfig) -> int:
        return self._recent_tokens_bytes(config, self.sliding_window - 1)


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Each token attends within its aligned chunk of `attention_chunk_size` tokens."""

    attention_chunk_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("attention_chunk_size", self.attention_chunk_size)

    def first_visible_token(self, position: int) -> int:
        return position // self.attention_chunk_size * self.attention_chunk_size

    def max_memory_usage_bytes(self, config: EngineConfig) -> int:
        return self._recent_tokens_bytes(config, self.attention_chunk_size - 1)


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """A recurrent layer. Its state is opaque bytes, one page per request.

    Attributes:
        shapes: Shape of each state tensor, without the block axis.
        dtypes: Element type of each state tensor.
        page_size_padded: Page size in bytes, if it is enlarged to match other layers; otherwise None.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise ConfigurationError(
                f"a state needs one dtype per tensor, and at least one tensor; got {len(self.shapes)} shapes, "
                f"{len(self.dtypes)} dtypes",
                key="shapes",
                value=self.shapes,
            )
        if self.page_size_padded is not None and self.page_size_padded < self.state_size_bytes:
            raise ConfigurationError(
                f"page_size_padded={self.page_size_padded} is too small: the state has {self.state_size_bytes} bytes",
                key="page_size_padded",
                value=self.page_size_padded,
            )

    @property
    def state_size_bytes(self) -> int:
        """Bytes of a page that the state fills; padding follows them."""
        return sum(
            prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    @property
    def page_size_bytes(self) -> int:
        return self.state_size_bytes if self.page_size_padded is None else self.page_size_padded

    def max_memory_usage_bytes(self, config: EngineConfig) -> int:
        return self.page_size_bytes


@dataclass(frozen=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Bidirectional attention inside an encoder, which keeps no cache."""

    def max_memory_usage_bytes(self, config: EngineConfig) -> int:
        return 0


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers of one kind, block size and window or chunk, whose pages differ. They share one block table.

    Attributes:
        kv_cache_specs: Layer name → its spec; at least one. A page of this spec is one page of each layer.
    """

    kv_cache_specs: Mapping[str, KVCacheSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.is_uniform_type(self.kv_cache_specs.values()):
            raise ConfigurationError(
                f"layers cannot share a block table unless their kind, block size and window are equal; got "
                f"{dict(self.kv_cache_specs)}",
                key="kv_cache_specs",
                value=self.kv_cache_specs,
            )

    @staticmethod
    def is_uniform_type(kv_cache_specs: Iterable[KVCacheSpec]) -> bool:
        """Return whether one block table serves all these layers: one kind, one block size, one window or
        chunk.
        """
        return len({_way_of_looking_back(spec) for spec in kv_cache_specs}) == 1

    def first_visible_token(self, position: int) -> int:
        return next(iter(self.kv_cache_specs.values())).first_visible_token(position)

    @property
    def page_size_bytes(self) -> int:
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    def max_memory_usage_bytes(self, config: EngineConfig) -> int:
        pages = max(
            _ceil_div(spec.max_memory_usage_bytes(config), spec.page_size_bytes)
            for spec in self.kv_cache_specs.values()
        )
        return pages * self.page_size_bytes


def _way_of_looking_back(spec: KVCacheSpec) -> tuple[object, ...]:
    """Return what a block table depends on. Layers for which it is equal can share one."""
    match spec:
        case SlidingWindowSpec():
            return SlidingWindowSpec, spec.block_size, spec.sliding_window
        case ChunkedLocalAttentionSpec():
            return ChunkedLocalAttentionSpec, spec.block_size, spec.attention_chunk_size
        case _:
            return type(spec), spec.block_size


@dataclass(frozen=True)
class KVCacheTensor:
    """One piece of the pool's memory.

    Attributes:
        size: Bytes: the pool's number of blocks times the page size of any of these layers.
        shared_by: Layers that use it, at most one per group. A block belongs to one of them at a time.
    """

    size: int
    shared_by: tuple[str, ...]


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share one block table.

    Attributes:
        layer_names: The layers, in the order of the pool's tensors.
        kv_cache_spec: The spec that they share.
    """

    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec


@dataclass(frozen=True)
class KVCacheConfig:
    """The pool of a node.

    Attributes:
        num_blocks: Blocks that all groups share, including the null block (block 0).
        kv_cache_tensors: Its memory; empty for a model without a cache.
        kv_cache_groups: Its block tables; empty for a model without a cache.
        draft_layers: The layers of a draft model, if there is one. An answer's tokens do not depend on what
            they keep, so a peer without the same draft model leaves them out.
    """

    num_blocks: int
    kv_cache_tensors: tuple[KVCacheTensor, ...]
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]
    draft_layers: frozenset[str] = frozenset()

    @property
    def target_groups(self) -> tuple[int, ...]:
        """Indices of the groups that are not made of draft layers only."""
        return tuple(
            index
            for index, group in enumerate(self.kv_cache_groups)
            if not group.layer_names or not self.draft_layers.issuperset(group.layer_names)
        )
