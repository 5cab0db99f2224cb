"""One part of the conformance suite: promises about memory, reads and guards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from ..base import TransferEnded, Transport
from ..errors import (
    ConfigurationError,
    KVTransferStateError,
    PeerLostError,
    RegionError,
    StaleRegionError,
    TransferTimeoutError,
)
from ..regions import Guard, Pool
from .harness import DEADLINE_S, HELD, PAGE, POOL_BYTES, Link, World, pairs_of

Create = Callable[[Mapping[str, object]], Transport]


def _is_mapped(address: int) -> bool:
    """Return whether a virtual address of this process is mapped."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


class MemoryPromises:
    """`allocate`, `register`, and the guard table."""

    def test_an_arena_is_zeroed_aligned_and_writable(self, world: World) -> None:
        for num_bytes in (1, PAGE + 1, 3 << 20):
            arena = world.node(num_bytes).arenas[0]
            assert arena.segment.num_bytes == len(arena.buffer) == num_bytes
            assert arena.segment.address % PAGE == 0
            assert not any(np.frombuffer(arena.buffer, dtype=np.uint8))
            arena.buffer[-1] = 255

    def test_memory_stays_mapped_until_the_transport_is_closed(self, create: Create) -> None:
        transport = create({})
        try:
            # A reference to the arena may be dropped early: reads are still written to its address.
            address = transport.allocate(3 << 20).segment.address
            gc.collect()
            assert _is_mapped(address), "allocate: the memory was unmapped before the transport was closed"
        finally:
            transport.close()

    def test_impossible_allocations_are_refused(self, world: World) -> None:
        transport = world.node(PAGE).transport
        for num_bytes in (0, -1, 1 << 60):
            with pytest.raises(ConfigurationError):
                transport.allocate(num_bytes)

    def test_one_pool_is_registered(self, create: Create) -> None:
        transport = create({})
        try:
            pool = Pool([transport.allocate(PAGE).segment])
            transport.register(pool)
            with pytest.raises(KVTransferStateError):
                transport.register(pool)
        finally:
            transport.close()

    def test_an_unknown_option_is_named(self, create: Create) -> None:
        with pytest.raises(ConfigurationError, match="colour") as caught:
            create({"colour": "red"})
        assert caught.value.key == "colour"

    @pytest.mark.parametrize(("index", "value"), [(-1, 1), (1 << 40, 1), (0, 0), (0, -1), (0, 2**63)])
    def test_a_guard_table_takes_only_valid_words(self, world: World, index: int, value: int) -> None:
        with pytest.raises(RegionError):
            world.node(PAGE).transport.guards.set(index, value)


class ReadPromises:
    """`start_read`: all the right bytes arrive, and only in the local regions; or the read ends with an error."""

    @pytest.mark.parametrize("num_bytes", [1, PAGE - 1, PAGE, PAGE + 1, 3 * (1 << 20) + 5])
    @pytest.mark.parametrize(("local", "remote"), [(0, 0), (3, 4099), (PAGE, 1)])
    def test_bytes_arrive_unchanged(
        self, world: World, link: Link, num_bytes: int, local: int, remote: int
    ) -> None:
        expected = link.consumer.memory().copy()
        expected[local : local + num_bytes] = link.producer.memory()[remote : remote + num_bytes]
        ended = world.read(link, pairs_of((local, remote, num_bytes)), HELD)
        assert ended.error is None
        assert ended.num_bytes == num_bytes
        assert ended.seconds > 0
        assert ended.mechanism
        assert np.array_equal(link.consumer.memory(), expected)

    def test_scattered_regions_of_many_sizes(self, world: World, link: Link) -> None:
        random = np.random.default_rng(3)
        slots, sources = random.permutation(1024), random.permutation(1024)
        rows = [
            (int(slot) * PAGE, int(source) * PAGE, int(size))
            for slot, source, size in zip(slots, sources, random.integers(1, PAGE, 1024), strict=True)
        ]
        expected = link.consumer.memory().copy()
        for local, remote, size in rows:
            expected[local : local + size] = link.producer.memory()[remote : remote + size]
        assert world.read(link, pairs_of(*rows), HELD).error is None
        assert np.array_equal(link.consumer.memory(), expected)

    def test_a_read_larger_than_any_buffer(self, world: World) -> None:
        num_bytes = 40 << 20
        link = world.pair(num_bytes)
        link.producer.transport.guards.set(HELD.index, HELD.value)
        assert world.read(link, pairs_of((1, 0, num_bytes - 1)), HELD).error is None
        assert np.array_equal(link.consumer.memory()[1:], link.producer.memory()[:-1])

    def test_pools_of_several_segments(self, world: World) -> None:
        link = world.link(world.node(3 * PAGE, PAGE, 2 * PAGE), world.node(2 * PAGE, 4 * PAGE))
        link.producer.fill(1)
        link.producer.transport.guards.set(HELD.index, HELD.value)
        pairs = pairs_of((0, 3 * PAGE, PAGE), (2 * PAGE, 4 * PAGE, 2 * PAGE), (4 * PAGE + 7, 5, 100))
        assert world.read(link, pairs, HELD).error is None
        consumer, producer = link.consumer, link.producer
        assert np.array_equal(consumer.memory(0)[:PAGE], producer.memory(1))
        assert np.array_equal(consumer.memory(1)[: 2 * PAGE], producer.memory(2))
        assert np.array_equal(consumer.memory(1)[2 * PAGE + 7 :][:100], producer.memory(0)[5:105])

    def test_the_side_that_accepted_can_read_too(self, world: World, link: Link) -> None:
        back = Link(link.consumer, link.producer, link.consumer_id, link.producer_id)
        link.consumer.transport.guards.set(1, 2)
        assert world.read(back, pairs_of((0, PAGE, PAGE)), Guard(1, 2)).error is None
        assert np.array_equal(link.producer.memory()[:PAGE], link.consumer.memory()[PAGE : 2 * PAGE])

    @pytest.mark.parametrize(
        "row",
        [
            (0, POOL_BYTES, 1),
            (POOL_BYTES, 0, 1),
            (0, POOL_BYTES - 1, 2),
            (POOL_BYTES - 1, 0, 2),
            (-1, 0, 1),
            (0, -1, 1),
            (0, 0, 0),
            (0, 0, -1),
            (0, 2**63 - 1, 2**63 - 1),
            (2**63 - 1, 0, 2**63 - 1),
        ],
    )
    def test_regions_outside_a_pool_are_refused(
        self, world: World, link: Link, row: tuple[int, int, int]
    ) -> None:
        before = link.consumer.memory().copy()
        with pytest.raises(RegionError):
            link.consumer.endpoint.start_read(
                link.producer_id, pairs_of((0, 0, 1), row), HELD, timeout_s=DEADLINE_S
            )
        world.serve_quietly()
        assert not link.consumer.of_type(TransferEnded)
        assert np.array_equal(link.consumer.memory(), before)

    def test_a_region_across_two_segments_is_refused(self, world: World) -> None:
        link = world.link(world.node(PAGE, PAGE), world.node(2 * PAGE))
        with pytest.raises(RegionError):
            link.consumer.endpoint.start_read(link.producer_id, pairs_of((0, PAGE - 1, 2)), HELD, timeout_s=1)

    def test_a_read_that_takes_too_long_times_out(self, world: World, link: Link) -> None:
        ended = world.read(link, pairs_of((0, 0, POOL_BYTES)), HELD, timeout_s=1e-9)
        assert isinstance(ended.error, TransferTimeoutError)

    def test_a_read_from_an_unknown_peer_is_refused(self, link: Link) -> None:
        with pytest.raises(PeerLostError):
            link.consumer.endpoint.start_read(987654, pairs_of((0, 0, 1)), HELD, timeout_s=1)


class GuardPromises:
    """A read succeeds only if the guard held after its bytes were copied."""

    @pytest.mark.parametrize("guard", [Guard(HELD.index, HELD.value + 1), Guard(HELD.index + 1, HELD.value)])
    def test_a_guard_of_another_offer_is_stale(self, world: World, link: Link, guard: Guard) -> None:
        ended = world.read(link, pairs_of((0, 0, PAGE)), guard)
        assert isinstance(ended.error, StaleRegionError)

    def test_a_cleared_guard_is_stale(self, world: World, link: Link) -> None:
        link.producer.transport.guards.clear(HELD.index)
        assert isinstance(world.read(link, pairs_of((0, 0, PAGE)), HELD).error, StaleRegionError)

    @pytest.mark.parametrize("guard", [Guard(-1, 1), Guard(1 << 40, 1), Guard(0, 0), Guard(0, -1)])
    def test_an_impossible_guard_is_refused(self, link: Link, guard: Guard) -> None:
        with pytest.raises(RegionError):
            link.consumer.endpoint.start_read(link.producer_id, pairs_of((0, 0, 1)), guard, timeout_s=1)

    def test_memory_that_is_reused_during_a_read_is_never_delivered(self, world: World, link: Link) -> None:
        """The owner clears the guard and writes during a read: the promised bytes arrive, or the read fails."""
        guards, memory = link.producer.transport.guards, link.producer.memory()
        for round_ in range(1, 21):
            guards.set(HELD.index, round_)
            memory[:] = round_
            transfer_id = link.consumer.endpoint.start_read(
                link.producer_id,
                pairs_of((0, 0, POOL_BYTES)),
                Guard(HELD.index, round_),
                timeout_s=DEADLINE_S,
            )
            guards.clear(HELD.index)
            memory[:] = 255
            world.serve(lambda: bool(link.consumer.ends_of(transfer_id)))  # noqa: B023 - called right here
            (ended,) = link.consumer.ends_of(transfer_id)
            if ended.error is None:
                assert np.all(link.consumer.memory() == round_), (
                    "a read delivered bytes that were written after the guard was cleared: check the guard after "
                    "the bytes were copied"
                )
            else:
                assert isinstance(ended.error, StaleRegionError)
