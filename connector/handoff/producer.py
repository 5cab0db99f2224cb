"""The producer's side of the handoff protocol: offers, their guards and their leases."""

from __future__ import annotations

from .config import HandoffConfig
from .events import Action, BlockTables, Identity
from .messages import ConsumerMessage

__all__ = ["ProducerProtocol"]


class ProducerProtocol:
    """Holds offers until each is delivered, aborted or expired.

    Every method takes `now`, in seconds of any monotonic clock, and returns actions to be done in order.

    Args:
        identity: This node.
        num_guards: Offers that can be held at once; one more ends at once, as aborted.
    """

    def __init__(self, identity: Identity, config: HandoffConfig, num_guards: int) -> None:
        raise NotImplementedError

    @property
    def num_offers(self) -> int:
        """Offers that are held."""
        raise NotImplementedError

    def offer(
        self, request_id: str, lease: int, block_ids: BlockTables, num_tokens: int, now: float
    ) -> list[Action]:
        """Hold a request's blocks for a consumer. `OfferEnded` follows, exactly once.

        Raises:
            KVTransferStateError: `lease` is not greater than every earlier one, or the request is offered already.
        """
        raise NotImplementedError

    def abort(self, request_id: str, now: float) -> list[Action]:
        """End an offer now. Unknown requests are ignored: the offer may have ended by itself."""
        raise NotImplementedError

    def peer_connected(self, peer_id: int, now: float) -> list[Action]:
        """A consumer connected; it must say `Hello` within `connect_timeout_s`."""
        raise NotImplementedError

    def peer_lost(self, peer_id: int, now: float) -> list[Action]:
        """A peer is gone: what it had claimed ends. Unknown peers are ignored."""
        raise NotImplementedError

    def receive(self, peer_id: int, message: ConsumerMessage, now: float) -> list[Action]:
        """A message came. From a peer that is not (or no longer) connected it is ignored."""
        raise NotImplementedError

    def advance(self, now: float) -> list[Action]:
        """Do what is due."""
        raise NotImplementedError

    def next_deadline(self) -> float:
        """When `advance` will have something to do; infinity if never."""
        raise NotImplementedError

    def shutdown(self, now: float) -> list[Action]:
        """End every offer and drop every peer."""
        raise NotImplementedError
