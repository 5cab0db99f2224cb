"""Which bytes of a peer's pool go where in ours.

The inputs are two layouts and a list of blocks, the output region pairs.

Pages are paired by content (name of the layer, byte of the page, block), never by position. Regions are
merged if they are adjacent on both sides. Everything is numpy arrays, end to end.

What must never break: every token of the blocks gets the bytes of the same layer and token of the peer, and
no byte outside of them is read or written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ...transports.errors import IncompatiblePeerError, RegionError
from ...transports.regions import RegionPairs
from .layout import KVLayout, LayerLayout

Int64Array = npt.NDArray[np.int64]

#: One group's blocks, shape `(num_blocks, 2)`: local block id, remote block id.
BlockPairs = Int64Array

#: A table of region pairs, shape `(num_regions, 3)`: local offset, remote offset, number of bytes.
RegionTable = Int64Array
# What a block adds to the offsets of its regions: (group, local block stride, remote block stride).
_Step = tuple[int, int, int]


def plan(local: KVLayout, remote: KVLayout, blocks: Sequence[BlockPairs]) -> RegionPairs:
    """Pair the pages of `blocks`, one array per group.

    See `Planner`, which does the first half once per peer.
    """
    return Planner(local, remote).plan(blocks)


class Planner:
    """Pairs of two layouts, made once per peer.

    Layers of one group that lie in the same bytes on both sides are moved once.

    Raises:
        IncompatiblePeerError: the layouts cannot be paired; the error names the field.
    """

    def __init__(self, local: KVLayout, remote: KVLayout) -> None:
        self._local_num_blocks = local.num_blocks
        self._remote_num_blocks = remote.num_blocks
        self._num_groups = local.num_groups
        self._layers_of_group = [0] * self._num_groups
        tables: dict[_Step, list[RegionTable]] = {}
        for ours, theirs in _distinct(_paired_layers(local, remote)):
            step = (ours.group_index, ours.block_stride, theirs.block_stride)
            tables.setdefault(step, []).append(page_table(ours, theirs))
            self._layers_of_group[ours.group_index] += 1
        try:
            self._block_tables = {step: merged(np.concatenate(parts)) for step, parts in tables.items()}
        except RegionError as error:  # ours share a cache and theirs do not, so two of theirs would be written into one of ours
            raise IncompatiblePeerError(
                field="layers that share a cache", local="some", remote="none"
            ) from error

    def plan(self, blocks: Sequence[BlockPairs]) -> RegionPairs:
        """Pair the pages of blocks.

        Args:
            blocks: One array per group, with the blocks in any order.

        Returns:
            The fewest region pairs, in the order of their local offsets.

        Raises:
            RegionError: the number of groups differs from the layouts', a block id is outside its pool or is
                the null block, or a local block would be written twice.
        """
        self._require_known(blocks)
        tables = [
            repeated(table, blocks[group][:, 0] * local_stride, blocks[group][:, 1] * remote_stride)
            for (group, local_stride, remote_stride), table in self._block_tables.items()
        ]
        return RegionPairs(merged(np.concatenate(tables)) if tables else np.empty((0, 3), np.int64))

    def num_regions_per_layer(self, blocks: Sequence[BlockPairs]) -> int:
        """Count the region pairs that the same blocks need if each layer has its own cache on both sides."""
        counts = zip(self._layers_of_group, blocks, strict=True)
        return sum(num_layers * _num_runs(pairs) for num_layers, pairs in counts)

    def _require_known(self, blocks: Sequence[BlockPairs]) -> None:
        if len(blocks) != self._num_groups:
            raise RegionError(f"{len(blocks)} block tables for {self._num_groups} groups of layers")
        for pairs in blocks:
            for side, column, num_blocks in (
                ("local", 0, self._local_num_blocks),
                ("remote", 1, self._remote_num_blocks),
            ):
                ids = pairs[:, column]
                wrong = (ids < 1) | (ids >= num_blocks)
                if wrong.any():
                    first = int(ids[int(np.argmax(wrong))])
                    raise RegionError(
                        f"{side} block {first} cannot be transferred: it is not from 1 to {num_blocks - 1}"
                    )


def _paired_layers(local: KVLayout, remote: KVLayout) -> Iterator[tuple[LayerLayout, LayerLayout]]:
    """Pair layers by name, or raise an error that names the first difference."""
    theirs_by_name = {layer.name: layer for layer in remote.layers}
    our_names = {layer.name for layer in local.layers}
    for name in theirs_by_name:
        _require_equal(f"layers.{name}", name in our_names, True)
    for ours in local.layers:
        _require_equal(f"layers.{ours.name}", True, ours.name in theirs_by_name)
        theirs = theirs_by_name[ours.name]
        for what in ("group_index", "block_size", "shard", "page_format", "page_bytes"):
            _require_equal(f"layers.{ours.name}.{what}", getattr(ours, what), getattr(theirs, what))
        yield ours, theirs


def _distinct(
    layers: Iterable[tuple[LayerLayout, LayerLayout]],
) -> Iterable[tuple[LayerLayout, LayerLayout]]:
    """Keep one of each set of layers that differ only in their names, on both sides."""
    return {
        (replace(ours, name=""), replace(theirs, name="")): (ours, theirs) for ours, theirs in layers
    }.values()


def _require_equal(field: str, local: object, remote: object) -> None:
    if local != remote:
        raise IncompatiblePeerError(field=field, local=local, remote=remote)


def page_table(ours: LayerLayout, theirs: LayerLayout) -> RegionTable:
    """Pair one layer's pages of block 0.

    They are cut where either side is cut, so each piece is contiguous on both.
    """
    our_offsets, our_ends = _fragment_columns(ours)
    their_offsets, their_ends = _fragment_columns(theirs)
    ends = np.union1d(our_ends, their_ends)
    starts = np.concatenate(([0], ends[:-1]))
    return np.stack(
        (
            _pool_offsets(starts, our_offsets, our_ends),
            _pool_offsets(starts, their_offsets, their_ends),
            ends - starts,
        ),
        axis=1,
    )


def _fragment_columns(layer: LayerLayout) -> tuple[Int64Array, Int64Array]:
    """Return the pool offset of each fragment of block 0, and where the fragment ends in the page."""
    fragments = np.array(layer.fragments, dtype=np.int64).reshape(-1, 2)
    return layer.base_offset + fragments[:, 0], np.cumsum(fragments[:, 1])


def _pool_offsets(page_offsets: Int64Array, offsets: Int64Array, ends: Int64Array) -> Int64Array:
    """Return where bytes of a page lie in the pool."""
    index = np.searchsorted(ends, page_offsets, side="right")
    starts = np.concatenate(([0], ends[:-1]))
    return offsets[index] + (page_offsets - starts[index])


def repeated(table: RegionTable, local_offsets: Int64Array, remote_offsets: Int64Array) -> RegionTable:
    """Copy a table for each pair of offsets, and add the offsets to the copy.

    Args:
        local_offsets: Shape `(num_copies,)`.
        remote_offsets: Likewise.
    """
    copies = np.empty((len(local_offsets), len(table), 3), dtype=np.int64)
    copies[:, :, 0] = local_offsets[:, None] + table[:, 0]
    copies[:, :, 1] = remote_offsets[:, None] + table[:, 1]
    copies[:, :, 2] = table[:, 2]
    return copies.reshape(-1, 3)


def merged(table: RegionTable) -> RegionTable:
    """Sort by local offset, and join regions that are adjacent on both sides.

    A run never joins two segments of a pool: each segment begins with bytes of block 0, which never moves.

    Raises:
        RegionError: a local byte is in two regions.
    """
    if len(table) < 2:
        return table
    table = table[np.argsort(table[:, 0], kind="stable")]
    ends = table[:-1] + table[:-1, 2:]
    if (ends[:, 0] > table[1:, 0]).any():
        first = int(np.argmax(ends[:, 0] > table[1:, 0]))
        raise RegionError(f"local bytes from {int(table[first + 1, 0])} would be written twice")
    joins = (ends[:, 0] == table[1:, 0]) & (ends[:, 1] == table[1:, 1])
    firsts = np.concatenate(([0], np.flatnonzero(~joins) + 1))
    merged = table[firsts]
    merged[:, 2] = np.add.reduceat(table[:, 2], firsts)
    return merged


def _num_runs(pairs: BlockPairs) -> int:
    """Count runs of blocks that are adjacent on both sides."""
    if not len(pairs):
        return 0
    ordered = pairs[np.argsort(pairs[:, 0], kind="stable")]
    return 1 + int((np.diff(ordered, axis=0) != 1).any(axis=1).sum())
