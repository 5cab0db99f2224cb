"""What a consumer knows of one request's load: its offer, and how far it is with each rank of the producer."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ...transports.errors import KVTransferError, ProtocolError, RegionError, StaleLeaseError
from .events import BlockTables, GroupBlocks, LocalBlocks, RemoteOffer
from .messages import MAX_GROUP_BLOCKS, Grant, Progress

__all__ = ["Load", "Part", "PartKey", "PartState", "Verdict"]

#: One rank's offer among all that there are: (address, epoch, lease).
PartKey = tuple[str, int, int]


class PartState(enum.Enum):
    CONNECTING = enum.auto()
    CLAIMING = enum.auto()
    GRANTED = enum.auto()
    READING = enum.auto()


@dataclass
class Part:
    """One rank of the producer, as far as one load is concerned.

    Attributes:
        rank: Its number among the offer's addresses.
        deadline: End of the present state; infinity where another deadline counts: a connecting part has its peer's.
        grant: What the rank granted, and what it said of its progress since; from the state GRANTED on.
        release: Whether the rank is still to be told that the load is over.
    """

    rank: int
    address: str
    state: PartState = PartState.CONNECTING
    deadline: float = math.inf
    grant: Grant | None = None
    release: bool = True

    def advance(self, progress: Progress) -> None:
        """The rank has more ready.

        Raises:
            ProtocolError: it has less, or more than it ever offered, or other groups, or too many blocks.
        """
        grant = self.grant
        if (
            grant is None
            or not grant.num_ready < progress.num_ready <= grant.num_tokens
            or len(progress.more_block_ids) != len(grant.block_ids)
        ):
            raise ProtocolError("Progress does not fit what was granted")
        pairs = zip(grant.block_ids, progress.more_block_ids, strict=True)
        tables = tuple(table + more for table, more in pairs)
        if any(len(table) > MAX_GROUP_BLOCKS for table in tables):
            raise ProtocolError(f"Progress makes a block table longer than {MAX_GROUP_BLOCKS}")
        self.grant = replace(grant, num_ready=progress.num_ready, block_ids=tables)


@dataclass(frozen=True)
class Verdict:
    """How a load is reported."""

    outcome: Literal["loaded", "failed", "dropped"]
    error: KVTransferError | None = None


class Load:
    """One request's way from the claim to the report.

    It is *connecting* or *claiming* until every part is granted, then *granted*, and *reading* while a part is. An offer
    that is still being computed is read in rounds: what is ready, then what has become ready meanwhile. With a
    verdict it is over but for the reads that still write into its blocks: it is *draining*.

    Attributes:
        blocks: Where to load to; None until somebody asked for it.
        num_taken: Of each group's blocks, how many were read, or are being read.
        verdict: How it will be reported; None while that is open.
    """

    def __init__(self, request_id: str, offer: RemoteOffer) -> None:
        self.request_id = request_id
        self.offer = offer
        self.parts = tuple(Part(rank, address) for rank, address in enumerate(offer.addresses))
        self.blocks: LocalBlocks | None = None
        self.num_taken: list[int] = []
        self.verdict: Verdict | None = None

    @property
    def keys(self) -> list[PartKey]:
        """The offer's names, by part."""
        return [(part.address, self.offer.epoch, self.offer.lease) for part in self.parts]

    @property
    def is_granted(self) -> bool:
        """Whether every part is granted."""
        return all(part.grant is not None for part in self.parts)

    @property
    def num_reads(self) -> int:
        """Reads that write into its blocks."""
        return sum(part.state is PartState.READING for part in self.parts)

    def part_at(self, address: str) -> Part:
        """The part of an address that the offer names."""
        return next(part for part in self.parts if part.address == address)

    def has_part_at(self, address: str) -> bool:
        """Whether the offer names this address."""
        return address in self.offer.addresses

    @property
    def num_ready(self) -> int:
        """Tokens that every rank has ready; 0 before all are granted."""
        return min(part.grant.num_ready if part.grant is not None else 0 for part in self.parts)

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all offered tokens ready."""
        grants = [part.grant for part in self.parts]
        return all(grant is not None and grant.num_ready == grant.num_tokens for grant in grants)

    def tables(self) -> BlockTables:
        """The producer's block tables, as far as all ranks know them.

        Raises:
            StaleLeaseError: the ranks granted different blocks or tokens.
        """
        grants = [part.grant for part in self.parts if part.grant is not None]
        least = min(grants, key=lambda grant: grant.num_ready)
        ends = [len(table) for table in least.block_ids]
        for grant in grants:
            tables = tuple(table[:end] for table, end in zip(grant.block_ids, ends, strict=False))
            if grant.num_tokens != least.num_tokens or tables != least.block_ids:
                raise StaleLeaseError("the ranks of the producer granted different blocks")
        return least.block_ids

    def take_readable(self, block_sizes: Sequence[int]) -> LocalBlocks:
        """Take the blocks to read now: all that are left, or those that are ready to their last token.

        Args:
            block_sizes: Our tokens a block, by group.

        Raises:
            RegionError: the number of groups differs from ours.
        """
        assert self.blocks is not None
        if len(self.blocks) != len(block_sizes):
            raise RegionError(f"{len(self.blocks)} groups to load; this node has {len(block_sizes)}")
        taken = []
        for index, (group, block_size) in enumerate(zip(self.blocks, block_sizes, strict=True)):
            first = self.num_taken[index]
            end = len(group.block_ids)
            if not self.is_whole:
                num_ready_blocks = self.num_ready // block_size - group.first_block_index
                end = max(first, min(end, num_ready_blocks))
            self.num_taken[index] = end
            is_any = end > first
            taken.append(
                GroupBlocks(group.first_block_index + first if is_any else 0, group.block_ids[first:end])
            )
        return tuple(taken)

    @property
    def is_taken(self) -> bool:
        """Whether no block is left to be read."""
        assert self.blocks is not None
        return all(
            taken == len(group.block_ids) for taken, group in zip(self.num_taken, self.blocks, strict=True)
        )
