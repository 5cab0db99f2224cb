"""One load of a consumer: its state, what each rank of the producer granted, and which blocks are still to be
read.

`ConsumerProtocol` puts in claims, local blocks, grants and the ends of reads; out come the reads that can
begin, and whether the load is over.

What must never break: a block is read only when it was granted as computed, by every rank that has a part of
it.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ...transports.errors import (
    KVTransferError,
    KVTransferStateError,
    ProtocolError,
    RegionError,
    TransferTimeoutError,
)
from ..errors import InvalidTransferParamsError, StaleLeaseError
from .events import BlockTables, GroupBlocks, LocalBlocks, RemoteOffer
from .messages import MAX_GROUP_BLOCKS, Grant, Progress

logger = logging.getLogger(__name__)

#: One rank's offer among all that there are: (address, epoch, lease).
PartKey = tuple[str, int, int]


class LoadState(enum.IntEnum):
    """The states of the consumer's table in `docs/design.md`.

    A part of a load is in one of the first four.
    """

    #: There is no session yet with a rank of the producer.
    CONNECTING = 1
    #: A rank has not granted its share yet.
    CLAIMING = 2
    #: All ranks have granted, and nothing is being read.
    GRANTED = 3
    #: The transport writes into the blocks.
    READING = 4
    #: The load is over, but the transport still writes into the blocks.
    DRAINING = 5
    #: The load is over, and nothing writes into the blocks.
    ENDED = 6

    def __str__(self) -> str:
        return self.name.lower()


#: Which states may follow which; `docs/design.md` says by which event.
LOAD_TRANSITIONS: Mapping[LoadState, frozenset[LoadState]] = {
    LoadState.CONNECTING: frozenset({LoadState.CLAIMING, LoadState.ENDED}),
    LoadState.CLAIMING: frozenset({LoadState.GRANTED, LoadState.ENDED}),
    LoadState.GRANTED: frozenset({LoadState.READING, LoadState.ENDED}),
    # Not to ENDED: while anything reads, the end of the load waits for it.
    LoadState.READING: frozenset({LoadState.GRANTED, LoadState.DRAINING}),
    LoadState.DRAINING: frozenset({LoadState.ENDED}),
    LoadState.ENDED: frozenset(),
}


@dataclass
class Part:
    """One rank of the producer, as far as one load is concerned. Only its `Load` changes it.

    Attributes:
        rank: Its number among the offer's addresses.
        state: CONNECTING, CLAIMING, GRANTED or READING.
        deadline: End of the present state; infinity where another deadline counts, as that of the connection.
        grant: What the rank granted, with the progress that it reported since; not None from the state
            GRANTED on.
        was_parked: Whether the rank had to compute before it could grant.
        is_owed_release: Whether the rank must still get a `Release`. It need not if the offer has ended at
            the rank, or the rank is gone.
    """

    rank: int
    address: str
    state: LoadState = LoadState.CONNECTING
    deadline: float = math.inf
    grant: Grant | None = None
    was_parked: bool = False
    is_owed_release: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether the rank has all offered tokens ready."""
        return self.grant is not None and self.grant.num_ready == self.grant.num_tokens


@dataclass(frozen=True)
class Verdict:
    """How a load is reported."""

    outcome: Literal["loaded", "failed", "dropped"]
    error: KVTransferError | None = None


class Load:
    """One request's way from the claim to the report. Only its own methods change it and its parts.

    An offer that is still being computed is read in rounds: what is ready, then what has become ready
    meanwhile.

    Attributes:
        traceparent: The span of the claim, for the producer; empty if the request is not traced.
        parts: One for each rank of the producer. The state of the load follows from theirs and the verdict.
        blocks: Where to load to; None until `fill`.
        filled_at: When that was known, in seconds of the protocol's clock; infinity until then.
        verdict: How it will be reported; None until that is known.
    """

    def __init__(self, request_id: str, offer: RemoteOffer, traceparent: str = "") -> None:
        self.request_id = request_id
        self.offer = offer
        self.traceparent = traceparent
        self.parts = tuple(Part(rank, address) for rank, address in enumerate(offer.addresses))
        self.blocks: LocalBlocks | None = None
        self.filled_at = math.inf
        self.verdict: Verdict | None = None
        self._num_taken: list[int] = []  # of each group's blocks: how many were read, or are being read

    def __repr__(self) -> str:
        # Without the offer's lease number, which lets a peer read: a repr ends up in logs.
        parts = ", ".join(str(part.state) for part in self.parts)
        return f"<load of request {self.request_id!r}: {self.state}, ranks: {parts}>"

    @property
    def state(self) -> LoadState:
        """Where it is in the consumer's table."""
        if self.verdict is not None:
            return LoadState.DRAINING if self.num_reads else LoadState.ENDED
        # Reading as soon as one rank is read, because then blocks are the transport's. Otherwise as far as
        # the last rank.
        return LoadState.READING if self.num_reads else min(part.state for part in self.parts)

    @property
    def has_waited(self) -> bool:
        """Whether a rank had to compute before it could grant."""
        return any(part.was_parked for part in self.parts)

    @property
    def keys(self) -> list[PartKey]:
        """The offer's names, by part."""
        return [(part.address, self.offer.epoch, self.offer.lease) for part in self.parts]

    @property
    def is_granted(self) -> bool:
        """Whether every part is granted."""
        return all(part.grant is not None for part in self.parts)

    @property
    def lacks_blocks(self) -> bool:
        """Whether it waits for nothing but blocks."""
        return self.is_granted and self.blocks is None and self.verdict is None

    @property
    def num_reads(self) -> int:
        """Reads that write into its blocks."""
        return sum(part.state is LoadState.READING for part in self.parts)

    @property
    def next_deadline(self) -> float:
        """When the first of its parts is overdue; infinity if none will be."""
        return min(part.deadline for part in self.parts)

    def part_at(self, address: str) -> Part:
        """The part of an address that the offer names."""
        return next(part for part in self.parts if part.address == address)

    def has_part_at(self, address: str) -> bool:
        """Whether the offer names this address."""
        return address in self.offer.addresses

    def lateness(self, part: Part) -> KVTransferError:
        """Why a part that does not read is overdue."""
        if part.state is LoadState.CLAIMING:
            return TransferTimeoutError(f"timed out waiting for {part.address} to answer the claim")
        if self.blocks is None:
            return TransferTimeoutError("timed out waiting for blocks to load into")
        return TransferTimeoutError("timed out waiting for the producer to compute the rest of the prompt")

    # -- changes -------------------------------------------------------------------------------------

    def claim(self, part: Part, deadline: float) -> None:
        """Note that the offer is claimed at a rank."""
        self._move(part, LoadState.CLAIMING, deadline)

    def park(self, part: Part, deadline: float) -> None:
        """Note that a rank still has to make the offer. It is waited for until `deadline`."""
        if part.state is LoadState.CLAIMING and self.verdict is None:
            part.deadline, part.was_parked = deadline, True

    def accept(self, part: Part, grant: Grant, deadline: float) -> None:
        """Note that a rank granted its share."""
        part.grant = grant
        self._move(part, LoadState.GRANTED, deadline)

    def advance(self, part: Part, progress: Progress) -> None:
        """Note that a rank has more ready.

        Raises:
            ProtocolError: it has less, or more than it ever offered, or other groups, or too many blocks.
                Nothing is changed.
        """
        grant = part.grant
        if (
            grant is None
            or not grant.num_ready < progress.num_ready <= grant.num_tokens
            or len(progress.more_block_ids) != len(grant.block_ids)
        ):
            raise ProtocolError(f"malformed Progress from {part.address}: it does not fit what was granted")
        pairs = zip(grant.block_ids, progress.more_block_ids, strict=True)
        tables = tuple(table + more for table, more in pairs)
        # Each message is bounded by itself; without this bound, many of them could fill the memory.
        if any(len(table) > MAX_GROUP_BLOCKS for table in tables):
            raise ProtocolError(
                f"malformed Progress from {part.address}: a block table is longer than {MAX_GROUP_BLOCKS}"
            )
        part.grant = replace(grant, num_ready=progress.num_ready, block_ids=tables)

    def fill(self, blocks: LocalBlocks, now: float) -> None:
        """Note where to load to.

        Raises:
            KVTransferStateError: that is known already.
        """
        if self.blocks is not None:
            raise KVTransferStateError(f"request {self.request_id!r} is loaded a second time")
        self.blocks, self.filled_at, self._num_taken = blocks, now, [0] * len(blocks)

    def start_read(self, part: Part, deadline: float) -> None:
        """Note that the transport reads from a rank."""
        self._move(part, LoadState.READING, deadline)

    def end_read(self, part: Part) -> None:
        """Note that the transport no longer reads from a rank."""
        self._move(part, LoadState.GRANTED, math.inf)

    def wait_for_progress(self, deadline: float) -> None:
        """Wait until `deadline` for each rank that has not granted everything.

        The others have nothing left to say.
        """
        for part in self.parts:
            part.deadline = math.inf if part.is_whole else deadline

    def keep_waiting(self, part: Part, deadline: float) -> None:
        """Note that a rank still computes. If its progress is waited for, it is waited for until `deadline`.

        While the load waits for blocks of its own, or reads, another deadline counts, which the rank must not
        move.
        """
        waits = self.blocks is not None and self.is_granted and part.state is LoadState.GRANTED
        if waits and part.deadline < math.inf:
            part.deadline = deadline

    def forgive(self, part: Part) -> None:
        """Note that a rank needs no release, and that this load no longer waits for it."""
        part.is_owed_release = False
        part.deadline = math.inf

    def decide(self, verdict: Verdict) -> Verdict:
        """Settle how the load will be reported. The first verdict counts: what follows from it is no news.

        Returns:
            The verdict that counts.
        """
        if self.verdict is None:
            before = self.state
            self.verdict = verdict
            self._check(before)
        for part in self.parts:
            # A read keeps its deadline: if it does not end, its peer is dropped, and then the load can be
            # reported.
            if part.state is not LoadState.READING:
                part.deadline = math.inf
        return self.verdict

    def _move(self, part: Part, state: LoadState, deadline: float) -> None:
        """Change the state of a part: the one place that does.

        Raises:
            KVTransferStateError: `LOAD_TRANSITIONS` does not have this change, of the part or of the load.
        """
        if state not in LOAD_TRANSITIONS[part.state]:
            raise KVTransferStateError(f"{self!r}: rank {part.rank} cannot become {state}")
        before = self.state
        part.state, part.deadline = state, deadline
        self._check(before)

    def _check(self, before: LoadState) -> None:
        after = self.state
        if after is before:
            return
        if after not in LOAD_TRANSITIONS[before]:
            raise KVTransferStateError(f"{self!r} cannot have been {before}")
        logger.debug("%r was %s", self, before)

    # -- what is there to be read --------------------------------------------------------------------

    @property
    def num_ready(self) -> int:
        """Tokens that every rank has ready; 0 before all are granted."""
        return min(part.grant.num_ready if part.grant is not None else 0 for part in self.parts)

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all offered tokens ready."""
        return all(part.is_whole for part in self.parts)

    @property
    def is_taken(self) -> bool:
        """Whether no block is left to be read."""
        assert self.blocks is not None
        return all(
            taken == len(group.block_ids) for taken, group in zip(self._num_taken, self.blocks, strict=True)
        )

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
        """Take the blocks to read now: all that are left, or those that are ready up to their last token.

        Args:
            block_sizes: Our tokens per block, by group.

        Raises:
            RegionError: the number of groups differs from ours.
        """
        assert self.blocks is not None
        if len(self.blocks) != len(block_sizes):
            raise RegionError(f"{len(self.blocks)} groups to load; this node has {len(block_sizes)}")
        taken = []
        for index, (group, block_size) in enumerate(zip(self.blocks, block_sizes, strict=True)):
            first = self._num_taken[index]
            end = len(group.block_ids)
            if not self.is_whole:
                # Whole blocks only: a block that is ready in part would have to be read twice.
                num_ready_blocks = self.num_ready // block_size - group.first_block_index
                end = max(first, min(end, num_ready_blocks))
            self._num_taken[index] = end
            is_any = end > first
            taken.append(
                GroupBlocks(group.first_block_index + first if is_any else 0, group.block_ids[first:end])
            )
        return tuple(taken)


class Loads:
    """The loads of a node by request, and the failures of claims whose load has not been asked for yet.

    Args:
        max_failures: Failures that are remembered; past it the oldest is forgotten.
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
        """Iterate over a copy: loads may end meanwhile."""
        return iter(tuple(self._loads.values()))

    @property
    def num_failures(self) -> int:
        """Failures that are remembered."""
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
        """The loads with a part at an address."""
        return [load for load in self if load.has_part_at(address)]

    def add(self, load: Load) -> None:
        """Keep a load until `remove`.

        Raises:
            InvalidTransferParamsError: its offer names too many ranks.
            StaleLeaseError: its offer names a rank twice, or another request has claimed it.
        """
        # Anyone who can send a request can write addresses, and each costs a connection.
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
        """Keep a failure until its load is asked for, or is dropped."""
        # This node may never learn that such a request was aborted, so the number of failures is bounded.
        if len(self._failures) >= self._max_failures:
            del self._failures[next(iter(self._failures))]
        self._failures[request_id] = error

    def take_failure(self, request_id: str) -> KVTransferError | None:
        """Why a claim failed; the failure is forgotten."""
        return self._failures.pop(request_id, None)

    def forget_failures(self) -> None:
        """Forget all failures."""
        self._failures.clear()
