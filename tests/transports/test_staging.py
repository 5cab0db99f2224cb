"""Pools on a GPU over the network transports: their bytes pass through staging buffers.

The GPU is a stand-in.

Device memory is poisoned: code that touches it with the CPU crashes. Copies end late, so a missing wait shows
old bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from kvferry.transports._slices import SliceLimits
from kvferry.transports.base import PeerLost, Transport
from kvferry.transports.cuda_mover import CudaMover
from kvferry.transports.errors import (
    KVTransferError,
    ProtocolError,
    TransportError,
)
from kvferry.transports.regions import Guard, RegionPairs
from kvferry.transports.registry import create_transport
from kvferry.transports.streams import encode_frame
from kvferry.transports.testing import (
    World,
    pairs_of,
)
from kvferry.transports.testing.harness import DEADLINE_S, Link, Node
from kvferry.transports.zeromq import ZeroMQTransport
from tests.support.cuda_stand_in import CudaDriverStandIn, CUresult
from tests.support.gpu_pools import has_all_buffers, recorded_movers
from tests.support.promises import OwnershipAndGuards

PAGE = 4096
POOL_BYTES = 8 << 20
HELD = Guard(3, 9)
SCATTERED = pairs_of(*((slot * PAGE, slot * PAGE, 100) for slot in range(64)))
EVERYTHING = pairs_of((0, 0, POOL_BYTES))
#: Small slices and the smallest ring, so that reads need many buffers and wait for them.
TIGHT = {"slice_bytes": 256 << 10, "staging_bytes": 1 << 20}

SCHEMES = ["zeromq", "tcp", "ucx"]

Create = Callable[[Mapping[str, object]], Transport]
MakeNode = Callable[..., Node]


def make(
    scheme: str, driver: CudaDriverStandIn, options: Mapping[str, object], *, on_gpu: bool = True
) -> Transport:
    transport = create_transport(scheme, options)
    if on_gpu:  # its arenas are memory of the stand-in's GPU, as an engine's framework allocates it
        transport._allocate = driver.allocate  # type: ignore[method-assign]
    return transport


@pytest.mark.option
@pytest.mark.parametrize("scheme", SCHEMES)
class TestATightRing(OwnershipAndGuards):
    """`test_sliced` proves what happens to a slice; this is that each transport does it."""

    @pytest.fixture
    def create(self, driver: CudaDriverStandIn, scheme: str) -> Create:
        return lambda options: make(scheme, driver, {**TIGHT, **options})


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def world(driver: CudaDriverStandIn) -> Iterator[World]:
    world = World(ZeroMQTransport)
    yield world
    driver.is_paused = False  # if a test failed: closing waits for copies
    world.close()


@pytest.fixture
def make_node(driver: CudaDriverStandIn, world: World, scheme: str) -> MakeNode:
    """`(on_gpu, **options)` → a node of `world` with a pool of 8 MiB; guard 3 holds 9."""

    def node(on_gpu: bool, **options: object) -> Node:
        transport = make(scheme, driver, options, on_gpu=on_gpu)
        node = world.add(transport, [transport.allocate(POOL_BYTES)])
        transport.guards.set(HELD.index, HELD.value)
        return node

    return node


@pytest.mark.parametrize(("producer_on_gpu", "consumer_on_gpu"), [(True, True), (True, False), (False, True)])
def test_pools_of_any_kind_can_pair_and_the_mechanism_names_staging(
    make_node: MakeNode, world: World, producer_on_gpu: bool, consumer_on_gpu: bool
) -> None:
    producer, consumer = make_node(producer_on_gpu, **TIGHT), make_node(consumer_on_gpu, **TIGHT)
    producer.fill(1)
    link = world.link(producer, consumer)
    for pairs in (SCATTERED, EVERYTHING):
        ended = world.read(link, pairs, HELD)
        assert ended.error is None
        assert ended.mechanism.endswith("+staged") == consumer_on_gpu
    assert np.array_equal(consumer.memory(), producer.memory())


# -- every buffer comes back, whatever happens -------------------------------------------------------


@pytest.fixture(autouse=True)
def movers(monkeypatch: pytest.MonkeyPatch, driver: CudaDriverStandIn) -> Iterator[list[CudaMover]]:
    """All movers of the test. At its end every ticket has ended and every buffer is back."""
    with recorded_movers(monkeypatch) as made:
        yield made


def start(link: Link, pairs: RegionPairs, *, timeout_s: float = DEADLINE_S) -> int:
    return link.consumer.endpoint.start_read(link.producer_id, pairs, HELD, timeout_s=timeout_s)


def ended(node: Node, transfer_id: int) -> bool:
    return bool(node.ends_of(transfer_id))


def test_a_copy_that_fails_at_the_reader_ends_its_read_alone(
    make_node: MakeNode, world: World, driver: CudaDriverStandIn
) -> None:
    link = world.link(make_node(False), make_node(True))
    for name in ("cuMemcpyAsync", "cuEventRecord", "cuLaunchHostFunc", "cuEventQuery"):
        driver.failures[name] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
        error = world.read(link, pairs_of((0, 0, 100)), HELD).error
        assert isinstance(error, TransportError)
        assert f"{name}: CUDA_ERROR_ILLEGAL_ADDRESS" in str(error)
        assert world.read(link, SCATTERED, HELD).error is None


def test_a_copy_that_fails_at_the_owner_loses_the_peer_that_asked(
    make_node: MakeNode, world: World, driver: CudaDriverStandIn
) -> None:
    producer = make_node(True)
    link = world.link(producer, make_node(False))
    other = world.link(producer, make_node(False))
    driver.failures["cuMemcpyAsync"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    assert isinstance(world.read(link, pairs_of((0, 0, 100)), HELD).error, KVTransferError)
    world.serve(lambda: bool(producer.of_type(PeerLost)))
    (lost,) = producer.of_type(PeerLost)
    assert "cuMemcpyAsync: CUDA_ERROR_ILLEGAL_ADDRESS" in str(lost.error)
    assert world.read(other, SCATTERED, HELD).error is None


def test_reads_of_several_peers_share_a_ring_that_is_too_small_for_one(
    make_node: MakeNode, world: World
) -> None:
    producer = make_node(True, **TIGHT)
    producer.fill(1)
    links = [world.link(producer, make_node(index == 0, **TIGHT)) for index in range(3)]
    reads = [(link.consumer, start(link, EVERYTHING)) for link in links for _ in range(2)]
    world.serve(lambda: all(ended(node, read) for node, read in reads))
    for node, read in reads:
        assert node.ends_of(read)[0].error is None
        assert np.array_equal(node.memory(), producer.memory())


@pytest.mark.parametrize(("theirs", "ours"), [(TIGHT, {}), ({}, TIGHT)])
def test_nodes_with_other_slice_bytes_can_pair(
    make_node: MakeNode, world: World, theirs: Mapping[str, object], ours: Mapping[str, object]
) -> None:
    """The owner's staging buffers hold its own slices; a reader with larger ones cuts its reads
    accordingly.
    """
    producer, consumer = make_node(True, **theirs), make_node(True, **ours)
    producer.fill(1)
    assert world.read(world.link(producer, consumer), EVERYTHING, HELD).error is None
    assert np.array_equal(consumer.memory(), producer.memory())


def test_a_peer_that_fetches_more_than_a_staging_buffer_holds_is_dropped(
    make_node: MakeNode, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = make_node(True, **TIGHT)
    good = world.link(producer, make_node(False))
    with monkeypatch.context() as patch:
        patch.setattr(SliceLimits, "within", lambda limits, max_bytes: limits)  # it ignores our hello
        bad = world.link(producer, make_node(False))
        world.read(bad, EVERYTHING, HELD)
    world.serve(lambda: bool(producer.of_type(PeerLost)))
    (lost,) = producer.of_type(PeerLost)
    assert lost.peer_id == bad.consumer_id
    assert isinstance(lost.error, ProtocolError)
    assert "our hello allows 524288" in str(lost.error)
    assert world.read(good, EVERYTHING, HELD).error is None


@pytest.mark.parametrize("scheme", ["tcp", "ucx"])  # zeromq sends copies, and keeps no buffer
def test_a_peer_that_does_not_receive_loses_its_buffers_to_those_that_wait(
    make_node: MakeNode, world: World, movers: list[CudaMover], scheme: str
) -> None:
    """It sends pings, so it is not silent."""
    producer = make_node(True, **TIGHT, peer_timeout_s=0.4)
    stalled = world.link(producer, make_node(False, slice_bytes=1 << 20, window_slices=64))
    other = world.link(producer, make_node(False, peer_timeout_s=0.4))
    for _ in range(4):
        start(stalled, EVERYTHING)
    checked: Any = stalled.consumer.endpoint
    table = checked._inner._table
    connection = table.connected_peer(stalled.producer_id).connection
    num_stuck = 0

    def ping() -> None:
        with suppress(KVTransferError):
            table.backend.stream_of(connection).send(encode_frame(table.backend.ping_kind, b""))

    def is_stuck() -> bool:
        nonlocal num_stuck
        ping()
        ring: Any = movers[0].gather_ring
        num_stuck = 0 if ring.num_free or movers[0].has_open_tickets else num_stuck + 1
        return num_stuck == 50

    world.serve(is_stuck, producer, other.consumer)
    transfer_id = start(other, SCATTERED)

    def is_over() -> bool:
        ping()
        return ended(other.consumer, transfer_id)

    world.serve(is_over, producer, other.consumer)
    assert other.consumer.ends_of(transfer_id)[0].error is None
    assert "keeps staging buffers" in str(producer.of_type(PeerLost)[0].error)


@pytest.mark.parametrize(
    "scheme", ["tcp"]
)  # ucx drops the peer, and zeromq takes no buffer before bytes have come
def test_a_read_that_times_out_does_not_keep_its_buffers_for_an_owner_that_sends_nothing(
    make_node: MakeNode, world: World, movers: list[CudaMover], scheme: str
) -> None:
    consumer = make_node(True, **TIGHT, peer_timeout_s=60.0)
    link = world.link(make_node(False), consumer)
    transfer_id = start(link, EVERYTHING, timeout_s=0.05)
    world.serve(lambda: ended(consumer, transfer_id), consumer)
    assert not consumer.of_type(PeerLost)
    assert has_all_buffers(movers[0])


def test_two_nodes_that_read_from_each_other_do_not_fill_each_others_rings(
    make_node: MakeNode, world: World
) -> None:
    first, second = make_node(True, **TIGHT), make_node(True, **TIGHT)
    forth, back = world.link(first, second), world.link(second, first)
    half = POOL_BYTES // 2
    reads = [
        (second, start(forth, pairs_of((0, 0, half)))),
        (first, start(back, pairs_of((half, half, half)))),
    ]
    world.serve(lambda: all(ended(node, read) for node, read in reads))
    assert [node.ends_of(read)[0].error for node, read in reads] == [None, None]
