"""One part of the conformance suite: promises about memory, reads and guards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ..base import PeerLost, TransferEnded, Transport
from ..errors import (
    ConfigurationError,
    KVTransferError,
    KVTransferStateError,
    PeerLostError,
    RegionError,
    StaleRegionError,
    TransferTimeoutError,
    TransportClosedError,
)
from ..machine import memory_of_this_process
from ..regions import Extents, Guard, Pool
from .harness import (
    DEADLINE_S,
    HELD,
    PAGE,
    POOL_BYTES,
    Link,
    World,
    pairs_of,
    refuses,
    same_bytes,
)
from .hostile import repeated_frames
from .limits import give_back_freed_memory, limited_memory, reached_limit, resident_bytes
from .order import broken, require

Create = Callable[[Mapping[str, object]], Transport]
OnGuardCheck = Callable[[Guard, Callable[[], None]], AbstractContextManager[None]]
ReadUnchecked = Callable[[Link, int, int, Guard], None]

ARRIVES = "a read without an error has put all the right bytes in place, and has changed no others"
GUARDED = (
    "a read succeeds only if the guard still held after its last byte was copied: copy the bytes first, then check "
    "the guard"
)
NOT_WRITTEN = "after a read has ended, or its endpoint is closed, nothing writes into its local regions"
BOUNDED = "a read outside either pool, or with an impossible guard, is refused, and copies nothing"
BEFORE = "before the kernel is asked for its pages, for example by `require_available`"
SERVED = "the owner of memory checks what a peer asks for, and serves no byte outside its pool"

#: What a test writes over memory that a transport must no longer touch.
POISON = 0xA5

#: More than the buffers of any transport for one peer.
MAX_WAITING_BYTES = 128 << 20

EVERYTHING = pairs_of((0, 0, POOL_BYTES))


class MemoryPromises:
    """`allocate`, `register`, and the guard table."""

    def test_an_arena_is_zeroed_aligned_and_writable(self, world: World) -> None:
        for num_bytes in (1, PAGE + 1, 3 << 20):
            arena = world.node(num_bytes).arenas[0]
            sizes = (arena.segment.num_bytes, len(arena.buffer))
            require(sizes == (num_bytes, num_bytes), f"an arena of {num_bytes} bytes has that size", sizes)
            address = arena.segment.address
            require(address % PAGE == 0, "an arena begins at a page", f"address {address:#x}")
            memory = np.frombuffer(arena.buffer, dtype=np.uint8)
            same_bytes(memory, np.zeros_like(memory), "an arena is zeroed")
            arena.buffer[-1] = 255

    def test_impossible_allocations_are_refused(self, world: World) -> None:
        """Limits keep the kernel from giving the pages: it would give them until it kills processes."""
        transport = world.node(PAGE).transport
        _, free = memory_of_this_process()
        for num_bytes in (0, -1, free + (1 << 30), 1 << 60):
            promise = f"an arena of {num_bytes} bytes is refused"
            with limited_memory(), refuses(ConfigurationError, promise):
                try:
                    transport.allocate(num_bytes)
                except ConfigurationError as error:
                    require(
                        not reached_limit(error),
                        f"{promise} {BEFORE}",
                        f"{error!r} after {error.__context__!r}",
                    )
                    raise

    def test_one_pool_is_registered(self, create: Create) -> None:
        transport = create({})
        try:
            arena = transport.allocate(PAGE)
            pool = Pool([arena.segment])
            transport.register(pool)
            with refuses(KVTransferStateError, "one pool is registered per transport"):
                transport.register(pool)
        finally:
            transport.close()

    def test_an_unknown_option_is_named(self, create: Create) -> None:
        promise = "an unknown option is refused by a `ConfigurationError` that names it"
        with refuses(ConfigurationError, promise):
            try:
                create({"colour": "red"})
            except ConfigurationError as error:
                require(error.key == "colour" and "colour" in str(error), promise, repr(error))
                raise

    @pytest.mark.parametrize(("index", "value"), [(-1, 1), (1 << 40, 1), (0, 0), (0, -1), (0, 2**63)])
    def test_a_guard_table_takes_only_valid_words(self, world: World, index: int, value: int) -> None:
        with refuses(RegionError, "a guard table takes only values from 1 to 2**63 - 1, at its own indices"):
            world.node(PAGE).transport.guards.set(index, value)


class ReadPromises:
    """`start_read`: all the right bytes arrive, and only in the local regions; or the read ends with an
    error.
    """

    @pytest.mark.parametrize("num_bytes", [1, PAGE - 1, PAGE, PAGE + 1, 3 * (1 << 20) + 5])
    @pytest.mark.parametrize(("local", "remote"), [(0, 0), (3, 4099), (PAGE, 1)])
    def test_bytes_arrive_unchanged(
        self, world: World, link: Link, num_bytes: int, local: int, remote: int
    ) -> None:
        expected = link.consumer.memory().copy()
        expected[local : local + num_bytes] = link.producer.memory()[remote : remote + num_bytes]
        ended = world.read(link, pairs_of((local, remote, num_bytes)), HELD)
        _require_success(ended)
        require(ended.num_bytes == num_bytes, "`num_bytes` is the size of the read", ended)
        require(ended.seconds > 0, "`seconds` is the time that the read took", ended)
        require(bool(ended.mechanism), "`mechanism` names what moved the bytes", ended)
        same_bytes(link.consumer.memory(), expected, ARRIVES)

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
        _require_success(world.read(link, pairs_of(*rows), HELD))
        same_bytes(link.consumer.memory(), expected, ARRIVES)

    def test_a_read_larger_than_any_buffer(self, world: World) -> None:
        num_bytes = 40 << 20
        link = world.pair(num_bytes)
        link.producer.transport.guards.set(HELD.index, HELD.value)
        _require_success(world.read(link, pairs_of((1, 0, num_bytes - 1)), HELD))
        same_bytes(link.consumer.memory()[1:], link.producer.memory()[:-1], ARRIVES)

    def test_many_reads_at_once(self, world: World, link: Link) -> None:
        """Each read gets its own bytes, whatever order they end in."""
        size = POOL_BYTES // 32
        expected = link.producer.memory().reshape(32, size)[::-1].reshape(-1)
        start = link.consumer.endpoint.start_read
        ids = [
            start(
                link.producer_id,
                pairs_of((number * size, POOL_BYTES - (number + 1) * size, size)),
                HELD,
                timeout_s=DEADLINE_S,
            )
            for number in range(32)
        ]
        for transfer_id in ids:
            _require_success(world.end_of(link, transfer_id))
        same_bytes(link.consumer.memory(), expected, ARRIVES)

    def test_pools_of_several_segments(self, world: World) -> None:
        link = world.link(world.node(3 * PAGE, PAGE, 2 * PAGE), world.node(2 * PAGE, 4 * PAGE))
        link.producer.fill(1)
        link.producer.transport.guards.set(HELD.index, HELD.value)
        pairs = pairs_of((0, 3 * PAGE, PAGE), (2 * PAGE, 4 * PAGE, 2 * PAGE), (4 * PAGE + 7, 5, 100))
        _require_success(world.read(link, pairs, HELD))
        consumer, producer = link.consumer, link.producer
        same_bytes(consumer.memory(0)[:PAGE], producer.memory(1), ARRIVES)
        same_bytes(consumer.memory(1)[: 2 * PAGE], producer.memory(2), ARRIVES)
        same_bytes(consumer.memory(1)[2 * PAGE + 7 :][:100], producer.memory(0)[5:105], ARRIVES)

    def test_the_side_that_accepted_can_read_too(self, world: World, link: Link) -> None:
        back = Link(link.consumer, link.producer, link.consumer_id, link.producer_id)
        link.consumer.transport.guards.set(1, 2)
        _require_success(world.read(back, pairs_of((0, PAGE, PAGE)), Guard(1, 2)))
        same_bytes(link.producer.memory()[:PAGE], link.consumer.memory()[PAGE : 2 * PAGE], ARRIVES)

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
        with refuses(RegionError, BOUNDED):
            link.consumer.endpoint.start_read(
                link.producer_id, pairs_of((0, 0, 1), row), HELD, timeout_s=DEADLINE_S
            )
        world.serve_quietly()
        ends = link.consumer.of_type(TransferEnded)
        require(not ends, "a read that `start_read` refused has no events", ends)
        same_bytes(link.consumer.memory(), before, BOUNDED)

    def test_a_region_across_two_segments_is_refused(self, world: World) -> None:
        link = world.link(world.node(PAGE, PAGE), world.node(2 * PAGE))
        with refuses(RegionError, "a region that lies in two segments is refused"):
            link.consumer.endpoint.start_read(link.producer_id, pairs_of((0, PAGE - 1, 2)), HELD, timeout_s=1)

    @pytest.mark.parametrize("row", [(POOL_BYTES, 1), (POOL_BYTES - 1, 2), (-1, 1), (2**63 - 1, 8)])
    def test_the_owner_refuses_a_peer_that_asks_for_more(
        self, world: World, link: Link, read_unchecked: ReadUnchecked, row: tuple[int, int]
    ) -> None:
        read_unchecked(link, *row, HELD)
        self._require_dropped(world, link)

    @pytest.mark.parametrize("guard", [Guard(-1, 1), Guard(1 << 40, 1)])
    def test_the_owner_refuses_a_peer_that_names_an_impossible_guard(
        self, world: World, link: Link, read_unchecked: ReadUnchecked, guard: Guard
    ) -> None:
        read_unchecked(link, 0, 1, guard)
        self._require_dropped(world, link)

    def test_the_owner_keeps_a_peer_to_what_its_guard_was_set_for(
        self, world: World, link: Link, read_unchecked: ReadUnchecked
    ) -> None:
        """A transport whose peers take the bytes themselves cannot do this, and says so by `checks_reads`."""
        guards = link.producer.transport.guards
        if not guards.checks_reads:
            pytest.skip("the owner takes no part in reads")
        allowed = Extents(np.array([100, 300]), np.array([200, 400]))
        guards.allow(HELD.index, lambda: allowed)
        before, inside = link.consumer.memory().copy(), pairs_of((7, 100, 100), (500, 310, 20))
        ended = world.read(link, inside, HELD)
        require(ended.error is None, f"{SERVED}, and serves what is allowed", ended)
        expected = before.copy()
        expected[7:107], expected[500:520] = link.producer.memory()[100:200], link.producer.memory()[310:330]
        same_bytes(link.consumer.memory(), expected, ARRIVES)
        # A peer may ask too late. Then it is told so, and nothing else.
        other = Guard(HELD.index, HELD.value + 1)
        _require_stale(world.read(link, pairs_of((0, 0, 100)), other))
        read_unchecked(link, 199, 2, HELD)
        self._require_dropped(world, link)

    def test_a_guard_that_was_cleared_restricts_nothing_afterwards(self, world: World, link: Link) -> None:
        guards = link.producer.transport.guards
        guards.allow(HELD.index, lambda: Extents(np.array([100]), np.array([200])))
        guards.clear(HELD.index)
        _require_stale(world.read(link, pairs_of((0, 0, 100)), HELD))
        guards.set(HELD.index, HELD.value + 1)
        ended = world.read(link, pairs_of((0, 0, 100)), Guard(HELD.index, HELD.value + 1))
        require(ended.error is None, "a guard restricts reads only after `allow`, and until `clear`", ended)

    def _require_dropped(self, world: World, link: Link) -> None:
        world.serve(lambda: bool(link.producer.of_type(PeerLost)), promise=f"{SERVED}: it drops the peer")

    def test_a_read_that_takes_too_long_times_out(self, world: World, link: Link) -> None:
        promise = "a read that is not over after `timeout_s` ends with a `TransferTimeoutError`"
        start = link.consumer.endpoint.start_read
        # The owner of the memory does nothing meanwhile. If its help is not needed, a copy in another thread
        # may be over before the loop looks at the time, on a busy machine; so try a few times.
        for _ in range(5):
            transfer_id = start(link.producer_id, EVERYTHING, HELD, timeout_s=1e-9)
            ended = world.end_of(link, transfer_id, link.consumer)
            if isinstance(ended.error, TransferTimeoutError):
                return
        broken(promise, f"{ended}, five times")

    def test_a_read_from_a_peer_that_stopped_ends_in_time(self, world: World, link: Link) -> None:
        """The owner of the memory does nothing any more.

        A transport that needs no help from it may succeed.
        """
        start = link.consumer.endpoint.start_read
        transfer_id = start(link.producer_id, EVERYTHING, HELD, timeout_s=0.1)
        ended = world.end_of(link, transfer_id, link.consumer)
        promise = "a read ends at its deadline even if the peer does nothing any more"
        require(ended.seconds < 5, promise, ended)
        allowed = (TransferTimeoutError, PeerLostError)
        require(ended.error is None or isinstance(ended.error, allowed), promise, ended)
        if ended.error is None:
            same_bytes(link.consumer.memory(), link.producer.memory(), ARRIVES)

    def test_a_read_beside_one_that_timed_out_gets_its_own_bytes(self, world: World, link: Link) -> None:
        """What was on its way for the first read arrives later, and must not be taken for bytes of the
        second.
        """
        start, half = link.consumer.endpoint.start_read, POOL_BYTES // 2
        late = start(link.producer_id, pairs_of((0, 0, half)), HELD, timeout_s=0.02)
        other = start(link.producer_id, pairs_of((half, half, half)), HELD, timeout_s=DEADLINE_S)
        world.end_of(link, late, link.consumer)  # meanwhile the owner of the memory does nothing
        ended = world.end_of(link, other)
        promise = "a read that timed out costs no other read its bytes; at most it costs the connection"
        require(ended.error is None or isinstance(ended.error, PeerLostError), promise, ended)
        if ended.error is None:
            same_bytes(link.consumer.memory()[half:], link.producer.memory()[half:], ARRIVES)

    def test_a_peer_that_asks_and_takes_nothing_delays_no_other(self, world: World, link: Link) -> None:
        start = link.consumer.endpoint.start_read
        for _ in range(16):  # more than the buffers of a connection hold
            start(link.producer_id, EVERYTHING, HELD, timeout_s=DEADLINE_S)
        world.turn(link.consumer)  # it has asked, and does nothing from now on
        other = world.link(link.producer, world.node(POOL_BYTES), besides=(link.consumer,))
        transfer_id = other.consumer.endpoint.start_read(
            other.producer_id, EVERYTHING, HELD, timeout_s=DEADLINE_S
        )
        ended = world.end_of(other, transfer_id, link.producer, other.consumer)
        require(ended.error is None, "a peer that asks and takes nothing delays no other peer", ended)
        same_bytes(other.consumer.memory(), link.producer.memory(), ARRIVES)

    def test_what_waits_for_a_peer_that_reads_everything_again_and_again_is_bounded(
        self, world: World, link: Link, read_unchecked: ReadUnchecked
    ) -> None:
        """It takes nothing. The owner of the memory waits for it, or drops it."""
        give_back_freed_memory()
        before = resident_bytes()
        for num_reads in range(1, 257):
            try:
                # A reader that asks for one slice at a time asks for the first one this often.
                with repeated_frames(256 if num_reads == 1 else 1):
                    read_unchecked(link, 0, POOL_BYTES, HELD)
            except KVTransferError:  # it was dropped, or its own queue is full
                break
            world.turn(link.producer)
            grown = resident_bytes() - before
            require(
                grown < MAX_WAITING_BYTES,
                "what waits for a peer that asks and takes nothing is bounded",
                f"after {num_reads} reads of {POOL_BYTES} bytes the process had {grown >> 20} MiB more",
            )

    def test_a_read_from_an_unknown_peer_is_refused(self, link: Link) -> None:
        with refuses(PeerLostError, "a read from an unknown peer is refused"):
            link.consumer.endpoint.start_read(987654, pairs_of((0, 0, 1)), HELD, timeout_s=1)


class OwnershipPromises:
    """Memory belongs to the endpoint until a read has ended, and to its owner from then on."""

    @pytest.mark.parametrize("num_turns", [0, 1, 2, 4])
    def test_nothing_is_written_after_a_read_has_timed_out(
        self, world: World, link: Link, num_turns: int
    ) -> None:
        """The peer helps only for some turns, so the read cannot finish in time; then it goes on."""
        start = link.consumer.endpoint.start_read
        transfer_id = start(link.producer_id, EVERYTHING, HELD, timeout_s=0.02)
        for _ in range(num_turns):
            world.turn()
        world.end_of(link, transfer_id, link.consumer)
        self._require_untouched(world, link, "the read had timed out")

    @pytest.mark.parametrize("num_turns", [0, 1, 2, 4])
    def test_nothing_is_written_after_a_read_was_cancelled(
        self, world: World, link: Link, num_turns: int
    ) -> None:
        start = link.consumer.endpoint.start_read
        transfer_id = start(link.producer_id, EVERYTHING, HELD, timeout_s=DEADLINE_S)
        for _ in range(num_turns):
            world.turn()
        link.consumer.endpoint.disconnect(link.producer_id)
        ended = world.end_of(link, transfer_id, link.consumer)
        allowed = ended.error is None or isinstance(ended.error, TransportClosedError)
        require(allowed, "`disconnect` ends reads with a `TransportClosedError`", ended)
        self._require_untouched(world, link, "the read was cancelled by `disconnect`")

    @pytest.mark.parametrize("num_turns", [0, 1, 2, 4])
    def test_nothing_is_written_after_a_peer_was_lost(self, world: World, link: Link, num_turns: int) -> None:
        start = link.consumer.endpoint.start_read
        transfer_id = start(link.producer_id, EVERYTHING, HELD, timeout_s=DEADLINE_S)
        for _ in range(num_turns):
            world.turn()
        expected = link.producer.memory().copy()
        world.forget(link.producer)
        # From now on its owner may reuse the memory. Other bytes than the poison, so that a late copy shows.
        link.producer.memory()[:] = POISON ^ 255
        ended = world.end_of(link, transfer_id)
        if ended.error is None:
            same_bytes(
                link.consumer.memory(),
                expected,
                "memory that its owner reuses after `close` is not delivered",
            )
        world.serve(lambda: bool(link.consumer.of_type(PeerLost)), promise="a peer that closes is lost")
        self._require_untouched(world, link, "the peer was lost")

    @pytest.mark.parametrize("num_turns", [0, 1, 2, 4])
    def test_nothing_is_written_after_a_close(self, world: World, link: Link, num_turns: int) -> None:
        link.consumer.endpoint.start_read(link.producer_id, EVERYTHING, HELD, timeout_s=DEADLINE_S)
        for _ in range(num_turns):
            world.turn()
        world.forget(link.consumer)
        self._require_untouched(world, link, "`close` had returned")

    def _require_untouched(self, world: World, link: Link, when: str) -> None:
        """Poison the consumer's memory, serve everything for a while, and require that the poison stays."""
        poison = np.full(POOL_BYTES, POISON, dtype=np.uint8)
        memory = link.consumer.memory()
        memory[:] = poison
        for _ in range(10):
            world.turn(timeout_s=0.002)
        same_bytes(memory, poison, f"{NOT_WRITTEN} (here {when})")

    def test_memory_of_an_arena_stays_mapped_until_close(self, world: World) -> None:
        """Even if the caller dropped the arena: a read that is in flight would crash the process."""
        transport = world.create()
        try:
            num_bytes = 64 << 20
            arena = transport.allocate(num_bytes)
            segment = arena.segment
            endpoint = transport.register(Pool([segment]))
            del arena
            gc.collect()
            require(
                _is_mapped(segment.address, num_bytes),
                "the memory of an arena stays mapped until `close`, even if the caller dropped the arena",
                f"{num_bytes} bytes at {segment.address:#x} are no longer mapped",
            )
            endpoint.close()
        finally:
            transport.close()


class GuardPromises:
    """A read succeeds only if the guard held after its bytes were copied."""

    @pytest.mark.parametrize("guard", [Guard(HELD.index, HELD.value + 1), Guard(HELD.index + 1, HELD.value)])
    def test_a_guard_of_another_offer_is_stale(self, world: World, link: Link, guard: Guard) -> None:
        _require_stale(world.read(link, pairs_of((0, 0, PAGE)), guard))

    def test_a_cleared_guard_is_stale(self, world: World, link: Link) -> None:
        link.producer.transport.guards.clear(HELD.index)
        _require_stale(world.read(link, pairs_of((0, 0, PAGE)), HELD))

    @pytest.mark.parametrize("guard", [Guard(-1, 1), Guard(1 << 40, 1), Guard(0, 0), Guard(0, -1)])
    def test_an_impossible_guard_is_refused(self, link: Link, guard: Guard) -> None:
        with refuses(RegionError, BOUNDED):
            link.consumer.endpoint.start_read(link.producer_id, pairs_of((0, 0, 1)), guard, timeout_s=1)

    def test_memory_that_is_reused_during_a_read_is_never_delivered(self, world: World, link: Link) -> None:
        """The owner clears the guard and writes, after 0, 1, 2, ... turns of the loop, until the read is
        faster.
        """
        guards, memory = link.producer.transport.guards, link.producer.memory()
        for num_turns in range(24):
            value = num_turns + 1
            guards.set(HELD.index, value)
            memory[:] = value
            start = link.consumer.endpoint.start_read
            guard = Guard(HELD.index, value)
            transfer_id = start(link.producer_id, EVERYTHING, guard, timeout_s=DEADLINE_S)
            for _ in range(num_turns // 2):
                world.turn()
            guards.clear(HELD.index)
            memory[:] = 255
            self._require_promised(link, world.end_of(link, transfer_id), value)

    def test_memory_that_is_reused_right_after_a_check_of_its_guard_is_never_delivered(
        self, world: World, link: Link, on_guard_check: OnGuardCheck
    ) -> None:
        """The owner clears the guard and writes in the moment after the transport has looked at the guard."""
        # Odd ones too: the last slice of a read is mostly a short one.
        sizes = (1, PAGE, PAGE + 7, POOL_BYTES - 3, POOL_BYTES)
        num_checks = [self._read_and_reuse(world, link, size, on_guard_check, after=1) for size in sizes]
        self._require_seen(sum(num_checks))

    def test_memory_that_is_reused_before_the_last_slice_is_copied_is_never_delivered(
        self, world: World, on_guard_check: OnGuardCheck
    ) -> None:
        """A guard that is cleared earlier is noticed at the slices before the last one, which is a
        short one.
        """
        num_bytes = (17 << 20) + 5  # a little more than a slice, also where slices are large
        link = world.pair(num_bytes)
        num_checks = self._read_and_reuse(world, link, num_bytes, on_guard_check, after=0)
        self._require_seen(num_checks)
        for after in (num_checks - 1, num_checks):
            self._read_and_reuse(world, link, num_bytes, on_guard_check, after=after)

    def _read_and_reuse(
        self, world: World, link: Link, num_bytes: int, on_guard_check: OnGuardCheck, *, after: int
    ) -> int:
        """Read; reuse the memory after this check of the guard, counted from 1.

        Return how many checks were seen.
        """
        guards, memory = link.producer.transport.guards, link.producer.memory()
        num_checks = 0

        def reuse() -> None:
            nonlocal num_checks
            num_checks += 1
            if num_checks == after:
                guards.clear(HELD.index)
                memory[:] = 255

        guards.set(HELD.index, HELD.value)
        memory[:] = 1
        with on_guard_check(HELD, reuse):
            ended = world.read(link, pairs_of((0, 0, num_bytes)), HELD)
        self._require_promised(link, ended, 1)
        return num_checks

    def _require_seen(self, num_checks: int) -> None:
        if not num_checks:
            pytest.skip(
                f"{type(self).__name__}: not declared: `on_guard_check`, how to see that a guard is checked; override "
                "this fixture, because the transport uses neither `WordTable.holds` nor `guard_holds`"
            )

    def _require_promised(self, link: Link, ended: TransferEnded, value: int) -> None:
        """Require that a read has delivered bytes of this value only, or failed because of the guard."""
        if ended.error is not None:
            return _require_stale(ended)
        memory: npt.NDArray[np.uint8] = link.consumer.memory()[: ended.num_bytes]
        same_bytes(memory, np.full_like(memory, value), GUARDED)


def _require_success(ended: TransferEnded) -> None:
    require(ended.error is None, "a read from a live peer whose guard holds succeeds", ended)


def _require_stale(ended: TransferEnded) -> None:
    require(
        isinstance(ended.error, StaleRegionError), f"{GUARDED}; if not, it is a `StaleRegionError`", ended
    )


def _is_mapped(address: int, num_bytes: int) -> bool:
    """Return whether all of a range of addresses is mapped in this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
        if begin <= address < end:
            if address + num_bytes <= end:
                return True
            address, num_bytes = end, num_bytes - (end - address)
    return False
