"""The values that go into the handoff protocol, and the actions that come out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ...transports.errors import KVTransferError
from ...transports.regions import Guard, RegionPairs
from ..planning.layout import KVLayout
from .messages import Message

#: Per group, block ids in the order of the request's tokens.
BlockTables = tuple[tuple[int, ...], ...]


# -- in ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Identity:
    """Who a node is, and what a peer must know of its cache.

    Attributes:
        epoch: Random number of this start of the node, from 1 to `MAX_EPOCH`.
        digest: Of `fields`: see `compatibility.digest`.
        fields: What must be equal on both sides, or should be.
        layout: Where the pages lie in this node's pool.
    """

    engine_id: str
    epoch: int
    digest: str
    fields: Mapping[str, str | int]
    layout: KVLayout


@dataclass(frozen=True)
class RemoteOffer:
    """What the consumer was told of a producer's offer, over a path that is not authenticated.

    Attributes:
        request_id: The producer's name of the request.
        addresses: One per rank of the producer.
        num_tokens: Tokens whose keys and values are offered.
        block_ids: Per group; never believed, the producer's grant is what counts.
        content: Digest of the consumer's own prompt, as far as the offer goes (see `content_digest`): what the producer's
            grant must repeat. It is not part of what the consumer was told.
    """

    engine_id: str
    epoch: int
    request_id: str
    lease: int
    addresses: tuple[str, ...]
    num_tokens: int
    block_ids: BlockTables
    content: str = ""


@dataclass(frozen=True)
class GroupBlocks:
    """A run of one group's block table that is to be loaded.

    Attributes:
        first_block_index: Position of `block_ids[0]` in the request's block table. What comes before is here already.
        block_ids: Local blocks to write. A null block (0) stands for a position that nobody needs.
    """

    first_block_index: int
    block_ids: tuple[int, ...]


#: One entry per group.
LocalBlocks = tuple[GroupBlocks, ...]


# -- out: things to do, in the order of the list -----------------------------------------------------


@dataclass(frozen=True)
class Connect:
    """Connect to `address`, then call `ConsumerProtocol.connecting`, or `connect_failed` if that raised."""

    address: str
    timeout_s: float


@dataclass(frozen=True)
class Send:
    """Encode and send. If that raises, the peer has failed: call `NodeProtocol.peer_failed`."""

    peer_id: int
    message: Message


@dataclass(frozen=True)
class SetGuard:
    """Make guard `index` hold `value`."""

    index: int
    value: int


@dataclass(frozen=True)
class ClearGuard:
    """Make every later check of guard `index` fail."""

    index: int


@dataclass(frozen=True)
class StartRead:
    """Start this read. When it ended, or could not start, call `ConsumerProtocol.read_ended`.

    Attributes:
        rank: Which rank of the producer is read from; there is one read at a time of a request from a rank.
        num_regions_per_layer: Regions that the same blocks need when each layer has a cache of its own.
    """

    request_id: str
    rank: int
    peer_id: int
    pairs: RegionPairs
    guard: Guard
    timeout_s: float
    num_regions_per_layer: int


@dataclass(frozen=True)
class Disconnect:
    """Drop the peer. Reads from it end soon, and are reported as any other read."""

    peer_id: int


@dataclass(frozen=True)
class PeerDiffers:
    """Warn: a peer differs in what may differ. Once per start of a peer's node.

    Attributes:
        differences: Field, our value, the peer's; at least one.
    """

    engine_id: str
    differences: tuple[tuple[str, str | int, str | int], ...]

    def __str__(self) -> str:
        fields = ", ".join(
            f"{field} differs (local {ours!r}, remote {theirs!r})" for field, ours, theirs in self.differences
        )
        return (
            f"peer {self.engine_id!r}: {fields}; prompts that the two nodes tokenize differently will not be "
            "handed over; give both nodes the same model folder"
        )


@dataclass(frozen=True)
class OfferEnded:
    """Report: the offer is over, once per offer. Its blocks can be reused from now on, not before."""

    request_id: str
    outcome: Literal["delivered", "aborted", "expired"]
    reason: str


@dataclass(frozen=True)
class OfferCompleted:
    """Tell: the offer of a request that is being loaded was still being computed, and is ready as a whole now."""

    request_id: str


@dataclass(frozen=True)
class LoadEnded:
    """Report: a load that was asked for is over, once per load. Nothing writes into its blocks any more.

    Attributes:
        outcome: `"loaded"`: all bytes are in place. `"failed"` or `"dropped"`: the blocks' contents are undefined.
        error: Why it failed; None exactly if it was loaded or dropped.
        blocks: What the load was asked to fill.
    """

    request_id: str
    outcome: Literal["loaded", "failed", "dropped"]
    error: KVTransferError | None
    blocks: LocalBlocks


Action = (
    Connect
    | Send
    | SetGuard
    | ClearGuard
    | StartRead
    | Disconnect
    | PeerDiffers
    | OfferEnded
    | OfferCompleted
    | LoadEnded
)
