"""Where the pages of a KV cache lie in a pool. Plain integers: no tensor, no device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

from ..transports.errors import ProtocolError

__all__ = ["KVLayout", "LayerLayout", "layer_layout_of_view", "per_layer_layout", "uniform_layout"]

#: Limits of a layout that comes from a peer.
_MAX_NUMBER = 2**62
_MAX_LAYERS = 4096
_MAX_FRAGMENTS = 1 << 16
_MAX_NAME_CHARS = 1024


@dataclass(frozen=True)
class LayerLayout:
    """Where one layer keeps its page of each block.

    The page of block `b` is the concatenation of its fragments; fragment `(offset, num_bytes)` lies at pool
    offset `base_offset + b * block_stride + offset`. Fragments are in logical order: byte `i` of a page means
    the same on two nodes whose `page_format` is equal, however the fragments are cut.

    Attributes:
        group_index: The block table that this layer uses.
        page_format: What the bytes of a page mean: shape, axes and element type of its logical order.
        base_offset: Pool offset of block 0, in bytes.
        block_stride: Bytes from one block to the next.
        fragments: `(offset, num_bytes)` of each contiguous piece of a page.
    """

    name: str
    group_index: int
    page_format: str
    base_offset: int
    block_stride: int
    fragments: tuple[tuple[int, int], ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return sum(num_bytes for _, num_bytes in self.fragments)

    def to_plain(self) -> dict[str, object]:
        """As maps, tuples, strings and integers."""
        return {
            "name": self.name,
            "group_index": self.group_index,
            "page_format": self.page_format,
            "base_offset": self.base_offset,
            "block_stride": self.block_stride,
            "fragments": self.fragments,
        }


@dataclass(frozen=True)
class KVLayout:
    """Where every layer's pages lie in one node's pool.

    Attributes:
        block_size: Tokens a block.
        num_blocks: Blocks of the pool; their ids are from 0 to `num_blocks - 1`, and 0 is the null block.
        pool_bytes: Size of the pool.
        layers: In the order of the model.
    """

    block_size: int
    num_blocks: int
    pool_bytes: int
    layers: tuple[LayerLayout, ...]

    @property
    def num_groups(self) -> int:
        """Number of block tables."""
        return 1 + max((layer.group_index for layer in self.layers), default=-1)

    def to_plain(self) -> dict[str, object]:
        """As maps, tuples, strings and integers, for a `Welcome`."""
        return {
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "pool_bytes": self.pool_bytes,
            "layers": tuple(layer.to_plain() for layer in self.layers),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, object]) -> KVLayout:
        """Parse what a peer says of its pool.

        Raises:
            ProtocolError: a field is missing, unknown, ill-typed or over its limits, or a page would lie
                outside the pool; the error names the field.
        """
        raise NotImplementedError


def uniform_layout(
    layer_names: Sequence[str], *, page_bytes: int, num_blocks: int, block_size: int, page_format: str
) -> KVLayout:
    """One block of all layers is one run of bytes: physical order (block, layer, page)."""
    raise NotImplementedError


def per_layer_layout(
    layer_names: Sequence[str], *, page_bytes: int, num_blocks: int, block_size: int, page_format: str
) -> KVLayout:
    """Each layer has a cache of its own: physical order (layer, block, page)."""
    raise NotImplementedError


def layer_layout_of_view(
    name: str,
    *,
    group_index: int,
    page_format: str,
    data_offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    kernel_blocks_per_block: int = 1,
) -> LayerLayout:
    """Describe a layer's cache from its view in logical order.

    Args:
        data_offset: Pool offset of the view's first element, in bytes.
        shape: `(num_kernel_blocks, *page shape)`, in elements.
        strides: Of the same axes, in elements, as tensors say them.
        itemsize: Bytes an element.
        kernel_blocks_per_block: Consecutive kernel blocks that make one block of the block table.

    Raises:
        ConfigurationError: the view has no page, or `kernel_blocks_per_block` does not divide its blocks.
    """
    raise NotImplementedError
