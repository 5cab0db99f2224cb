"""Regions of bytes: the only thing that a transport moves.

A *pool* is the memory that one process registers: one or more segments of addresses, seen as a single run of
offsets. A *region* is `num_bytes` bytes at an offset of a pool. *Region pairs* say which remote region a read
copies into which local one. Nothing here knows tokens, layers or requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from .copying import locate_regions, sum_words
from .errors import RegionError

#: Main memory, or memory of a GPU.
MemoryKind = Literal["host", "cuda"]

Int64Array = npt.NDArray[np.int64]
AddressArray = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Segment:
    """`num_bytes` bytes at a virtual address of this process.

    If `kind` is `"cuda"`, only a GPU can access them.
    """

    address: int
    num_bytes: int
    kind: MemoryKind = "host"


@dataclass(frozen=True)
class Guard:
    """A word of the peer's guard table that must hold `value` after the bytes were copied.

    The owner of the memory clears the word before it gives the memory another meaning. So if the word still
    holds `value` after the copy, the copied bytes are those that were promised. The owner uses no value twice
    for one word.
    """

    index: int
    value: int


class Pool:
    """The memory that one process registered: segments placed end to end in one run of offsets."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self.segments = tuple(segments)
        if not self.segments or any(s.num_bytes <= 0 for s in self.segments):
            raise RegionError(f"a pool needs at least one segment, and no empty ones; got {self.segments}")
        #: The kind of memory of all segments.
        self.kind: MemoryKind = self.segments[0].kind
        if any(s.kind != self.kind for s in self.segments):
            raise RegionError("all segments of a pool must be in main memory, or all on a GPU")
        sizes = np.array([s.num_bytes for s in self.segments], dtype=np.int64)
        self._ends = np.cumsum(sizes)
        self._starts = self._ends - sizes
        bases = np.array([s.address for s in self.segments], dtype=np.uint64)
        self._shifts = bases - self._starts.astype(np.uint64)  # offset + shift = address, modulo 2**64

    @property
    def num_bytes(self) -> int:
        """Size of the run of offsets, in bytes."""
        return int(self._ends[-1])

    def segment_offset(self, index: int) -> int:
        """Return the pool offset at which segment `index` begins."""
        return int(self._starts[index])

    def segment_indices(self, offsets: Int64Array) -> npt.NDArray[np.intp]:
        """Return the index of the segment at each offset, shape `(num_regions,)`; past the last one if there
        is none.
        """
        return self._ends.searchsorted(offsets, side="right")

    def addresses(self, offsets: Int64Array, num_bytes: Int64Array) -> AddressArray:
        """Return the virtual addresses of regions, shape `(num_regions,)`.

        Raises:
            RegionError: a region is empty, outside the pool, or in more than one segment.
        """
        addresses = np.empty(len(offsets), dtype=np.uint64)
        first = locate_regions(addresses, offsets, num_bytes, self._ends, self._shifts)
        if first < len(offsets):
            raise RegionError(
                f"region {first} (offset {int(offsets[first])}, {int(num_bytes[first])} bytes) "
                f"is not inside one segment of a pool of {self.num_bytes} bytes"
            )
        return addresses


class Extents:
    """A set of bytes of a pool, kept as runs that neither touch nor overlap.

    Args:
        starts: Offset of the first byte of each run, shape `(num_runs,)`. Runs may touch and overlap, in any
            order.
        ends: Offset after its last byte, likewise.
    """

    def __init__(self, starts: Int64Array, ends: Int64Array) -> None:
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], np.maximum.accumulate(ends[order])
        # Where a run begins after everything before it.
        firsts = np.ones(len(starts), dtype=bool)
        firsts[1:] = starts[1:] > ends[:-1]
        self._starts = starts[firsts]
        self._ends = ends[np.append(np.flatnonzero(firsts)[1:] - 1, len(ends) - 1)] if len(ends) else ends

    def cover(self, offsets: Int64Array, lengths: Int64Array) -> bool:
        """Return whether regions lie in it, each of them in one run.

        Offset plus length must be less than 2**63.
        """
        if not len(self._starts):
            return not len(offsets)
        runs = self._starts.searchsorted(offsets, side="right") - 1
        return bool((runs >= 0).all() and (offsets + lengths <= self._ends[runs]).all())


class RegionPairs:
    """Which remote regions a read copies into which local ones.

    Attributes:
        table: `(num_regions, 3)` int64: local offset, remote offset, number of bytes. The local regions of
            one read do not overlap.
    """

    def __init__(self, table: Int64Array) -> None:
        if table.ndim != 2 or table.shape[1] != 3 or table.dtype != np.int64:
            raise RegionError(f"region pairs are (num_regions, 3) int64, got {table.dtype} {table.shape}")
        self.table = table

    def __len__(self) -> int:
        return int(self.table.shape[0])

    @property
    def local_offsets(self) -> Int64Array:
        return self.table[:, 0]

    @property
    def remote_offsets(self) -> Int64Array:
        return self.table[:, 1]

    @property
    def lengths(self) -> Int64Array:
        return self.table[:, 2]

    @property
    def num_bytes(self) -> int:
        """Total size in bytes."""
        return sum_words(self.lengths)
