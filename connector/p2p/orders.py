"""The orders of the scheduler half for one step, and the address that a worker half sends it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from ..base import KVConnectorHandshakeMetadata, KVConnectorMetadata
from ..handoff.events import BlockTables, LocalBlocks, RemoteOffer


@dataclass(frozen=True)
class Announcement:
    """Expect an offer of a request that has arrived.

    Attributes:
        lease: The offer's number.
        name: The router's name of a rendezvous, by which consumers claim; empty: they claim by the request's id.
    """

    lease: int
    name: str = ""


@dataclass(frozen=True)
class OfferOrder:
    """Hold a finished request's blocks for a consumer.

    Attributes:
        lease: The offer's number.
        block_ids: Per group, the request's block table.
        num_tokens: Tokens whose keys and values are in the blocks; the last block may be partly filled.
        content: Digest of the tokens that they were computed from.
        guard_value: What its guard holds; 0: the offer's number.
        is_answer: The tokens are a prompt and its answer, and the consumer is the node of the conversation's next prompt.
    """

    lease: int
    block_ids: BlockTables
    num_tokens: int
    content: str
    guard_value: int = 0
    is_answer: bool = False


@dataclass(frozen=True)
class OpenOrder:
    """Let a consumer read a request's blocks while its prompt is still computed. The engine keeps the blocks.

    Attributes:
        lease: As in `OfferOrder`.
        block_ids: Per group, the block table so far.
        num_tokens: Tokens that will be offered when the prompt is computed.
        num_ready: Tokens whose keys and values are in the blocks.
        content, guard_value: As in `OfferOrder`.
    """

    lease: int
    block_ids: BlockTables
    num_tokens: int
    num_ready: int
    content: str
    guard_value: int = 0


@dataclass(frozen=True)
class ExtendOrder:
    """Let the consumer of an open offer read what has been computed since.

    Attributes:
        block_ids: As in `OpenOrder`; longer than before.
        num_ready: As in `OpenOrder`.
    """

    block_ids: BlockTables
    num_ready: int


@dataclass(frozen=True)
class HandoffMetadata(KVConnectorMetadata):
    """One step's orders, carried out in the order of the attributes. All but `withdrawals` are by request.

    Attributes:
        announcements: Offers that will be made: their requests have arrived.
        offers: Blocks to hold for consumers, or to let them read.
        extensions: What has been computed of open offers since.
        completions: Open offers whose request has finished with all of its prompt computed: the block tables. The blocks are
            held from now on.
        withdrawals: Lease numbers of announced offers that will not be made: their requests ended, or lost their blocks.
        aborts: Open offers whose request has ended otherwise. Their blocks are held until no peer reads them.
        releases: Offers that no consumer will load: the request, or the name of a rendezvous, and the lease number. An offer that a consumer has claimed continues.
        claims: Offers of other nodes to claim before there are blocks to read them into.
        loads: Per group, local blocks to read claimed offers into.
        drops: Claims that are no longer needed.
        traceparents: Of requests among the announcements and claims that are traced: the `traceparent` of their node's span.
    """

    announcements: Mapping[str, Announcement] = field(default_factory=dict)
    offers: Mapping[str, OfferOrder | OpenOrder] = field(default_factory=dict)
    extensions: Mapping[str, ExtendOrder] = field(default_factory=dict)
    completions: Mapping[str, BlockTables] = field(default_factory=dict)
    withdrawals: tuple[int, ...] = ()
    aborts: tuple[str, ...] = ()
    releases: tuple[tuple[str, int], ...] = ()
    claims: Mapping[str, RemoteOffer] = field(default_factory=dict)
    loads: Mapping[str, LocalBlocks] = field(default_factory=dict)
    drops: tuple[str, ...] = ()
    traceparents: Mapping[str, str] = field(default_factory=dict)

    def is_empty(self) -> bool:
        """Say whether there is nothing to do."""
        return not any(getattr(self, order.name) for order in fields(self))

    def only_announces(self) -> bool:
        """Say whether there is nothing but announcements, which change nothing until a peer claims."""
        others = (order.name for order in fields(self) if order.name not in ("announcements", "traceparents"))
        return not any(getattr(self, name) for name in others)


@dataclass(frozen=True)
class WorkerAddress(KVConnectorHandshakeMetadata):
    """Where a worker half can be reached.

    Attributes:
        address: Where peers connect.
        epoch: Random number of this start of the node; peers refuse any other number.
        rank: The worker's number in its node; see `ParallelConfig.rank`.
    """

    address: str
    epoch: int
    rank: int
