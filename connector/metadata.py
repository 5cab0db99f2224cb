"""What the scheduler half orders in one step, and what a worker half says of itself. Plain and frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .base import KVConnectorHandshakeMetadata, KVConnectorMetadata
from .handoff.events import BlockTables, LocalBlocks, RemoteOffer

__all__ = ["HandoffMetadata", "OfferOrder", "WorkerAddress"]


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
class HandoffMetadata(KVConnectorMetadata):
    """One step's orders, each by request; carried out in the order of the attributes.

    Attributes:
        offers: Blocks to hold for consumers.
        claims: Offers of other nodes to claim before there are blocks to read them into.
        loads: Per group, local blocks to read claimed offers into.
        drops: Claims that nobody needs any more.
    """

    offers: Mapping[str, OfferOrder] = field(default_factory=dict)
    claims: Mapping[str, RemoteOffer] = field(default_factory=dict)
    loads: Mapping[str, LocalBlocks] = field(default_factory=dict)
    drops: tuple[str, ...] = ()

    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.offers or self.claims or self.loads or self.drops)


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
