"""Which block of the producer goes into which of ours."""

from __future__ import annotations

import numpy as np

from ...transports.errors import RegionError
from ..planning.plan import BlockPairs
from .events import BlockTables, GroupBlocks, LocalBlocks

__all__ = ["pair_blocks"]


def pair_blocks(blocks: LocalBlocks, tables: BlockTables) -> list[BlockPairs]:
    """Pair the blocks to load with the producer's block tables, by position in the request.

    Positions with a local null block are left out: nobody needs them.

    Returns:
        One array a group, shape `(num_blocks, 2)`: local block id, remote block id.

    Raises:
        RegionError: the number of groups differs, or a position is behind the end of the producer's table.
    """
    if len(blocks) != len(tables):
        raise RegionError(f"{len(blocks)} groups to load; the producer granted {len(tables)}")
    return [_pair_group(index, *pair) for index, pair in enumerate(zip(blocks, tables, strict=True))]


def _pair_group(index: int, group: GroupBlocks, table: tuple[int, ...]) -> BlockPairs:
    first = group.first_block_index
    end = first + len(group.block_ids)
    if not 0 <= first <= end <= len(table):
        raise RegionError(f"blocks {first} to {end} of group {index}; the producer granted {len(table)}")
    pairs = np.empty((len(group.block_ids), 2), dtype=np.int64)
    pairs[:, 0] = group.block_ids
    pairs[:, 1] = table[first:end]
    needed: BlockPairs = pairs[pairs[:, 0] != 0]
    return needed
