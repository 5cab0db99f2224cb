"""What the scheduler half orders in one step, and what a worker half says of itself. Plain and frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from .base import KVConnectorHandshakeMetadata, KVConnectorMetadata
from .handoff.events import BlockTables, LocalBlocks, RemoteOffer

__all__ = ["ExtendOrder", "HandoffMetadata", "OfferOrder", "OpenOrder", "WorkerAddress"]


@dataclass(frozen=True)
class OfferOrder:
    """Hold a finished request's blocks for a consumer.

    Attributes:
        lease: The offer's number; orders come in the order of their numbers.
        block_ids: Per group, the request's block table.
        num_tokens: Tokens whose keys and values are in the blocks; the last block may be partly filled.
    """

    lease: int
    block_ids: BlockTables
    num_tokens: int


@dataclass(frozen=True)
class OpenOrder:
    """Let a consumer read a request's blocks while its prompt is still computed. The blocks stay the engine's.

    Attributes:
        lease: As in `OfferOrder`.
        block_ids: Per group, the block table so far.
        num_tokens: Tokens that will be offered in the end.
        num_ready: Tokens whose keys and values are in the blocks.
    """

    lease: int
    block_ids: BlockTables
    num_tokens: int
    num_ready: int


@dataclass(frozen=True)
class ExtendOrder:
    """More of an open offer is computed.

    Attributes:
        block_ids: As in `OpenOrder`; longer than before.
        num_ready: As in `OpenOrder`.
    """

    block_ids: BlockTables
    num_ready: int


@dataclass(frozen=True)
class HandoffMetadata(KVConnectorMetadata):
    """One step's orders, by request but for `withdrawals`; carried out in the order of the attributes.

    Attributes:
        offers: Blocks to hold, or to let read, for consumers; in the order of their leases.
        extensions: What more of open offers is computed.
        completions: Open offers whose request has finished, all computed: the block tables. They are held from now on.
        withdrawals: Numbers of offers that consumers were told of and that never come: their requests lost their blocks
            in the same step.
        aborts: Open offers whose request has ended otherwise. Their blocks are held until nobody reads them.
        claims: Offers of other nodes to claim before there are blocks to read them into.
        loads: Per group, local blocks to read claimed offers into.
        drops: Claims that nobody needs any more.
    """

    offers: Mapping[str, OfferOrder | OpenOrder] = field(default_factory=dict)
    extensions: Mapping[str, ExtendOrder] = field(default_factory=dict)
    completions: Mapping[str, BlockTables] = field(default_factory=dict)
    withdrawals: tuple[int, ...] = ()
    aborts: tuple[str, ...] = ()
    claims: Mapping[str, RemoteOffer] = field(default_factory=dict)
    loads: Mapping[str, LocalBlocks] = field(default_factory=dict)
    drops: tuple[str, ...] = ()

    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return all(not getattr(self, order.name) for order in fields(self))


@dataclass(frozen=True)
class WorkerAddress(KVConnectorHandshakeMetadata):
    """Where a worker half can be reached.

    Attributes:
        address: What peers connect to.
        epoch: Random number of this start of the node; peers refuse any other.
        rank: The worker's number in its node; see `ParallelConfig.rank`.
    """

    address: str
    epoch: int
    rank: int
