"""A node whose weights change while it runs: nothing that was computed with other weights is handed over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from kvferry.connector.p2p.worker import HandoffWorker
from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, assert_whole, engine_config, load

WHY = "the weights changed"


@pytest.fixture(params=["inproc", "shm", "tcp"])
def nodes(request: pytest.FixtureRequest) -> Iterator[tuple[ModelFreeNode, ModelFreeNode]]:
    with two_nodes(request.param) as pair:
        yield pair


@contextmanager
def two_nodes(transport: str) -> Iterator[tuple[ModelFreeNode, ModelFreeNode]]:
    """Yield a producer and a consumer of the same model, which have handed over before."""
    with ExitStack() as stack:
        producer, consumer = (
            stack.enter_context(ModelFreeNode(engine_config(transport), CacheShape())) for _ in range(2)
        )
        assert handed_over(producer, consumer, "first") == ""
        yield producer, consumer
        for node in (producer, consumer):
            assert_whole(node)


def handed_over(producer: ModelFreeNode, consumer: ModelFreeNode, name: str) -> str:
    """Hand a prompt over, and return why that failed; empty if it did not."""
    offered, params = producer.prefill(f"p-{name}", 9, seed=len(name))
    expected = producer.contents(offered)
    request = Request(f"d-{name}", 9, params)
    blocks = load(consumer, producer, request)
    error = consumer.load_error(request.request_id)
    assert error or torch.equal(consumer.contents(blocks), expected)
    consumer.finish(request.request_id, "error" if error else "stop")
    release(producer, params)
    return error


def handed_over_by_a_new_connection(producer: ModelFreeNode, consumer: ModelFreeNode, name: str) -> str:
    """The same, after a change that has closed the connection: a load that begins before its node has noticed
    fails for that.
    """
    errors = (handed_over(producer, consumer, f"{name}-{number}") for number in range(20))
    return next(error for error in errors if "is not connected" not in error and "lost" not in error)


def release(producer: ModelFreeNode, params: object) -> None:
    """Give an offer up as a router does whose decode node could not load it, and wait until no block
    is held.
    """
    assert isinstance(params, dict)
    name = params["remote_request_id"]
    producer.add(
        Request(f"release-{name}", 1, {**params, "do_remote_prefill": False, "do_release": True}), seed=9
    )
    producer.step_until(lambda: not producer.held)


def change(node: ModelFreeNode, weights: str | None) -> None:
    half = node.worker._worker  # type: ignore[attr-defined]
    assert isinstance(half, HandoffWorker)
    half.begin_anew(weights, WHY)


@pytest.mark.parametrize("changed", ["producer", "consumer"])
def test_nodes_hand_over_again_when_both_have_the_same_weights(
    nodes: tuple[ModelFreeNode, ModelFreeNode], changed: str
) -> None:
    producer, consumer = nodes
    first, second = (producer, consumer) if changed == "producer" else (consumer, producer)
    change(first, "other")
    error = handed_over_by_a_new_connection(producer, consumer, "unlike")
    assert "weights" in error
    assert "'other'" in error
    change(second, "other")
    assert handed_over(producer, consumer, "again") == ""


def test_an_offer_ends_with_the_weights_that_it_was_computed_with(
    nodes: tuple[ModelFreeNode, ModelFreeNode],
) -> None:
    """Also if both nodes have the same weights afterwards, and the offer was claimed before."""
    producer, consumer = nodes
    offers = [producer.prefill(f"p-{name}", 9)[1] for name in ("claimed", "open")]
    requests = [Request(f"d-{number}", 9, params) for number, params in enumerate(offers)]
    consumer.add(requests[0], is_queued=True, computes=False)
    for node in nodes:
        node.step()
    for node in (consumer, producer):
        change(node, "other")
    producer.step_until(lambda: not producer.held)
    consumer.add(requests[1], is_queued=True, computes=False)
    for request in requests:
        consumer.start(request.request_id)
        consumer.step_until(lambda: consumer.num_reports(request.request_id, "recving") > 0, producer)  # noqa: B023
        assert consumer.load_error(request.request_id)
        consumer.finish(request.request_id, "error")
    assert WHY in consumer.load_error("d-0")


def test_a_node_can_end_everything_and_stay_what_it_is(nodes: tuple[ModelFreeNode, ModelFreeNode]) -> None:
    producer, consumer = nodes
    producer.prefill("p-open", 9)
    producer.step()
    assert producer.held
    change(producer, None)
    producer.step_until(lambda: not producer.held)
    assert handed_over_by_a_new_connection(producer, consumer, "after") == ""
