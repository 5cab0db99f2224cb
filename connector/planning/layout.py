"""Where the pages of a KV cache lie in a pool. Plain integers: no tensor, no device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import cast

from ...transports.errors import ConfigurationError, ProtocolError
from ..checks import Check, array, checked_fields, integer, integers, text
from .slots import WHOLE, Shard, SlotArray

# Limits of a layout that comes from a peer. Every offset inside an accepted one fits an int64.
_MAX_BYTES = 2**60
_MAX_BLOCKS = 2**31 - 1
_MAX_BLOCK_SIZE = 1 << 20
_MAX_GROUPS = 64
_MAX_LAYERS = 4096
_MAX_FRAGMENTS = 1 << 18


@dataclass(frozen=True)
class LayerLayout:
    """Where one layer keeps its page of each block.

    The page of block `b` is the concatenation of its fragments; fragment `(offset, num_bytes)` lies at pool
    offset `base_offset + b * block_stride + offset`. Fragments are in logical order: byte `i` of a page means
    the same on two nodes whose `page_format` is equal, however the fragments are cut. A page whose inside is
    known (`slots`) can also be paired token by token and head by head; any other moves whole or not at all.

    Attributes:
        group_index: The block table that this layer uses.
        page_format: What the bytes of a page mean: shape, axes and element type of its logical order.
        base_offset: Pool offset of block 0, in bytes.
        block_stride: Bytes from one block to the next.
        fragments: `(offset, num_bytes)` of each contiguous piece of a page.
        block_size: Tokens a block.
        shard: Which part of the model's layer this is.
        slots: Where each token's vectors lie; None if the order inside a page is the engine's secret.
    """

    name: str
    group_index: int
    page_format: str
    base_offset: int
    block_stride: int
    fragments: tuple[tuple[int, int], ...]
    block_size: int
    shard: Shard = WHOLE
    slots: SlotArray | None = None

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
            "block_size": self.block_size,
            "shard": self.shard.to_plain(),
            "slots": self.slots.to_plain() if self.slots is not None else {},
        }

    def end(self, num_blocks: int) -> int:
        """Pool offset behind the last byte of `num_blocks` blocks."""
        farthest = max(offset + num_bytes for offset, num_bytes in self.fragments)
        end = (num_blocks - 1) * self.block_stride + farthest
        if self.slots is not None:
            end = max(end, self.slots.end(num_blocks * self.block_size, self.shard.num))
        return self.base_offset + end


@dataclass(frozen=True)
class KVLayout:
    """Where every layer's pages lie in one node's pool.

    Attributes:
        num_blocks: Blocks of the pool; their ids are from 0 to `num_blocks - 1`, and 0 is the null block.
        pool_bytes: Size of the pool.
        layers: In the order of the model.
    """

    num_blocks: int
    pool_bytes: int
    layers: tuple[LayerLayout, ...]

    @property
    def num_groups(self) -> int:
        """Number of block tables."""
        return 1 + max((layer.group_index for layer in self.layers), default=-1)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens a block, by group. Of a group without layers here it is 1: nothing of it is kept."""
        sizes = {layer.group_index: layer.block_size for layer in self.layers}
        return tuple(sizes.get(group, 1) for group in range(self.num_groups))

    def to_plain(self) -> dict[str, object]:
        """As maps, tuples, strings and integers, for a `Welcome`."""
        return {
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
        layout = cls(**checked_fields("layout", plain, _LAYOUT_CHECKS))
        names = {layer.name for layer in layout.layers}
        if len(names) < len(layout.layers):
            raise ProtocolError("layout.layers: a name appears twice")
        for index, layer in enumerate(layout.layers):
            end = layer.end(layout.num_blocks)
            if end > layout.pool_bytes:
                raise ProtocolError(
                    f"layout.layers[{index}] ends at byte {end} of a pool of {layout.pool_bytes} bytes"
                )
        return layout


# -- what a peer's layout must look like -------------------------------------------------------------


def _layers(name: str, value: object) -> tuple[LayerLayout, ...]:
    plain_layers = array(name, value, _MAX_LAYERS)
    layers = []
    num_fragments = 0
    for index, entry in enumerate(plain_layers):
        plain = _plain_map(f"{name}[{index}]", entry)
        layer = LayerLayout(**checked_fields(f"{name}[{index}]", plain, _LAYER_CHECKS))
        _require_whole_kernel_blocks(f"{name}[{index}]", layer)
        num_fragments += len(layer.fragments)
        if num_fragments > _MAX_FRAGMENTS:
            raise ProtocolError(f"{name} has more than {_MAX_FRAGMENTS} fragments")
        layers.append(layer)
    return tuple(layers)


def _require_whole_kernel_blocks(name: str, layer: LayerLayout) -> None:
    if layer.slots is not None and layer.block_size % layer.slots.kernel_block_size:
        raise ProtocolError(
            f"{name}.slots.kernel_block_size is {layer.slots.kernel_block_size}, in blocks of {layer.block_size}"
        )


def _shard(name: str, value: object) -> Shard:
    return Shard.from_plain(name, _plain_map(name, value))


def _slots(name: str, value: object) -> SlotArray | None:
    plain = _plain_map(name, value)
    return SlotArray.from_plain(name, plain) if plain else None


def _plain_map(name: str, value: object) -> dict[str, object]:
    if type(value) is not dict:
        raise ProtocolError(f"{name} must be a map, got {type(value).__name__}")
    return value


def _fragments(name: str, value: object) -> tuple[tuple[int, int], ...]:
    pair = integers(0, _MAX_BYTES, max_count=2)
    fragments = tuple(pair(name, entry) for entry in array(name, value, _MAX_FRAGMENTS))
    if not fragments or any(len(entry) != 2 or entry[1] == 0 for entry in fragments):
        raise ProtocolError(f"{name} holds at least one pair of offset and size, no size being 0")
    return cast(tuple[tuple[int, int], ...], fragments)


_LAYER_CHECKS: dict[str, Check] = {
    "name": text,
    "group_index": integer(0, _MAX_GROUPS - 1),
    "page_format": text,
    "base_offset": integer(0, _MAX_BYTES),
    "block_stride": integer(1, _MAX_BYTES),
    "fragments": _fragments,
    "block_size": integer(1, _MAX_BLOCK_SIZE),
    "shard": _shard,
    "slots": _slots,
}
_LAYOUT_CHECKS: dict[str, Check] = {
    "num_blocks": integer(1, _MAX_BLOCKS),
    "pool_bytes": integer(1, _MAX_BYTES),
    "layers": _layers,
}


# -- builders ----------------------------------------------------------------------------------------


def uniform_layout(
    layer_names: Sequence[str], *, page_bytes: int, num_blocks: int, block_size: int, page_format: str
) -> KVLayout:
    """One block of all layers is one run of bytes: physical order (block, layer, page). One group."""
    block_bytes = len(layer_names) * page_bytes
    layers = tuple(
        LayerLayout(name, 0, page_format, index * page_bytes, block_bytes, ((0, page_bytes),), block_size)
        for index, name in enumerate(layer_names)
    )
    return KVLayout(num_blocks, num_blocks * block_bytes, layers)


def per_layer_layout(
    layer_names: Sequence[str], *, page_bytes: int, num_blocks: int, block_size: int, page_format: str
) -> KVLayout:
    """Each layer has a cache of its own: physical order (layer, block, page). One group."""
    layer_bytes = num_blocks * page_bytes
    layers = tuple(
        LayerLayout(name, 0, page_format, index * layer_bytes, page_bytes, ((0, page_bytes),), block_size)
        for index, name in enumerate(layer_names)
    )
    return KVLayout(num_blocks, len(layer_names) * layer_bytes, layers)


def layer_layout_of_view(
    name: str,
    *,
    group_index: int,
    page_format: str,
    data_offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    block_size: int,
    kernel_blocks_per_block: int = 1,
    shard: Shard = WHOLE,
    slots: SlotArray | None = None,
) -> LayerLayout:
    """Describe a layer's cache from its view in logical order.

    Args:
        data_offset: Pool offset of the view's first element, in bytes.
        shape: `(num_kernel_blocks, *page shape)`, in elements.
        strides: Of the same axes, in elements, as tensors say them.
        itemsize: Bytes an element.
        block_size: Tokens a block of the block table.
        kernel_blocks_per_block: Consecutive kernel blocks that make one block of the block table.

    Raises:
        ConfigurationError: an axis is empty, a stride negative, or `kernel_blocks_per_block` does not divide
            the view's blocks.
    """
    if len(shape) != len(strides) or min(shape, default=0) < 1 or min(strides) < 0:
        raise ConfigurationError(f"cache of {name}: shape {tuple(shape)}, strides {tuple(strides)}")
    if shape[0] % kernel_blocks_per_block:
        raise ConfigurationError(
            f"cache of {name}: {shape[0]} kernel blocks are not whole blocks of {kernel_blocks_per_block}"
        )
    byte_strides = [stride * itemsize for stride in strides]
    fragments = _contiguous_runs((kernel_blocks_per_block, *shape[1:]), byte_strides, itemsize)
    block_stride = kernel_blocks_per_block * byte_strides[0]
    return LayerLayout(
        name, group_index, page_format, data_offset, block_stride, fragments, block_size, shard, slots
    )


def _contiguous_runs(
    shape: Sequence[int], byte_strides: Sequence[int], itemsize: int
) -> tuple[tuple[int, int], ...]:
    """The fewest `(offset, num_bytes)` that hold an array's elements in logical order."""
    axes = [(size, stride) for size, stride in zip(shape, byte_strides, strict=True) if size > 1]
    run = itemsize
    while axes and axes[-1][1] == run:
        run *= axes.pop()[0]
    runs: list[tuple[int, int]] = []
    for index in product(*(range(size) for size, _ in axes)):
        offset = sum(i * stride for i, (_, stride) in zip(index, axes, strict=True))
        if runs and sum(runs[-1]) == offset:
            runs[-1] = (runs[-1][0], runs[-1][1] + run)
        else:
            runs.append((offset, run))
    return tuple(runs)
