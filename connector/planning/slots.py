"""What lies inside an attention layer's page, by content: which heads, and where each token's vectors are.

A *slot* is a token's position in a pool: `block_id * block_size + offset`. A *kernel block* is the block of
an attention kernel; one or more consecutive kernel blocks make a block of the block table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

from ...transports.checked import Refused, integer, record, text

# Limits of what a peer may describe. Every offset inside an accepted layout fits an int64.
MAX_BYTES = 2**60
_MAX_NAME_CHARS = 1024
_MAX_SHARES = 1 << 16
_MAX_KERNEL_BLOCK_SIZE = 1 << 20

Name = Annotated[str, text(_MAX_NAME_CHARS)]
Offset = Annotated[int, integer(0, MAX_BYTES)]
Size = Annotated[int, integer(1, MAX_BYTES)]
_Count = Annotated[int, integer(1, _MAX_SHARES)]


@dataclass(frozen=True)
class Shard:
    """Which part of a layer one rank keeps: shares `first` to `first + num - 1` of the model's `total`.

    A share is a KV head of an attention layer. If a layer is not kept by heads, a share is one rank's part of
    it. Two ranks may keep the same share.
    """

    first: Annotated[int, integer(0, _MAX_SHARES)]
    num: _Count
    total: _Count

    @property
    def end(self) -> int:
        """The share after the last one."""
        return self.first + self.num

    def to_plain(self) -> dict[str, object]:
        """Return a map of integers, for a peer."""
        return asdict(self)

    def require_consistent(self) -> None:
        """Check a shard that a peer described."""
        if self.end > self.total:
            raise Refused(f"ends at share {self.end} of {self.total}")


#: A layer that one rank keeps as a whole and that is not divided into heads.
WHOLE = Shard(0, 1, 1)


@dataclass(frozen=True)
class SlotArray:
    """A layer's cache as an array over (slot, part, head) of vectors; each vector is one run of bytes.

    The vector of slot `s`, part `p` and the shard's head `h` lies at the layer's base offset plus
    `s // kernel_block_size * kernel_block_stride + s % kernel_block_size * slot_stride + p * part_stride +
    h * head_stride`. The strides express the order inside a page (tokens or heads first) and the split into
    kernel blocks.

    Attributes:
        element: Element type, e.g. `"float16"`.
        num_parts: 2, keys and values; or 1, a latent that stands for both.
        vector_bytes: Bytes of one head's vector.
        kernel_block_size: Slots per kernel block.
        kernel_block_stride: Bytes from one kernel block to the next.
        slot_stride: Bytes from one slot to the next in a kernel block.
        part_stride: Bytes from keys to values.
        head_stride: Bytes from one head to the next.
        grain: Slots that move together: 1; or `kernel_block_size`, if only the engine's kernels know where
            the tokens are inside one head's share of a kernel block. Then a "vector" is that share, and
            `slot_stride` means nothing.
    """

    element: Name
    num_parts: Annotated[int, integer(1, 2)]
    vector_bytes: Size
    kernel_block_size: Annotated[int, integer(1, _MAX_KERNEL_BLOCK_SIZE)]
    kernel_block_stride: Offset
    slot_stride: Offset
    part_stride: Offset
    head_stride: Offset
    grain: Annotated[int, integer(1, _MAX_KERNEL_BLOCK_SIZE)] = 1

    def require_consistent(self) -> None:
        """Check an array that a peer described."""
        if self.grain not in (1, self.kernel_block_size):
            raise Refused(
                f"must be 1 or kernel_block_size {self.kernel_block_size}, got {self.grain}", ".grain"
            )

    def end(self, num_slots: int, num_heads: int) -> int:
        """Bytes from the layer's base offset to the end of the last vector."""
        num_kernel_blocks = num_slots // self.kernel_block_size
        return (
            (num_kernel_blocks - 1) * self.kernel_block_stride
            + (self.kernel_block_size // self.grain - 1) * self.slot_stride
            + (self.num_parts - 1) * self.part_stride
            + (num_heads - 1) * self.head_stride
            + self.vector_bytes
        )

    def to_plain(self) -> dict[str, object]:
        """Return a map of strings and integers, for a peer."""
        return asdict(self)

    @staticmethod
    def from_plain(plain: Mapping[object, object]) -> SlotArray:
        """Read what `to_plain` returns. Raises Refused: it is malformed."""
        return record(SlotArray).read(plain)  # type: ignore[no-any-return]


def slot_array_of_view(
    shape: Sequence[int], strides: Sequence[int], *, itemsize: int, element: str
) -> SlotArray | None:
    """Describe an attention layer's cache from its view.

    Args:
        shape: `(num_kernel_blocks, num_parts, kernel_block_size, num_heads, head_size)`.
        strides: Of the same axes, in elements.
        itemsize: Bytes per element.

    Returns:
        The array; None if a vector's elements are not contiguous, so that only whole pages can move.
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


def head_array_of_view(
    shape: Sequence[int],
    strides: Sequence[int],
    *,
    itemsize: int,
    element: str,
    is_packed: bool,
) -> SlotArray | None:
    """Describe an attention layer's cache from a view that has heads before tokens and one run per head and
    token.

    Args:
        shape: `(num_kernel_blocks, num_heads, kernel_block_size, size)`; `size` elements are all that one
            head keeps of one token.
        strides: Of the same axes, in elements.
        itemsize: Bytes per element.
        is_packed: The engine's kernels keep a head's tokens in an order of their own within a kernel block,
            so the strides of the last two axes only say where the head's share is.

    Returns:
        The array; None if what moves together is not contiguous, so that only whole pages can move.
    """
    kernel_block, head, slot, elem = (stride * itemsize for stride in strides)
    _, _, num_slots, size = shape
    if elem != itemsize and size > 1:
        return None
    vector_bytes = size * itemsize
    if is_packed and slot != vector_bytes and num_slots > 1:
        return None
    return SlotArray(
        element=element,
        num_parts=1,
        vector_bytes=vector_bytes * (num_slots if is_packed else 1),
        kernel_block_size=num_slots,
        kernel_block_stride=kernel_block,
        slot_stride=0 if is_packed else slot,
        part_stride=0,
        head_stride=head,
        grain=num_slots if is_packed else 1,
    )
