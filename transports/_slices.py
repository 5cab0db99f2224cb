"""Cutting a read into slices that are fetched one by one, and the order of reads. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

import numpy as np

from .regions import AddressArray, Int64Array, RegionPairs

T = TypeVar("T")


@dataclass(frozen=True)
class SliceLimits:
    """How a read is cut.

    Attributes:
        slice_bytes: Longest row. Rows share a slice of up to about this many bytes, and always fewer than
            twice as many.
        max_rows: Most rows per slice.
        alone_bytes: A row of at least this many bytes has a slice of its own; by default none has.
    """

    slice_bytes: int
    max_rows: int
    alone_bytes: int = 1 << 62

    @property
    def max_bytes(self) -> int:
        """No slice has more bytes than this."""
        return 2 * self.slice_bytes

    def within(self, max_bytes: int) -> Self:
        """Return these limits, lowered if necessary, so that no slice has more than `max_bytes` bytes."""
        return replace(self, slice_bytes=min(self.slice_bytes, max_bytes // 2))


@dataclass(frozen=True)
class SlicePlan:
    """The rows of a read, and how they are grouped into slices. No row is longer than a slice.

    Attributes:
        rows: `(num_rows, 2)`: remote offset, num_bytes.
        targets: `(num_rows,)` local addresses.
        bounds: `(num_slices + 2,)`: slice `i` is the rows `bounds[i]` to `bounds[i + 1]`. The one after the
            last has no rows: a fetch of it asks only whether the guard still holds.
    """

    rows: Int64Array
    targets: AddressArray
    bounds: Int64Array

    @classmethod
    def of(cls, pairs: RegionPairs, targets: AddressArray, limits: SliceLimits) -> SlicePlan:
        """Cut a read whose regions have the local addresses `targets`, shape `(num_regions,)`."""
        rows = pairs.table[:, 1:].copy()
        # Most small reads have one row, for which an index takes a tenth of the time of `max`.
        longest = int(rows[0, 1] if len(rows) == 1 else rows[:, 1].max(initial=0))
        if longest > limits.slice_bytes:
            rows, targets = _cut(rows, targets, limits.slice_bytes)
        return cls(rows, targets, _bounds(rows[:, 1], longest, limits))

    def __len__(self) -> int:
        return len(self.bounds) - 2

    def rows_of(self, index: int) -> Int64Array:
        return self.rows[self.bounds[index] : self.bounds[index + 1]]

    def targets_of(self, index: int) -> AddressArray:
        return self.targets[self.bounds[index] : self.bounds[index + 1]]


def _cut(rows: Int64Array, targets: AddressArray, slice_bytes: int) -> tuple[Int64Array, AddressArray]:
    """Cut the rows that are longer than a slice, and their targets with them."""
    num_pieces = -(-rows[:, 1] // slice_bytes)
    region = np.repeat(np.arange(len(rows)), num_pieces)
    nth = np.arange(len(region)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    skipped = nth * slice_bytes
    lengths = np.minimum(slice_bytes, rows[region, 1] - skipped)
    return np.stack([rows[region, 0] + skipped, lengths], axis=1), targets[region] + skipped.astype(np.uint64)


def _bounds(lengths: Int64Array, longest: int, limits: SliceLimits) -> Int64Array:
    """Return the bounds of the slices. `longest`: of the rows, or of what they were cut from."""
    num_rows = len(lengths)
    if num_rows <= 1:
        return np.array([0, 1, 1] if num_rows else [0, 0])
    # For most small reads the product is small enough, so that no sum is taken.
    fits = num_rows * longest <= limits.slice_bytes or lengths.sum() <= limits.slice_bytes
    if fits and num_rows <= limits.max_rows and longest < limits.alone_bytes:
        return np.array([0, num_rows, num_rows])
    is_large = lengths >= limits.alone_bytes
    filled = (np.cumsum(lengths) - 1) // limits.slice_bytes
    counted = np.arange(num_rows) // limits.max_rows
    begins = np.ones(num_rows, dtype=bool)
    begins[1:] = is_large[1:] | is_large[:-1] | (np.diff(filled) > 0) | (np.diff(counted) > 0)
    return np.append(np.flatnonzero(begins), [num_rows, num_rows]).astype(np.int64)


class RoundRobin(Generic[T]):
    """Reads that are served in rotation, one slice each, so that a small read does not wait for a large one.

    Args:
        wants: Whether a read has a slice to fetch. If it has none, it is dropped when it is next.
    """

    def __init__(self, wants: Callable[[T], bool]) -> None:
        self._wants = wants
        self._waiting: deque[T] = deque()

    def add(self, read: T) -> None:
        """Append a read."""
        self._waiting.append(read)

    def clear(self) -> None:
        """Drop all reads; also within the loop."""
        self._waiting.clear()

    def __iter__(self) -> Iterator[T]:
        """Yield reads, each for its next slice. If the loop is left instead, the read is next again."""
        waiting = self._waiting
        while waiting:
            if self._wants(waiting[0]):
                yield waiting[0]
                waiting.rotate(-1)
            else:
                waiting.popleft()
