"""Which bytes of a producer's ranks go where in our pool if the two nodes are not alike.

Bytes are paired by what they mean: layer, token, keys or values, head. So the nodes may differ in the number
of ranks and in the heads and layers of each, in block size, in the order inside a page, and in where pages
lie. If the order inside a layer's pages is unknown, whole pages move, or whole heads of them. See `plan.py`
for two nodes of the same shape.

A *unit* is the longest run of tokens that is never cut by a block of either side. All units of a layer are
alike, so one is planned once per peer and repeated for the blocks of a request. Everything is numpy arrays,
end to end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

from ...transports.errors import IncompatiblePeerError, RegionError
from ...transports.regions import RegionPairs
from .layout import KVLayout, LayerLayout
from .plan import RegionTable, merged, page_table, repeated
from .slots import SlotArray
from .sources import Share, choose_sources

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class GroupTables:
    """One group's blocks of a request, on both sides.

    Attributes:
        first_block_index: Position of `local_block_ids[0]` in our block table. We have the blocks before it
            already.
        local_block_ids: Shape `(num_blocks,)`. A null block (0) stands for a position that is not needed.
        remote_block_ids: Shape `(num_remote_blocks,)`, the producer's block table from the request's first
            token.
    """

    first_block_index: int
    local_block_ids: Int64Array
    remote_block_ids: Int64Array


@dataclass(frozen=True)
class _Side:
    """One node's blocks, and how far a token's bytes are from those of the pool's first slot.

    Attributes:
        num_blocks: Of the pool.
        span: Slots per `span_stride`: those of a kernel block, or of a block that moves whole.
        grain_stride: Bytes from one grain of a span to the next.
    """

    num_blocks: int
    block_size: int
    span: int
    span_stride: int
    grain_stride: int

    def require_known(self, name: str, block_ids: Int64Array) -> None:
        """Refuse the null block, and ids outside the pool."""
        wrong = (block_ids < 1) | (block_ids >= self.num_blocks)
        if wrong.any():
            first = int(block_ids[int(np.argmax(wrong))])
            raise RegionError(
                f"{name} block {first} cannot be transferred: it is not from 1 to {self.num_blocks - 1}"
            )

    def offsets(self, slots: Int64Array, grain: int) -> Int64Array:
        """Return the bytes from slot 0 to each slot. Each slot is the first of its grain."""
        return slots // self.span * self.span_stride + slots % self.span // grain * self.grain_stride


@dataclass(frozen=True)
class _Step:
    """What layers whose bytes move in the same strides have in common.

    Attributes:
        grain: Tokens that move together: 1, or those of a block if the order inside a page, or inside a
            head's share of it, is unknown.
        unit: Tokens per unit; a multiple of `grain`.
    """

    rank: int
    group_index: int
    grain: int
    unit: int
    local: _Side
    remote: _Side


@dataclass(frozen=True)
class _Units:
    """Where units lie on both sides, shape `(num_units,)`. Only the last unit of a request may be short.

    Attributes:
        num_tokens: Tokens in each unit.
    """

    local_slots: Int64Array
    remote_slots: Int64Array
    num_tokens: Int64Array


class ReshardPlanner:
    """Pairs of our layout and those of all ranks of a producer, made once per peer.

    Args:
        remotes: By rank, both tensor-parallel and pipeline-parallel ones.

    Raises:
        IncompatiblePeerError: the layouts cannot be paired; the error names the field.
    """

    def __init__(self, local: KVLayout, remotes: Sequence[KVLayout]) -> None:
        self._num_groups = local.num_groups
        self._num_ranks = len(remotes)
        tables: dict[_Step, list[RegionTable]] = {}
        for share in choose_sources(local, remotes):
            step = _step_of(share, local.num_blocks, remotes[share.rank].num_blocks)
            tables.setdefault(step, []).append(_grain_table(share))
        self._layers = {step: _alike(parts) for step, parts in tables.items()}
        try:
            self._grain_tables = {step: merged(np.concatenate(parts)) for step, parts in tables.items()}
        except RegionError as error:  # layers of ours overlap, so one would overwrite the other
            raise IncompatiblePeerError(
                field="layers that share a cache", local="some", remote="none"
            ) from error
        self._unit_tables = {
            step: _unit_table(step, table, step.unit) for step, table in self._grain_tables.items()
        }

    def plan(self, groups: Sequence[GroupTables], num_tokens: int) -> list[RegionPairs]:
        """Pair the bytes of a request's first `num_tokens` tokens for which there are local blocks.

        Bytes of later tokens in the last block stay unchanged, unless the block moves whole.

        Args:
            groups: One entry per group.

        Returns:
            For each rank the fewest region pairs, in the order of their local offsets; none for a rank that
            is not needed.

        Raises:
            RegionError: the number of groups differs from the layouts', a block id is outside its pool, the
                producer has the null block where we need a block, the producer has no tokens for one of our
                blocks, or a local block would be written twice.
        """
        if len(groups) != self._num_groups:
            raise RegionError(f"{len(groups)} block tables for {self._num_groups} groups of layers")
        tables: list[list[RegionTable]] = [[] for _ in range(self._num_ranks)]
        for step, unit_table in self._unit_tables.items():
            units = _units(groups[step.group_index], step, num_tokens)
            tables[step.rank].extend(_tables_of_units(step, self._grain_tables[step], unit_table, units))
        return [
            RegionPairs(merged(np.concatenate(parts)) if parts else np.empty((0, 3), np.int64))
            for parts in tables
        ]

    def num_regions_per_layer(self, groups: Sequence[GroupTables], num_tokens: int) -> list[int]:
        """Count the region pairs per rank that the same bytes need if no pair spans two layers."""
        counts = [0] * self._num_ranks
        for step, layers in self._layers.items():
            units = _units(groups[step.group_index], step, num_tokens)
            for table, num_layers in layers:
                parts = list(_tables_of_units(step, table, _unit_table(step, table, step.unit), units))
                counts[step.rank] += num_layers * len(merged(np.concatenate(parts)))
        return counts


def _alike(tables: Sequence[RegionTable]) -> list[tuple[RegionTable, int]]:
    """Return one table per set of layers that differ only in their base offsets, and the size of the set."""
    found: dict[bytes, tuple[RegionTable, int]] = {}
    for table in tables:
        shape = table.copy()
        shape[:, :2] -= table[0, :2]
        first, count = found.get(shape.tobytes(), (table, 0))
        found[shape.tobytes()] = first, count + 1
    return list(found.values())


def _tables_of_units(
    step: _Step, grain_table: RegionTable, unit_table: RegionTable, units: _Units
) -> Iterator[RegionTable]:
    is_short = units.num_tokens < step.unit
    yield _table_of_units(unit_table, step, units, ~is_short)
    if is_short.any():
        rest = int(units.num_tokens[is_short][0])
        yield _table_of_units(_unit_table(step, grain_table, rest), step, units, is_short)


# -- one unit: once per peer ---------------------------------------------------------------------------


def _step_of(share: Share, local_num_blocks: int, remote_num_blocks: int) -> _Step:
    layers, nums = (share.ours, share.theirs), (local_num_blocks, remote_num_blocks)
    slots = share.slots()
    if slots is None:
        unit = grain = share.ours.block_size
        sides = [
            _Side(num_blocks, unit, unit, layer.block_stride, 0)
            for layer, num_blocks in zip(layers, nums, strict=True)
        ]
    else:
        grain, unit = slots[0].grain, gcd(*(array.kernel_block_size for array in slots))
        sides = [
            _Side(
                num_blocks,
                layer.block_size,
                array.kernel_block_size,
                array.kernel_block_stride,
                array.slot_stride,
            )
            for layer, num_blocks, array in zip(layers, nums, slots, strict=True)
        ]
    return _Step(share.rank, share.ours.group_index, grain, unit, *sides)


def _grain_table(share: Share) -> RegionTable:
    """Pair the first grain of the pool: the vectors of slot 0, or the page of block 0."""
    slots = share.slots()
    if slots is None:
        return page_table(share.ours, share.theirs)
    ours, theirs = slots
    table = np.empty((ours.num_parts, share.num, 3), dtype=np.int64)
    table[:, :, 0] = _vector_offsets(share.ours, ours, share)
    table[:, :, 1] = _vector_offsets(share.theirs, theirs, share)
    table[:, :, 2] = ours.vector_bytes
    return table.reshape(-1, 3)


def _vector_offsets(layer: LayerLayout, array: SlotArray, share: Share) -> Int64Array:
    """Pool offsets of slot 0's vectors, shape `(num_parts, num_heads)`."""
    heads = np.arange(share.first - layer.shard.first, share.first - layer.shard.first + share.num)
    parts = np.arange(array.num_parts)
    return layer.base_offset + parts[:, None] * array.part_stride + heads * array.head_stride


def _unit_table(step: _Step, grain_table: RegionTable, num_tokens: int) -> RegionTable:
    """Pair the first `num_tokens` tokens of the pool, at most one unit."""
    grains = np.arange(-(-num_tokens // step.grain), dtype=np.int64)
    table = repeated(grain_table, grains * step.local.grain_stride, grains * step.remote.grain_stride)
    return merged(table)


# -- the units of a request ----------------------------------------------------------------------------


def _units(group: GroupTables, step: _Step, num_tokens: int) -> _Units:
    """Cut the local blocks into units, and find each unit's tokens on the other side."""
    local_size, remote_size = step.local.block_size, step.remote.block_size
    positions = group.first_block_index + np.arange(len(group.local_block_ids), dtype=np.int64)
    needed = group.local_block_ids != 0
    step.local.require_known("local", group.local_block_ids[needed])
    first_tokens = positions[needed] * local_size
    _require_offered(first_tokens, num_tokens)
    within = np.arange(0, local_size, step.unit, dtype=np.int64)
    tokens = (first_tokens[:, None] + within).reshape(-1)
    local_slots = (group.local_block_ids[needed, None] * local_size + within).reshape(-1)
    is_offered = tokens < num_tokens
    tokens, local_slots = tokens[is_offered], local_slots[is_offered]
    remote_blocks = _at_positions(group.remote_block_ids, tokens // remote_size)
    step.remote.require_known("remote", remote_blocks)
    remote_slots = remote_blocks * remote_size + tokens % remote_size
    return _Units(local_slots, remote_slots, np.minimum(num_tokens - tokens, step.unit))


def _require_offered(first_tokens: Int64Array, num_tokens: int) -> None:
    """Refuse a local block without any offered token: it would count as loaded, with undefined contents."""
    wrong = (first_tokens < 0) | (first_tokens >= num_tokens)
    if wrong.any():
        first = int(first_tokens[int(np.argmax(wrong))])
        raise RegionError(f"a block to load begins at token {first}; {num_tokens} tokens are offered")


def _at_positions(block_ids: Int64Array, positions: Int64Array) -> Int64Array:
    if len(positions) and (last := int(positions.max())) >= len(block_ids):
        raise RegionError(f"block {last} of the request is needed; the producer granted {len(block_ids)}")
    found: Int64Array = block_ids[positions]
    return found


def _table_of_units(
    table: RegionTable, step: _Step, units: _Units, which: npt.NDArray[np.bool_]
) -> RegionTable:
    """Repeat the table of the pool's first unit for some of the units."""
    return repeated(
        table,
        step.local.offsets(units.local_slots[which], step.grain),
        step.remote.offsets(units.remote_slots[which], step.grain),
    )
