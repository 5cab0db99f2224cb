"""Nodes with their pools on a GPU hand blocks over, with a stand-in for CUDA's driver.

A GPU executes work after the program has launched it. Until then no block may be offered, and none may be written into.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from kvferry.connector.computed import mark_computed
from kvferry.connector.handoff.events import GroupBlocks, RemoteOffer
from kvferry.connector.metadata import Announcement, HandoffMetadata, OfferOrder
from kvferry.connector.options import ConnectorOptions
from kvferry.connector.registration import describe_caches
from kvferry.connector.testing import (
    PER_LAYER,
    UNIFORM,
    CacheShape,
    MakeNode,
    Request,
    compute,
    engine_config,
    fetch,
    node_maker,
    settle,
)
from kvferry.connector.worker_half import RunningHandoffs
from kvferry.transports.auto import transport as auto_transport
from kvferry.transports.regions import Pool
from kvferry.transports.shm import SharedMemoryTransport
from kvferry.transports.testing.cuda_driver import CudaDriverStandIn
from tests.support.gpu_pools import GpuPools

SHAPE = CacheShape(num_layers=1)
POOL = SHAPE.kv_cache_config()
(LAYER,) = POOL.kv_cache_groups[0].layer_names
OFFERED, LOADED = (1, 2), (3, 4)


class Side:
    """The running handoffs of a node. The test decides how far its GPU has computed."""

    def __init__(self, driver: CudaDriverStandIn, engine_id: str, value: float) -> None:
        arena = driver.allocate(SHAPE.num_blocks * SHAPE.spec.page_size_bytes)
        self.cache = torch.frombuffer(arena.buffer, dtype=SHAPE.dtype)
        self.cache = self.cache.view(SHAPE.num_blocks, *SHAPE.logical_page).fill_(value)
        self.is_behind = True
        self.num_asked = 0
        config = engine_config("shm", engine_id=engine_id)
        # To PyTorch this is main memory. The transport is told that it is memory of a GPU.
        in_main_memory = describe_caches(config, POOL, {LAYER: self.cache}, [])
        registration = replace(in_main_memory, pool=Pool([arena.segment]))
        self.handoffs = RunningHandoffs(
            config, registration, SharedMemoryTransport(), ConnectorOptions(), self.mark
        )
        address = self.handoffs.address
        self.offer = RemoteOffer(
            engine_id, address.epoch, "p", 1, (address.address,), len(OFFERED) * SHAPE.block_size, (OFFERED,)
        )

    def mark(self) -> Callable[[], bool]:
        return self.is_computed

    def is_computed(self) -> bool:
        self.num_asked += 1
        return not self.is_behind

    def start_offer(self, *, is_computed: bool = False) -> None:
        # The GPU has finished the step that announces the offer. Otherwise no other node could know about the offer.
        is_behind, self.is_behind = self.is_behind, False
        self.handoffs.submit(HandoffMetadata(announcements={"p": Announcement(self.offer.lease)}))
        deadline = time.monotonic() + 20
        while not self.num_asked:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        self.is_behind = is_behind
        order = OfferOrder(self.offer.lease, self.offer.block_ids, self.offer.num_tokens, self.offer.content)
        self.handoffs.submit(HandoffMetadata(offers={"p": order}), is_computed=is_computed)

    def start_load(self, offer: RemoteOffer) -> None:
        orders = HandoffMetadata(claims={"d": offer}, loads={"d": (GroupBlocks(0, LOADED),)})
        self.handoffs.submit(orders)

    def until_asked_again(self) -> None:
        """Wait until the handoff thread has seen twice that the GPU is behind."""
        seen, deadline = self.num_asked, time.monotonic() + 20
        while self.num_asked < seen + 2:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def until_ended(self) -> dict[str, str]:
        """Wait for the end of the load. Returns the reason if it failed."""
        deadline = time.monotonic() + 20
        while True:
            report = self.handoffs.outcomes.take_report()
            if "d" in report.finished_recving:
                return report.load_errors
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDriverStandIn]:
    stand_in: Any = CudaDriverStandIn()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", stand_in)
    yield stand_in
    stand_in.close()
    assert not +stand_in.held


@pytest.fixture
def producer(driver: CudaDriverStandIn) -> Iterator[Side]:
    side = Side(driver, "producer", 1.0)
    yield side
    side.handoffs.close()


@pytest.fixture
def consumer(driver: CudaDriverStandIn) -> Iterator[Side]:
    side = Side(driver, "consumer", 2.0)
    yield side
    side.handoffs.close()


def test_blocks_go_from_pool_to_pool(producer: Side, consumer: Side) -> None:
    producer.is_behind = consumer.is_behind = False
    producer.start_offer()
    consumer.start_load(producer.offer)
    assert consumer.until_ended() == {}
    assert (consumer.cache[list(LOADED)] == 1.0).all()
    assert (consumer.cache[[2, 5]] == 2.0).all()
    stats = consumer.handoffs.outcomes.take_stats()
    assert stats is not None
    assert [record.mechanism for record in stats.transfers] == ["cuda_ipc"]


def test_blocks_are_offered_when_they_are_computed(producer: Side, consumer: Side) -> None:
    consumer.is_behind = False
    producer.start_offer()
    consumer.start_load(producer.offer)
    producer.until_asked_again()
    producer.cache[list(OFFERED)] = 7.0  # the GPU had not finished this yet
    producer.is_behind = False
    assert consumer.until_ended() == {}
    assert (consumer.cache[list(LOADED)] == 7.0).all()


def test_blocks_that_are_certainly_computed_are_offered_while_the_gpu_is_busy(
    producer: Side, consumer: Side
) -> None:
    consumer.is_behind = False
    producer.start_offer(is_computed=True)
    consumer.start_load(producer.offer)
    assert consumer.until_ended() == {}
    assert producer.is_behind


def test_blocks_are_loaded_once_no_earlier_work_on_the_gpu_writes_them(
    producer: Side, consumer: Side
) -> None:
    producer.is_behind = False
    producer.start_offer()
    consumer.start_load(producer.offer)
    consumer.until_asked_again()
    consumer.cache[list(LOADED)] = 7.0  # written by the last step of the request that had these blocks before
    consumer.is_behind = False
    assert consumer.until_ended() == {}
    assert (consumer.cache[list(LOADED)] == 1.0).all()


def test_a_gpu_that_failed_ends_everything(producer: Side, consumer: Side) -> None:
    def fail() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    consumer.is_computed = fail  # type: ignore[method-assign]
    consumer.start_load(producer.offer)
    assert "illegal memory access" in consumer.until_ended()["d"]


def test_a_node_that_shuts_down_does_not_wait_for_its_gpu(producer: Side, consumer: Side) -> None:
    consumer.start_load(producer.offer)
    consumer.handoffs.close()
    assert "shuts down" in consumer.until_ended()["d"]


def test_a_cpu_is_never_behind() -> None:
    assert mark_computed(torch.device("cpu"))()


# -- between nodes, over each transport ---------------------------------------------------------------

UCX = pytest.param("ucx", marks=pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed"))


@pytest.fixture
def make_node(
    gpu_pools: GpuPools, connector: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Make nodes with `connector`. `"auto, elsewhere"` is `auto` with each node on a host of its own."""
    name, _, is_elsewhere = connector.partition(", ")
    if is_elsewhere:
        hosts = itertools.count()
        monkeypatch.setattr(auto_transport, "this_host", lambda: f"host-{next(hosts)}")
    with node_maker({"kv_connector": name}) as make:
        yield make


@pytest.mark.parametrize("connector", ["shm", "zeromq", "tcp", UCX, "auto", "auto, elsewhere"])
def test_both_layouts_are_handed_over_from_gpu_to_gpu(make_node: MakeNode, connector: str) -> None:
    nodes = [make_node(UNIFORM), make_node(PER_LAYER), make_node(replace(PER_LAYER, block_size=8))]
    for number, (producer, consumer) in enumerate(itertools.permutations(nodes, 2)):
        params = compute(producer, Request(f"p{number}", 18, first_token_id=100 * number))
        fetch(consumer, producer, Request(f"d{number}", 18, params, first_token_id=100 * number))
    settle(*nodes)
    mechanisms = {record.mechanism for node in nodes for record in node.stats.transfers}
    if connector in ("shm", "auto"):
        assert mechanisms == {"cuda_ipc"}
    else:
        assert all(mechanism.endswith("+staged") for mechanism in mechanisms)


@pytest.mark.parametrize("connector", ["zeromq", "tcp", UCX, "auto"])
def test_a_gpu_and_a_cpu_hand_over_to_each_other(
    make_node: MakeNode, gpu_pools: GpuPools, connector: str
) -> None:
    gpu = make_node(PER_LAYER)
    gpu_pools.is_on = False
    cpu = make_node(UNIFORM)
    for number, (producer, consumer) in enumerate([(gpu, cpu), (cpu, gpu)]):
        params = compute(producer, Request(f"p{number}", 18, first_token_id=100 * number))
        fetch(consumer, producer, Request(f"d{number}", 18, params, first_token_id=100 * number))
    settle(gpu, cpu)
    assert [
        record.mechanism.endswith("+staged") for node in (cpu, gpu) for record in node.stats.transfers
    ] == [
        False,
        True,
    ]
