"""The bytes of a pool that belong to blocks, for owners that check what peers read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...transports.regions import Extents
from .layout import KVLayout


class BlockExtents:
    """The bytes of blocks, by group.

    Args:
        layout: Where each layer's pages lie.
    """

    def __init__(self, layout: KVLayout) -> None:
        #: By group: offset of a run in block 0, its length, and what each block adds to the offset; shape
        #: `(num_runs, 3)`.
        self._runs = [_runs_of(layout, group) for group in range(layout.num_groups)]

    def of(self, block_ids: Sequence[Sequence[int]]) -> Extents:
        """Return the bytes of blocks: one block table per group."""
        starts, ends = [], []
        # A rank without layers of the last groups still gets their block tables. Nothing of them lies in its
        # pool.
        for runs, table in zip(self._runs, block_ids, strict=False):
            ids = np.array(table, dtype=np.int64)
            firsts = (runs[:, 0] + ids[:, None] * runs[:, 2]).ravel()
            starts.append(firsts)
            ends.append(firsts + np.tile(runs[:, 1], len(ids)))
        return Extents(np.concatenate(starts), np.concatenate(ends))


def _runs_of(layout: KVLayout, group: int) -> npt.NDArray[np.int64]:
    """Return the runs of block 0 of a group. Pages that lie end to end in every block are one run."""
    pages = sorted(
        (layer.block_stride, layer.base_offset + offset, num_bytes)
        for layer in layout.layers
        if layer.group_index == group
        for offset, num_bytes in layer.fragments
    )
    runs: list[list[int]] = []
    for stride, offset, num_bytes in pages:
        if runs and runs[-1][2] == stride and runs[-1][0] + runs[-1][1] == offset:
            runs[-1][1] += num_bytes
        else:
            runs.append([offset, num_bytes, stride])
    return np.array(runs, dtype=np.int64).reshape(-1, 3)
