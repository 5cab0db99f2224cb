"""A node that lets go of its caches for a while: it ends every handoff, answers peers, and comes back as
another start of the same node.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvferry.connector.p2p.worker import HandoffWorker
from kvferry.connector.testing import ModelFreeNode, Request

from .test_changed_weights import handed_over_by_a_new_connection, two_nodes

WHY = "the node is asleep"


@pytest.fixture(params=["shm", "tcp"])
def nodes(request: pytest.FixtureRequest) -> Iterator[tuple[ModelFreeNode, ModelFreeNode]]:
    with two_nodes(request.param) as pair:
        yield pair


def half_of(node: ModelFreeNode) -> HandoffWorker:
    half = node.worker._worker  # type: ignore[attr-defined]
    assert isinstance(half, HandoffWorker)
    return half


def wake_up(node: ModelFreeNode) -> None:
    """Serve the caches again, and have the scheduler half learn where, as vLLM does."""
    half_of(node).wake_up()
    node.scheduler.set_handshake_metadata({0: half_of(node).get_handshake_metadata()})


def refusal(producer: ModelFreeNode, consumer: ModelFreeNode, request: Request) -> str:
    """Have a consumer load what it must not get, and return why it did not."""
    consumer.add(request, computes=False)
    consumer.step()
    consumer.step_until(lambda: consumer.num_reports(request.request_id, "recving") > 0, producer)
    consumer.finish(request.request_id, "error")
    return consumer.load_error(request.request_id)


def test_an_offer_from_before_is_never_honoured_and_later_ones_are(
    nodes: tuple[ModelFreeNode, ModelFreeNode],
) -> None:
    producer, consumer = nodes
    _, params = producer.prefill("p-old", 9)
    assert params is not None
    producer.step()  # the offer is ordered with the step after the answer
    before = half_of(producer).get_handshake_metadata()
    half_of(producer).sleep(WHY)
    half_of(producer).sleep(WHY)  # vLLM may call it again
    producer.step_until(lambda: not producer.held)  # the blocks are free, although the node is asleep
    assert WHY in refusal(producer, consumer, Request("d-asleep", 9, params))
    wake_up(producer)
    wake_up(producer)
    after = half_of(producer).get_handshake_metadata()
    assert after.address == before.address
    assert after.epoch != before.epoch
    assert "restarted" in refusal(producer, consumer, Request("d-awake", 9, params))
    assert handed_over_by_a_new_connection(producer, consumer, "new") == ""
    assert handed_over_by_a_new_connection(consumer, producer, "back") == ""


def test_other_weights_after_the_wake_are_refused_by_name(
    nodes: tuple[ModelFreeNode, ModelFreeNode],
) -> None:
    producer, consumer = nodes
    half_of(producer).sleep(WHY)
    half_of(producer).begin_anew("other", "the weights changed")  # the weights wake before the cache
    wake_up(producer)
    error = handed_over_by_a_new_connection(producer, consumer, "unlike")
    assert "weights" in error
    assert "'other'" in error
    half_of(consumer).begin_anew("other", "the weights changed")
    assert handed_over_by_a_new_connection(producer, consumer, "alike") == ""


def test_a_read_in_flight_ends_before_the_memory_goes(nodes: tuple[ModelFreeNode, ModelFreeNode]) -> None:
    """Nothing is written into the pool afterwards, and the load is reported as failed, once."""
    producer, consumer = nodes
    _, params = producer.prefill("p", 9)
    is_reading = hold_next_read(half_of(consumer))
    consumer.add(Request("d", 9, params), computes=False)
    consumer.step()
    producer.step()
    assert is_reading.wait(20)
    driver: Any = half_of(consumer)._driver
    half_of(consumer).sleep(WHY)
    assert not driver.loads_in_transfer
    assert not driver._thread.is_alive()
    blocks = consumer.blocks_of("d")
    consumer.pool.fill(blocks, seed=7)  # as if the memory were another's now
    before = consumer.contents(blocks)
    consumer.step_until(lambda: consumer.num_reports("d", "recving") > 0, producer)
    assert WHY in consumer.load_error("d")
    wake_up(consumer)
    producer.step_until(lambda: not producer.held, consumer)
    assert torch.equal(consumer.contents(blocks), before)
    consumer.finish("d", "error")
    assert consumer.num_reports("d", "recving") == 1
    assert handed_over_by_a_new_connection(producer, consumer, "new") == ""


def hold_next_read(half: HandoffWorker) -> threading.Event:
    """Keep a node's next read in flight until the end of all handoffs is ordered.

    The handoff thread waits inside `start_read`, so nothing can note the read's end before that.

    Returns:
        An event that is set when the read has begun.
    """
    driver: Any = half._driver
    is_reading, is_ordered = threading.Event(), threading.Event()
    start_read = driver._endpoint.start_read

    def start(*args: Any, **kwargs: Any) -> int:
        transfer_id: int = start_read(*args, **kwargs)
        is_reading.set()
        assert is_ordered.wait(20)
        return transfer_id

    class Orders(deque[Any]):
        def append(self, order: Any) -> None:
            super().append(order)
            if order.begin_anew is not None:
                is_ordered.set()

    driver._endpoint.start_read, driver._orders = start, Orders(driver._orders)
    return is_reading
