"""The values that go into the handoff protocol, and the actions that come out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ...transports.errors import KVTransferError
from ...transports.regions import Guard, RegionPairs
from ..planning.layout import KVLayout
from .messages import PROTOCOL_VERSION, SPOKEN_VERSIONS, Message

#: Per group, block ids in the order of the request's tokens.
BlockTables = tuple[tuple[int, ...], ...]


# -- in ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Identity:
    """The identity of a node, and what a peer must know of its cache.

    Attributes:
        epoch: A random number for this start of the node, from 1 to `MAX_EPOCH`.
        digest: The digest of `fields`; see `compatibility.digest`.
        fields: What must be equal on both sides, or should be.
        layout: Where the pages lie in this node's pool.
        release: The release of kvferry, for error messages of peers.
        spoken: The versions of the protocol that this node speaks.
    """

    engine_id: str
    epoch: int
    digest: str
    fields: Mapping[str, str | int]
    layout: KVLayout
    release: str = ""
    spoken: range = SPOKEN_VERSIONS


@dataclass(frozen=True)
class RemoteOffer:
    """A producer's offer as the consumer's request describes it.

    It came over a path that is not authenticated.

    Attributes:
        request_id: The producer's id of the request; in a rendezvous, the name that the router drew.
        addresses: One per rank of the producer.
        num_tokens: Tokens whose keys and values are offered.
        block_ids: Per group. Nothing is read by them: only the block ids of the producer's grant count.
        content: Digest of as much of the consumer's own prompt as the offer covers (see `content_digest`).
            The consumer computes it; the producer's grant must repeat it.
        is_rendezvous: The offer may not exist yet. `num_tokens` is the number that the consumer expects.
    """

    engine_id: str
    epoch: int
    request_id: str
    lease: int
    addresses: tuple[str, ...]
    num_tokens: int
    block_ids: BlockTables
    content: str = ""
    is_rendezvous: bool = False


@dataclass(frozen=True)
class GroupBlocks:
    """A run of one group's block table that is to be loaded.

    Attributes:
        first_block_index: Position of `block_ids[0]` in the request's block table. The blocks before it are
            here already.
        block_ids: Local blocks to write. A null block (0) stands for a position that is not needed.
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
    """Encode and send this message. If that raises, the peer has failed: call `NodeProtocol.peer_failed`.

    Attributes:
        version: The version of the protocol to encode it in: the one that both sides speak.
    """

    peer_id: int
    message: Message
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True)
class SetGuard:
    """Make guard `index` hold `value`, for the offer of this request.

    Attributes:
        block_ids: What peers may read under it: one block table per group.
    """

    index: int
    value: int
    request_id: str
    block_ids: BlockTables


@dataclass(frozen=True)
class ExtendGuard:
    """Let peers read these blocks under guard `index`, which are those of before and more.

    The guard holds what it held.
    """

    index: int
    block_ids: BlockTables


@dataclass(frozen=True)
class ClearGuard:
    """Clear guard `index`: every later check of it fails."""

    index: int


@dataclass(frozen=True)
class StartRead:
    """Start this read. When it has ended, or could not be started, call `ConsumerProtocol.read_ended`.

    Attributes:
        rank: The rank of the producer that is read. A request has at most one read per rank at a time.
        num_regions_per_layer: Regions that the same blocks would need if each layer had a cache of its own.
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
    """Drop the peer. Its reads end soon, and their ends are reported like those of other reads."""

    peer_id: int


@dataclass(frozen=True)
class PeerDiffers:
    """Warn that a peer differs in fields that may differ. Once per start of a peer's node.

    Attributes:
        differences: Field, our value, the peer's value; at least one.
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
class LayersLeftOut:
    """Say which layers of our draft model a peer cannot fill. Once per start of a peer's node."""

    engine_id: str
    layers: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"peer {self.engine_id!r} does not have layers {', '.join(self.layers)} of this node's draft model: prompts from "
            "there are loaded without them, so few drafted tokens are accepted; the answers are the same"
        )


@dataclass(frozen=True)
class OfferEnded:
    """Report, once per offer, that it has ended. Its blocks may be reused from now on, not before."""

    request_id: str
    outcome: Literal["delivered", "aborted", "expired"]
    reason: str


@dataclass(frozen=True)
class ClaimUnmet:
    """Report that a claim of a rendezvous was denied because its request did not come.

    Attributes:
        name: The router's name of the rendezvous.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class OfferCompleted:
    """Report that the offer of a load, which was still being computed, is ready as a whole now."""

    request_id: str


@dataclass(frozen=True)
class LoadEnded:
    """Report, once per load that was asked for, that it has ended. Nothing writes into its blocks any more.

    Attributes:
        outcome: `"loaded"`: all bytes are in place. `"failed"` or `"dropped"`: the contents of the blocks are
            undefined.
        error: Why it failed; None if it was loaded or dropped.
        blocks: The blocks that it was to fill.
    """

    request_id: str
    outcome: Literal["loaded", "failed", "dropped"]
    error: KVTransferError | None
    blocks: LocalBlocks


Action = (
    Connect
    | Send
    | SetGuard
    | ExtendGuard
    | ClearGuard
    | StartRead
    | Disconnect
    | PeerDiffers
    | LayersLeftOut
    | OfferEnded
    | ClaimUnmet
    | OfferCompleted
    | LoadEnded
)
