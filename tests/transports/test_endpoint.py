"""The peer table keeps its promises, whatever a backend reports, and the checks detect it if it does not."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvferry.transports.base import MessageReceived, PeerLost, TransferEnded
from kvferry.transports.endpoint import (
    Backend,
    HandshakeLimits,
    Peer,
    PeerEndpoint,
    PeerState,
    PeerTable,
    Read,
)
from kvferry.transports.errors import (
    BackpressureError,
    ConfigurationError,
    KVTransferError,
    PeerLostError,
    RegionError,
    TransferTimeoutError,
)
from kvferry.transports.regions import Guard, RegionPairs
from kvferry.transports.testing.order import CheckedEndpoint, EventOrder

GUARD = Guard(0, 1)
PAIRS = RegionPairs(np.array([[0, 0, 8]], dtype=np.int64))
LIMITS = HandshakeLimits(timeout_s=5.0, max_connecting=4)


@dataclass(eq=False)
class Wire:
    """A connection of the random backend, and counts of the calls on it."""

    name: str
    num_hang_ups: int = 0
    num_releases: int = 0
    copying: set[int] = field(default_factory=set)


class RandomBackend(Backend[Wire]):
    """Reports events at random: at once or later, in any state, late and twice.

    It breaks no rule about memory.

    Args:
        now: The clock, which a wait advances.
    """

    def __init__(self, peers: PeerTable[Wire], rng: random.Random, now: list[float]) -> None:
        self._peers = peers
        self._rng = rng
        self._now = now
        self._names = itertools.count(1)
        self.wires: list[Wire] = []
        self.seen: list[Peer[Wire]] = []  # including lost ones
        self.reads: list[Read[Wire]] = []  # including ended ones
        self.is_calm = False

    def listen(self, address: str) -> str:
        return "random:here"

    def prepare(self, address: str) -> Wire:
        if address != "random:there":
            raise ConfigurationError("not an address", key="address", value=address)
        return self._wire()

    def _wire(self) -> Wire:
        wire = Wire(f"wire {next(self._names)}")
        self.wires.append(wire)
        return wire

    def connect(self, peer: Peer[Wire]) -> None:
        self.seen.append(peer)
        match self._rng.randrange(8):
            case 0:
                raise BackpressureError("no descriptors")
            case 1:
                raise PeerLostError("refused")
            case 2:
                raise ZeroDivisionError("a bug")
            case 3 | 4:
                self._peers.connected(peer)

    def hang_up(self, peer: Peer[Wire], error: KVTransferError) -> None:
        peer.connection.num_hang_ups += 1
        if self._rng.random() < 0.2:
            self._peers.lose(peer, PeerLostError("the socket says so too"))
        if self._rng.random() < 0.1:
            raise OSError("close failed")

    def release(self, peer: Peer[Wire]) -> None:
        assert not peer.connection.copying, "memory is freed during a copy"
        assert peer.connection.num_hang_ups == 1
        peer.connection.num_releases += 1

    def send(self, peer: Peer[Wire], message: bytes) -> None:
        assert peer.connection.num_hang_ups == 0

    def start_read(self, read: Read[Wire]) -> None:
        chance = self._rng.randrange(10)
        if chance == 0:
            raise RegionError("outside")
        self.reads.append(read)
        read.mechanism = "random"
        if chance == 1:
            raise ZeroDivisionError("a bug")
        if chance in (2, 3):
            self._peers.end_read(read)
        else:
            read.peer.connection.copying.add(read.transfer_id)

    def stop_read(self, read: Read[Wire]) -> bool:
        assert read.error is not None
        if self._rng.random() < 0.05:
            read.peer.connection.copying.discard(read.transfer_id)
            raise ZeroDivisionError("a bug")
        if self._rng.random() < 0.5:
            return read.transfer_id not in read.peer.connection.copying
        read.peer.connection.copying.discard(read.transfer_id)
        return True

    def turn(self, timeout_s: float) -> None:
        for _ in range(self._rng.randrange(4)):
            if self.is_calm:
                break
            self._happen()
        if not self._peers.has_events:
            self._now[0] += timeout_s

    def _happen(self) -> None:
        kind = self._rng.randrange(7)
        if kind == 0:
            peer = self._peers.add_incoming(self._wire())
            self.seen.append(peer)
        elif kind == 1 and self.seen:
            self._peers.connected(self._any_peer())
        elif kind == 2 and self.seen:
            self._peers.message(self._any_peer(), b"hello")
        elif kind == 3 and self.seen and self._rng.random() < 0.5:
            self._peers.lose(self._any_peer(), self._rng.choice([PeerLostError("gone"), ValueError("a bug")]))
        elif self.reads:
            self.end(self.reads[-self._rng.randint(1, min(8, len(self.reads)))])

    def _any_peer(self) -> Peer[Wire]:
        return self.seen[-self._rng.randint(1, min(8, len(self.seen)))]

    def end(self, read: Read[Wire]) -> None:
        read.peer.connection.copying.discard(read.transfer_id)
        self._peers.end_read(read)

    def interrupt(self) -> None:
        pass

    def stop_serving(self) -> None:
        for wire in self.wires:
            wire.copying.clear()

    def close(self) -> None:
        pass


Table = type[PeerTable[Wire]]


def play(seed: int, table_type: Table = PeerTable, num_steps: int = 150) -> None:
    """Let a random owner use an endpoint with a random backend, then let everything end."""
    rng = random.Random(seed)
    now = [1000.0]
    table = table_type(lambda peers: RandomBackend(peers, rng, now), LIMITS, clock=lambda: now[0])
    backend = table.backend
    assert isinstance(backend, RandomBackend)
    endpoint = CheckedEndpoint(PeerEndpoint("random", table))
    usable: list[int] = []
    for _ in range(num_steps):
        peer_id = rng.choice(usable) if usable else 0
        try:
            match rng.randrange(8):
                case 0:
                    usable.append(endpoint.start_connect("random:there", timeout_s=rng.uniform(0.1, 20)))
                case 1:
                    endpoint.send(peer_id, b"?")
                case 2 | 3 | 4:
                    endpoint.start_read(peer_id, PAIRS, GUARD, timeout_s=rng.uniform(0.01, 30))
                case 5 if rng.random() < 0.3:
                    endpoint.disconnect(peer_id)
        except (BackpressureError, PeerLostError, RegionError):
            pass
        usable += [e.peer_id for e in endpoint.wait_events(rng.choice([0.0, 0.5])) if hasattr(e, "incoming")]
    backend.is_calm = True
    endpoint.wait_events(100.0)  # all deadlines pass, and reads that can be stopped are stopped
    now[0] += 100.0
    endpoint.wait_events(0.0)
    for read in list(backend.reads):
        if read.transfer_id in read.peer.connection.copying:
            backend.end(read)
    endpoint.wait_events(0.0)
    assert not endpoint.order.unended, "reads never ended"
    assert not endpoint.order.connecting, "connections were neither established nor failed"
    assert math.isinf(table.next_deadline())
    endpoint.close()
    for wire in backend.wires:
        assert wire.num_hang_ups <= 1
        assert wire.num_releases == wire.num_hang_ups


@pytest.mark.parametrize("part", range(4))
def test_promises_hold_whatever_a_backend_reports(part: int) -> None:
    for seed in range(part * 60, part * 60 + 60):
        try:
            play(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


# -- planted bugs ------------------------------------------------------------------------------------


class ReportsAnEndTwice(PeerTable[Wire]):
    def end_read(
        self, read: Read[Wire], error: KVTransferError | None = None, *, ended_at: float | None = None
    ) -> None:
        if read.transfer_id not in self._reads:
            self._events.append(TransferEnded(read.transfer_id, error, 0, 0.0, ""))
        else:
            super().end_read(read, error, ended_at=ended_at)


class ReportsAMessageAfterTheLoss(PeerTable[Wire]):
    def message(self, peer: Peer[Wire], message: bytes) -> None:
        if peer.state is PeerState.LEAVING and peer.loss is not None:
            self._events.append(MessageReceived(peer.peer_id, message))
        else:
            super().message(peer, message)


class UsesIdsAgain(PeerTable[Wire]):
    def __init__(
        self,
        make_backend: Callable[[PeerTable[Wire]], Backend[Wire]],
        limits: HandshakeLimits,
        *,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(make_backend, limits, clock=clock)
        self._ids = itertools.cycle(range(1, 60))  # type: ignore[assignment]


class ReportsTheLossBeforeTheReads(PeerTable[Wire]):
    def _leave(self, peer: Peer[Wire], reason: KVTransferError, loss: PeerLost | None) -> None:
        if loss is not None:
            self._events.append(loss)
        super()._leave(peer, reason, None)


class ReportsPeersThatNeverCame(PeerTable[Wire]):
    def _leave(self, peer: Peer[Wire], reason: KVTransferError, loss: PeerLost | None) -> None:
        if peer.incoming:
            loss = PeerLost(peer.peer_id, reason)
        super()._leave(peer, reason, loss)


class ForgetsReadsOfADroppedPeer(PeerTable[Wire]):
    def disconnect(self, peer_id: int) -> None:
        super().disconnect(peer_id)
        self._events = [event for event in self._events if not isinstance(event, TransferEnded)]


class ReleasesMemoryBeforeTheReads(PeerTable[Wire]):
    def _leave(self, peer: Peer[Wire], reason: KVTransferError, loss: PeerLost | None) -> None:
        super()._leave(peer, reason, loss)
        if peer.reads:
            self.backend.release(peer)


PLANTED: list[Table] = [
    ReportsAnEndTwice,
    ReportsAMessageAfterTheLoss,
    UsesIdsAgain,
    ReportsTheLossBeforeTheReads,
    ReportsPeersThatNeverCame,
    ForgetsReadsOfADroppedPeer,
    ReleasesMemoryBeforeTheReads,
]


@pytest.mark.parametrize("table", PLANTED, ids=lambda table: table.__name__)
def test_a_planted_bug_is_found(table: Table) -> None:
    for seed in range(60):
        try:
            play(seed, table)
        except AssertionError:
            return
    pytest.fail("no seed found it")


# -- single promises ---------------------------------------------------------------------------------


class QuietBackend(RandomBackend):
    """Reports nothing by itself, and cannot interrupt reads."""

    def connect(self, peer: Peer[Wire]) -> None:
        self.seen.append(peer)

    def hang_up(self, peer: Peer[Wire], error: KVTransferError) -> None:
        peer.connection.num_hang_ups += 1

    def start_read(self, read: Read[Wire]) -> None:
        self.reads.append(read)
        read.peer.connection.copying.add(read.transfer_id)

    def stop_read(self, read: Read[Wire]) -> bool:
        return read.transfer_id not in read.peer.connection.copying


@dataclass
class Quiet:
    """An endpoint with a `QuietBackend`."""

    table: PeerTable[Wire]
    backend: QuietBackend
    endpoint: PeerEndpoint[Wire]
    now: list[float]

    def connect(self) -> Peer[Wire]:
        peer_id = self.endpoint.start_connect("random:there", timeout_s=5.0)
        peer = self.table.peer(peer_id)
        assert peer is not None
        self.table.connected(peer)
        self.endpoint.wait_events(0.0)
        return peer

    def start_read(self, peer: Peer[Wire], timeout_s: float = 5.0) -> Read[Wire]:
        self.endpoint.start_read(peer.peer_id, PAIRS, GUARD, timeout_s=timeout_s)
        return self.backend.reads[-1]


@pytest.fixture
def quiet() -> Quiet:
    now = [1000.0]
    table: PeerTable[Wire] = PeerTable(
        lambda peers: QuietBackend(peers, random.Random(0), now), LIMITS, clock=lambda: now[0]
    )
    assert isinstance(table.backend, QuietBackend)
    table.backend.is_calm = True
    return Quiet(table, table.backend, PeerEndpoint("random", table), now)


def test_the_first_reason_to_stop_a_read_is_reported(quiet: Quiet) -> None:
    peer = quiet.connect()
    read = quiet.start_read(peer, timeout_s=1.0)
    assert quiet.endpoint.wait_events(2.0) == []  # it has timed out, but cannot be stopped
    quiet.endpoint.disconnect(peer.peer_id)
    quiet.backend.end(read)
    (ended,) = quiet.endpoint.wait_events(0.0)
    assert isinstance(ended, TransferEnded)
    assert isinstance(ended.error, TransferTimeoutError)


def test_a_peer_dropped_while_it_leaves_is_not_reported_as_lost(quiet: Quiet) -> None:
    peer = quiet.connect()
    read = quiet.start_read(peer)
    quiet.table.lose(peer, PeerLostError("gone"))
    quiet.endpoint.disconnect(peer.peer_id)
    quiet.backend.end(read)
    assert [type(event) for event in quiet.endpoint.wait_events(0.0)] == [TransferEnded]


def test_a_leaving_peer_cannot_be_used(quiet: Quiet) -> None:
    peer = quiet.connect()
    quiet.start_read(peer)
    quiet.table.lose(peer, PeerLostError("gone"))
    with pytest.raises(PeerLostError):
        quiet.endpoint.send(peer.peer_id, b"?")
    with pytest.raises(PeerLostError):
        quiet.start_read(peer)


def test_a_second_end_is_ignored_and_logged(quiet: Quiet, caplog: pytest.LogCaptureFixture) -> None:
    read = quiet.start_read(quiet.connect())
    quiet.backend.end(read)
    quiet.backend.end(read)
    assert len(quiet.endpoint.wait_events(0.0)) == 1
    assert f"second end of transfer {read.transfer_id}" in caplog.text


def test_handshakes_are_bounded_in_number_and_time(quiet: Quiet) -> None:
    mine = [quiet.endpoint.start_connect("random:there", timeout_s=1.0) for _ in range(LIMITS.max_connecting)]
    with pytest.raises(BackpressureError, match="max_connecting"):
        quiet.endpoint.start_connect("random:there", timeout_s=1.0)
    theirs = [quiet.table.add_incoming(Wire("theirs")) for _ in range(LIMITS.max_connecting + 1)]
    assert [peer.state for peer in theirs[:2]] == [PeerState.LEAVING, PeerState.HANDSHAKING]
    quiet.endpoint.wait_events(0.5)
    assert quiet.endpoint.wait_events(0.5) != []
    quiet.endpoint.wait_events(LIMITS.timeout_s)
    assert {peer.state for peer in theirs} == {PeerState.LEAVING}
    assert [quiet.table.peer(peer_id) for peer_id in mine] == [None] * len(mine)


def test_a_message_before_the_handshake_is_over_costs_the_connection(quiet: Quiet) -> None:
    peer_id = quiet.endpoint.start_connect("random:there", timeout_s=1.0)
    (peer,) = quiet.backend.seen
    quiet.table.message(peer, b"too early")
    assert [type(event) for event in quiet.endpoint.wait_events(0.0)] == [PeerLost]
    assert quiet.table.peer(peer_id) is None


def test_deadlines_of_ended_reads_do_not_accumulate(quiet: Quiet) -> None:
    peer = quiet.connect()
    for _ in range(5000):
        quiet.backend.end(quiet.start_read(peer))
    quiet.endpoint.wait_events(0.0)
    assert len(quiet.table._deadlines) < 1000


def test_a_timer_fires_once_and_not_if_it_was_cancelled(quiet: Quiet) -> None:
    fired: list[str] = []
    quiet.table.call_at(1001.0, lambda: fired.append("kept"))
    quiet.table.cancel(quiet.table.call_at(1001.0, lambda: fired.append("cancelled")))
    quiet.endpoint.wait_events(5.0)
    assert fired == ["kept"]
    assert quiet.now[0] == 1005.0


def test_the_order_of_events_is_checked() -> None:
    order = EventOrder()
    order.connect_started(1)
    with pytest.raises(AssertionError, match="not connected"):
        order.happened(MessageReceived(1, b""))
    with pytest.raises(AssertionError, match="is unknown"):
        order.happened(PeerLost(2, PeerLostError("")))
