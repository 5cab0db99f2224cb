"""The orders of the scheduler half for one step, and the address that a worker half sends it.

They travel as they were collected: a record per request, whose attributes stand in the order in which a
request goes through them. The worker halves of all ranks get the same orders.

What must never break: the handoff thread carries orders out in this sequence, announcements first, and before
any message of a peer that was sent after the engine's answer. So no claim meets an offer that is not known
yet, and an id that is used again means the later request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..base import KVConnectorHandshakeMetadata, KVConnectorMetadata
from ..handoff.events import BlockTables, LocalBlocks, RemoteOffer


@dataclass(frozen=True)
class Announcement:
    """Expect an offer of a request that has arrived.

    Attributes:
        lease: The offer's number.
        name: The router's name of a rendezvous, by which consumers claim; empty: they claim by the request's
            id.
        num_loads: Loads after which the offer is over.
    """

    lease: int
    name: str = ""
    num_loads: int = 1


@dataclass(frozen=True)
class OfferOrder:
    """Hold a finished request's blocks for a consumer.

    Attributes:
        lease: The offer's number.
        block_ids: Per group, the request's block table.
        num_tokens: Tokens whose keys and values are in the blocks; the last block may be partly filled.
        content: Digest of the tokens that they were computed from.
        guard_value: What its guard holds; 0: the offer's number.
    """

    lease: int
    block_ids: BlockTables
    num_tokens: int
    content: str
    guard_value: int = 0


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


@dataclass
class RequestOrders:
    """What the worker halves do about one request in a step, in the order of the attributes.

    None: nothing of that kind.

    The scheduler half adds to it until it is sent; from then on it does not change.

    Attributes:
        traceparent: The `traceparent` of the node's span of the request, if the request has arrived in this
            step and is traced.
        announcement: An offer will be made: the request has arrived.
        offer: Hold its blocks for a consumer, or let one read them.
        extension: What has been computed of the open offer since.
        completion: Its prompt is computed and the request has finished: the open offer's block tables. The
            blocks are held from now on.
        withdrawal: Lease number of the announced offer, which will not be made: the request ended, or lost
            its blocks.
        abort: End the open offer, whose request has ended otherwise. The blocks are held until no peer reads
            them.
        claim: An offer of another node, to claim before there are blocks to read it into.
        load: Per group, local blocks to read the claimed offer into.
        drop: The claim is no longer needed.
    """

    request_id: str
    traceparent: str = ""
    announcement: Announcement | None = None
    offer: OfferOrder | OpenOrder | None = None
    extension: ExtendOrder | None = None
    completion: BlockTables | None = None
    withdrawal: int | None = None
    abort: bool = False
    claim: RemoteOffer | None = None
    load: LocalBlocks | None = None
    drop: bool = False

    def is_empty(self) -> bool:
        """Say whether there is nothing to do."""
        return self.announcement is None and self.only_announces()

    def only_announces(self) -> bool:
        """Say whether nothing but the announcement is to be done, which changes nothing until a peer
        claims.
        """
        return self == RequestOrders(self.request_id, self.traceparent, self.announcement)


@dataclass(frozen=True)
class HandoffMetadata(KVConnectorMetadata):
    """One step's orders.

    Attributes:
        requests: By request, in the order in which they were given. A request id that was used again comes
            twice.
        releases: Offers that no consumer will load: the request, or the name of a rendezvous, and the lease
            number. An offer that a consumer has claimed continues. They come after all others.
        counts: What the scheduler half has counted, by its key in `stats.COUNTERS`. One rank adds it to its
            stats.
    """

    requests: tuple[RequestOrders, ...] = ()
    releases: tuple[tuple[str, int], ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)

    def is_empty(self) -> bool:
        """Say whether there is nothing to do."""
        return not self.requests and not self.releases and not self.counts

    def loads(self) -> HandoffMetadata:
        """Return the loads alone."""
        loading = (order for order in self.requests if order.load is not None)
        return HandoffMetadata(tuple(RequestOrders(order.request_id, load=order.load) for order in loading))

    def without_loads(self) -> HandoffMetadata:
        """Return all but the loads."""
        others = (replace(order, load=None) for order in self.requests)
        return replace(self, requests=tuple(order for order in others if not order.is_empty()))

    def only_announces(self) -> bool:
        """Say whether there is nothing but announcements."""
        return not self.releases and all(orders.only_announces() for orders in self.requests)


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
