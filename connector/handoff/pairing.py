"""What to read from which rank of a producer, from our blocks, its block tables, and the layouts of all its
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...transports.errors import IncompatiblePeerError, RegionError
from ...transports.regions import RegionPairs
from ..planning.common import GroupPair, common_layers
from ..planning.layout import KVLayout
from ..planning.plan import BlockPairs, Planner
from ..planning.reshard import GroupTables, ReshardPlanner
from .events import BlockTables, GroupBlocks, LocalBlocks
from .peers import PeerSession

#: Producers whose planners are kept. A planner depends on layouts only, so one per producer serves all
#: requests; past this number the oldest is made again when it is needed.
_MAX_PLANNERS = 64


@dataclass(frozen=True)
class RankPlan:
    """What to read from one rank of the producer; at least one pair.

    Attributes:
        num_regions_per_layer: Regions that the same blocks would need if each layer had a cache of its own.
    """

    rank: int
    pairs: RegionPairs
    num_regions_per_layer: int


class NodePlanner(Protocol):
    """Plans reads from all ranks of one producer.

    Attributes:
        left_out: Names of our draft layers that this producer cannot fill.
    """

    @property
    def left_out(self) -> Sequence[str]: ...

    def plan(self, blocks: LocalBlocks, tables: BlockTables, num_tokens: int) -> list[RankPlan]:
        """Pair the blocks to load with the producer's, by position in the request.

        Args:
            tables: Per group, the producer's block table from the request's first token.
            num_tokens: Tokens whose keys and values are in those blocks.

        Returns:
            One plan for each rank from which something is needed.

        Raises:
            RegionError: the number of groups differs, a position is past the end of the producer's table, a
                block is not of its pool, or a local block would be written twice.
        """


def plan_for(local: KVLayout, remotes: Sequence[KVLayout], rank: int) -> NodePlanner:
    """Make a planner for a producer.

    Args:
        remotes: The layouts of its ranks.
        rank: Our number in our own node. If several ranks keep just what we do, the one with our number is
            read, so that all ranks of the producer serve about as much.

    Raises:
        IncompatiblePeerError: the caches cannot be paired; names the field.
    """
    common = common_layers(local, remotes)
    if common is None:
        return _plan_for(local, remotes, rank)
    planner = _plan_for(common.local, common.remotes, rank)
    return _OfCommonLayers(planner, common.groups, common.left_out)


def _plan_for(local: KVLayout, remotes: Sequence[KVLayout], rank: int) -> NodePlanner:
    # One rank first: its plan pairs whole pages, which is much cheaper than the pairs of vectors of the other
    # planner.
    for candidate in sorted(range(len(remotes)), key=lambda index: index != rank):
        try:
            return _FromOneRank(candidate, Planner(local, remotes[candidate]))
        except IncompatiblePeerError:
            continue  # not alike; if the caches do not fit at all, the other planner raises the error that says why
    return _FromManyRanks(ReshardPlanner(local, remotes))


class _OfCommonLayers:
    """Reads the layers that both nodes have, which may be in other groups on the two sides.

    Args:
        planner: Of the layers that both nodes have, grouped by pairs of block tables.
        groups: Those pairs.
    """

    def __init__(self, planner: NodePlanner, groups: Sequence[GroupPair], left_out: Sequence[str]) -> None:
        self.left_out = left_out
        self._planner = planner
        self._groups = groups

    def plan(self, blocks: LocalBlocks, tables: BlockTables, num_tokens: int) -> list[RankPlan]:
        if any(remote >= len(tables) for _, remote in self._groups):
            raise RegionError(f"the producer granted {len(tables)} groups, fewer than its layout has")
        ours = tuple(blocks[group] for group, _ in self._groups)
        theirs = tuple(tables[group] for _, group in self._groups)
        return self._planner.plan(ours, theirs, num_tokens)


class _FromOneRank:
    """Reads from one rank, which keeps just what we do, in blocks like ours."""

    left_out: Sequence[str] = ()

    def __init__(self, rank: int, planner: Planner) -> None:
        self._rank = rank
        self._planner = planner

    def plan(self, blocks: LocalBlocks, tables: BlockTables, num_tokens: int) -> list[RankPlan]:
        pairs = pair_blocks(blocks, tables)
        regions = self._planner.plan(pairs)
        if not len(regions):
            return []
        return [RankPlan(self._rank, regions, self._planner.num_regions_per_layer(pairs))]


class _FromManyRanks:
    """Reads from all ranks of a producer of another shape."""

    left_out: Sequence[str] = ()

    def __init__(self, planner: ReshardPlanner) -> None:
        self._planner = planner

    def plan(self, blocks: LocalBlocks, tables: BlockTables, num_tokens: int) -> list[RankPlan]:
        _require_as_many(blocks, tables)
        groups = [_group_tables(*pair) for pair in zip(blocks, tables, strict=True)]
        plans = self._planner.plan(groups, num_tokens)
        counts = self._planner.num_regions_per_layer(groups, num_tokens)
        return [
            RankPlan(rank, pairs, count)
            for rank, (pairs, count) in enumerate(zip(plans, counts, strict=True))
            if len(pairs)
        ]


def pair_blocks(blocks: LocalBlocks, tables: BlockTables) -> list[BlockPairs]:
    """Pair the blocks to load with block tables of the same block sizes.

    Positions with a local null block are left out.

    Returns:
        One array per group, shape `(num_blocks, 2)`: local block id, remote block id.

    Raises:
        RegionError: the number of groups differs, or a position is past the end of the producer's table.
    """
    _require_as_many(blocks, tables)
    return [_pair_group(index, *pair) for index, pair in enumerate(zip(blocks, tables, strict=True))]


def _require_as_many(blocks: LocalBlocks, tables: BlockTables) -> None:
    if len(blocks) != len(tables):
        raise RegionError(f"{len(blocks)} groups to load; the producer granted {len(tables)}")


def _pair_group(index: int, group: GroupBlocks, table: tuple[int, ...]) -> BlockPairs:
    first = group.first_block_index
    end = first + len(group.block_ids)
    if not 0 <= first <= end <= len(table):
        raise RegionError(f"blocks {first} to {end} of group {index}; the producer granted {len(table)}")
    pairs = np.empty((len(group.block_ids), 2), dtype=np.int64)
    pairs[:, 0] = group.block_ids
    pairs[:, 1] = table[first:end]
    # A null block stands for a position that no layer of this group needs, as before a window: nothing is
    # read there.
    needed: BlockPairs = pairs[pairs[:, 0] != 0]
    return needed


def _group_tables(group: GroupBlocks, table: tuple[int, ...]) -> GroupTables:
    return GroupTables(
        group.first_block_index,
        np.array(group.block_ids, dtype=np.int64),
        np.array(table, dtype=np.int64),
    )


class NodePlanners:
    """Planners by producer, each made once for the connections that its ranks have now.

    Args:
        local: Our pool's layout.
        rank: Our number in our own node.
    """

    def __init__(self, local: KVLayout, rank: int) -> None:
        self._local = local
        self._rank = rank
        self._planners: dict[tuple[int, ...], NodePlanner] = {}  # by peer ids, which are never used again

    def get(self, sessions: Sequence[PeerSession]) -> NodePlanner:
        """The planner for a producer.

        Args:
            sessions: With each of its ranks, in their order.

        Raises:
            IncompatiblePeerError: the caches cannot be paired; names the field.
        """
        key = tuple(session.peer_id for session in sessions)
        if key not in self._planners:
            planner = plan_for(self._local, [session.layout for session in sessions], self._rank)
            if len(self._planners) >= _MAX_PLANNERS:
                del self._planners[next(iter(self._planners))]
            self._planners[key] = planner
        return self._planners[key]

    def forget(self, peer_id: int) -> None:
        """Forget the planners of a connection that is gone."""
        self._planners = {key: planner for key, planner in self._planners.items() if peer_id not in key}
