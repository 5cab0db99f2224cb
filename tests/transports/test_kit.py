"""The conformance kit passes a correct transport and catches each planted bug, with a message that names the
promise.
"""

from __future__ import annotations

import mmap
import os
import re
import resource
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from small_transport import LISTENERS, SLICE_BYTES, SmallBackend, SmallTransport, Wire

from kvferry.transports import Pool
from kvferry.transports._memory import MappedArena
from kvferry.transports.base import Arena, Endpoint, Event, PeerLost, TransferEnded
from kvferry.transports.endpoint import Peer, Read
from kvferry.transports.errors import ConfigurationError, KVTransferError
from kvferry.transports.regions import Guard, Int64Array
from kvferry.transports.testing import Link, TransportConformance, leaks, pairs_of
from kvferry.transports.testing.limits import give_back_freed_memory, resident_bytes
from kvferry.transports.testing.wrapping import WrappedEndpoint

#: What planted bugs leave behind. The test that runs them cleans up.
LEFT = ExitStack()


class _Conformance(TransportConformance):
    transport: type[SmallTransport] = SmallTransport

    @pytest.fixture
    def create(self) -> Any:
        return self.transport

    @pytest.fixture
    def read_unchecked(self) -> Any:
        def read(link: Link, remote_offset: int, num_bytes: int, guard: Guard) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(SmallBackend, "check", lambda *args: None)
                pairs = pairs_of((0, remote_offset, num_bytes))
                link.consumer.endpoint.start_read(link.producer_id, pairs, guard, timeout_s=20)

        return read

    @pytest.fixture
    def connect_raw(self) -> Any:
        def connect(address: str) -> socket.socket:
            listener: socket.socket = LISTENERS[address].strangers  # type: ignore[attr-defined]
            return socket.create_connection(listener.getsockname())

        return connect


class TestSmall(_Conformance):
    connect_raw = None  # frames are objects, and no stranger can send one


@dataclass(frozen=True)
class Planted:
    """A planted bug.

    Attributes:
        bug: A backend, endpoint or transport with the bug.
        test: The test of the kit that catches it.
        says: A part of the message: the promise and what was seen.
        id: Of parameters of that test, the one to run.
    """

    bug: type
    test: str
    says: str
    id: str = ""

    @property
    def name(self) -> str:
        return f"Test{self.bug.__name__}{next(i for i, one in enumerate(PLANTED) if one is self)}"

    @property
    def suite(self) -> type[TransportConformance]:
        bug: Any = self.bug

        class Transport(SmallTransport):
            if issubclass(bug, SmallBackend):
                backend = bug

            def _allocate(self, num_bytes: int) -> Arena:
                arena = super()._allocate(num_bytes)
                if bug is CopiesInAThreadThatNothingStops:  # it would crash this process
                    LEFT.callback(id, arena)
                return arena

            def _open(self, pool: Pool) -> Endpoint:
                inner = super()._open(pool)
                return bug(inner) if issubclass(bug, Endpoint) else inner

        kind = bug if issubclass(bug, SmallTransport) else Transport
        return type(self.name, (_Conformance,), {"transport": kind, "deadline_s": 1.0})


GUARDED = "broken promise: a read succeeds only if the guard still held after its last byte was copied"
ARRIVES = "broken promise: a read without an error has put all the right bytes in place"
UNTOUCHED = "broken promise: after a read has ended, or its endpoint is closed, nothing writes"
IN_ORDER = "broken promise: messages arrive whole, once each, and in the order"
SERVED = "broken promise: the owner of memory checks what a peer asks for"
LEFT_BEHIND = "the test left something behind"

PLANTED: list[Planted] = []
T = TypeVar("T", bound=type)


def caught_by(test: str, says: str, id: str = "") -> Callable[[T], T]:
    """Plant a bug that a test of the kit catches."""

    def plant(bug: T) -> T:
        PLANTED.append(Planted(bug, test, says, id))
        return bug

    return plant


# == bugs of a backend =============================================================================


@caught_by(
    "test_memory_that_is_reused_right_after_a_check_of_its_guard_is_never_delivered",
    f"{GUARDED}.*1 of 1 bytes are wrong.*255 instead of 1",
)
class ChecksTheGuardFirst(SmallBackend):
    def serve(self, wire: Wire, transfer_id: int, rows: Int64Array, guard: Guard) -> None:
        is_held = self.guards.holds(guard)
        self.post(wire.far, "data", transfer_id, is_held, self.gather(rows))


@caught_by(
    "test_memory_that_is_reused_during_a_read_is_never_delivered",
    f"{GUARDED}.*bytes are wrong.*255 instead of",
)
class ChecksTheGuardOnce(SmallBackend):
    """For the first slice of a read."""

    def serve(self, wire: Wire, transfer_id: int, rows: Int64Array, guard: Guard) -> None:
        checked = self.__dict__.setdefault("checked", {})
        if transfer_id not in checked:
            checked[transfer_id] = self.guards.holds(guard)
        self.post(wire.far, "data", transfer_id, checked[transfer_id], self.gather(rows))


@caught_by(
    "test_memory_that_is_reused_before_the_last_slice_is_copied_is_never_delivered",
    f"{GUARDED}.*5 of 17825797 bytes are wrong.*255 instead of 1",
)
class ChecksNoGuardOfAShortLastSlice(SmallBackend):
    def serve(self, wire: Wire, transfer_id: int, rows: Int64Array, guard: Guard) -> None:
        begun: set[int] = self.__dict__.setdefault("begun", set())
        is_short_last = transfer_id in begun and rows[:, 1].sum() < SLICE_BYTES
        begun.add(transfer_id)
        if is_short_last:
            self.post(wire.far, "data", transfer_id, True, self.gather(rows))
        else:
            super().serve(wire, transfer_id, rows, guard)


@caught_by("test_a_cleared_guard_is_stale", f"{GUARDED}.*error=None")
class IgnoresTheGuard(SmallBackend):
    def serve(self, wire: Wire, transfer_id: int, rows: Int64Array, guard: Guard) -> None:
        self.post(wire.far, "data", transfer_id, True, self.gather(rows))


@caught_by("test_a_guard_of_another_offer_is_stale", f"{GUARDED}.*error=None", "guard0")
class AcceptsAnyValueOfTheGuard(SmallBackend):
    def serve(self, wire: Wire, transfer_id: int, rows: Int64Array, guard: Guard) -> None:
        word = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int64 * 64).from_address(self.guards.address))
        self.post(wire.far, "data", transfer_id, bool(word[guard.index]), self.gather(rows))


@caught_by(
    "test_nothing_is_written_after_a_read_has_timed_out",
    f"{UNTOUCHED}.*the read had timed out.*bytes are wrong",
    "0",
)
@caught_by(
    "test_nothing_is_written_after_a_read_was_cancelled",
    f"{UNTOUCHED}.*the read was cancelled.*bytes are wrong",
    "0",
)
class WritesAfterTheEnd(SmallBackend):
    """Stopping a read forgets nothing, so the answer is still put into place."""

    def stop_read(self, read: Read[Wire]) -> bool:
        return True

    def release(self, peer: Peer[Wire]) -> None:
        pass


@caught_by(
    "test_nothing_is_written_after_a_peer_was_lost", f"{UNTOUCHED}.*the peer was lost.*bytes are wrong", "0"
)
@caught_by(
    "test_nothing_is_written_after_a_close", f"{UNTOUCHED}.*`close` had returned.*bytes are wrong", "0"
)
class CopiesInAThreadThatNothingStops(SmallBackend):
    def start_read(self, read: Read[Wire]) -> None:
        wire = read.peer.connection
        assert wire.far is not None
        self.check(read, wire.far.backend)
        there, rows = wire.far.backend, read.pairs.table

        def copy() -> None:
            for _ in range(30):
                self.place(rows, there.gather(rows[:, 1:]))
                time.sleep(0.005)

        thread = threading.Thread(target=copy)
        thread.start()
        LEFT.callback(thread.join)


@caught_by("test_scattered_regions_of_many_sizes", f"{ARRIVES}.*bytes are wrong")
class MixesUpOffsets(SmallBackend):
    def place(self, rows: Int64Array, data: bytes) -> None:
        super().place(rows[::-1], data)


@caught_by("test_a_read_larger_than_any_buffer", f"{ARRIVES}.*bytes are wrong")
class ReportsAPartAsTheWhole(SmallBackend):
    def take(self, wire: Wire, transfer_id: int, is_held: bool, data: bytes) -> None:
        if transfer_id in wire.pending:
            read, slices = wire.pending.pop(transfer_id)
            self.place(slices[0], data)
            self.peers.end_read(read)


@caught_by("test_a_read_beside_one_that_timed_out_gets_its_own_bytes", f"{ARRIVES}.*bytes are wrong")
class TakesLateBytesForAnother(SmallBackend):
    """Takes a slice for which no read waits for one of the read that does."""

    def take(self, wire: Wire, transfer_id: int, is_held: bool, data: bytes) -> None:
        if transfer_id not in wire.pending and wire.pending:
            transfer_id = next(iter(wire.pending))
        super().take(wire, transfer_id, is_held, data)


@caught_by(
    "test_a_peer_that_asks_and_takes_nothing_delays_no_other", "each read that `start_read` accepted ends"
)
class ServesOnePeerToTheEnd(SmallBackend):
    """Serves another peer only when the one before has asked for all that it wants."""

    def serve(self, wire: Wire, transfer_id: int, rows: Int64Array, guard: Guard) -> None:
        before = self.__dict__.setdefault("before", wire)
        if before is not wire and not before.is_cut and before.far is not None and before.far.pending:
            self.post(wire, "read", transfer_id, rows, guard)
            return
        self.before = wire
        super().serve(wire, transfer_id, rows, guard)


@caught_by(
    "test_what_waits_for_a_peer_that_reads_everything_again_and_again_is_bounded",
    r"broken promise: what waits for a peer that asks and takes nothing is bounded.*\d+ MiB more",
)
class ServesWithoutABound(SmallBackend):
    """It gathers whatever a peer asks for, also if the peer takes nothing."""

    def require_taken(self, wire: Wire) -> None:
        pass


@caught_by(
    "test_regions_outside_a_pool_are_refused",
    "broken promise: a read outside either pool.*the call raised nothing instead of RegionError",
    "row0",
)
class ChecksNoBounds(SmallBackend):
    def check(self, read: Read[Wire], there: SmallBackend) -> None:
        pass


@caught_by("test_the_owner_refuses_a_peer_that_asks_for_more", SERVED, "row1")
class ServesWhateverIsAsked(SmallBackend):
    def gather(self, rows: Int64Array) -> bytes:
        return bytes(int(rows[:, 1].sum()))


@caught_by("test_the_owner_refuses_a_peer_that_names_an_impossible_guard", SERVED, "guard1")
class ServesWithAnyGuard(SmallBackend):
    def serve(self, wire: Wire, transfer_id: int, rows: Int64Array, guard: Guard) -> None:
        super().serve(wire, transfer_id, rows, replace(guard, index=guard.index % 64))


@caught_by(
    "test_many_messages_at_once_keep_their_order",
    f"{IN_ORDER}.*number 0 differs: b'1999' of 4 bytes instead of b'0' of 1 bytes",
)
class ReordersMessages(SmallBackend):
    def turn(self, timeout_s: float) -> None:
        messages = [frame for frame in self.inbox if frame[1][0] == "message"]
        others = [frame for frame in self.inbox if frame[1][0] != "message"]
        self.inbox.clear()
        self.inbox.extend(others + messages[::-1])
        super().turn(timeout_s)


@caught_by("test_many_messages_at_once_keep_their_order", f"{IN_ORDER}.*2000 were sent")
class LosesMessages(SmallBackend):
    def send(self, peer: Peer[Wire], message: bytes) -> None:
        if message != b"1234":
            super().send(peer, message)


@caught_by(
    "test_messages_keep_their_order_both_ways", f"{IN_ORDER}.*of 65536 bytes instead of .* of 100000 bytes"
)
class TruncatesMessages(SmallBackend):
    def send(self, peer: Peer[Wire], message: bytes) -> None:
        super().send(peer, message[: 1 << 16])


@caught_by("test_a_message_is_not_repeated", f"{IN_ORDER}.*2 messages instead of 1")
class RepeatsMessages(SmallBackend):
    def send(self, peer: Peer[Wire], message: bytes) -> None:
        super().send(peer, message)
        super().send(peer, message)


@caught_by(
    "test_a_peer_that_does_not_drain_is_noticed",
    "broken promise: what waits for a peer is bounded.*256 messages of 1048576 bytes were accepted",
)
class QueuesWithoutBound(SmallBackend):
    def send(self, peer: Peer[Wire], message: bytes) -> None:
        self.post(peer.connection.far, "message", message)


@caught_by(
    "test_disconnect_is_reported_to_the_other_side_only",
    "broken promise: `disconnect` is reported to the other side by one `PeerLost`",
)
class NeverSaysGoodbye(SmallBackend):
    def hang_up(self, peer: Peer[Wire], error: KVTransferError) -> None:
        pass


@caught_by(
    "test_a_new_endpoint_at_an_old_address_is_a_new_peer",
    "broken promise: a peer whose endpoint was closed is lost.*with bytes of the new endpoint",
)
class ReadsTheSuccessor(SmallBackend):
    """It takes what listens at an address for the peer that once did, and does not notice that the peer is
    gone.
    """

    def start_read(self, read: Read[Wire]) -> None:
        there = LISTENERS.get(read.peer.connection.address)
        if there is None:
            return super().start_read(read)
        rows = read.pairs.table
        self.place(rows, there.gather(rows[:, 1:]))
        self.peers.end_read(read)

    def handle(self, wire: Wire, frame: tuple[Any, ...]) -> None:
        if frame != ("bye",):
            super().handle(wire, frame)


@caught_by(
    "test_waiting_ends_without_events",
    r"broken promise: `close` ends soon.*not ended after 1 s; it was at .*test_kit.py:.* in close",
)
class HangsInClose(SmallBackend):
    def close(self) -> None:
        super().close()
        threading.Event().wait()


@caught_by("test_wake_before_waiting_is_not_lost", "broken promise: `wake` ends.*it waited for")
class LosesWakes(SmallBackend):
    def interrupt(self) -> None:
        with self.changed:
            self.changed.notify_all()  # only a wait that has begun ends


@caught_by("test_one_address_serves_many", rf"{LEFT_BEHIND}.*thread 'copier', started at .*test_kit.py")
class LeavesAThread(SmallBackend):
    def listen(self, address: str) -> str:
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait, name="copier")
        LEFT.callback(thread.join)
        LEFT.callback(stop.set)
        thread.start()
        return super().listen(address)


@caught_by("test_one_address_serves_many", rf"{LEFT_BEHIND}.*IPv4 listener at 127.0.0.1:\d+")
class LeavesAListener(SmallBackend):
    def listen(self, address: str) -> str:
        LEFT.enter_context(socket.create_server(("127.0.0.1", 0)))
        return super().listen(address)


@caught_by("test_one_address_serves_many", rf"{LEFT_BEHIND}.*descriptor \d+: /dev/null")
class LeavesADescriptor(SmallBackend):
    def connect(self, peer: Peer[Wire]) -> None:
        super().connect(peer)
        LEFT.callback(os.close, os.open("/dev/null", os.O_RDONLY))


@caught_by("test_one_address_serves_many", rf"{LEFT_BEHIND}.*mapped memory '/memfd:peer-pool', 4096 bytes")
class LeavesAMapping(SmallBackend):
    def connect(self, peer: Peer[Wire]) -> None:
        super().connect(peer)
        descriptor = os.memfd_create("peer-pool")
        os.ftruncate(descriptor, 4096)
        mapping = mmap.mmap(descriptor, 4096)
        os.close(descriptor)
        LEFT.callback(mapping.close)


@caught_by("test_a_close_frees_its_address", "broken promise: `close` frees everything.*listen.*in use")
class LeavesItsAddress(SmallBackend):
    def stop_serving(self) -> None:
        kept = {address: backend for address, backend in LISTENERS.items() if backend is self}
        super().stop_serving()
        LISTENERS.update(kept)
        for address in kept:
            LEFT.callback(LISTENERS.pop, address, None)


@caught_by(
    "test_a_close_frees_its_address", "broken promise: `close` frees everything.*listener.sock'. still exist"
)
class LeavesASocketFile(SmallBackend):
    def listen(self, address: str) -> str:
        folder = LEFT.enter_context(tempfile.TemporaryDirectory())
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(f"{folder}/listener.sock")
        self.unix.listen()
        return super().listen(address)

    def close(self) -> None:
        super().close()
        self.unix.close()


@caught_by(
    "test_nonsense_costs_only_its_own_connection",
    r"broken promise: a frame whose length the protocol forbids.*took \d+ bytes of nonsense",
    "piece0",
)
class TakesAFrameOfAnyLength(SmallBackend):
    """It receives until the announced number of bytes has come, however large that is."""

    def listen(self, address: str) -> str:
        self.strangers = socket.create_server(("127.0.0.1", 0))
        self.strangers.settimeout(0.001)
        self.connections: list[socket.socket] = []
        return super().listen(address)

    def turn(self, timeout_s: float) -> None:
        super().turn(timeout_s)
        if hasattr(self, "strangers"):
            with suppress(TimeoutError):
                self.connections.append(self.strangers.accept()[0])
            for connection in self.connections:
                with suppress(BlockingIOError):
                    connection.recv(1 << 20, socket.MSG_DONTWAIT)

    def close(self) -> None:
        super().close()
        if hasattr(self, "strangers"):
            for sock in [self.strangers, *self.connections]:
                sock.close()


# == bugs of an endpoint or a transport ============================================================


@caught_by(
    "test_the_side_that_accepted_can_read_too",
    "broken promise: each read ends with exactly one `TransferEnded`.*transfer 999 was never started",
)
class ReportsUnknownReads(WrappedEndpoint):
    def wait_events(self, timeout_s: float) -> list[Event]:
        events = super().wait_events(timeout_s)
        return [replace(e, transfer_id=999) if isinstance(e, TransferEnded) else e for e in events]


@caught_by(
    "test_reads_end_before_their_peer_is_lost",
    r"broken promise: the reads from a peer end before its `PeerLost`.*lost before its transfers",
)
class EndsReadsAfterTheLoss(WrappedEndpoint):
    def wait_events(self, timeout_s: float) -> list[Event]:
        return sorted(super().wait_events(timeout_s), key=lambda event: isinstance(event, TransferEnded))


@caught_by(
    "test_disconnect_is_reported_to_the_other_side_only",
    "broken promise: `PeerLost` is the last event of a peer.*lost or disconnected already",
)
class ReportsItsOwnDisconnect(WrappedEndpoint):
    def disconnect(self, peer_id: int) -> None:
        super().disconnect(peer_id)
        self.lost = [PeerLost(peer_id, KVTransferError("disconnected"))]

    def wait_events(self, timeout_s: float) -> list[Event]:
        lost, self.lost = self.__dict__.get("lost", []), []
        return [*super().wait_events(timeout_s), *lost]


@caught_by(
    "test_connecting_to_a_closed_address_ends_in_time",
    "broken promise: whatever fails, the event has an error.*an error without text",
)
class FailsWithoutText(WrappedEndpoint):
    def wait_events(self, timeout_s: float) -> list[Event]:
        events = super().wait_events(timeout_s)
        return [replace(e, error=KVTransferError()) if isinstance(e, PeerLost) else e for e in events]


@caught_by(
    "test_a_cleared_guard_is_stale",
    r"broken promise: a read that fails ends with a `TransportError`.*OSError\('no'\)",
)
class FailsWithAForeignError(WrappedEndpoint):
    def wait_events(self, timeout_s: float) -> list[Event]:
        events: list[Any] = super().wait_events(timeout_s)
        return [
            replace(e, error=OSError("no")) if isinstance(e, TransferEnded) and e.error else e for e in events
        ]


@caught_by(
    "test_reads_end_before_their_peer_is_lost",
    r"broken promise: the reads from a peer end before its `PeerLost`.*lost before its transfers",
)
class ForgetsReadsOfLostPeers(WrappedEndpoint):
    def wait_events(self, timeout_s: float) -> list[Event]:
        events = super().wait_events(timeout_s)
        return [e for e in events if not (isinstance(e, TransferEnded) and e.error)]


@caught_by(
    "test_the_side_that_accepted_can_read_too",
    r"broken promise: each read ends with exactly one `TransferEnded`.*ended twice",
)
class ReportsEndsTwice(WrappedEndpoint):
    def wait_events(self, timeout_s: float) -> list[Event]:
        events = super().wait_events(timeout_s)
        return events + [event for event in events if isinstance(event, TransferEnded)]


@caught_by(
    "test_connecting_to_a_peer_that_stopped_ends_in_time",
    "broken promise: `Connected` or `PeerLost` follows a `start_connect` within `timeout_s`",
)
@caught_by(
    "test_a_read_from_a_peer_that_stopped_ends_in_time",
    "broken promise: each read that `start_read` accepted ends",
)
class HasNoDeadlines(WrappedEndpoint):
    def start_connect(self, address: str, *, timeout_s: float) -> int:
        return super().start_connect(address, timeout_s=1e6)

    def start_read(self, peer_id: int, pairs: Any, guard: Guard, *, timeout_s: float) -> int:
        return super().start_read(peer_id, pairs, guard, timeout_s=1e6)


@caught_by(
    "test_a_peer_that_connects_again_is_a_new_peer", "broken promise: ids of peers are never used twice"
)
class UsesPeerIdsAgain(WrappedEndpoint):
    def start_connect(self, address: str, *, timeout_s: float) -> int:
        super().start_connect(address, timeout_s=timeout_s)
        return 1


@caught_by(
    "test_memory_of_an_arena_stays_mapped_until_close",
    "broken promise: the memory of an arena stays mapped until `close`.*are no longer mapped",
)
class LetsGoOfArenas(SmallTransport):
    def allocate(self, num_bytes: int) -> Arena:
        return self._allocate(num_bytes)


@caught_by(
    "test_impossible_allocations_are_refused",
    r"broken promise: an arena of \d+ bytes is refused before the kernel is asked.*File too large",
)
class AsksTheKernelForPages(SmallTransport):
    """It takes what the kernel gives, as a file in memory, and refuses what it does not give."""

    def _allocate(self, num_bytes: int) -> Arena:
        # Without a limit the kernel would give pages until it kills processes.
        assert num_bytes < 1 << 30 or resource.getrlimit(resource.RLIMIT_FSIZE)[0] <= 1 << 30
        descriptor = os.memfd_create("arena")
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            return MappedArena(mmap.mmap(descriptor, num_bytes), num_bytes)
        except OSError as error:
            raise ConfigurationError(f"cannot allocate {num_bytes} bytes: {error}") from error
        finally:
            os.close(descriptor)


@caught_by(
    "test_an_unknown_option_is_named",
    "broken promise: an unknown option is refused.*raised nothing instead of ConfigurationError",
)
class IgnoresUnknownOptions(SmallTransport):
    def __init__(self, options: object) -> None:
        super().__init__()


@caught_by("test_one_pool_is_registered", "broken promise: one pool is registered per transport")
class RegistersTwice(SmallTransport):
    def register(self, pool: Pool) -> Endpoint:
        self._endpoint = None
        return super().register(pool)


@dataclass
class Recorder:
    """Collects what an inner run of pytest reports."""

    text: str = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.text += str(report.longrepr or "")


@pytest.mark.slow  # all in all
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name.removeprefix("Test"))
def test_a_planted_bug_is_caught(planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test of the kit that should catch it, in this process."""
    (tmp_path / f"{planted.name}.py").write_text(
        f"import sys\nhere = sys.modules[{__name__!r}]\n"
        f"{planted.name} = here.PLANTED[{PLANTED.index(planted)}].suite\n"
    )
    parameter = f"[{planted.id}]" if planted.id else ""
    test = f"{tmp_path}/{planted.name}.py::{planted.name}::{planted.test}{parameter}"
    off = [f"-pno:{name}" for name in ("terminal", "cacheprovider", "asyncio", "faulthandler", "xdist")]
    recorder = Recorder()
    monkeypatch.setattr(leaks, "SETTLE_S", 0.2)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with LEFT:
        status = pytest.main(
            [*off, "--rootdir", str(tmp_path), "-c", os.devnull, test],
            plugins=[recorder],
        )
    assert status == pytest.ExitCode.TESTS_FAILED, "the kit did not notice"
    assert re.search(planted.says, recorder.text, flags=re.DOTALL), recorder.text[-2000:]


def test_growth_is_seen_however_much_memory_was_freed_before() -> None:
    def allocate() -> list[bytes]:
        return [b"x" * (900 << 10) for _ in range(200)]

    bytes(1 << 20)  # after this was freed, the C library takes anything smaller from its heap
    before = allocate()
    kept = before[-1]  # the end of the heap: what lies before it cannot shrink away
    del before
    give_back_freed_memory()
    resident = resident_bytes()
    now = allocate()
    assert resident_bytes() - resident > 150 << 20
    del kept, now


def test_capabilities_that_are_not_declared_are_named_by_one_skipped_test() -> None:
    class Undeclared(TransportConformance):
        pass

    class HalfDeclared(Undeclared):
        connect_raw = None

        @pytest.fixture
        def read_unchecked(self) -> Any:
            return None

    needy: Any = "test_the_owner_refuses_a_peer_that_asks_for_more"
    assert getattr(Undeclared, needy) is None
    with pytest.raises(
        pytest.skip.Exception, match="Undeclared: not declared: `read_unchecked`.*`connect_raw`"
    ):
        Undeclared().test_all_capabilities_are_declared()  # type: ignore[attr-defined]
    assert getattr(HalfDeclared, needy) is getattr(TransportConformance, needy)
    assert HalfDeclared.test_nonsense_costs_only_its_own_connection is None
    assert HalfDeclared.test_all_capabilities_are_declared is None  # type: ignore[attr-defined]


class WithoutCapabilities(_Conformance):
    """Its fixtures return None, and one is None."""

    on_guard_check = None

    @pytest.fixture
    def read_unchecked(self) -> Any:
        return None

    @pytest.fixture
    def connect_raw(self) -> Any:
        return None


def test_a_fixture_that_returns_none_is_a_reason_to_skip(tmp_path: Path) -> None:
    (tmp_path / "test_transport_without.py").write_text(
        f"import sys\nTestNone = sys.modules[{__name__!r}].WithoutCapabilities\n"
    )
    wanted = "asks_for_more or impossible_guard or again_and_again or kept or nonsense or right_after_a_check"
    off = [f"-pno:{name}" for name in ("terminal", "cacheprovider", "asyncio", "faulthandler", "xdist")]
    recorder = Recorder()
    status = pytest.main(
        [*off, "--rootdir", str(tmp_path), "-c", os.devnull, "-k", wanted, str(tmp_path)], plugins=[recorder]
    )
    assert status == pytest.ExitCode.OK, recorder.text
    for name in ("read_unchecked", "connect_raw"):
        assert f"this test needs `{name}`, and the fixture returned None" in recorder.text
