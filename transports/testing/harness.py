"""What the conformance suite drives: nodes with a pool each, and one loop that serves them all in one thread."""

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

#: What the producer's guard table holds in most tests.
HELD = Guard(index=5, value=77)

#: For what must happen at once. Generous: the machine may be busy with something else.
DEADLINE_S = 20.0

E = TypeVar("E", Connected, MessageReceived, PeerLost, TransferEnded)


def pairs_of(*rows: tuple[int, int, int]) -> RegionPairs:
    """Region pairs from rows of local offset, remote offset, bytes."""
    return RegionPairs(np.array(rows, dtype=np.int64).reshape(-1, 3))


@dataclass
class Node:
    """A transport, its endpoint and pool, and every event that the endpoint ever reported, in a correct order."""

    transport: Transport
    endpoint: CheckedEndpoint
    arenas: Sequence[Arena]
    history: list[Event] = field(default_factory=list)

    def memory(self, arena: int = 0) -> npt.NDArray[np.uint8]:
        """The bytes of an arena, seen without the transport."""
        return np.frombuffer(self.arenas[arena].buffer, dtype=np.uint8)

    def fill(self, seed: int) -> None:
        """Give every byte of the pool another value, the same for the same seed."""
        random = np.random.default_rng(seed)
        for index in range(len(self.arenas)):
            memory = self.memory(index)
            memory[:] = random.integers(0, 256, len(memory), dtype=np.uint8)

    def of_type(self, kind: type[E]) -> list[E]:
        """What was reported of one kind, in order."""
        return [event for event in self.history if isinstance(event, kind)]

    def messages(self, peer_id: int) -> list[bytes]:
        return [event.message for event in self.of_type(MessageReceived) if event.peer_id == peer_id]

    def ends_of(self, transfer_id: int) -> list[TransferEnded]:
        return [event for event in self.of_type(TransferEnded) if event.transfer_id == transfer_id]


@dataclass(frozen=True)
class Link:
    """Two nodes that know each other: `consumer` connected to `producer`."""

    producer: Node
    consumer: Node
    producer_id: int
    consumer_id: int


@dataclass
class World:
    """Makes nodes, serves them, and closes them all in the end."""

    create: Callable[[], Transport]
    nodes: list[Node] = field(default_factory=list)

    def node(self, *arena_bytes: int) -> Node:
        """A node with a registered pool of arenas of these sizes."""
        transport = self.create()
        try:
            return self.add(transport, [transport.allocate(num_bytes) for num_bytes in arena_bytes])
        except BaseException:
            transport.close()
            raise

    def add(self, transport: Transport, arenas: Sequence[Arena], pool: Pool | None = None) -> Node:
        """A node of a transport whose pool is not registered.

        Args:
            pool: By default all of the arenas.
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
        """Two new nodes with pools of one arena each, of different contents, connected."""
        link = self.link(self.node(num_bytes), self.node(num_bytes))
        link.producer.fill(1)
        link.consumer.fill(2)
        return link

    def serve(self, is_done: Callable[[], bool], *nodes: Node) -> None:
        """Collect events of all nodes, or of these, until `is_done`."""
        deadline = time.monotonic() + DEADLINE_S
        while not is_done():
            assert time.monotonic() < deadline, f"nothing came of it: {[n.history[-5:] for n in self.nodes]}"
            for node in nodes or self.nodes:
                node.history += node.endpoint.wait_events(0.001)

    def serve_quietly(self, *nodes: Node) -> None:
        """Let what is under way arrive, where the point is that nothing is."""
        for _ in range(20):
            for node in nodes or self.nodes:
                node.history += node.endpoint.wait_events(0.005)

    def read(
        self, link: Link, pairs: RegionPairs, guard: Guard, timeout_s: float = DEADLINE_S
    ) -> TransferEnded:
        """Read from the producer into the consumer's pool, to the end."""
        endpoint = link.consumer.endpoint
        transfer_id = endpoint.start_read(link.producer_id, pairs, guard, timeout_s=timeout_s)
        self.serve(lambda: bool(link.consumer.ends_of(transfer_id)))
        (ended,) = link.consumer.ends_of(transfer_id)
        return ended

    def forget(self, node: Node) -> None:
        """Close a node, and serve it no more."""
        node.transport.close()
        self.nodes.remove(node)

    def close(self) -> None:
        for node in self.nodes:
            node.transport.close()
