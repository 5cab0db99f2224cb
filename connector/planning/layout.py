"""Where the pages of a KV cache lie in a pool. Plain integers: no tensor, no device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated

from ...transports.checked import Record, Refused, entries, integer, mapping, record
from ...transports.errors import ConfigurationError, ProtocolError
from .slots import MAX_BYTES, WHOLE, Name, Offset, Shard, Size, SlotArray

# Limits of a layout that comes from a peer.
_MAX_BLOCKS = 2**31 - 1
_MAX_BLOCK_SIZE = 1 << 20
_MAX_GROUPS = 64
_MAX_LAYERS = 4096
_MAX_FRAGMENTS = 1 << 18

#: What the names of a draft model's layers begin with. It is part of the name because peers of any release
#: accept any name.
_DRAFT = "draft:"


def draft_layer_name(draft: str, name: str) -> str:
    """Name a draft model's layer for peers, so that equal names mean equal draft models.

    Args:
        draft: A name for everything that the draft model's cache depends on.
        name: The layer's own name.
    """
    return f"{_DRAFT}{draft}:{name}"


# -- what fields may hold ----------------------------------------------------------------------------


def _fragments(value: object) -> tuple[tuple[int, int], ...]:
    known = entries(value, _MAX_FRAGMENTS)
    if not known or not all(map(_is_fragment, known)):
        raise Refused(
            f"must be a list of at least one pair (offset, size), each from 0 to {MAX_BYTES}, no size being 0"
        )
    return known  # type: ignore[return-value]


def _is_fragment(value: object) -> bool:
    if type(value) is not tuple or len(value) != 2:
        return False
    offset, size = value
    return type(offset) is type(size) is int and 0 <= offset <= MAX_BYTES and 1 <= size <= MAX_BYTES


def _slots(value: object) -> SlotArray | None:
    return SlotArray.from_plain(known) if (known := mapping(value)) else None


def _layers(value: object) -> tuple[LayerLayout, ...]:
    layers: list[LayerLayout] = []
    num_fragments = 0
    for entry in entries(value, _MAX_LAYERS):
        try:
            layers.append(record(LayerLayout).read(entry))
        except Refused as refused:
            refused.path = f"[{len(layers)}]{refused.path}"
            raise
        # Counted while walking, because each layer may have as many as all together.
        num_fragments += len(layers[-1].fragments)
        if num_fragments > _MAX_FRAGMENTS:
            raise Refused(f"must have at most {_MAX_FRAGMENTS} fragments in all layers")
    return tuple(layers)


# -- the layout --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerLayout:
    """Where one layer keeps its page of each block.

    The page of block `b` is the concatenation of its fragments; fragment `(offset, num_bytes)` lies at pool
    offset `base_offset + b * block_stride + offset`. Fragments are in logical order: byte `i` of a page means
    the same on two nodes whose `page_format` is equal, however the pages are cut into fragments. If `slots`
    describes the inside of a page, pages can also be paired token by token and head by head. Otherwise they
    move whole.

    Attributes:
        group_index: The block table that this layer uses.
        page_format: What the bytes of a page mean: shape, axes and element type of its logical order.
        base_offset: Pool offset of block 0, in bytes.
        block_stride: Bytes from one block to the next.
        fragments: `(offset, num_bytes)` of each contiguous piece of a page.
        block_size: Tokens per block.
        shard: Which part of the model's layer this is.
        slots: Where each token's vectors lie; None if only the engine knows the order inside a page.
    """

    name: Name
    group_index: Annotated[int, integer(0, _MAX_GROUPS - 1)]
    page_format: Name
    base_offset: Offset
    block_stride: Size
    fragments: Annotated[tuple[tuple[int, int], ...], _fragments]
    block_size: Annotated[int, integer(1, _MAX_BLOCK_SIZE)]
    shard: Shard = WHOLE
    slots: Annotated[SlotArray | None, _slots] = None

    @property
    def is_draft(self) -> bool:
        """Whether it belongs to a draft model, so that a peer may leave it out."""
        return self.name.startswith(_DRAFT)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return sum(num_bytes for _, num_bytes in self.fragments)

    def to_plain(self) -> dict[str, object]:
        """Return maps, tuples, strings and integers, for a peer."""
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
        """Pool offset after the last byte of `num_blocks` blocks."""
        farthest = max(offset + num_bytes for offset, num_bytes in self.fragments)
        end = (num_blocks - 1) * self.block_stride + farthest
        if self.slots is not None:
            end = max(end, self.slots.end(num_blocks * self.block_size, self.shard.num))
        return self.base_offset + end

    def require_consistent(self) -> None:
        """Check a layer that a peer described."""
        if self.slots is not None and self.block_size % self.slots.kernel_block_size:
            raise Refused(
                f"must divide block_size {self.block_size}, got {self.slots.kernel_block_size}",
                ".slots.kernel_block_size",
            )


@dataclass(frozen=True)
class KVLayout:
    """Where every layer's pages lie in one node's pool.

    Attributes:
        num_blocks: Blocks of the pool; their ids are from 0 to `num_blocks - 1`, and 0 is the null block.
        pool_bytes: Size of the pool.
        layers: In the order of the model.
    """

    num_blocks: Annotated[int, integer(1, _MAX_BLOCKS)]
    pool_bytes: Size
    layers: Annotated[tuple[LayerLayout, ...], _layers]

    @property
    def num_groups(self) -> int:
        """Number of block tables."""
        return 1 + max((layer.group_index for layer in self.layers), default=-1)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens per block, by group; 1 for groups with no layers on this rank."""
        sizes = {layer.group_index: layer.block_size for layer in self.layers}
        return tuple(sizes.get(group, 1) for group in range(self.num_groups))

    def to_plain(self) -> dict[str, object]:
        """Return maps, tuples, strings and integers, for a `Welcome`."""
        return {
            "num_blocks": self.num_blocks,
            "pool_bytes": self.pool_bytes,
            "layers": tuple(layer.to_plain() for layer in self.layers),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, object]) -> KVLayout:
        """Parse a peer's description of its pool.

        Raises:
            ProtocolError: a field is missing, unknown, ill-typed or over its limits, or a page would lie
                outside the pool; the error names the field.
        """
        try:
            return _LAYOUT.read(plain)
        except Refused as refused:
            raise ProtocolError(refused.text("layout")) from None

    def require_consistent(self) -> None:
        """Check a pool that a peer described: no layer may lie outside it."""
        if len({layer.name for layer in self.layers}) < len(self.layers):
            raise Refused("must have a different name each", ".layers")
        for index, layer in enumerate(self.layers):
            end = layer.end(self.num_blocks)
            if end > self.pool_bytes:
                raise Refused(f"ends at byte {end} of a pool of {self.pool_bytes} bytes", f".layers[{index}]")


_LAYOUT = Record(KVLayout)


# -- builders ----------------------------------------------------------------------------------------


def uniform_layout(
    layer_names: Sequence[str], *, page_bytes: int, num_blocks: int, block_size: int, page_format: str
) -> KVLayout:
    """Lay out a pool where each block is one run of bytes: physical order (block, layer, page). One group."""
    block_bytes = len(layer_names) * page_bytes
    layers = tuple(
        LayerLayout(name, 0, page_format, index * page_bytes, block_bytes, ((0, page_bytes),), block_size)
        for index, name in enumerate(layer_names)
    )
    return KVLayout(num_blocks, num_blocks * block_bytes, layers)


def per_layer_layout(
    layer_names: Sequence[str], *, page_bytes: int, num_blocks: int, block_size: int, page_format: str
) -> KVLayout:
    """Lay out a pool where each layer has its own cache: physical order (layer, block, page). One group."""
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
        strides: Of the same axes, in elements, as `Tensor.stride` returns them.
        itemsize: Bytes per element.
        block_size: Tokens per block of the block table.
        kernel_blocks_per_block: Consecutive kernel blocks that make one block of the block table.

    Raises:
        ConfigurationError: an axis is empty, a stride negative, or `kernel_blocks_per_block` does not divide
            the view's blocks.
    """
    if len(shape) != len(strides) or min(shape, default=0) < 1 or min(strides) < 0:
        raise ConfigurationError(
            f"cannot describe the cache of {name}: an axis is empty or a stride negative, in shape {tuple(shape)} "
            f"with strides {tuple(strides)}"
        )
    if shape[0] % kernel_blocks_per_block:
        raise ConfigurationError(
            f"cannot describe the cache of {name}: its {shape[0]} kernel blocks do not divide into blocks of "
            f"{kernel_blocks_per_block}"
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
    """Return the fewest `(offset, num_bytes)` that hold an array's elements in logical order."""
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
