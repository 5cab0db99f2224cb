"""The producer and the consumer of a node on one transport. Each event goes to the one that it concerns.

A runtime turns transport events into these calls, and orders into calls of `producer` and `consumer`:

    Connected        → peer_connected          offer, abort       → producer.offer, .abort
    MessageReceived  → message_received        claim, load, drop  → consumer.claim, .load, .drop
    PeerLost         → peer_lost               timeout            → advance, at next_deadline()
    TransferEnded    → consumer.read_ended

The runtime handles events before it calls `advance`. After a process was stopped for a while, heartbeats and
answers wait in its sockets; they must count before any deadline does.
"""

from __future__ import annotations

from collections.abc import Callable

from ...transports.errors import KVTransferError, ProtocolError, VersionMismatchError
from ..errors import ConnectorError
from .consumer import ConsumerProtocol
from .events import Action, Disconnect, Identity
from .messages import ConsumerMessage, Message, decode
from .producer import ProducerProtocol


class NodeProtocol:
    """A producer and a consumer that share a transport.

    Incoming peers are consumers, outgoing ones producers.
    """

    def __init__(self, producer: ProducerProtocol, consumer: ConsumerProtocol) -> None:
        self.producer = producer
        self.consumer = consumer

    def peer_connected(self, peer_id: int, incoming: bool, now: float) -> list[Action]:
        """Begin with a peer that is connected. The consumer connects, so an incoming peer is one."""
        side = self.producer if incoming else self.consumer
        return side.peer_connected(peer_id, now)

    def peer_lost(self, peer_id: int, error: KVTransferError, now: float) -> list[Action]:
        """End what a peer was needed for that is gone, or could not be reached."""
        return [*self.producer.peer_lost(peer_id, now), *self.consumer.peer_lost(peer_id, error, now)]

    def peer_failed(self, peer_id: int, error: KVTransferError, now: float) -> list[Action]:
        """Drop a peer that misbehaved, or to which nothing can be sent."""
        return [Disconnect(peer_id), *self.peer_lost(peer_id, error, now)]

    def message_received(
        self, peer_id: int, data: bytes, now: float, note: Callable[[Message], None] | None = None
    ) -> list[Action]:
        """Handle a message. A peer that sends what the protocol forbids is dropped.

        Args:
            note: Called with the message before it is handled, if it can be read.
        """
        try:
            message = decode(data, self.version_with(peer_id), self.producer.spoken)
        except VersionMismatchError as error:
            # A consumer gets our `Welcome` in the version nearest to its own. It either repeats its `Hello`
            # in that version or reports an error that names both versions.
            answer = self.producer.answer_hello(peer_id, error.remote)
            return [*answer, *self.consumer.peer_lost(peer_id, error, now)]
        except ProtocolError as error:
            return self.peer_failed(peer_id, error, now)
        if note is not None:
            note(message)
        if isinstance(message, ConsumerMessage):
            return self.producer.receive(peer_id, message, now)
        return self.consumer.receive(peer_id, message, now)

    def version_with(self, peer_id: int) -> int:
        """The version of the protocol that a peer speaks with us; our newest before the end of the
        handshake.
        """
        known = self.producer.version_with(peer_id) or self.consumer.version_with(peer_id)
        return known or self.producer.spoken[-1]

    def advance(self, now: float) -> list[Action]:
        """Do what is due."""
        return [*self.producer.advance(now), *self.consumer.advance(now)]

    def next_deadline(self) -> float:
        """When `advance` will have something to do; infinity if never."""
        return min(self.producer.next_deadline(), self.consumer.next_deadline())

    def begin_anew(self, identity: Identity, why: str) -> list[Action]:
        """End every offer and every load, drop every peer, and go on as `identity`.

        The identity names the same start of the same node. If what the node computes has changed, its digest
        is another one, and each peer compares it before it accepts anything that is offered from now on.

        Args:
            why: For the errors of loads, and for the peers whose claims end.
        """
        return [
            *self.producer.begin_anew(identity, why),
            *self.consumer.begin_anew(identity, ConnectorError(f"the load was ended: {why}")),
        ]

    def shutdown(self, now: float) -> list[Action]:
        """End every offer and every load, and drop every peer."""
        return [*self.producer.shutdown(now), *self.consumer.shutdown(now)]
