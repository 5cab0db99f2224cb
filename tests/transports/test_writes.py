"""What lies below writes: the frames, the regions that are accepted, and writers that lie."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transports import Guard, PeerLost, Pool, RegionPairs, Segment
from kvferry.transports._memory import WordTable
from kvferry.transports._windows import Windows
from kvferry.transports._write_frames import MAX_ROWS, Answer, Outcome, Request, decode
from kvferry.transports.errors import (
    ChecksumError,
    KVTransferError,
    PeerLostError,
    ProtocolError,
    StaleRegionError,
    TransferTimeoutError,
)
from kvferry.transports.inproc import InProcTransport
from kvferry.transports.registry import create_transport
from kvferry.transports.shm import SharedMemoryTransport
from kvferry.transports.testing import Link, Node, World, pairs_of, regions_of

KIB = 1 << 10
GUARD = Guard(2, 22)
WORD = Guard(1, 2)
REQUEST = Request(7, Guard(1, 2), Guard(3, 4), 5.0, pairs_of((0, 8, 16), (32, 64, 1)))

small = st.integers(-5, 70)


class TestFrames:
    @given(
        st.integers(0, 2**64 - 1),
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=4, max_size=4),
        st.floats(0, 86400),
        st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3), max_size=5),
    )
    def test_requests_survive(
        self, request_id: int, words: list[int], timeout_s: float, rows: list[tuple[int, int, int]]
    ) -> None:
        request = Request(request_id, Guard(*words[:2]), Guard(*words[2:]), timeout_s, pairs_of(*rows))
        decoded = decode(request.encode())
        assert isinstance(decoded, Request)
        assert np.array_equal(decoded.pairs.table, request.pairs.table)
        assert dataclasses.replace(decoded, pairs=request.pairs) == request

    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            (StaleRegionError("x"), StaleRegionError),
            (TransferTimeoutError("x"), TransferTimeoutError),
            (ChecksumError("x"), ChecksumError),
            (PeerLostError("x" * 5000), KVTransferError),
        ],
    )
    def test_errors_survive(self, error: KVTransferError, kind: type[KVTransferError]) -> None:
        decoded = decode(Answer.of(1, error, "tcp").encode())
        assert isinstance(decoded, Answer)
        assert isinstance(decoded.error(), kind)
        assert decoded.mechanism == "tcp"

    @given(st.binary(max_size=200), st.sampled_from([b"", b"\x01", b"\x02"]))
    def test_nonsense_is_a_typed_error(self, noise: bytes, kind: bytes) -> None:
        try:
            decode(kind + noise)
        except ProtocolError:
            return

    @given(st.data())
    def test_mutations_are_a_typed_error_or_a_frame(self, data: st.DataObject) -> None:
        frame = bytearray(data.draw(st.sampled_from([REQUEST.encode(), Answer.of(1, None, "tcp").encode()])))
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
        try:
            decode(bytes(frame[: data.draw(st.integers(0, len(frame)))]))
        except ProtocolError:
            return

    @pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0])
    def test_impossible_times_are_refused(self, timeout_s: float) -> None:
        with pytest.raises(ProtocolError):
            decode(dataclasses.replace(REQUEST, timeout_s=timeout_s).encode())

    def test_too_many_rows_are_refused(self) -> None:
        rows = RegionPairs(np.ones((MAX_ROWS + 1, 3), dtype=np.int64))
        with pytest.raises(ProtocolError):
            decode(dataclasses.replace(REQUEST, pairs=rows).encode())


@pytest.fixture
def table() -> WordTable:
    table = WordTable.anonymous(8)
    table.set(GUARD.index, GUARD.value)
    return table


POOL = Pool([Segment(1 << 20, 64)])


class TestWindows:
    @given(
        st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4)), max_size=6),
        st.lists(st.tuples(small, small), max_size=4),
    )
    def test_a_region_is_admitted_if_each_of_its_bytes_was_accepted(
        self, accepted: list[tuple[int, int]], written: list[tuple[int, int]]
    ) -> None:
        table = WordTable.anonymous(8)
        table.set(GUARD.index, GUARD.value)
        windows = Windows(table)
        windows.accept(1, GUARD, regions_of(*accepted), POOL)
        allowed = {byte for start, length in accepted for byte in range(start, start + length)}
        is_allowed = all(
            length > 0 and allowed.issuperset(range(start, start + length)) for start, length in written
        )
        pairs = pairs_of(*((start, 0, length) for start, length in written))
        if is_allowed:
            assert windows.admits(1, GUARD, pairs)
        else:
            with pytest.raises(ProtocolError):
                windows.admits(1, GUARD, pairs)

    @pytest.mark.parametrize("extreme", [2**63 - 1, -(2**63), 2**62])
    def test_numbers_at_the_edge_are_refused(self, table: WordTable, extreme: int) -> None:
        windows = Windows(table)
        windows.accept(1, GUARD, regions_of((0, 64)), POOL)
        for row in ((extreme, 0, 1), (0, 0, extreme), (extreme, 0, extreme)):
            with pytest.raises(ProtocolError):
                windows.admits(1, GUARD, pairs_of(row))

    def test_each_peer_has_its_own(self, table: WordTable) -> None:
        windows = Windows(table)
        windows.accept(1, GUARD, regions_of((0, 64)), POOL)
        assert windows.admits(1, GUARD, pairs_of((0, 0, 1)))
        assert not windows.admits(2, GUARD, pairs_of((0, 0, 1)))
        windows.forget(1)
        assert not windows.admits(1, GUARD, pairs_of((0, 0, 1)))

    def test_the_last_acceptance_under_a_word_counts(self, table: WordTable) -> None:
        windows = Windows(table)
        windows.accept(1, GUARD, regions_of((0, 64)), POOL)
        later = Guard(GUARD.index, GUARD.value + 1)
        table.set(later.index, later.value)
        windows.accept(1, later, regions_of((0, 8)), POOL)
        assert not windows.admits(1, GUARD, pairs_of((0, 0, 1)))
        assert windows.admits(1, later, pairs_of((0, 0, 1)))
        with pytest.raises(ProtocolError):
            windows.admits(1, later, pairs_of((8, 0, 1)))


@pytest.fixture
def world() -> Iterator[World]:
    world = World(InProcTransport)
    yield world
    world.close()


@pytest.fixture
def link(world: World) -> Link:
    """A producer that may write the second KiB of the consumer's pool."""
    link = world.pair(4 * KIB)
    link.consumer.transport.guards.set(GUARD.index, GUARD.value)
    link.consumer.transport.accept_writes(link.producer_id, GUARD, regions_of((KIB, KIB)))
    return link


def request(row: tuple[int, int, int], word: Guard = WORD, guard: Guard = GUARD) -> bytes:
    return Request(1, word, guard, 5.0, pairs_of(row)).encode()


FAR = 2**62

LIES: dict[str, bytes] = {
    "a region beside what was accepted": request((0, 0, 1)),
    "a region that begins in what was accepted": request((KIB, 0, KIB + 1)),
    "a region outside the target's pool": request((FAR, 0, 1)),
    "a region outside the writer's own pool": request((KIB, FAR, 1)),
    "a region of no bytes": request((KIB, 0, 0)),
    "a word outside the writer's table": request((KIB, 0, 1), word=Guard(1 << 40, 2)),
    "a word that can never hold": request((KIB, 0, 1), word=Guard(1, 0)),
    "an answer to nobody": Answer(99, Outcome.WRITTEN, "", "").encode(),
    "no frame": b"\x09nonsense",
    "half a frame": request((KIB, 0, 1))[:-1],
    "a request without an end of time": struct.pack(
        "<BQqqqqd", 1, 1, 1, 2, *dataclasses.astuple(GUARD), float("inf")
    ),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_who_lies_about_a_write_is_dropped_and_changes_nothing(world: World, link: Link, lie: bytes) -> None:
    before = link.consumer.memory().copy()
    _say(link, lie)
    world.serve(lambda: bool(link.consumer.of_type(PeerLost)))
    assert isinstance(link.consumer.of_type(PeerLost)[0].error, ProtocolError)
    world.serve(lambda: bool(link.producer.of_type(PeerLost)))
    assert np.array_equal(link.consumer.memory(), before)


@pytest.mark.parametrize(
    "claim",
    [
        lambda: request((KIB, 0, KIB), guard=Guard(GUARD.index, GUARD.value + 1)),
        lambda: request((KIB, 0, KIB), guard=Guard(5, 55)),
        lambda: request((KIB, 0, KIB), guard=Guard(-1, 1)),
    ],
)
def test_a_request_under_what_does_not_hold_changes_nothing(
    world: World, link: Link, claim: Callable[[], bytes]
) -> None:
    before = link.consumer.memory().copy()
    _say(link, claim())
    world.serve_quietly()
    assert np.array_equal(link.consumer.memory(), before)


def test_a_word_of_the_writers_is_known_to_its_target_alone(world: World, link: Link) -> None:
    """Nobody reads a writer's pool by guessing which of its own words holds during a write."""
    writer = link.producer.transport
    assert isinstance(writer, InProcTransport)
    world.start_write(link, pairs_of((0, KIB, KIB)), GUARD)
    values = [writer.guards.holds(Guard(writer.guards.num_words - 1, value)) for value in range(1000)]
    assert not any(values)


@pytest.mark.parametrize(
    "scheme",
    [
        "zeromq",
        pytest.param(
            "ucx", marks=pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")
        ),
    ],
)
def test_a_cleared_guard_stops_a_write_within_its_window(scheme: str) -> None:
    num_bytes = 96 << 20
    world = World(lambda: create_transport(scheme, {}))
    link = world.pair(num_bytes)
    target, before = link.consumer, link.consumer.memory().copy()
    target.transport.guards.set(GUARD.index, GUARD.value)
    target.transport.accept_writes(link.producer_id, GUARD, regions_of((0, num_bytes)))
    transfer_id = world.start_write(link, pairs_of((0, 0, num_bytes)), GUARD)
    world.serve(lambda: bool(np.any(target.memory()[:KIB] != before[:KIB])))
    target.transport.guards.clear(GUARD.index)
    world.serve(lambda: bool(link.producer.ends_of(transfer_id)))
    assert isinstance(link.producer.ends_of(transfer_id)[0].error, StaleRegionError)
    rest = slice(64 << 20, None)
    assert np.array_equal(target.memory()[rest], before[rest])
    world.close()


def test_memory_in_no_arena_is_written_from_over_shm() -> None:
    """And into: the target's own pool may be anything."""
    world = World(SharedMemoryTransport)
    memories = [np.full(KIB, value, dtype=np.uint8) for value in (1, 2)]
    for memory in memories:
        node = Node(SharedMemoryTransport(), [])
        node.transport.register(Pool([Segment(memory.ctypes.data, memory.nbytes)]))
        world.nodes.append(node)
    link = world.link(*world.nodes)
    link.consumer.transport.guards.set(GUARD.index, GUARD.value)
    link.consumer.transport.accept_writes(link.producer_id, GUARD, regions_of((0, KIB)))
    ended = world.write(link, pairs_of((0, 24, KIB - 24)), GUARD)
    world.close()
    assert ended.error is None
    assert ended.mechanism == "process_vm_readv"
    assert memories[1].tolist() == [2] * 24 + [1] * (KIB - 24)


def _say(link: Link, frame: bytes) -> None:
    """Send what no transport of ours would."""
    assert isinstance(link.producer.transport, InProcTransport)
    link.producer.transport.send_write_frame(link.consumer_id, frame)
