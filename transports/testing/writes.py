"""A part of the conformance suite (see `testing`): writes, for transports that can write."""

from __future__ import annotations

import numpy as np
import pytest

from ..base import PeerLost, TransferEnded
from ..errors import (
    PeerLostError,
    RegionError,
    StaleRegionError,
    TransferTimeoutError,
    TransportClosedError,
)
from ..regions import Guard, Regions
from .harness import DEADLINE_S, HELD, PAGE, POOL_BYTES, Link, World, pairs_of, regions_of

EVERYTHING = regions_of((0, POOL_BYTES))


class WritePromises:
    """`accept_writes` and `start_write`: the producer writes into the consumer's pool, where it may."""

    @pytest.fixture
    def target(self, link: Link) -> Link:
        """`link`, whose consumer accepts everything under its guard `HELD`."""
        if not link.producer.transport.can_write(link.consumer_id):
            pytest.skip("this transport does not write")
        return _accepting(link, EVERYTHING)

    @pytest.mark.parametrize(("local", "remote", "num_bytes"), [(0, 0, 1), (3, 4099, 3 * (1 << 20) + 5)])
    def test_bytes_are_written_unchanged(
        self, world: World, target: Link, local: int, remote: int, num_bytes: int
    ) -> None:
        expected = target.consumer.memory().copy()
        expected[remote : remote + num_bytes] = target.producer.memory()[local : local + num_bytes]
        ended = world.write(target, pairs_of((local, remote, num_bytes)), HELD)
        assert ended.error is None
        assert ended.num_bytes == num_bytes
        assert ended.seconds > 0
        assert ended.mechanism
        assert np.array_equal(target.consumer.memory(), expected)

    def test_scattered_regions_are_written(self, world: World, target: Link) -> None:
        random = np.random.default_rng(3)
        sources, slots = random.permutation(1024), random.permutation(1024)
        rows = [
            (int(source) * PAGE, int(slot) * PAGE, int(size))
            for source, slot, size in zip(sources, slots, random.integers(1, PAGE, 1024), strict=True)
        ]
        expected = target.consumer.memory().copy()
        for local, remote, size in rows:
            expected[remote : remote + size] = target.producer.memory()[local : local + size]
        assert world.write(target, pairs_of(*rows), HELD).error is None
        assert np.array_equal(target.consumer.memory(), expected)

    def test_more_regions_than_one_request_holds(self, world: World, target: Link) -> None:
        count = 70_000
        rows = np.arange(count)
        pairs = pairs_of(*zip((rows * 7).tolist(), (rows * 11).tolist(), [7] * count, strict=True))
        assert world.write(target, pairs, HELD).error is None
        written = np.lib.stride_tricks.as_strided(target.consumer.memory(), (count, 7), (11, 1))
        assert np.array_equal(written.reshape(-1), target.producer.memory()[: 7 * count])

    def test_a_write_larger_than_any_buffer(self, world: World, target: Link) -> None:
        num_bytes = 40 << 20
        large = _accepting(world.pair(num_bytes), regions_of((0, num_bytes)))
        assert world.write(large, pairs_of((0, 1, num_bytes - 1)), HELD).error is None
        assert np.array_equal(large.consumer.memory()[1:], large.producer.memory()[:-1])

    def test_who_connected_can_write_too(self, world: World, target: Link) -> None:
        back = Link(target.consumer, target.producer, target.consumer_id, target.producer_id)
        _accepting(back, regions_of((PAGE, PAGE)))
        assert world.write(back, pairs_of((0, PAGE, PAGE)), HELD).error is None
        assert np.array_equal(target.producer.memory()[PAGE : 2 * PAGE], target.consumer.memory()[:PAGE])

    def test_a_message_sent_after_a_write_comes_after_its_bytes(self, world: World, target: Link) -> None:
        for value in range(1, 6):
            target.producer.memory()[:] = value
            assert world.write(target, pairs_of((0, 0, POOL_BYTES)), HELD).error is None
            target.producer.transport.send(target.consumer_id, bytes([value]))
            world.serve(lambda: target.consumer.messages(target.producer_id)[-1:] == [bytes([value])])  # noqa: B023
            assert np.all(target.consumer.memory() == value)

    def test_a_target_hears_nothing_of_a_write(self, world: World, target: Link) -> None:
        num_seen = len(target.consumer.history)
        assert world.write(target, pairs_of((0, 0, PAGE)), HELD).error is None
        world.serve_quietly()
        assert len(target.consumer.history) == num_seen

    def test_several_writers_write_under_one_guard(self, world: World, target: Link) -> None:
        other = world.link(world.node(POOL_BYTES), target.consumer)
        other.producer.fill(9)
        _accepting(other, regions_of((0, PAGE)))
        _accepting(target, regions_of((PAGE, PAGE)))
        assert world.write(other, pairs_of((0, 0, PAGE)), HELD).error is None
        assert world.write(target, pairs_of((0, PAGE, PAGE)), HELD).error is None
        assert np.array_equal(target.consumer.memory()[:PAGE], other.producer.memory()[:PAGE])
        assert np.array_equal(target.consumer.memory()[PAGE : 2 * PAGE], target.producer.memory()[:PAGE])

    def test_nothing_is_written_that_was_not_accepted(self, world: World, target: Link) -> None:
        """Neither under another value, nor another word, nor under the guard of what may only be read."""
        before = target.consumer.memory().copy()
        target.consumer.transport.guards.set(6, 66)
        for guard in (Guard(HELD.index, HELD.value + 1), Guard(HELD.index + 2, HELD.value), Guard(6, 66)):
            ended = world.write(target, pairs_of((0, 0, PAGE)), guard)
            assert isinstance(ended.error, StaleRegionError)
        assert np.array_equal(target.consumer.memory(), before)

    def test_nothing_is_written_after_the_guard_was_cleared(self, world: World, target: Link) -> None:
        before = target.consumer.memory().copy()
        target.consumer.transport.guards.clear(HELD.index)
        ended = world.write(target, pairs_of((0, 0, PAGE)), HELD)
        assert isinstance(ended.error, StaleRegionError)
        assert np.array_equal(target.consumer.memory(), before)

    @pytest.mark.parametrize("row", [(0, 2 * PAGE, 1), (0, PAGE - 1, 2)])
    def test_who_writes_elsewhere_is_dropped(
        self, world: World, target: Link, row: tuple[int, int, int]
    ) -> None:
        _accepting(target, regions_of((PAGE, PAGE)))
        before = target.consumer.memory().copy()
        ended = world.write(target, pairs_of((0, PAGE, 1), row), HELD)
        assert isinstance(ended.error, PeerLostError)
        world.serve(lambda: bool(target.consumer.of_type(PeerLost)))
        assert np.array_equal(target.consumer.memory(), before)

    def test_regions_that_touch_are_accepted_as_one(self, world: World, target: Link) -> None:
        _accepting(target, regions_of((2 * PAGE, PAGE), (0, PAGE), (PAGE, PAGE), (PAGE // 2, PAGE)))
        assert world.write(target, pairs_of((0, 0, 3 * PAGE)), HELD).error is None

    def test_a_guard_that_is_cleared_during_a_write_fails_it(self, world: World, target: Link) -> None:
        """The target takes the memory back: the writer hears it, or had written everything before."""
        for value in range(1, 11):
            guard = Guard(HELD.index, 1000 + value)
            _accepting(target, EVERYTHING, guard)
            target.producer.memory()[:] = value
            transfer_id = world.start_write(target, pairs_of((0, 0, POOL_BYTES)), guard)
            target.consumer.history += target.consumer.transport.wait_events(0.0)
            target.consumer.transport.guards.clear(HELD.index)
            world.serve(lambda: bool(target.producer.ends_of(transfer_id)))  # noqa: B023 - called right here
            (ended,) = target.producer.ends_of(transfer_id)
            if ended.error is None:
                assert np.all(target.consumer.memory() == value)
            else:
                assert isinstance(ended.error, StaleRegionError)

    def test_writes_outside_a_pool_are_refused(self, world: World, target: Link) -> None:
        for row in ((0, POOL_BYTES, 1), (POOL_BYTES, 0, 1), (-1, 0, 1), (0, 0, 0), (0, -1, 1)):
            with pytest.raises(RegionError):
                world.start_write(target, pairs_of((0, 0, 1), row), HELD)
        world.serve_quietly()
        assert not target.producer.of_type(TransferEnded)

    def test_accepting_what_is_not_there_is_refused(self, target: Link) -> None:
        for row in ((0, POOL_BYTES + 1), (-1, 1), (0, 0), (POOL_BYTES, 1)):
            with pytest.raises(RegionError):
                target.consumer.transport.accept_writes(target.producer_id, HELD, regions_of(row))

    def test_an_impossible_guard_is_refused_in_writes(self, world: World, target: Link) -> None:
        for guard in (Guard(-1, 1), Guard(1 << 40, 1), Guard(0, 0), Guard(0, -1)):
            with pytest.raises(RegionError):
                world.start_write(target, pairs_of((0, 0, 1)), guard)
            with pytest.raises(RegionError):
                target.consumer.transport.accept_writes(target.producer_id, guard, EVERYTHING)

    def test_strangers_cannot_write(self, target: Link) -> None:
        assert not target.producer.transport.can_write(987654)
        with pytest.raises(PeerLostError):
            target.producer.transport.start_write(987654, pairs_of((0, 0, 1)), HELD, timeout_s=1)
        with pytest.raises(PeerLostError):
            target.consumer.transport.accept_writes(987654, HELD, EVERYTHING)

    def test_a_write_that_takes_too_long_times_out(self, world: World, target: Link) -> None:
        ended = world.write(target, pairs_of((0, 0, POOL_BYTES)), HELD, timeout_s=1e-9)
        assert isinstance(ended.error, TransferTimeoutError)
        assert world.write(target, pairs_of((0, 0, POOL_BYTES)), HELD).error is None

    def test_a_target_that_does_nothing_is_dropped_in_time(self, world: World, target: Link) -> None:
        transfer_id = world.start_write(target, pairs_of((0, 0, PAGE)), HELD, timeout_s=0.1)
        world.serve(lambda: bool(target.producer.of_type(PeerLost)), target.producer)
        (ended,) = target.producer.ends_of(transfer_id)
        assert isinstance(ended.error, (TransferTimeoutError, PeerLostError))
        assert isinstance(target.producer.history[-1], PeerLost)
        world.serve(lambda: bool(target.consumer.of_type(PeerLost)))
        after = target.consumer.memory().copy()
        world.serve_quietly()
        assert np.array_equal(target.consumer.memory(), after)

    def test_dropping_the_target_ends_writes_once(self, world: World, target: Link) -> None:
        ids = [world.start_write(target, pairs_of((0, 0, POOL_BYTES)), HELD) for _ in range(8)]
        target.producer.transport.disconnect(target.consumer_id)
        world.serve(lambda: bool(target.consumer.of_type(PeerLost)))
        world.serve_quietly()
        ended = target.producer.of_type(TransferEnded)
        assert sorted(event.transfer_id for event in ended) == ids
        assert all(isinstance(event.error, TransportClosedError) for event in ended)
        assert not target.producer.of_type(PeerLost)

    def test_dropping_the_writer_ends_its_writing(self, world: World, target: Link) -> None:
        ids = [world.start_write(target, pairs_of((0, 0, POOL_BYTES)), HELD) for _ in range(8)]
        target.consumer.history += target.consumer.transport.wait_events(0.01)
        target.consumer.transport.disconnect(target.producer_id)
        after = target.consumer.memory().copy()
        world.serve(lambda: bool(target.producer.of_type(PeerLost)))
        world.serve_quietly()
        assert np.array_equal(target.consumer.memory(), after)
        ended = target.producer.of_type(TransferEnded)
        assert sorted(event.transfer_id for event in ended) == ids
        assert all(event.error is None or isinstance(event.error, PeerLostError) for event in ended)
        assert isinstance(target.producer.history[-1], PeerLost)

    def test_nothing_is_written_after_the_writer_was_lost(self, world: World, target: Link) -> None:
        for _ in range(4):
            world.start_write(target, pairs_of((0, 0, POOL_BYTES)), HELD)
        target.consumer.history += target.consumer.transport.wait_events(0.01)
        world.forget(target.producer)
        world.serve(lambda: bool(target.consumer.of_type(PeerLost)))
        after = target.consumer.memory().copy()
        world.serve_quietly()
        assert np.array_equal(target.consumer.memory(), after)
        assert target.consumer.history[-1] == target.consumer.of_type(PeerLost)[0]

    def test_closing_during_writes_is_harmless(self, world: World, target: Link) -> None:
        world.start_write(target, pairs_of((0, 0, POOL_BYTES)), HELD)
        transport = target.producer.transport
        world.forget(target.producer)
        with pytest.raises(TransportClosedError):
            transport.start_write(target.consumer_id, pairs_of((0, 0, 1)), HELD, timeout_s=DEADLINE_S)
        with pytest.raises(TransportClosedError):
            transport.accept_writes(target.consumer_id, HELD, EVERYTHING)
        world.serve(lambda: bool(target.consumer.of_type(PeerLost)))


def _accepting(link: Link, regions: Regions, guard: Guard = HELD) -> Link:
    """Have the consumer accept writes from the producer."""
    link.consumer.transport.guards.set(guard.index, guard.value)
    link.consumer.transport.accept_writes(link.producer_id, guard, regions)
    return link
