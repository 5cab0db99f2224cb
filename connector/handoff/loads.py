"""What a consumer knows of one request's load: its offer, and how far it is with each rank of the producer."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ...transports.errors import KVTransferError, ProtocolError, RegionError, TransferTimeoutError
from ..errors import InvalidTransferParamsError, StaleLeaseError
from .events import BlockTables, GroupBlocks, LocalBlocks, RemoteOffer
from .messages import MAX_GROUP_BLOCKS, Grant, Progress

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

    def lateness(self, part: Part) -> KVTransferError:
        """What a part that does not read has waited for too long."""
        if part.state is PartState.CLAIMING:
            return TransferTimeoutError("the claim was not answered in time")
        what = "no blocks to load into came" if self.blocks is None else "the prompt was not computed"
        return TransferTimeoutError(f"{what} in time")

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


class Loads:
    """The loads of a node by request, and the failures of claims whose load was not asked for yet.

    Args:
        max_failures: That are remembered; the oldest are forgotten.
        max_ranks: Addresses that an offer may name.
    """

    def __init__(self, max_failures: int, max_ranks: int) -> None:
        self._max_failures = max_failures
        self._max_ranks = max_ranks
        self._loads: dict[str, Load] = {}  # by request
        self._request_of: dict[PartKey, str] = {}
        self._failures: dict[str, KVTransferError] = {}  # by request

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[Load]:
        """Those of now: they may end meanwhile."""
        return iter(tuple(self._loads.values()))

    @property
    def num_failures(self) -> int:
        """Failures that nobody has asked for."""
        return len(self._failures)

    def knows(self, request_id: str) -> bool:
        """Whether the request has claimed."""
        return request_id in self._loads or request_id in self._failures

    def get(self, request_id: str) -> Load | None:
        """The load of a request, until it is reported."""
        return self._loads.get(request_id)

    def of_part(self, key: PartKey) -> Load | None:
        """The load that an offer's rank belongs to."""
        request_id = self._request_of.get(key)
        return None if request_id is None else self._loads[request_id]

    def at(self, address: str) -> list[Load]:
        """Those with a part at an address."""
        return [load for load in self if load.has_part_at(address)]

    def add(self, load: Load) -> None:
        """Keep a load until `remove`.

        Raises:
            InvalidTransferParamsError: its offer names too many ranks.
            StaleLeaseError: its offer names a rank twice, or another request has claimed it.
        """
        if len(load.parts) > self._max_ranks:
            raise InvalidTransferParamsError(
                f"the offer was not claimed: it names {len(load.parts)} addresses, and max_peer_ranks is {self._max_ranks}; "
                "raise max_peer_ranks if its node really has that many ranks",
                key="remote_addresses",
                value=len(load.parts),
            )
        if len(set(load.keys)) != len(load.keys):
            raise StaleLeaseError("the offer names one address for two ranks")
        if others := [self._request_of[key] for key in load.keys if key in self._request_of]:
            raise StaleLeaseError(f"the offer is claimed already, by request {others[0]!r}")
        self._loads[load.request_id] = load
        self._request_of.update(dict.fromkeys(load.keys, load.request_id))

    def remove(self, load: Load) -> None:
        """Forget a load."""
        del self._loads[load.request_id]
        for key in load.keys:
            del self._request_of[key]

    def remember(self, request_id: str, error: KVTransferError) -> None:
        """Keep a failure until somebody asks for the load."""
        if len(self._failures) >= self._max_failures:
            del self._failures[next(iter(self._failures))]
        self._failures[request_id] = error

    def take_failure(self, request_id: str) -> KVTransferError | None:
        """Why a claim failed."""
        return self._failures.pop(request_id, None)

    def forget_failures(self) -> None:
        """Nobody will ask any more."""
        self._failures.clear()
