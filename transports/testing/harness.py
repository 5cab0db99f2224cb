"""Nodes with a pool each, and one loop that serves them all in one thread.

The conformance suite is built on them.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ..base import Arena, Connected, Event, MessageReceived, PeerLost, TransferEnded, Transport
from ..regions import Guard, Pool, RegionPairs
from .leaks import place_of
from .order import CheckedEndpoint, broken

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


@contextmanager
def refuses(error: type[Exception], promise: str) -> Iterator[None]:
    """Run a block that raises `error`.

    Raises:
        AssertionError: it raised nothing or something else. The message names the promise.
    """
    __tracebackhide__ = True
    try:
        yield
    except error:
        return
    except Exception as other:  # noqa: BLE001 - any other error breaks the promise as well
        broken(promise, f"the call raised {other!r} instead of {error.__name__}", other)
    broken(promise, f"the call raised nothing instead of {error.__name__}")


def same_bytes(found: npt.NDArray[np.uint8], expected: npt.NDArray[np.uint8], promise: str) -> None:
    """Compare memory.

    Raises:
        AssertionError: it differs. The message names the promise, and where the bytes differ.
    """
    __tracebackhide__ = True
    if not np.array_equal(found, expected):
        wrong = np.flatnonzero(found != expected)
        at = int(wrong[0])
        broken(
            promise,
            f"{len(wrong)} of {len(expected)} bytes are wrong; the first is at offset {at}: "
            f"{int(found[at])} instead of {int(expected[at])}",
        )


@contextmanager
def ends_within(timeout_s: float, promise: str) -> Iterator[None]:
    """Interrupt a block that does not end in time. In threads other than the main one it does nothing.

    Raises:
        AssertionError: the block was interrupted. The message names the promise.
    """
    __tracebackhide__ = True
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    seen: list[str] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        where = place_of(frame) if frame is not None else "an unknown place"
        seen.append(f"it had not ended after {timeout_s:g} s; it was at {where}")
        broken(promise, seen[0])

    # The timer may be in use: pytest-timeout ends tests with it. So it goes on afterwards.
    handler = signal.signal(signal.SIGALRM, interrupt)
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, timeout_s)
    began = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left_s - (time.monotonic() - began)))
    if seen:  # the block may have swallowed the exception
        broken(promise, seen[0])


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
    """Make nodes, serve them, and close them all at the end.

    Attributes:
        deadline_s: Seconds to wait for something that should happen at once.
    """

    create: Callable[[], Transport]
    nodes: list[Node] = field(default_factory=list)
    deadline_s: float = DEADLINE_S

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

    def link(self, producer: Node, consumer: Node, address: str = "", besides: Sequence[Node] = ()) -> Link:
        """Connect `consumer` to an address of `producer`, by default a new one.

        Args:
            besides: Nodes that are not served meanwhile.
        """
        seen = len(producer.of_type(Connected))
        address = address or producer.endpoint.listen("")
        producer_id = consumer.endpoint.start_connect(address, timeout_s=DEADLINE_S)
        self.serve(
            lambda: (
                len(producer.of_type(Connected)) > seen
                and Connected(producer_id, incoming=False) in consumer.history
            ),
            *(node for node in self.nodes if node not in besides),
            promise="an endpoint that listens accepts a peer, and both sides report `Connected`",
        )
        (incoming,) = producer.of_type(Connected)[seen:]
        return Link(producer, consumer, producer_id, incoming.peer_id)

    def pair(self, num_bytes: int) -> Link:
        """Make two nodes with pools of one arena each and different contents, and connect them."""
        link = self.link(self.node(num_bytes), self.node(num_bytes))
        link.producer.fill(1)
        link.consumer.fill(2)
        return link

    def serve(
        self, is_done: Callable[[], bool], *nodes: Node, promise: str = "what a test waits for happens"
    ) -> None:
        """Collect events of all nodes, or of these, until `is_done` returns True.

        Raises:
            AssertionError: it did not within `deadline_s`. The message names the promise and each node's last
                events.
        """
        deadline = time.monotonic() + self.deadline_s
        while not is_done():
            if time.monotonic() >= deadline:
                broken(
                    promise,
                    f"it did not happen within {self.deadline_s:g} s; the last events of each node are "
                    f"{[node.history[-5:] for node in self.nodes]}",
                )
            self.turn(*nodes, timeout_s=0.001)

    def turn(self, *nodes: Node, timeout_s: float = 0.0) -> None:
        """Collect events of all nodes, or of these, once."""
        for node in nodes or self.nodes:
            node.history += node.endpoint.wait_events(timeout_s)

    def serve_quietly(self, *nodes: Node) -> None:
        """Collect events for a while. For tests that nothing more happens."""
        for _ in range(20):
            self.turn(*nodes, timeout_s=0.005)

    def read(
        self, link: Link, pairs: RegionPairs, guard: Guard, timeout_s: float = DEADLINE_S
    ) -> TransferEnded:
        """Read from the producer's pool into the consumer's; return the end of the read."""
        endpoint = link.consumer.endpoint
        return self.end_of(link, endpoint.start_read(link.producer_id, pairs, guard, timeout_s=timeout_s))

    def end_of(self, link: Link, transfer_id: int, *nodes: Node) -> TransferEnded:
        """Serve all nodes, or these, until a read of the consumer has ended; return its end."""
        self.serve(
            lambda: bool(link.consumer.ends_of(transfer_id)),
            *nodes,
            promise="each read that `start_read` accepted ends with a `TransferEnded`, at its deadline at the latest",
        )
        (ended,) = link.consumer.ends_of(transfer_id)
        return ended

    def forget(self, node: Node) -> None:
        """Close a node, and stop serving it."""
        self.nodes.remove(node)
        self._close(node)

    def close(self) -> None:
        """Close all nodes."""
        with ExitStack() as stack:  # if one does not close, the others still do
            for node in reversed(self.nodes):
                stack.callback(self._close, node)
            self.nodes.clear()

    def _close(self, node: Node) -> None:
        with ends_within(
            self.deadline_s, "`close` ends soon, even if reads are in flight and peers do not answer"
        ):
            node.transport.close()
