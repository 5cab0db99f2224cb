"""The virtual clock, and the network: connections with latency, and reads that share their nodes' bandwidth
fairly.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.connector.p2p import loop
from kvferry.transports.base import (
    Connected,
    Endpoint,
    Event,
    GuardTable,
    MessageReceived,
    PeerLost,
    TransferEnded,
)
from kvferry.transports.errors import (
    KVTransferError,
    PeerLostError,
    StaleRegionError,
    TransferTimeoutError,
    TransportClosedError,
)
from kvferry.transports.regions import Guard, RegionPairs

from ..explore import PromiseBroken

Bytes = npt.NDArray[np.uint8]


def require(kept: bool, promise: str, about: object = "") -> None:
    """Fail unless a promise is kept."""
    if not kept:
        raise PromiseBroken(promise, str(about))


class Clock:
    """Virtual seconds, and what is to happen when.

    Of two things at the same moment the earlier planned one happens first.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Plan an action."""
        self._number += 1
        heapq.heappush(self._heap, (self.now + seconds, self._number, action, arguments))

    def run(self, until: float) -> bool:
        """Do what is planned; return whether nothing is left."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, action, arguments = heapq.heappop(self._heap)
            action(*arguments)
        return not self._heap

    @contextmanager
    def rules_the_loop(self) -> Iterator[None]:
        """Let the handoff thread's driver read this clock."""
        real, loop._now = loop._now, lambda: self.now
        try:
            yield
        finally:
            loop._now = real


@dataclass(eq=False)
class Link:
    """A connection: each end is an endpoint and the peer's number there."""

    ends: tuple[tuple[SimulatedEndpoint, int], tuple[SimulatedEndpoint, int]]
    is_open: bool = True
    #: When the latest message to each end arrives: later ones must not overtake it.
    latest: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def other(self, endpoint: SimulatedEndpoint) -> tuple[SimulatedEndpoint, int]:
        return self.ends[1] if self.ends[0][0] is endpoint else self.ends[0]


@dataclass(eq=False)
class Read:
    """A read under way. Half of its regions are copied at its start, and the others at its end."""

    number: int
    reader: SimulatedEndpoint
    owner: SimulatedEndpoint
    link: Link
    pairs: RegionPairs
    guard: Guard
    began: float
    left: float
    rate: float = 0.0
    since: float = 0.0
    version: int = 0
    held_before: bool = False


class Guards(GuardTable):
    """A guard table that notices a word which two offers use."""

    def __init__(self, num_guards: int) -> None:
        self.num_guards = num_guards
        self.words = [0] * num_guards

    def set(self, index: int, value: int) -> None:
        require(self.words[index] == 0, "a guard serves one offer at a time")
        self.words[index] = value

    def clear(self, index: int) -> None:
        self.words[index] = 0


class Network:
    """All endpoints, by address.

    Attributes:
        cuts: Pairs of addresses between which nothing arrives.
    """

    def __init__(self, clock: Clock, chance: random.Random, latency_s: float, bytes_per_s: float) -> None:
        self.clock, self.chance = clock, chance
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.endpoints: dict[str, SimulatedEndpoint] = {}
        self.cuts: set[frozenset[str]] = set()
        self.counts: Counter[str] = Counter()

    def delay(self) -> float:
        """Draw how long a message takes."""
        return self.latency_s * (0.5 + self.chance.random())

    def is_cut(self, one: SimulatedEndpoint, other: SimulatedEndpoint) -> bool:
        return bool(self.cuts) and frozenset((one.address, other.address)) in self.cuts

    def cut(self, one: str, other: str, seconds: float) -> None:
        """Break the connections between two addresses, and let no new one be made for a while."""
        pair = frozenset((one, other))
        self.cuts.add(pair)
        self.clock.after(seconds, self.cuts.discard, pair)
        ends = [each for each in (self.endpoints.get(one), self.endpoints.get(other)) if each is not None]
        for link in [link for end in ends for link in end.links.values()]:
            if frozenset(end.address for end, _ in link.ends) == pair:
                self.break_link(link)

    def break_link(self, link: Link) -> None:
        """Let each end learn in its own time that the other one is gone."""
        if link.is_open:
            link.is_open = False
            for endpoint, peer_id in link.ends:
                self.clock.after(self.delay(), endpoint.lose, peer_id, PeerLostError("the connection broke"))


class SimulatedEndpoint(Endpoint):
    """An endpoint whose pool peers read.

    Args:
        on_event: Called when something waits in `wait_events`.
    """

    scheme = "sim"

    def __init__(
        self, network: Network, address: str, pool: Bytes, guards: Guards, on_event: Callable[[], None]
    ) -> None:
        self.network, self.address, self.pool, self.guards = network, address, pool, guards
        self.links: dict[int, Link] = {}
        self.reads: dict[int, Read] = {}
        self.serving: dict[Read, None] = {}
        self.is_closed = False
        self._events: list[Event] = []
        self._on_event = on_event
        self._number = 0
        network.endpoints[address] = self

    def _draw(self) -> int:
        self._number += 1
        return self._number

    def _note(self, event: Event) -> None:
        if not self.is_closed:
            self._events.append(event)
            self._on_event()

    # -- peers -----------------------------------------------------------------------------------------

    def listen(self, address: str) -> str:
        return self.address

    def start_connect(self, address: str, *, timeout_s: float) -> int:
        peer_id = self._draw()
        self.network.clock.after(self.network.delay(), self._connect, peer_id, address, timeout_s)
        return peer_id

    def _connect(self, peer_id: int, address: str, timeout_s: float) -> None:
        clock, other = self.network.clock, self.network.endpoints.get(address)
        if other is None or other.is_closed:
            self._note(PeerLost(peer_id, PeerLostError("connection refused")))
        elif self.network.is_cut(self, other):
            clock.after(timeout_s, self._note, PeerLost(peer_id, PeerLostError("connecting timed out")))
        else:
            link = Link(((self, peer_id), (other, other._draw())))
            for end, number in link.ends:
                end.links[number] = link
            self._note(Connected(peer_id, incoming=False))
            other._note(Connected(link.ends[1][1], incoming=True))

    def disconnect(self, peer_id: int) -> None:
        link = self.links.pop(peer_id, None)
        for read in [read for read in self.reads.values() if read.link is link]:
            self._end(read, TransportClosedError("disconnected"))
        if link is not None and link.is_open:
            link.is_open = False
            other, number = link.other(self)
            self.network.clock.after(
                self.network.delay(), other.lose, number, PeerLostError("the peer disconnected")
            )

    def lose(self, peer_id: int, error: KVTransferError) -> None:
        """Learn that a peer is gone. Its reads end first."""
        if (link := self.links.pop(peer_id, None)) is not None:
            for read in [read for read in self.reads.values() if read.link is link]:
                self._end(read, error)
            self._note(PeerLost(peer_id, error))

    def send(self, peer_id: int, message: bytes) -> None:
        link = self.links.get(peer_id)
        if link is None:
            raise PeerLostError("no such peer")
        if not link.is_open:
            return  # as into a socket whose other end has just gone
        other, number = link.other(self)
        side = link.ends.index((other, number))
        clock = self.network.clock
        link.latest[side] = arrives = max(link.latest[side], clock.now + self.network.delay())
        clock.after(arrives - clock.now, other._arrive, link, number, message)

    def _arrive(self, link: Link, peer_id: int, message: bytes) -> None:
        if self.links.get(peer_id) is link and link.is_open:
            self._note(MessageReceived(peer_id, message))

    # -- reads -----------------------------------------------------------------------------------------

    def start_read(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int:
        link = self.links.get(peer_id)
        if link is None:
            raise PeerLostError("no such peer")
        clock = self.network.clock
        owner = link.other(self)[0]
        read = Read(
            self._draw(), self, owner, link, pairs, guard, clock.now, float(pairs.num_bytes), since=clock.now
        )
        read.held_before = self._holds(read)
        self.reads[read.number] = owner.serving[read] = read  # type: ignore[assignment]
        self._copy(read, 0, len(pairs) // 2)
        self._share(owner)
        clock.after(timeout_s, self._time_out, read)
        return read.number

    def _copy(self, read: Read, first: int, end: int) -> None:
        for local, remote, size in read.pairs.table[first:end].tolist():
            self.pool[local : local + size] = read.owner.pool[remote : remote + size]

    def _share(self, owner: SimulatedEndpoint) -> None:
        """Give each read that leaves or enters one of two nodes its share of the bandwidth from now on."""
        clock, bandwidth = self.network.clock, self.network.bytes_per_s
        for read in dict.fromkeys((*owner.serving, *self.reads.values())):
            read.left -= read.rate * (clock.now - read.since)
            read.since, read.version = clock.now, read.version + 1
            read.rate = bandwidth / max(len(read.owner.serving), len(read.reader.reads))
            clock.after(
                max(read.left, 0.0) / read.rate + self.network.latency_s, self._arrived, read, read.version
            )

    def _arrived(self, read: Read, version: int) -> None:
        if read.version == version and read.number in read.reader.reads:
            read.reader._finish(read)

    def _finish(self, read: Read) -> None:
        self._copy(read, len(read.pairs) // 2, len(read.pairs))
        self._end(read, None if self._is_fresh(read) else StaleRegionError("the guard changed"))

    def _holds(self, read: Read) -> bool:
        return read.owner.guards.words[read.guard.index] == read.guard.value

    def _is_fresh(self, read: Read) -> bool:
        return self._holds(read)

    def _time_out(self, read: Read) -> None:
        if read.number in self.reads:
            self._end(read, TransferTimeoutError("the read took too long"))

    def _end(self, read: Read, error: KVTransferError | None) -> None:
        del self.reads[read.number], read.owner.serving[read]
        self._share(read.owner)
        self.network.counts["reads"] += 1
        seconds = self.network.clock.now - read.began
        self._note(TransferEnded(read.number, error, read.pairs.num_bytes, seconds, "simulated"))

    # -- the owner's loop ------------------------------------------------------------------------------

    def wait_events(self, timeout_s: float) -> list[Event]:
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        self._on_event()

    def close(self) -> None:
        """Be gone: the process has ended, and its memory with it."""
        self.is_closed = True
        for link in list(self.links.values()):
            self.network.break_link(link)
        for read in [*self.serving]:
            read.reader._end(read, PeerLostError("the peer died"))
        for read in [*self.reads.values()]:
            del self.reads[read.number], read.owner.serving[read]
        if self.network.endpoints.get(self.address) is self:
            del self.network.endpoints[self.address]
