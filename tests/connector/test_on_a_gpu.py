"""Nodes with their pools on a GPU hand blocks over, with a stand-in for CUDA's driver.

A GPU executes work after the program has launched it. Until then no block may be offered, and none may be
written into.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from kvferry.connector.handoff.events import GroupBlocks, RemoteOffer
from kvferry.connector.p2p.computed import AT_ONCE, Mark, mark_computed
from kvferry.connector.p2p.options import ConnectorOptions
from kvferry.connector.p2p.orders import (
    Announcement,
    ExtendOrder,
    HandoffMetadata,
    OfferOrder,
    OpenOrder,
    RequestOrders,
)
from kvferry.connector.p2p.registration import describe_caches
from kvferry.connector.p2p.worker import start_handoffs
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
from kvferry.transports.auto import transport as auto_transport
from kvferry.transports.regions import Pool
from kvferry.transports.shm import SharedMemoryTransport
from tests.support.cuda_stand_in import BINDINGS, CudaDriverStandIn
from tests.support.gpu_pools import GpuPools
from tests.support.handoff_orders import ordered
from tests.support.patience import DEADLINE_S

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
        self._has_run = threading.Event()
        self._is_awaited = threading.Event()
        self._ended: dict[str, str | None] = {}  # load → why it failed, or None
        self.num_asked = 0
        config = engine_config("shm", engine_id=engine_id)
        # To PyTorch this is main memory. The transport is told that it is memory of a GPU.
        in_main_memory = describe_caches(config, POOL, {LAYER: self.cache}, [])
        registration = replace(in_main_memory, pool=Pool([arena.segment]))
        self.handoffs = start_handoffs(config, registration, SharedMemoryTransport(), ConnectorOptions())
        address = self.handoffs.address
        self.offer = RemoteOffer(
            engine_id, address.epoch, "p", 1, (address.address,), len(OFFERED) * SHAPE.block_size, (OFFERED,)
        )

    @property
    def is_behind(self) -> bool:
        return not self._has_run.is_set()

    @is_behind.setter
    def is_behind(self, value: bool) -> None:
        if value:
            self._is_awaited.clear()
            self._has_run.clear()
        else:
            self._has_run.set()

    def mark(self) -> Mark:
        return Mark(lambda: self.is_computed(), self.wait)

    def submit(self, orders: HandoffMetadata, *, is_computed: bool = False) -> None:
        self.handoffs.submit(orders, AT_ONCE if is_computed else self.mark())

    def wait(self) -> None:
        self._is_awaited.set()
        assert self._has_run.wait(DEADLINE_S)

    def remote(self, request_id: str, lease: int, blocks: tuple[int, ...] = OFFERED) -> RemoteOffer:
        return replace(
            self.offer,
            request_id=request_id,
            lease=lease,
            block_ids=(blocks,),
            num_tokens=len(blocks) * SHAPE.block_size,
        )

    def announce(self, *offers: RemoteOffer) -> None:
        announced = (
            RequestOrders(offer.request_id, announcement=Announcement(offer.lease)) for offer in offers
        )
        self.submit(HandoffMetadata(tuple(announced)), is_computed=True)

    def open(self, offer: RemoteOffer, num_ready: int, *, is_computed: bool) -> None:
        """Offer blocks of a prompt that is still being computed."""
        order = OpenOrder(offer.lease, offer.block_ids, offer.num_tokens, num_ready, "")
        self.submit(ordered(offer.request_id, offer=order), is_computed=is_computed)

    def until(self, is_true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_true():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def close(self) -> None:
        self.is_behind = False  # otherwise the thread that waits for the GPU would not end
        self.handoffs.close(DEADLINE_S)

    def is_computed(self) -> bool:
        self.num_asked += 1
        return not self.is_behind

    def start_offer(self, *, is_computed: bool = False) -> None:
        # The GPU has finished the step that announces the offer. Otherwise no other node could know about the
        # offer.
        is_behind, self.is_behind = self.is_behind, False
        self.submit(ordered("p", announcement=Announcement(self.offer.lease)))
        self.until(lambda: self.num_asked > 0)
        self.is_behind = is_behind
        order = OfferOrder(self.offer.lease, self.offer.block_ids, self.offer.num_tokens, self.offer.content)
        self.submit(ordered("p", offer=order), is_computed=is_computed)

    def start_load(self, offer: RemoteOffer, request_id: str = "d", blocks: tuple[int, ...] = LOADED) -> None:
        self.submit(ordered(request_id, claim=offer, load=(GroupBlocks(0, blocks),)))

    def until_awaited(self) -> None:
        """Wait until orders wait for the GPU."""
        assert self._is_awaited.wait(DEADLINE_S)

    def until_ended(self, request_id: str = "d") -> dict[str, str]:
        """Wait for the end of a load. Returns the reason if it failed."""

        def has_ended() -> bool:
            report = self.handoffs.outcomes.take_report()
            # A report can contain the ends of several loads, and no later report repeats them.
            self._ended |= dict.fromkeys(report.finished_recving) | report.load_errors
            return request_id in self._ended

        self.until(has_ended)
        error = self._ended[request_id]
        return {} if error is None else {request_id: error}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDriverStandIn]:
    stand_in: Any = CudaDriverStandIn()
    for name in BINDINGS:
        monkeypatch.setitem(sys.modules, name, stand_in)
    yield stand_in
    stand_in.close()
    assert not +stand_in.held


@pytest.fixture
def producer(driver: CudaDriverStandIn) -> Iterator[Side]:
    side = Side(driver, "producer", 1.0)
    yield side
    side.close()


@pytest.fixture
def consumer(driver: CudaDriverStandIn) -> Iterator[Side]:
    side = Side(driver, "consumer", 2.0)
    yield side
    side.close()


def test_blocks_are_offered_when_they_are_computed(producer: Side, consumer: Side) -> None:
    consumer.is_behind = False
    producer.start_offer()
    consumer.start_load(producer.offer)
    producer.until_awaited()
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
    consumer.until_awaited()
    consumer.cache[list(LOADED)] = 7.0  # written by the last step of the request that had these blocks before
    consumer.is_behind = False
    assert consumer.until_ended() == {}
    assert (consumer.cache[list(LOADED)] == 1.0).all()


def test_a_claim_waits_for_an_announcement_that_came_after_work_on_the_gpu(
    producer: Side, consumer: Side
) -> None:
    consumer.is_behind = False
    early, late = producer.remote("early", 1), producer.remote("late", 2, (3, 4))
    producer.announce(early)
    producer.open(early, early.num_tokens, is_computed=False)
    producer.until_awaited()
    producer.announce(late)
    consumer.start_load(late, "late")
    consumer.start_load(replace(late, lease=3), "unknown")  # its claim comes after the other one
    assert "was never made" in consumer.until_ended("unknown")["unknown"]
    assert producer.is_behind
    producer.is_behind = False
    producer.open(late, late.num_tokens, is_computed=True)
    assert consumer.until_ended("late") == {}


def test_a_gpu_that_failed_ends_everything(producer: Side, consumer: Side) -> None:
    def fail() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    consumer.is_computed = fail  # type: ignore[method-assign]
    consumer.start_load(producer.offer)
    assert "illegal memory access" in consumer.until_ended()["d"]


def test_a_node_that_shuts_down_does_not_wait_for_its_gpu(producer: Side, consumer: Side) -> None:
    consumer.start_load(producer.offer)
    consumer.until_awaited()
    consumer.close()
    assert "shuts down" in consumer.until_ended()["d"]


def test_a_cpu_is_never_behind() -> None:
    assert mark_computed(torch.device("cpu")).is_over()


def test_nothing_asks_the_gpu_while_it_computes(producer: Side, consumer: Side) -> None:
    """Each question takes the interpreter's lock from the step that launches the model's kernels."""
    consumer.is_behind = False
    producer.start_offer()
    producer.until_awaited()
    num_asked = producer.num_asked
    time.sleep(0.2)  # the GPU computes
    assert producer.num_asked == num_asked
    producer.is_behind = False
    consumer.start_load(producer.offer)
    assert consumer.until_ended() == {}
    assert producer.num_asked == num_asked + 1


# -- preemptions while the GPU computes -----------------------------------------------------------------


def test_a_preemption_waits_for_no_pass_and_ends_no_other_offer(
    producer: Side, consumer: Side, caplog: pytest.LogCaptureFixture
) -> None:
    consumer.is_behind = False
    preempted, other = producer.remote("preempted", 1), producer.remote("other", 2)
    producer.announce(preempted, other)
    producer.open(preempted, SHAPE.block_size, is_computed=True)
    producer.open(other, other.num_tokens, is_computed=True)
    consumer.start_load(preempted)
    producer.submit(ordered("preempted", extension=ExtendOrder(preempted.block_ids, preempted.num_tokens)))
    producer.until_awaited()
    consumer.until(lambda: bool((consumer.cache[LOADED[0]] == 1.0).all()))
    producer.handoffs.retract({"preempted"})
    # The GPU has not computed anything meanwhile. What the next step writes must not arrive.
    producer.cache[list(OFFERED)] = 9.0
    assert producer.is_behind
    error = consumer.until_ended()["d"]
    assert "the offer was aborted" in error or "no longer holds" in error
    producer.cache[list(OFFERED)] = 1.0
    consumer.start_load(other, "other", (5, 6))
    assert consumer.until_ended("other") == {}
    assert (consumer.cache[[5, 6]] == 1.0).all()
    assert producer.is_behind
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_an_offer_that_waits_for_the_gpu_is_never_made_after_its_preemption(
    producer: Side, consumer: Side
) -> None:
    consumer.is_behind = False
    first, again = producer.remote("p", 1), producer.remote("p", 2)
    producer.announce(first)
    producer.open(first, SHAPE.block_size, is_computed=False)
    consumer.start_load(first)
    producer.until_awaited()
    producer.handoffs.retract({"p"})
    # The request is computed and offered again, and only this offer counts.
    producer.announce(again)
    producer.open(again, again.num_tokens, is_computed=False)
    consumer.start_load(again, "again", (5, 6))
    producer.is_behind = False
    assert "was never made" in consumer.until_ended()["d"]
    assert consumer.until_ended("again") == {}
    assert (consumer.cache[[5, 6]] == 1.0).all()
    # The end of the first one is not reported: that of the second one is reported once the request has
    # finished.
    ended: list[str] = []
    producer.submit(ordered("p", completion=again.block_ids))
    producer.until(
        lambda: bool(ended.extend(producer.handoffs.outcomes.take_report().finished_sending) or ended)
    )
    assert ended == ["p"]
    stats = producer.handoffs.outcomes.take_stats()
    assert stats is not None
    assert stats.counters["offers_aborted_total"] == 1
    assert "live_leases" not in stats.counters  # it is as before


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
