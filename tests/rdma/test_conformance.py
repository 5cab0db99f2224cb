"""`ucx` and `nixl` keep the promises of a transport over RDMA verbs: those that bytes or the loss of a peer
are part of.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import ClassVar, TypeVar

import pytest

from kvferry.transports import Transport
from kvferry.transports.registry import create_transport
from kvferry.transports.testing import TransportConformance
from kvferry.transports.testing.harness import DEADLINE_S, HELD, POOL_BYTES, Link, World
from kvferry.transports.testing.reads import EVERYTHING
from tests.transports import test_nixl, test_ucx

from .conftest import OWNER, READER, options_of

#: Promises about what happens inside one node or on the control connection. The other suites check them, and
#: the guest is slow.
LEFT_OUT = (
    "test_a_close_frees_its_address",
    "test_a_guard_table_takes_only_valid_words",
    "test_a_malformed_address_is_refused",
    "test_a_message_is_not_repeated",
    "test_a_new_endpoint_at_an_old_address_is_a_new_peer",
    "test_a_peer_that_does_not_drain_is_noticed",
    "test_a_read_from_an_unknown_peer_is_refused",
    "test_an_address_is_taken_once",
    "test_an_arena_is_zeroed_aligned_and_writable",
    "test_an_impossible_guard_is_refused",
    "test_an_oversized_message_is_refused_and_harms_nothing",
    "test_an_unknown_option_is_named",
    "test_any_thread_may_wake",
    "test_closing_twice_is_harmless_and_final",
    "test_connecting_to_a_closed_address_ends_in_time",
    "test_impossible_allocations_are_refused",
    "test_many_messages_at_once_keep_their_order",
    "test_memory_of_an_arena_stays_mapped_until_close",
    "test_messages_keep_their_order_both_ways",
    "test_nonsense_costs_only_its_own_connection",
    "test_one_address_serves_many",
    "test_one_pool_is_registered",
    "test_regions_outside_a_pool_are_refused",
    "test_several_peers_are_told_apart",
    "test_wake_before_waiting_is_not_lost",
    "test_waiting_ends_without_events",
)

Suite = TypeVar("Suite", bound=type[TransportConformance])
Create = Callable[[Mapping[str, object]], Transport]


def creator(scheme: str) -> Create:
    """Return what makes transports.

    The first one uses the owner's device and all others the reader's, so that the wire connects them to it.
    The guest cannot connect a device to itself.
    """
    devices = itertools.chain((OWNER,), itertools.repeat(READER))

    def create(options: Mapping[str, object]) -> Transport:
        return create_transport(scheme, {**options_of(next(devices)), **options})

    return create


def shortened(suite: Suite) -> Suite:
    """Remove the tests of `LEFT_OUT`."""
    for name in LEFT_OUT:
        assert hasattr(suite, name), f"there is no {name} to leave out"
        setattr(suite, name, None)
    return suite


@shortened
class TestUCX(test_ucx.TestUCX):
    deadline_s: ClassVar[float] = 60.0

    @pytest.fixture
    def create(self) -> Create:
        return creator("ucx")

    def test_reads_of_the_same_memory_may_be_cut_one_after_the_other(self, world: World, link: Link) -> None:
        """UCX tells the sends of the peer that was lost first when those of the last one end."""
        other = world.link(link.producer, world.node(POOL_BYTES), besides=(link.consumer,))
        for each in (link, other):
            for _ in range(16):
                each.consumer.endpoint.start_read(each.producer_id, EVERYTHING, HELD, timeout_s=DEADLINE_S)
            world.turn(each.consumer)  # it has asked, and does nothing from now on
        for _ in range(16):
            world.turn(link.producer)
        link.producer.endpoint.close()


@shortened
class TestNIXL(test_nixl.NIXLConformance):
    deadline_s: ClassVar[float] = 60.0

    @pytest.fixture
    def create(self) -> Create:
        return creator("nixl")
