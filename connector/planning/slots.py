"""What lies inside an attention layer's page, by content: whose heads, and where each token's vectors are.

A *slot* is a token's position in a pool: `block_id * block_size + offset`. A *kernel block* is the block of an
attention kernel; one or more, in a row, make a block of the block table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from ...transports.errors import ProtocolError
from ..checks import Check, checked_fields, integer, text

_MAX_BYTES = 2**60
_MAX_SHARES = 1 << 16
_MAX_PARTS = 2
_MAX_KERNEL_BLOCK_SIZE = 1 << 20


@dataclass(frozen=True)
class Shard:
    """Which part of a layer one rank keeps: shares `first` to `first + num - 1` of the model's `total`.

    A share is a KV head of an attention layer; of a layer that is not kept by heads, it is a rank's part. Two
    ranks may keep the same share.
    """

    first: int
    num: int
    total: int

    @property
    def end(self) -> int:
        """The share behind the last one."""
        return self.first + self.num

    def to_plain(self) -> dict[str, object]:
        """As a map of integers."""
        return asdict(self)

    @classmethod
    def from_plain(cls, name: str, plain: Mapping[str, object]) -> Self:
        """Parse what a peer says.

        Raises:
            ProtocolError: a field is missing, unknown, ill-typed or over its limits; the error names it.
        """
        shard = cls(**checked_fields(name, plain, _SHARD_CHECKS))
        if shard.end > shard.total:
            raise ProtocolError(f"{name} ends at share {shard.end} of {shard.total}")
        return shard


#: A layer that one rank keeps as a whole, of which no parts are known.
WHOLE = Shard(0, 1, 1)


@dataclass(frozen=True)
class SlotArray:
    """A layer's cache as an array over (slot, part, head) of vectors; each vector is one run of bytes.

    The vector of slot `s`, part `p` and the shard's head `h` lies at the layer's base offset plus
    `s // kernel_block_size * kernel_block_stride + s % kernel_block_size * slot_stride + p * part_stride +
    h * head_stride`. So the order inside a page (tokens or heads first) and the split into kernel blocks are
    nothing but numbers.

    Attributes:
        element: Element type, e.g. `"float16"`.
        num_parts: 2, keys and values; or 1, a latent that stands for both.
        vector_bytes: Bytes of one head's vector.
        kernel_block_size: Slots a kernel block.
        kernel_block_stride: Bytes from one kernel block to the next.
        slot_stride: Bytes from one slot to the next in a kernel block.
        part_stride: Bytes from keys to values.
        head_stride: Bytes from one head to the next.
    """

    element: str
    num_parts: int
    vector_bytes: int
    kernel_block_size: int
    kernel_block_stride: int
    slot_stride: int
    part_stride: int
    head_stride: int

    def end(self, num_slots: int, num_heads: int) -> int:
        """Bytes from the layer's base offset to behind the last vector."""
        num_kernel_blocks = num_slots // self.kernel_block_size
        return (
            (num_kernel_blocks - 1) * self.kernel_block_stride
            + (self.kernel_block_size - 1) * self.slot_stride
            + (self.num_parts - 1) * self.part_stride
            + (num_heads - 1) * self.head_stride
            + self.vector_bytes
        )

    def to_plain(self) -> dict[str, object]:
        """As a map of strings and integers."""
        return asdict(self)

    @classmethod
    def from_plain(cls, name: str, plain: Mapping[str, object]) -> Self:
        """Parse what a peer says; where the vectors end is for the layout to check.

        Raises:
            ProtocolError: a field is missing, unknown, ill-typed or over its limits; the error names it.
        """
        return cls(**checked_fields(name, plain, _SLOT_CHECKS))


def slot_array_of_view(
    shape: Sequence[int], strides: Sequence[int], *, itemsize: int, element: str
) -> SlotArray | None:
    """Describe an attention layer's cache from its view.

    Args:
        shape: `(num_kernel_blocks, num_parts, kernel_block_size, num_heads, head_size)`.
        strides: Of the same axes, in elements.
        itemsize: Bytes an element.

    Returns:
        The array; None if a vector's elements are not next to each other, so that only whole pages can move.
    """
    kernel_block, part, slot, head, elem = (stride * itemsize for stride in strides)
    if elem != itemsize and shape[4] > 1:
        return None
    return SlotArray(
        element=element,
        num_parts=shape[1],
        vector_bytes=shape[4] * itemsize,
        kernel_block_size=shape[2],
        kernel_block_stride=kernel_block,
        slot_stride=slot,
        part_stride=part,
        head_stride=head,
    )


_stride = integer(0, _MAX_BYTES)
_SHARD_CHECKS: dict[str, Check] = {
    "first": integer(0, _MAX_SHARES),
    "num": integer(1, _MAX_SHARES),
    "total": integer(1, _MAX_SHARES),
}
_SLOT_CHECKS: dict[str, Check] = {
    "element": text,
    "num_parts": integer(1, _MAX_PARTS),
    "vector_bytes": integer(1, _MAX_BYTES),
    "kernel_block_size": integer(1, _MAX_KERNEL_BLOCK_SIZE),
    "kernel_block_stride": _stride,
    "slot_stride": _stride,
    "part_stride": _stride,
    "head_stride": _stride,
}
