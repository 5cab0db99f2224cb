"""The backend that works on every device that torch supports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .backend import AttentionBackend, AttentionParams, LookBack, MetadataBuilder, MultipleOf
from .metadata import AttentionMetadata, CommonAttentionMetadata
from .paged import Tile, attend, make_tiles, write_kv_to_slots

if TYPE_CHECKING:
    import torch

    from ...connector.config import PageOrder


@dataclass(frozen=True)
class TorchAttentionMetadata(AttentionMetadata):
    """Tiles of one step, made for each way of looking back when the first such layer asks for them.

    Attributes:
        block_size: Tokens per kernel block.
    """

    block_size: int
    _tiles: dict[LookBack, tuple[Tile, ...]] = field(default_factory=dict)

    def tiles(self, look_back: LookBack) -> tuple[Tile, ...]:
        """Return the tiles for layers that look back this far."""
        tiles = self._tiles.get(look_back)
        if tiles is None:
            tiles = self._tiles[look_back] = make_tiles(self.common, self.block_size, look_back)
        return tiles


class TorchMetadataBuilder(MetadataBuilder):
    def build(self, common: CommonAttentionMetadata) -> TorchAttentionMetadata:
        return TorchAttentionMetadata(common, self.kernel_block_size)


class TorchAttentionBackend(AttentionBackend):
    """Paged attention in plain torch, on any device.

    The logical cache is `(num_blocks, 2, block_size, num_kv_heads, head_size)`, keys then values. For one
    layer this is also the order in memory. For all layers blocks come first, so that a block of all layers is
    one run of bytes.
    """

    @staticmethod
    def get_name() -> str:
        return "TORCH"

    @staticmethod
    def get_unavailable_reason(device: torch.device, dtype: torch.dtype) -> str:
        return ""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)

    @staticmethod
    def get_supported_kernel_block_sizes() -> tuple[int | MultipleOf, ...]:
        return (MultipleOf(1),)

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return TorchMetadataBuilder

    @staticmethod
    def write_kv(
        key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> None:
        write_kv_to_slots(key, value, kv_cache, metadata.common.slot_mapping)

    @staticmethod
    def attend(
        query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, params: AttentionParams
    ) -> torch.Tensor:
        if not isinstance(metadata, TorchAttentionMetadata):
            raise TypeError(f"the TORCH backend needs its own metadata, got {type(metadata).__name__}")
        return attend(query, kv_cache, metadata.tiles(params.look_back), params)


class TorchHeadsFirstBackend(TorchAttentionBackend):
    """The torch backend with page order HND: each head's tokens are adjacent in memory, `(…, num_kv_heads,
    block_size, head_size)`.
    """

    @staticmethod
    def get_name() -> str:
        return "TORCH_HND"

    @staticmethod
    def get_page_order() -> PageOrder:
        return "HND"

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 2, 4, 3, 5) if include_num_layers_dimension else (0, 1, 3, 2, 4)
