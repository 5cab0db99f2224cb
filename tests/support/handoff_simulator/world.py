"""The runtime and the transport of a simulated world: they carry out actions, deliver messages and copy
bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from functools import cache

import numpy as np

from kvferry.connector.handoff.events import (
    Action,
    ClearGuard,
    Connect,
    Disconnect,
    ExtendGuard,
    LoadEnded,
    OfferEnded,
    Send,
    SetGuard,
    StartRead,
)
from kvferry.connector.handoff.loads import LoadState
from kvferry.connector.handoff.messages import decode, encode
from kvferry.connector.handoff.offers import OfferState
from kvferry.connector.planning.extents import BlockExtents
from kvferry.connector.planning.layout import KVLayout
from kvferry.transports.errors import (
    KVTransferError,
    PeerLostError,
    StaleRegionError,
    TransferTimeoutError,
    TransportClosedError,
)

from ..explore import PromiseBroken
from .simulated import PeerEvent, SimulatedEngine, SimulatedRank, SimulatedRead

#: Peer ids are above this and below 2**40, and no other number is: a program that compares two worlds can
#: tell them apart.
FIRST_PEER_ID = 10**9


def _words_of(rank: SimulatedRank, peer_id: int, event: PeerEvent) -> str:
    """Say what a rank learns of a peer."""
    if isinstance(event, bool):
        return f"learns that {'a consumer' if event else 'its producer'} is connected"
    if isinstance(event, bytes):
        try:
            return f"receives {decode(event, rank.protocol.version_with(peer_id), rank.protocol.producer.spoken)}"
        except KVTransferError as error:
            return f"gets a message that it refuses: {error}"
    return f"learns that a connection is lost: {event}"


@cache
def _extents_of(layout: KVLayout) -> BlockExtents:
    return BlockExtents(layout)


class SimulatedWorld(ABC):
    """Engines and everything between them.

    Args:
        checks_after_copy: Whether the transport checks guards after it has copied. False is a planted bug.

    Attributes:
        numbers_by_kind: Whether each kind of thing has numbers of its own, so that names do not tell what
            else there was.
        told: What happens, in words; None: that is not written down.
    """

    numbers_by_kind = False

    def __init__(self, checks_after_copy: bool) -> None:
        self.now = 0.0
        self.told: list[str] | None = None
        self.engines: dict[str, SimulatedEngine] = {}
        self._checks_after_copy = checks_after_copy
        self._counters: Counter[str] = Counter()

    @abstractmethod
    def offer_ended(self, rank: SimulatedRank, ended: OfferEnded) -> None:
        """A rank reports the end of an offer."""

    @abstractmethod
    def load_ended(self, rank: SimulatedRank, ended: LoadEnded) -> None:
        """A rank reports the end of a load."""

    @property
    def ranks(self) -> list[SimulatedRank]:
        """All ranks that are alive."""
        return [rank for engine in self.engines.values() for rank in engine.living_ranks]

    def say(self, words: Callable[[], str]) -> None:
        """Write down what happens."""
        if self.told is not None:
            self.told.append(words())

    # -- what there is to choose from ------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Ranks with an order that they have not carried out."""
        return sum(bool(rank.orders) for rank in self.ranks)

    @property
    def num_in_flight(self) -> int:
        """Ends of connections at which something waits to be delivered."""
        return sum(bool(box) for rank in self.ranks for box in rank.inbox.values())

    @property
    def num_reads(self) -> int:
        """Reads that are in progress."""
        return sum(len(rank.reads) for rank in self.ranks)

    def links(self) -> list[tuple[SimulatedRank, int]]:
        """Connections, each by both of its ends."""
        return [(rank, peer_id) for rank in self.ranks for peer_id in rank.links]

    def has_messages(self, rank: SimulatedRank, peer_id: int) -> bool:
        """Whether messages are in flight to this end of a connection."""
        return any(isinstance(event, bytes) for event in rank.inbox[peer_id])

    def deadlines(self) -> list[float]:
        """When each rank, and each read that has not failed, has something to do."""
        reads = [read.deadline for rank in self.ranks for read in rank.reads.values() if read.error is None]
        return reads + [rank.protocol.next_deadline() for rank in self.ranks]

    # -- what must hold --------------------------------------------------------------------------------

    def require(self, kept: bool, promise: str) -> None:
        """Fail unless a promise is kept; the failure shows the state of every offer and load."""
        if not kept:
            raise PromiseBroken(promise, self.states())

    def states(self) -> str:
        """The state of every offer and load of every rank that lives."""
        return "; ".join(
            f"{rank.engine.address}/{rank.number}: {[*rank.protocol.producer.offers, *rank.protocol.consumer.loads]}"
            for rank in self.ranks
        )

    def _require_true_states(self, rank: SimulatedRank) -> None:
        """Compare the states that the records of a rank have with what is so in this world.

        The records themselves check that each change is in their table.
        """
        for offer in rank.protocol.producer.offers:
            self.require(offer.state is not OfferState.ENDED, "an offer that ended is forgotten")
            if offer.is_made:
                is_guarded = rank.guards[offer.granted.guard_index] != 0
                self.require(is_guarded, "an offer that can be read has its guard set")
        reading = {request_id for request_id, _ in rank.reads}
        for load in rank.protocol.consumer.loads:
            self.require(load.state is not LoadState.ENDED, "a load that ended is forgotten")
            is_reading = load.state in (LoadState.READING, LoadState.DRAINING)
            self.require(
                is_reading == (load.request_id in reading), "a load is reading or draining while it is read"
            )

    # -- what happens by itself, in any order ----------------------------------------------------------

    def deliver(self, which: int) -> bool:
        """Deliver one event or message that is in flight between two ranks."""
        waiting = [(rank, peer) for rank in self.ranks for peer, box in rank.inbox.items() if box]
        if not waiting:
            return False
        rank, peer_id = waiting[which % len(waiting)]
        event = rank.inbox[peer_id].popleft()
        self.say(lambda: f"{rank.name} {_words_of(rank, peer_id, event)}")
        if isinstance(event, bool):
            self.do(rank, rank.protocol.peer_connected(peer_id, event, self.now))
        elif isinstance(event, bytes):
            self.do(rank, rank.protocol.message_received(peer_id, event, self.now))
        else:
            self._forget_peer(rank, peer_id)
            for key in [key for key, read in rank.reads.items() if read.order.peer_id == peer_id]:
                self._end_read(rank, key, event)
            self.do(rank, rank.protocol.peer_lost(peer_id, event, self.now))
        return True

    def copy(self, which: int) -> bool:
        """Copy one region of a read, or check its guard and end it."""
        reading = [(rank, key) for rank in self.ranks for key in rank.reads]
        if not reading:
            return False
        self._copy_read(*reading[which % len(reading)])
        return True

    def _copy_read(self, rank: SimulatedRank, key: tuple[str, int]) -> None:
        read = rank.reads[key]
        guard = read.order.guard
        holds = read.source.guards[guard.index] == guard.value
        if read.num_copied == 0:
            read.held_before = holds
        self.say(lambda: f"{rank.name} goes on with its read for {key[0]}, after {read.num_copied} regions")
        if read.error is not None:
            self._end_read(rank, key, read.error)
        elif read.num_copied < len(read.order.pairs):
            local, remote, size = (int(value) for value in read.order.pairs.table[read.num_copied])
            if holds:
                extents = _extents_of(read.source.identity.layout).of(read.source.allowed[guard.index])
                is_allowed = extents.cover(np.array([remote]), np.array([size]))
                self.require(is_allowed, "a read lies within what its guard was set for")
            rank.pool[local : local + size] = read.source.pool[remote : remote + size]
            read.num_copied += 1
        else:
            is_fresh = holds if self._checks_after_copy else read.held_before
            self._end_read(rank, key, None if is_fresh else StaleRegionError("the guard changed"))

    def tick(self, seconds: float, late: int = 0) -> None:
        """Let time pass.

        Args:
            late: The ranks whose thread does not run meanwhile, as bits. They do what is due at the end of a
                later tick.
        """
        self.now += seconds
        late_ones = [rank.name for index, rank in enumerate(self.ranks) if late >> index & 1]
        self.say(lambda: f"{seconds:g} s pass; late is: {', '.join(late_ones) or 'no rank'}")
        for index, rank in enumerate(self.ranks):
            for read in rank.reads.values():
                if read.deadline <= self.now and read.error is None:
                    read.error = TransferTimeoutError("the read took too long")
            if late >> index & 1:
                continue
            self.do(rank, rank.protocol.advance(self.now))
            self.require(rank.protocol.next_deadline() > self.now, "advance does everything that is due")

    def sever(self, which: int, lost: int = 0) -> None:
        """Break a connection. Each end learns of it in its own time.

        Args:
            lost: At which ends the messages in flight are lost, as bits. At the others they still arrive
                first.
        """
        if links := self.links():
            rank, peer_id = links[which % len(links)]
            remote, remote_peer_id = rank.links.pop(peer_id)
            del remote.links[remote_peer_id]
            at = [end.name for bit, end in enumerate((rank, remote)) if lost >> bit & 1]
            losses = f", with what is in flight to {' and '.join(at)}" if at else ""
            self.say(lambda: f"the connection of {rank.name} and {remote.name} breaks{losses}")
            for bit, (end, number) in enumerate(((rank, peer_id), (remote, remote_peer_id))):
                self._lose(end, number, "the connection broke", is_mute=bool(lost >> bit & 1))

    def die(self, rank: SimulatedRank, *, is_mute: bool = False) -> None:
        """Kill a process. Its readers keep its memory mapped, so their reads go on.

        Args:
            is_mute: Whether the messages that it sent, and that are still in flight, are lost.
        """
        self.say(lambda: f"{rank.name} dies{', and what it sent last is lost' if is_mute else ''}")
        rank.is_dead = True
        for remote, remote_peer_id in list(rank.links.values()):
            self._lose(remote, remote_peer_id, "the peer died", is_mute=is_mute)
            del remote.links[remote_peer_id]
        rank.links.clear()

    def _lose(self, rank: SimulatedRank, peer_id: int, why: str, *, is_mute: bool) -> None:
        if is_mute:
            rank.inbox[peer_id] = deque(
                event for event in rank.inbox[peer_id] if not isinstance(event, bytes)
            )
        rank.inbox[peer_id].append(PeerLostError(why))

    # -- what a runtime does with actions --------------------------------------------------------------

    def do(self, rank: SimulatedRank, actions: list[Action]) -> None:
        """Carry out actions, and what follows from them."""
        waiting = deque(actions)
        while waiting:
            waiting.extend(self._act(rank, waiting.popleft()))
        self._require_true_states(rank)

    def next_number(self, kind: str) -> int:
        """Draw a number that nothing else has; if `numbers_by_kind`, nothing else of this kind."""
        counter = kind if self.numbers_by_kind else ""
        self._counters[counter] += 1
        return self._counters[counter]

    def _new_peer_id(self) -> int:
        return FIRST_PEER_ID + self.next_number("peer")

    def _act(self, rank: SimulatedRank, action: Action) -> list[Action]:
        match action:
            case Connect(address):
                return self._connect(rank, address)
            case Send(peer_id, message, version):
                data = encode(message, version)
                if peer_id in rank.links:
                    remote, remote_peer_id = rank.links[peer_id]
                    remote.inbox[remote_peer_id].append(data)
            case SetGuard(index, value, _, block_ids):
                rank.guards[index], rank.allowed[index] = value, block_ids
            case ExtendGuard(index, block_ids):
                rank.allowed[index] = block_ids
            case ClearGuard(index):
                rank.guards[index] = 0
            case StartRead():
                self._start_read(rank, action)
            case Disconnect(peer_id):
                self._disconnect(rank, peer_id)
            case OfferEnded():
                self.offer_ended(rank, action)
            case LoadEnded():
                self.load_ended(rank, action)
        return []

    def _start_read(self, rank: SimulatedRank, order: StartRead) -> None:
        key = (order.request_id, order.rank)
        self.require(key not in rank.reads, "one read at a time for a request from a rank")
        source = rank.links.get(order.peer_id, (rank, 0))[0]
        rank.reads[key] = SimulatedRead(order, source, self.now + order.timeout_s)
        if order.peer_id not in rank.links:
            rank.reads[key].error = PeerLostError("no such peer")

    def _connect(self, rank: SimulatedRank, address: str) -> list[Action]:
        remote = self._rank_at(address)
        if remote is None:
            return rank.protocol.consumer.connect_failed(
                address, PeerLostError("there is no such rank"), self.now
            )
        peer_id, remote_peer_id = self._new_peer_id(), self._new_peer_id()
        rank.links[peer_id] = (remote, remote_peer_id)
        remote.links[remote_peer_id] = (rank, peer_id)
        rank.inbox[peer_id] = deque([False])
        remote.inbox[remote_peer_id] = deque([True])
        return rank.protocol.consumer.connecting(address, peer_id, self.now)

    def _rank_at(self, address: str) -> SimulatedRank | None:
        name, _, number = address.rpartition("/")
        rank = self.engines[name].ranks[int(number)]
        return None if rank.is_dead else rank

    def _disconnect(self, rank: SimulatedRank, peer_id: int) -> None:
        for read in rank.reads.values():
            if read.order.peer_id == peer_id:
                read.error = TransportClosedError("disconnected")
        if peer_id in rank.links:
            remote, remote_peer_id = rank.links[peer_id]
            remote.inbox[remote_peer_id].append(PeerLostError("the peer disconnected"))
            del remote.links[remote_peer_id]
        self._forget_peer(rank, peer_id)

    def _forget_peer(self, rank: SimulatedRank, peer_id: int) -> None:
        rank.links.pop(peer_id, None)
        rank.inbox.pop(peer_id, None)

    def _end_read(self, rank: SimulatedRank, key: tuple[str, int], error: KVTransferError | None) -> None:
        read = rank.reads.pop(key)
        self.do(rank, rank.protocol.consumer.read_ended(read.order, error, self.now))
