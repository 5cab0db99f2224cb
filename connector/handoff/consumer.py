"""The consumer's side of the handoff protocol: peers, claims and reads."""

from __future__ import annotations

from ...transports.errors import KVTransferError
from .config import HandoffConfig
from .events import Action, Identity, LocalBlocks, RemoteOffer
from .messages import ProducerMessage

__all__ = ["ConsumerProtocol"]


class ConsumerProtocol:
    """Claims offers and reads them; reports every load that was asked for, exactly once.

    Every method takes `now`, in seconds of any monotonic clock, and returns actions to be done in order.
    Requests are named by this node's own ids; an offer carries the producer's.

    Args:
        identity: This node.
        rank: Which of an offer's addresses is this rank's.
    """

    def __init__(self, identity: Identity, config: HandoffConfig, rank: int = 0) -> None:
        raise NotImplementedError

    @property
    def num_loads(self) -> int:
        """Requests that are claimed, reading, or failed and not yet asked for."""
        raise NotImplementedError

    @property
    def num_reads(self) -> int:
        """Reads that were started and have not ended: their blocks belong to the transport."""
        raise NotImplementedError

    # -- orders of this node -------------------------------------------------------------------------

    def claim(self, request_id: str, offer: RemoteOffer, now: float) -> list[Action]:
        """Take the offer, before there are blocks to read it into; its lease follows our heartbeats from now on.

        A failure is remembered, and reported by `load`.

        Raises:
            KVTransferStateError: the request has claimed already.
        """
        raise NotImplementedError

    def load(self, request_id: str, blocks: LocalBlocks, now: float) -> list[Action]:
        """Read into these blocks as soon as the offer is granted. `LoadEnded` follows, exactly once.

        A request that never claimed, or whose failure was forgotten, ends at once as failed.

        Raises:
            KVTransferStateError: the request is being loaded already.
        """
        raise NotImplementedError

    def drop(self, request_id: str, now: float) -> list[Action]:
        """The request is over: release its offer. `LoadEnded` follows if `load` was called. Unknown ones are ignored."""
        raise NotImplementedError

    # -- what happened -------------------------------------------------------------------------------

    def connecting(self, address: str, peer_id: int, now: float) -> list[Action]:
        """A `Connect` was started and goes by this peer id."""
        raise NotImplementedError

    def connect_failed(self, address: str, error: KVTransferError, now: float) -> list[Action]:
        """A `Connect` could not be started."""
        raise NotImplementedError

    def peer_connected(self, peer_id: int, now: float) -> list[Action]:
        """The peer can be talked to."""
        raise NotImplementedError

    def peer_lost(self, peer_id: int, error: KVTransferError, now: float) -> list[Action]:
        """The peer is gone, or never came. Unknown peers are ignored."""
        raise NotImplementedError

    def receive(self, peer_id: int, message: ProducerMessage, now: float) -> list[Action]:
        """A message came. From a peer that is not (or no longer) connected it is ignored."""
        raise NotImplementedError

    def read_ended(self, request_id: str, error: KVTransferError | None, now: float) -> list[Action]:
        """The read of a `StartRead` is over, or could not be started. Call it exactly once for each."""
        raise NotImplementedError

    def advance(self, now: float) -> list[Action]:
        """Do what is due."""
        raise NotImplementedError

    def next_deadline(self) -> float:
        """When `advance` will have something to do; infinity if never."""
        raise NotImplementedError

    def shutdown(self, now: float) -> list[Action]:
        """End every load and drop every peer. Loads that are reading end when their reads have: see `num_reads`."""
        raise NotImplementedError
