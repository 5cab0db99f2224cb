"""What an owner lets his peers write into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from ._memory import WordTable, require_guard
from .errors import ProtocolError
from .regions import Guard, Int64Array, Pool, RegionPairs, Regions


@dataclass(frozen=True)
class _Window:
    """Regions under a guard, merged: `starts` ascend, and no two of them touch. Each `(num_regions,)`."""

    guard: Guard
    starts: Int64Array
    ends: Int64Array

    @classmethod
    def of(cls, guard: Guard, regions: Regions) -> Self:
        order = np.argsort(regions.offsets)
        starts = regions.offsets[order]
        ends = np.maximum.accumulate(starts + regions.lengths[order])
        begins = np.ones(len(starts), dtype=bool)
        begins[1:] = starts[1:] > ends[:-1]
        last = np.append(begins[1:], True) if len(starts) else begins
        return cls(guard, starts[begins], ends[last])

    def covers(self, offsets: Int64Array, lengths: Int64Array) -> bool:
        """Whether every region lies inside. Any numbers will do: they are a stranger's."""
        if not len(self.starts):
            return not len(offsets)
        index = np.searchsorted(self.starts, offsets, side="right") - 1
        room = np.where(index >= 0, self.ends[index] - np.maximum(offsets, 0), 0)
        return bool(((lengths > 0) & (lengths <= room)).all())


class Windows:
    """The regions that were accepted, for each peer and guard."""

    def __init__(self, table: WordTable) -> None:
        self._table = table
        self._windows: dict[tuple[int, int], _Window] = {}  # by peer, and index of the guard

    def accept(self, peer_id: int, guard: Guard, regions: Regions, pool: Pool) -> None:
        """Accept what one peer writes into regions of `pool`, instead of what it could under this word before.

        Raises:
            RegionError: a region is outside the pool, or the guard outside the table. Nothing changed.
        """
        require_guard(guard, self._table.num_guards)
        pool.addresses(regions.offsets, regions.lengths)
        held = {key: window for key, window in self._windows.items() if self._table.holds(window.guard)}
        self._windows = {**held, (peer_id, guard.index): _Window.of(guard, regions)}

    def admits(self, peer_id: int, guard: Guard, pairs: RegionPairs) -> bool:
        """Whether a peer may write into `pairs`' local regions now.

        Raises:
            ProtocolError: it may write under this guard, but not there.
        """
        window = self._windows.get((peer_id, guard.index))
        if window is None or window.guard != guard or not self._table.holds(guard):
            return False
        if not window.covers(pairs.local_offsets, pairs.lengths):
            raise ProtocolError("the peer writes where nothing was accepted of it")
        return True

    def forget(self, peer_id: int) -> None:
        """Accept nothing of a peer any more."""
        self._windows = {key: window for key, window in self._windows.items() if key[0] != peer_id}
