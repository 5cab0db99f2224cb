"""Two nodes, a wire and an owner of memory around `Reader` and `Server` of `transports.sliced`, in small
steps.

`explore_wire` takes every order of the steps, with every loss, and checks the promises after each step.
There are no sockets, no threads and no clock, so each schedule can be repeated.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvferry.transports import sliced
from kvferry.transports._slices import SlicePlan
from kvferry.transports.errors import ChecksumError, KVTransferError, StaleRegionError, TransportError
from kvferry.transports.movers import Mover, Ring, StagingBuffer, Ticket
from kvferry.transports.regions import AddressArray, Guard, Int64Array
from kvferry.transports.sliced import SliceState, Transfer, Verdict

from .explore import PromiseBroken, explore

#: What the bytes of the owner's pool are while the guard holds, and after the owner has reused them.
PROMISED, REUSED = 1, 2
#: What changes on its way; what the reader's owner writes into regions of a read that has ended.
CORRUPT, POISON = 3, 99

GUARD = Guard(0, 7)
WINDOW = 2
SLICE_BYTES = 2

Step = tuple[Any, ...]


@dataclass(frozen=True)
class Wire:
    """How a transport moves slices.

    Attributes:
        is_together: The last byte and the verdict arrive at the same time.
        can_divert: Bytes of a read that was stopped can be kept from their target.
        is_apart: Bytes arrive in memory of the transport's own.
        is_late: Bytes leave straight from the pool after the owner was asked for its verdict.
        staged, gathered: The bytes pass through staging buffers at the reader, and at the owner.
        num_buffers: Of the reader. With one, slices wait for it; with two, copies run at the same time.
    """

    name: str
    is_together: bool
    can_divert: bool
    is_apart: bool = False
    is_late: bool = False
    staged: bool = False
    gathered: bool = False
    num_buffers: int = 1

    def __str__(self) -> str:
        return f"{self.name}{', staged' * self.staged * self.num_buffers}{', gathered' * self.gathered}"

    def with_buffers(self, staged: bool, gathered: bool) -> Wire:
        """Return the same wire between pools of another kind."""
        return replace(self, staged=staged, gathered=gathered)


def bytes_at(address: int, num_bytes: int = SLICE_BYTES) -> bytes:
    return ctypes.string_at(address, num_bytes)


def put(address: int, value: int) -> None:
    ctypes.memset(address, value, 1)


class Buffers(Ring):
    """A few buffers. To give one back twice is an error."""

    def __init__(self, count: int) -> None:
        self.memory = np.zeros((count, SLICE_BYTES), dtype=np.uint8)
        self.free = [StagingBuffer(int(row.ctypes.data), SLICE_BYTES, self.memory) for row in self.memory]
        self.count = count
        self.waiting: dict[object, Callable[[], None]] = {}

    def take(self, num_bytes: int) -> StagingBuffer | None:
        return self.free.pop(0) if self.free else None

    def give_back(self, buffer: StagingBuffer) -> None:
        assert buffer not in self.free, "a buffer comes back once"
        self.free.append(buffer)
        if self.waiting:
            self.waiting.pop(next(iter(self.waiting)))()

    def when_free(self, waiter: object, call: Callable[[], None]) -> None:
        self.waiting.setdefault(waiter, call)

    def forget(self, waiter: object) -> None:
        self.waiting.pop(waiter, None)

    def is_awaited(self, besides: object) -> bool:
        return any(waiter is not besides for waiter in self.waiting)


@dataclass(eq=False)
class Copy:
    """A copy that moves its first byte when it starts, and the second one when it ends."""

    source: int
    target: int
    ticket: Ticket = field(default_factory=Ticket)


class SlowMover(Mover):
    """Copies end when a step says so, in order."""

    kind = "cuda"
    needs_staging = True

    def __init__(self, count: int) -> None:
        self.gather_ring, self.scatter_ring = Buffers(count), Buffers(count)
        self.gathers: list[Copy] = []
        self.scatters: list[Copy] = []

    def start_gather(self, buffer_address: int, sources: AddressArray, lengths: Int64Array) -> Ticket:
        return self._start(self.gathers, int(sources[0]), buffer_address)

    def start_scatter(self, targets: AddressArray, buffer_address: int, lengths: Int64Array) -> Ticket:
        return self._start(self.scatters, buffer_address, int(targets[0]))

    def start_scatter_each(self, targets: AddressArray, sources: AddressArray, lengths: Int64Array) -> Ticket:
        raise NotImplementedError

    def _start(self, copies: list[Copy], source: int, target: int) -> Ticket:
        copy = Copy(source, target)
        put(target, bytes_at(source, 1)[0])
        copies.append(copy)
        return copy.ticket

    def end(self, copies: list[Copy], error: KVTransferError | None) -> None:
        copy = copies.pop(0)
        put(copy.target + 1, bytes_at(copy.source + 1, 1)[0])
        copy.ticket.end(error)


class HostMover(SlowMover):
    """The copies of main memory."""

    needs_staging = False

    def start_scatter(self, targets: AddressArray, buffer_address: int, lengths: Int64Array) -> Ticket:
        ticket = super().start_scatter(targets, buffer_address, lengths)
        self.end(self.scatters, None)
        return ticket


@dataclass(eq=False, slots=True)
class Piece(sliced.Slice):
    """A slice that records its transitions.

    Attributes:
        data: Its bytes, if they arrive in memory of the transport's own.
        target, given: Where they arrive otherwise, as it was when it was fetched.
    """

    data: bytearray = field(default_factory=bytearray, init=False)
    target: int = field(default=0, init=False)
    given: StagingBuffer | None = field(default=None, init=False)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "state":
            Nodes.transitions.add((getattr(self, "state", None), value))
        object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Fetch:
    tag: tuple[int, int]
    rows: Int64Array
    guard: Guard = GUARD

    @property
    def num_bytes(self) -> int:
        return int(self.rows[:, 1].sum())


class ModelReader(sliced.Reader[Piece]):
    def __init__(self, nodes: Nodes, mover: Mover) -> None:
        super().__init__(mover, WINDOW, nodes.end_read, nodes.fail)
        self.nodes = nodes
        self.arrives_apart = nodes.wire.is_apart

    def needs_buffer(self, rows: Int64Array, num_bytes: int) -> bool:
        return num_bytes > 0 and self.nodes.wire.staged and not self.nodes.wire.is_apart

    def make_slice(
        self, transfer: Transfer, index: int, rows: Int64Array, num_bytes: int, buffer: StagingBuffer | None
    ) -> Piece:
        return Piece(transfer, index, (transfer.read.transfer_id, index), rows, num_bytes, buffer)

    def send_fetch(self, piece: Piece) -> None:
        assert piece.tag not in self.nodes.all_fetched, "a slice is fetched once"
        self.nodes.all_fetched.add(piece.tag)
        piece.given = piece.buffer
        if piece.num_bytes:
            piece.target = piece.buffer.address if piece.buffer is not None else int(piece.targets[0])
        self.nodes.fetches[piece.tag] = Fetch(piece.tag, piece.rows)

    def divert(self, piece: Piece) -> bool:
        return self.nodes.wire.can_divert

    def start_scatter(self, piece: Piece) -> Ticket:
        if not piece.data:
            return super().start_scatter(piece)
        source = np.frombuffer(bytes(piece.data), dtype=np.uint8)
        if piece.buffer is None:
            return self._mover.start_scatter(piece.targets, int(source.ctypes.data), piece.lengths)
        ctypes.memmove(piece.buffer.address, bytes(piece.data), SLICE_BYTES)
        return super().start_scatter(piece)


@dataclass(eq=False, slots=True)
class Outgoing(sliced.Answer[Fetch]):
    """An answer on its way.

    Attributes:
        data: Its bytes, if they were copied when it was sent.
        num_moved: How many bytes have left.
        verdict: The owner's, once it is known.
    """

    data: bytes = field(default=b"", init=False)
    num_moved: int = field(default=0, init=False)
    is_corrupt: bool = field(default=False, init=False)
    verdict: Verdict | None = field(default=None, init=False)


class ModelServer(sliced.Server[Fetch, Outgoing]):
    def __init__(self, nodes: Nodes, served: Any) -> None:
        super().__init__(served, 1 << 20, nodes.fail)
        self.nodes = nodes

    def make_answer(self, fetch: Fetch, addresses: AddressArray) -> Outgoing:
        return Outgoing(fetch, addresses)

    def is_gathered(self, fetch: Fetch) -> bool:
        return self.nodes.wire.gathered

    def send(self, answer: Outgoing) -> None:
        self.nodes.outgoing[answer.fetch.tag] = answer
        if self.nodes.wire.is_late:
            is_straight = answer.has_bytes and answer.buffer is None
            if answer.buffer is not None:
                answer.data = bytes_at(answer.buffer.address)
            is_held = self.left(answer)
            answer.has_bytes &= is_held
            answer.verdict = (Verdict.LATER if is_straight else Verdict.HELD) if is_held else Verdict.STALE
        elif not answer.has_bytes:
            answer.verdict = Verdict.HELD if self.left(answer) else Verdict.STALE


class Nodes:
    """One reader, one owner, and what is between them.

    Args:
        num_slices: Of each read.
        num_faults: The most that go wrong: the owner reuses its memory, a byte changes, a copy fails, a read
            is stopped, the connection is closed.
    """

    transitions: set[tuple[SliceState | None, SliceState]] = set()  # noqa: RUF012 - of all runs

    def __init__(self, wire: Wire, num_slices: tuple[int, ...], num_faults: int) -> None:
        self.wire = wire
        self.faults_left = num_faults
        total = sum(num_slices) * SLICE_BYTES
        self.theirs = np.full(total or 1, PROMISED, dtype=np.uint8)
        self.ours = np.zeros(total or 1, dtype=np.uint8)
        self.holds = True
        self.is_closed = False
        self.faults: set[str] = set()
        self.all_fetched: set[tuple[int, int]] = set()
        self.fetches: dict[tuple[int, int], Fetch] = {}
        self.outgoing: dict[tuple[int, int], Outgoing] = {}
        self.arrived_only: set[tuple[int, int]] = set()  # whose bytes were reported
        self.judged_only: set[tuple[int, int]] = set()  # whose verdict was reported
        self.ends: dict[int, list[Any]] = {}
        self.mover = SlowMover(wire.num_buffers) if wire.staged else HostMover(1)
        self.owners_mover = SlowMover(1)
        base = int(self.theirs.ctypes.data)
        served = SimpleNamespace(
            mover=self.owners_mover,
            guards=SimpleNamespace(holds=lambda guard: self.holds),
            locate=lambda rows, guard: (rows[:, 0] + base).astype(np.uint64),
        )
        self.reader, self.server = ModelReader(self, self.mover), ModelServer(self, served)
        self.reads: dict[int, tuple[Any, slice]] = {}
        begin = 0
        for read_id, count in enumerate(num_slices):
            offsets = np.arange(begin, begin + count * SLICE_BYTES, SLICE_BYTES)
            rows = np.stack([offsets, np.full(count, SLICE_BYTES)], axis=1).astype(np.int64)
            targets = (offsets + int(self.ours.ctypes.data)).astype(np.uint64)
            bounds = np.append(np.arange(count + 1), count)
            read = SimpleNamespace(transfer_id=read_id, guard=GUARD, error=None)
            self.reads[read_id] = read, slice(begin, begin + count * SLICE_BYTES)
            begin += count * SLICE_BYTES
            self.reader.start(read, SlicePlan(rows, targets, bounds))  # type: ignore[arg-type]

    # -- what the machines report ----------------------------------------------------------------------

    def end_read(self, read: Any, error: KVTransferError | None = None) -> None:
        self.ends.setdefault(read.transfer_id, []).append(read.error or error)
        region = self.ours[self.reads[read.transfer_id][1]]
        if read.error is None and error is None:
            assert (region == PROMISED).all(), "a read delivers only bytes that the guard promised"
        region[:] = POISON  # from now on they are not the reader's

    def fail(self, error: Exception) -> None:
        assert isinstance(error, TransportError), f"only a copy fails here, not {error!r}"
        self.close()

    # -- steps -----------------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[Callable[..., None], Step]]:
        """Yield everything that may happen next."""
        for tag in list(self.fetches):
            yield self.serve, (tag,)
        for tag, answer in list(self.outgoing.items()):
            if answer.has_bytes and answer.num_moved < SLICE_BYTES:
                yield self.move, (tag,)
            elif self.wire.is_together:
                yield self.deliver_all, (tag,)
            else:
                if tag not in self.arrived_only:
                    yield self.deliver_bytes, (tag,)
                if tag not in self.judged_only:
                    yield self.deliver_verdict, (tag,)
        if self.mover.scatters:
            yield self.end_scatter, (None,)
        if self.owners_mover.gathers:
            yield self.end_gather, (None,)
        if not self.faults_left or self.is_closed:
            return
        if self.holds:
            yield self.reuse, ()
        for tag, answer in self.outgoing.items():
            if self.wire.is_together and answer.num_moved and not answer.is_corrupt:
                yield self.corrupt, (tag,)
        if self.mover.scatters:
            yield self.end_scatter, ("the GPU failed",)
        if self.owners_mover.gathers:
            yield self.end_gather, ("the GPU failed",)
        for read_id in self.reads:
            if read_id not in self.ends:
                yield self.stop, (read_id,)
        yield self.close, ()

    def _fault(self, name: str) -> None:
        self.faults_left -= 1
        self.faults.add(name)

    def serve(self, tag: tuple[int, int]) -> None:
        """The owner receives a fetch."""
        self.server.answer(self.fetches.pop(tag))

    def move(self, tag: tuple[int, int]) -> None:
        """One byte leaves the owner's memory, and arrives."""
        answer, at = self.outgoing[tag], self.outgoing[tag].num_moved
        if answer.data:
            value = answer.data[at]
        else:
            address = answer.buffer.address if answer.buffer is not None else int(answer.addresses[0])
            value = bytes_at(address + at, 1)[0]
        piece = self.reader._slices[tag]
        if self.wire.is_apart:
            piece.data.append(value)
        elif piece.state is SliceState.FETCHED:
            ring = self.mover.scatter_ring
            assert isinstance(ring, Buffers)
            assert piece.given not in ring.free, "bytes arrive in a buffer that is in use"
            put(piece.target + at, value)
        answer.num_moved += 1
        if answer.num_moved == SLICE_BYTES and not self.wire.is_late:
            answer.verdict = Verdict.HELD if self.server.left(answer) else Verdict.STALE

    def deliver_all(self, tag: tuple[int, int]) -> None:
        """The reader learns of the last byte and of the verdict."""
        answer = self.outgoing.pop(tag)
        assert answer.verdict is not None
        piece = self.reader.find(tag)
        error = ChecksumError("corrupt") if answer.is_corrupt else None
        self.reader.answered(piece, answer.verdict)
        self.reader.arrived(piece, error)

    def deliver_bytes(self, tag: tuple[int, int]) -> None:
        """UCX reports the last byte."""
        self.arrived_only.add(tag)
        self.reader.arrived(self.reader._slices[tag])
        self._forget_if_delivered(tag)

    def deliver_verdict(self, tag: tuple[int, int]) -> None:
        """The verdict comes, before the bytes or after them."""
        verdict = self.outgoing[tag].verdict
        assert verdict is not None
        self.judged_only.add(tag)
        self.reader.answered(self.reader.find(tag), verdict)
        self._forget_if_delivered(tag)

    def _forget_if_delivered(self, tag: tuple[int, int]) -> None:
        if tag in self.arrived_only and tag in self.judged_only:
            del self.outgoing[tag]

    def end_scatter(self, failure: str | None) -> None:
        self._end(self.mover, self.mover.scatters, failure)

    def end_gather(self, failure: str | None) -> None:
        self._end(self.owners_mover, self.owners_mover.gathers, failure)

    def _end(self, mover: SlowMover, copies: list[Copy], failure: str | None) -> None:
        if failure is not None:
            self._fault("copy failed")
        mover.end(copies, TransportError(failure) if failure is not None else None)

    def reuse(self) -> None:
        """The owner clears the guard, and then writes to its memory."""
        self._fault("reused")
        self.holds = False
        self.theirs[:] = REUSED
        for answer in self.outgoing.values():
            # The sum may be of what was there, and the rest of the bytes are others.
            if (
                self.wire.is_together
                and not answer.data
                and answer.buffer is None
                and answer.num_moved < SLICE_BYTES
            ):
                answer.is_corrupt = answer.has_bytes

    def corrupt(self, tag: tuple[int, int]) -> None:
        """A byte is not what it was when it left."""
        self._fault("corrupt")
        self.outgoing[tag].is_corrupt = True
        piece = self.reader._slices[tag]
        if self.wire.is_apart:
            piece.data[0] = CORRUPT
        elif piece.state is SliceState.FETCHED:
            put(piece.target, CORRUPT)

    def stop(self, read_id: int) -> None:
        """The reader's owner gives a read up."""
        self._fault("stopped")
        self._stop(read_id)

    def _stop(self, read_id: int) -> None:
        read = self.reads[read_id][0]
        read.error = read.error or TransportError("stopped")
        if self.reader.stop(read):
            self.end_read(read)

    def close(self) -> None:
        """The connection is gone: nothing arrives or leaves any more."""
        self._fault("closed")
        self.is_closed = True
        self.fetches.clear()
        for answer in self.outgoing.values():
            if answer.verdict is None:
                self.server.forget(answer)
        self.outgoing.clear()
        self.reader.close()
        self.server.close()
        for read_id in self.reads:
            if read_id not in self.ends:
                self._stop(read_id)

    # -- promises --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check what holds after every step."""
        in_flight = {*self.fetches, *self.outgoing}
        assert self.is_closed or len(in_flight) <= WINDOW + 1, "a window bounds what is on its way"
        for read_id, ends in self.ends.items():
            assert len(ends) == 1, "a read ends once"
            region = self.ours[self.reads[read_id][1]]
            assert (region == POISON).all(), "nothing is written into the regions of a read that has ended"

    def check_end(self) -> None:
        """Check what holds when nothing can happen any more."""
        assert self.ends.keys() == self.reads.keys(), "every read ends"
        for mover in (self.mover, self.owners_mover):
            for ring in (mover.gather_ring, mover.scatter_ring):
                assert isinstance(ring, Buffers)
                assert len(ring.free) == ring.count, "every buffer comes back"
                assert not ring.waiting, "no one waits for a buffer"
        assert not self.reader._transfers, "no read is kept"
        assert not self.reader.num_in_flight, "no slice keeps its place in the window"
        assert self.is_closed or not self.server.num_unsent, "no answer is kept"
        for (error,) in self.ends.values():
            assert error is None or self.faults, "a read fails only for a reason"
            if isinstance(error, StaleRegionError):
                assert "reused" in self.faults, "a guard that held is not stale"
            if isinstance(error, ChecksumError):
                assert "corrupt" in self.faults, "bytes that did not change are not corrupt"

    def snapshot(self) -> object:
        """Return everything on which the future depends."""
        reader, server = self.reader, self.server

        def seen(buffer: StagingBuffer | None) -> object:
            return None if buffer is None else bytes_at(buffer.address)

        def answer(found: Outgoing) -> object:
            moved = found.num_moved, found.data, found.verdict, found.is_corrupt
            return found.fetch.tag, seen(found.buffer), found.has_bytes, found.is_held, moved

        def piece(found: Piece) -> object:
            return found.tag, found.state, found.is_answered, seen(found.buffer), bytes(found.data)

        return (
            self.faults_left,
            self.holds,
            self.is_closed,
            frozenset(self.faults),
            self.theirs.tobytes(),
            self.ours.tobytes(),
            tuple(self.fetches),
            tuple(map(answer, self.outgoing.values())),
            frozenset(self.arrived_only),
            frozenset(self.judged_only),
            tuple((key, tuple(type(error) for error in ends)) for key, ends in sorted(self.ends.items())),
            tuple(map(piece, reader._slices.values())),
            tuple(map(piece, reader._arrived)),
            tuple(
                (key, t.num_slices, t.num_fetched, t.num_done, t.num_scattering)
                + (t.is_settled, t.is_stopped, t.is_doubtful, type(t.error))
                for key, t in sorted(reader._transfers.items())
            ),
            tuple(map(answer, server._waiting)),
            server.num_unsent,
            tuple(bytes_at(copy.source) for copy in self.mover.scatters),
            tuple(bytes_at(copy.target) for copy in self.owners_mover.gathers),
            len(self.mover.scatter_ring.free),  # type: ignore[attr-defined]
            len(self.owners_mover.gather_ring.free),  # type: ignore[attr-defined]
        )


@dataclass
class SlicedState:
    """Two nodes after some steps. They are made again by taking the steps again."""

    wire: Wire
    num_slices: tuple[int, ...]
    num_faults: int
    path: tuple[tuple[str, Step], ...] = ()

    def __post_init__(self) -> None:
        self.nodes = Nodes(self.wire, self.num_slices, self.num_faults)
        for choice in self.path:
            self._take(choice)

    def _take(self, choice: tuple[str, Step]) -> None:
        name, arguments = choice
        getattr(self.nodes, name)(*arguments)

    def choices(self) -> list[tuple[str, Step]]:
        return [(step.__name__, arguments) for step, arguments in self.nodes.steps()]

    def do(self, choice: tuple[str, Step]) -> tuple[()]:
        self.path = (*self.path, choice)
        try:
            self._take(choice)
            self.nodes.check()
        except Exception as error:
            raise PromiseBroken(repr(error)) from error
        return ()

    def fingerprint(self) -> object:
        return self.nodes.snapshot()

    def keep(self) -> Callable[[], SlicedState]:
        return partial(SlicedState, self.wire, self.num_slices, self.num_faults, self.path)

    def check(self, again: Callable[[], SlicedState]) -> None:
        """Check the end, if only faults can still happen."""
        if all(name in _FAULTS or arguments == ("the GPU failed",) for name, arguments in self.choices()):
            try:
                self.nodes.check_end()
            except Exception as error:
                raise PromiseBroken(repr(error)) from error

    def labels(self) -> Mapping[str, int]:
        return {}

    def tell(self, choices: Sequence[tuple[str, Step]]) -> list[str]:
        return [f"{name} {arguments}" for name, arguments in choices]


def explore_wire(wire: Wire, num_slices: tuple[int, ...], num_faults: int) -> int:
    """Take every order of steps once per state; return how many states there are.

    Raises:
        Counterexample: a promise does not hold in one of them.
    """
    return explore(partial(SlicedState, wire, num_slices, num_faults)).num_states


_FAULTS = ("reuse", "corrupt", "stop", "close")
