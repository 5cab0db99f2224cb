"""Nodes with a pool each, and one loop that serves them all in one thread. The conformance suite is built on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ..base import Arena, Connected, Event, MessageReceived, PeerLost, TransferEnded, Transport
from ..regions import Guard, Pool, RegionPairs
from .order import CheckedEndpoint

PAGE = 4096
POOL_BYTES = 4 << 20

#: The guard that the producer sets in most tests.
HELD = Guard(index=5, value=77)

#: Seconds to wait for something that should happen at once. Generous, because the machine may be busy.
DEADLINE_S = 20.0

E = TypeVar("E", Connected, MessageReceived, PeerLost, TransferEnded)


def pairs_of(*rows: tuple[int, int, int]) -> RegionPairs:
    """Return region pairs; each row is local offset, remote offset, number of bytes."""
    return RegionPairs(np.array(rows, dtype=np.int64).reshape(-1, 3))


@dataclass
class Node:
    """A transport, its endpoint and the arenas of its pool.

    Attributes:
        history: Every event that the endpoint reported. Their order was checked.
    """

    transport: Transport
    endpoint: CheckedEndpoint
    arenas: Sequence[Arena]
    history: list[Event] = field(default_factory=list)

    def memory(self, arena: int = 0) -> npt.NDArray[np.uint8]:
        """Return the bytes of an arena, without using the transport."""
        return np.frombuffer(self.arenas[arena].buffer, dtype=np.uint8)

    def fill(self, seed: int) -> None:
        """Fill the pool with random bytes; the same seed gives the same bytes."""
        random = np.random.default_rng(seed)
        for index in range(len(self.arenas)):
            memory = self.memory(index)
            memory[:] = random.integers(0, 256, len(memory), dtype=np.uint8)

    def of_type(self, kind: type[E]) -> list[E]:
        """Return the reported events of one kind, in order."""
        return [event for event in self.history if isinstance(event, kind)]

    def messages(self, peer_id: int) -> list[bytes]:
        """Return the messages of a peer, in order."""
        return [event.message for event in self.of_type(MessageReceived) if event.peer_id == peer_id]

    def ends_of(self, transfer_id: int) -> list[TransferEnded]:
        """Return the ends that were reported of a read: none or one."""
        return [event for event in self.of_type(TransferEnded) if event.transfer_id == transfer_id]


@dataclass(frozen=True)
class Link:
    """Two connected nodes. `consumer` connected to `producer`.

    Attributes:
        producer_id: The producer, as the consumer knows it.
        consumer_id: The consumer, as the producer knows it.
    """

    producer: Node
    consumer: Node
    producer_id: int
    consumer_id: int


@dataclass
class World:
    """Make nodes, serve them, and close them all at the end."""

    create: Callable[[], Transport]
    nodes: list[Node] = field(default_factory=list)

    def node(self, *arena_bytes: int) -> Node:
        """Make a node whose registered pool has arenas of these sizes, in bytes."""
        transport = self.create()
        try:
            return self.add(transport, [transport.allocate(num_bytes) for num_bytes in arena_bytes])
        except BaseException:
            transport.close()
            raise

    def add(self, transport: Transport, arenas: Sequence[Arena], pool: Pool | None = None) -> Node:
        """Register a pool with a transport, and make a node of them.

        Args:
            pool: By default all arenas.
        """
        endpoint = transport.register(pool or Pool([arena.segment for arena in arenas]))
        node = Node(transport, CheckedEndpoint(endpoint), arenas)
        self.nodes.append(node)
        return node

    def link(self, producer: Node, consumer: Node) -> Link:
        """Connect `consumer` to a new address of `producer`."""
        seen = len(producer.of_type(Connected))
        address = producer.endpoint.listen("")
        producer_id = consumer.endpoint.start_connect(address, timeout_s=DEADLINE_S)
        self.serve(lambda: len(producer.of_type(Connected)) > seen)
        self.serve(lambda: Connected(producer_id, incoming=False) in consumer.history)
        (incoming,) = producer.of_type(Connected)[seen:]
        assert incoming.incoming
        return Link(producer, consumer, producer_id, incoming.peer_id)

    def pair(self, num_bytes: int) -> Link:
        """Make two nodes with pools of one arena each and different contents, and connect them."""
        link = self.link(self.node(num_bytes), self.node(num_bytes))
        link.producer.fill(1)
        link.consumer.fill(2)
        return link

    def serve(self, is_done: Callable[[], bool], *nodes: Node) -> None:
        """Collect events of all nodes, or of these, until `is_done` returns True.

        Raises:
            AssertionError: it did not within `DEADLINE_S`. The message shows each node's last events.
        """
        deadline = time.monotonic() + DEADLINE_S
        while not is_done():
            assert time.monotonic() < deadline, (
                f"timed out after {DEADLINE_S:g} s waiting for events; the last ones of each node: "
                f"{[node.history[-5:] for node in self.nodes]}"
            )
            for node in nodes or self.nodes:
                node.history += node.endpoint.wait_events(0.001)

    def serve_quietly(self, *nodes: Node) -> None:
        """Collect events for a while. For tests that nothing more happens."""
        for _ in range(20):
            for node in nodes or self.nodes:
                node.history += node.endpoint.wait_events(0.005)

    def read(
        self, link: Link, pairs: RegionPairs, guard: Guard, timeout_s: float = DEADLINE_S
    ) -> TransferEnded:
        """Read from the producer's pool into the consumer's; return the end of the read."""
        endpoint = link.consumer.endpoint
        transfer_id = endpoint.start_read(link.producer_id, pairs, guard, timeout_s=timeout_s)
        self.serve(lambda: bool(link.consumer.ends_of(transfer_id)))
        (ended,) = link.consumer.ends_of(transfer_id)
        return ended

    def forget(self, node: Node) -> None:
        """Close a node, and stop serving it."""
        node.transport.close()
        self.nodes.remove(node)

    def close(self) -> None:
        """Close all nodes."""
        for node in self.nodes:
            node.transport.close()
