"""The transports that tests put around others behave like them, except for the configured faults and
delays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from kvferry.transports import MessageReceived, PeerLost, TransferEnded, Transport
from kvferry.transports.errors import (
    ChecksumError,
    ConfigurationError,
    PeerLostError,
    StaleRegionError,
    TransferTimeoutError,
)
from kvferry.transports.registry import create_transport, register_transport
from kvferry.transports.testing import Link, TransportConformance, World, pairs_of
from kvferry.transports.testing.delays import DelayedTransport
from kvferry.transports.testing.faulty import FaultyTransport
from kvferry.transports.testing.harness import HELD, POOL_BYTES

register_transport("delayed", "kvferry.transports.testing.delays:DelayedTransport")
register_transport("faulty", "kvferry.transports.testing.faulty:FaultyTransport")

EVERYTHING = pairs_of((0, 0, POOL_BYTES))


@pytest.mark.slow  # as a whole
@pytest.mark.option
class TestFaultlessAndLate(TransportConformance):
    """One wrapper is inside the other, so that the suite runs only once."""

    read_unchecked = connect_raw = None

    @pytest.fixture
    def create(self) -> Any:
        def create(options: Mapping[str, object]) -> Transport:
            return FaultyTransport({"inner": "delayed", **options})

        return create


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "explode"},
        {"kind": "corrupt", "at": "message"},
        {"kind": "drop", "at": "noon"},
        {"kind": "drop", "nth": 0},
        {"kind": "fail", "error": "ValueError"},
        {"kind": "fail", "wings": 2},
    ],
)
def test_invalid_faults_are_refused(fault: Mapping[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        create_transport("faulty", {"faults": [fault]})


@pytest.fixture
def faulty(request: pytest.FixtureRequest) -> Iterator[tuple[World, Link]]:
    """Two connected nodes. The consumer has the faults of the test's parameter."""
    world = World(FaultyTransport)
    producer = world.node(POOL_BYTES)
    world.create = lambda: FaultyTransport({"faults": request.param})
    link = world.link(producer, world.node(POOL_BYTES))
    producer.fill(1)
    producer.transport.guards.set(HELD.index, HELD.value)
    yield world, link
    world.close()


def faults(*rows: Mapping[str, object]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("faulty", [rows], indirect=True, ids=["script"])


Faulty = tuple[World, Link]


@faults({"kind": "fail", "nth": 2, "error": "StaleRegionError"})
def test_the_nth_transfer_fails_as_configured(faulty: Faulty) -> None:
    world, link = faulty
    errors = [world.read(link, EVERYTHING, HELD).error for _ in range(3)]
    assert [type(error) for error in errors] == [type(None), StaleRegionError, type(None)]


@faults({"kind": "corrupt"})
def test_corrupt_bytes_differ_and_are_noticed(faulty: Faulty) -> None:
    world, link = faulty
    assert isinstance(world.read(link, EVERYTHING, HELD).error, ChecksumError)
    assert not np.array_equal(link.consumer.memory(), link.producer.memory())


@faults({"kind": "drop", "at": "message", "nth": 2})
def test_a_peer_is_dropped_at_a_message_that_is_sent(faulty: Faulty) -> None:
    world, link = faulty
    link.consumer.endpoint.send(link.producer_id, b"heard")
    transfer_id = link.consumer.endpoint.start_read(link.producer_id, EVERYTHING, HELD, timeout_s=20)
    with pytest.raises(PeerLostError):
        link.consumer.endpoint.send(link.producer_id, b"unheard")
    world.serve(lambda: bool(link.consumer.of_type(PeerLost)) and bool(link.producer.of_type(PeerLost)))
    assert link.producer.messages(link.consumer_id) == [b"heard"]
    ended, lost = link.consumer.history[-2:]
    assert isinstance(ended, TransferEnded)
    assert ended.transfer_id == transfer_id
    assert isinstance(ended.error, PeerLostError)
    assert isinstance(lost, PeerLost)


@faults({"kind": "stall"})
def test_nothing_comes_from_a_stalled_peer(faulty: Faulty) -> None:
    world, link = faulty
    link.producer.endpoint.send(link.consumer_id, b"unheard")
    assert isinstance(world.read(link, EVERYTHING, HELD, timeout_s=0.1).error, TransferTimeoutError)
    link.consumer.endpoint.send(link.producer_id, b"unheard")
    world.serve_quietly()
    assert not link.consumer.of_type(MessageReceived)
    assert not link.producer.of_type(MessageReceived)


def order_of_events(seed: int) -> list[str]:
    """Return the events of one node for a few messages and reads, in order."""
    world = World(lambda: DelayedTransport({"seed": seed}))
    link = world.pair(POOL_BYTES)
    link.producer.transport.guards.set(HELD.index, HELD.value)
    for number in range(4):
        link.producer.endpoint.send(link.consumer_id, bytes([number]))
        link.consumer.endpoint.start_read(link.producer_id, EVERYTHING, HELD, timeout_s=20)
    world.serve(lambda: len(link.consumer.history) == 9)
    world.close()
    return [type(event).__name__ for event in link.consumer.history]


def test_delays_depend_on_their_seed() -> None:
    orders = [order_of_events(seed) for seed in range(4)]
    assert order_of_events(2) == orders[2]
    assert len({tuple(order) for order in orders}) > 1
