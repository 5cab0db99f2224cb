"""A handoff from end to end, over each transport, between two nodes of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from kvferry.connector.stats import COUNTERS
from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, engine_config

UNIFORM = CacheShape()
PER_LAYER = replace(UNIFORM, layout="per-layer")
FOREIGN = replace(UNIFORM, layout="foreign")
SHORT_LEASE = {"lease_s": 0.2, "heartbeat_s": 0.05}

MakeNode = Callable[..., ModelFreeNode]


UCX = pytest.param("ucx", marks=pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed"))


@pytest.fixture(params=["inproc", "shm", "zeromq", UCX, "auto"])
def connector(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_node(connector: str) -> Iterator[MakeNode]:
    """Makes nodes that are shut down after the test."""
    with ExitStack() as stack:

        def make(
            shape: CacheShape = UNIFORM, *, options: dict[str, Any] | None = None, **fields: Any
        ) -> ModelFreeNode:
            config = engine_config(
                connector, block_size=shape.block_size, kv_connector_extra_config=options or {}, **fields
            )
            return stack.enter_context(ModelFreeNode(config, shape))

        yield make


def load(
    consumer: ModelFreeNode, producer: ModelFreeNode, request: Request, local_blocks: list[int] | None = None
) -> list[int]:
    """Run a request's load to its end, good or bad; return the request's block table."""
    consumer.scheduler.on_new_request(request)
    blocks, num_tokens = consumer.start_load(request, local_blocks or [])
    assert num_tokens > 0
    consumer.step_until(lambda: consumer.num_reports(request.request_id, "recving") > 0, producer)
    return blocks


def by_token(node: ModelFreeNode, blocks: list[int]) -> torch.Tensor:
    """What blocks hold: (layer, key or value, token, head, element)."""
    return node.contents(blocks).transpose(1, 2).flatten(2, 3)


def assert_whole(node: ModelFreeNode) -> None:
    """Nothing is held or remembered any more, and every block is free once."""
    assert not node.held
    assert sorted(node.free_blocks) == list(range(1, node.shape.num_blocks))


def is_freed(producer: ModelFreeNode) -> Callable[[], bool]:
    return lambda: not producer.held


class TestDelivery:
    @pytest.mark.parametrize(
        "consumer_shape", [UNIFORM, PER_LAYER, FOREIGN], ids=lambda shape: f"to-{shape.layout}"
    )
    @pytest.mark.parametrize("producer_shape", [UNIFORM, PER_LAYER, FOREIGN], ids=lambda shape: shape.layout)
    def test_the_bytes_arrive(
        self, make_node: MakeNode, producer_shape: CacheShape, consumer_shape: CacheShape
    ) -> None:
        producer = make_node(producer_shape, role="kv_producer")
        consumer = make_node(consumer_shape, role="kv_consumer")
        offered, params = producer.prefill("p", 18, seed=1)
        expected = producer.contents(offered)
        request = Request("d", 18, params)
        blocks = load(consumer, producer, request)
        assert torch.equal(consumer.contents(blocks), expected)
        assert consumer.load_error("d") == ""
        producer.step_until(is_freed(producer), consumer)
        consumer.finish(request, blocks, "stop")
        assert_whole(producer)
        assert_whole(consumer)

    @pytest.mark.parametrize("num_tokens", [2, 3, 4, 5, 8, 17])
    def test_any_length_arrives(self, make_node: MakeNode, num_tokens: int) -> None:
        producer, consumer = make_node(), make_node()
        offered, params = producer.prefill("p", num_tokens, seed=2)
        expected = producer.contents(offered)
        blocks = load(consumer, producer, Request("d", num_tokens, params))
        assert torch.equal(consumer.contents(blocks), expected)

    def test_other_blocks_are_left_alone(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node(PER_LAYER)
        everything = list(range(consumer.shape.num_blocks))
        consumer.fill(everything, seed=3)
        before = consumer.contents(everything)
        _, params = producer.prefill("p", 10)
        blocks = load(consumer, producer, Request("d", 10, params))
        others = [block for block in everything if block not in blocks]
        assert torch.equal(consumer.contents(others), before[:, others])

    def test_only_missing_blocks_move(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node()
        offered, params = producer.prefill("p", 18, seed=4)
        expected = producer.contents(offered)
        cached = consumer.allocate(8)
        consumer.fill(cached, seed=99)
        before = consumer.contents(cached)
        blocks = load(consumer, producer, Request("d", 18, params), cached)
        assert torch.equal(consumer.contents(blocks[2:]), expected[:, 2:])
        assert torch.equal(consumer.contents(cached), before)
        assert consumer.stats.transfers[0].num_blocks == 3

    @pytest.mark.parametrize("consumer_block_size", [2, 8, 16])
    @pytest.mark.parametrize("producer_layout", ["uniform", "per-layer"])
    def test_other_block_sizes_arrive_token_by_token(
        self, make_node: MakeNode, consumer_block_size: int, producer_layout: Any
    ) -> None:
        producer = make_node(replace(UNIFORM, layout=producer_layout))
        consumer = make_node(replace(UNIFORM, block_size=consumer_block_size))
        offered, params = producer.prefill("p", 18, seed=4)
        expected = by_token(producer, offered)[:, :, :18]
        blocks = load(consumer, producer, Request("d", 18, params))
        assert torch.equal(by_token(consumer, blocks)[:, :, :18], expected)
        (record,) = consumer.stats.transfers
        assert record.num_bytes == expected.numel() * expected.element_size()
        assert record.num_regions_per_layer >= record.num_regions > 0

    def test_a_prompt_that_is_here_moves_nothing_and_frees_the_producer(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node()
        _, params = producer.prefill("p", 9)
        request = Request("d", 9, params)
        consumer.scheduler.on_new_request(request)
        blocks, num_tokens = consumer.start_load(request, consumer.allocate(8))
        assert num_tokens == 0
        producer.step_until(is_freed(producer), consumer)
        consumer.finish(request, blocks, "stop")
        assert consumer.num_reports("d", "recving") == 0
        assert_whole(producer)
        assert_whole(consumer)

    def test_many_at_once(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node()
        expected, blocks = {}, {}
        for index in range(7):
            offered, params = producer.prefill(f"p{index}", 13, seed=index)
            expected[f"d{index}"] = producer.contents(offered)
            request = Request(f"d{index}", 13, params)
            consumer.scheduler.on_new_request(request)
            blocks[f"d{index}"], _ = consumer.start_load(request)
        consumer.step_until(lambda: all(consumer.num_reports(d, "recving") for d in expected), producer)
        for request_id, table in blocks.items():
            assert torch.equal(consumer.contents(table), expected[request_id])
        producer.step_until(is_freed(producer), consumer)
        assert_whole(producer)

    def test_two_nodes_hand_over_both_ways(self, make_node: MakeNode) -> None:
        one, two = make_node(), make_node()
        for producer, consumer in ((one, two), (two, one), (one, two)):
            offered, params = producer.prefill("p", 10, seed=5)
            expected = producer.contents(offered)
            blocks = load(consumer, producer, Request("d", 10, params))
            assert torch.equal(consumer.contents(blocks), expected)
            producer.step_until(is_freed(producer), consumer)
            consumer.outputs.clear()
            producer.outputs.clear()

    def test_a_claim_may_come_before_its_offer(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node()
        offered, params = producer.prefill("p", 10, seed=6)
        expected = producer.contents(offered)
        request = Request("d", 10, params)
        consumer.scheduler.on_new_request(request)
        blocks, _ = consumer.start_load(request)
        consumer.step()  # the producer's worker half has not heard of the offer yet
        consumer.step_until(lambda: consumer.num_reports("d", "recving") > 0, producer)
        assert torch.equal(consumer.contents(blocks), expected)


class TestFigures:
    def test_neighbours_in_the_uniform_layout_are_one_region(
        self, make_node: MakeNode, connector: str
    ) -> None:
        producer, consumer = make_node(), make_node()
        _, params = producer.prefill("p", 18)
        load(consumer, producer, Request("d", 18, params))
        (record,) = consumer.stats.transfers
        assert (record.request_id, record.direction, record.error) == ("d", "receive", "")
        chosen = ("shm", "on this host") if connector == "auto" else (connector, "")
        assert (record.transport, record.reason) == chosen
        assert record.layout == "uniform"
        assert (record.num_blocks, record.num_regions) == (5, 1)
        assert record.num_regions_per_layer == UNIFORM.num_layers
        assert record.num_bytes == 5 * UNIFORM.num_layers * UNIFORM.spec.page_size_bytes
        assert record.seconds > 0

    def test_the_per_layer_layout_needs_a_region_a_layer(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER)
        _, params = producer.prefill("p", 18)
        load(consumer, producer, Request("d", 18, params))
        (record,) = consumer.stats.transfers
        assert (record.layout, record.num_regions) == ("per-layer", PER_LAYER.num_layers)

    def test_the_counters_count(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node()
        _, params = producer.prefill("p", 18)
        load(consumer, producer, Request("d", 18, params))
        producer.step_until(is_freed(producer), consumer)
        assert consumer.stats.counters["loads_total"] == 1
        assert consumer.stats.counters["loaded_blocks_total"] == 5
        assert consumer.stats.counters["loaded_bytes_total"] == consumer.stats.transfers[0].num_bytes
        assert producer.stats.counters == {"offers_delivered_total": 1}
        assert consumer.step().kv_connector_stats is None
        assert consumer.stats.counters.keys() <= COUNTERS.keys()


class TestFailure:
    def test_a_lease_that_ran_out_is_stale(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(options=SHORT_LEASE), make_node()
        _, params = producer.prefill("p", 10)
        producer.step_until(is_freed(producer))
        assert producer.stats.counters == {"offers_expired_total": 1}
        producer.fill(range(1, 32), seed=66)  # the blocks are another request's now
        before = consumer.contents(range(32))
        request = Request("d", 10, params)
        blocks = load(consumer, producer, request)
        assert "the offer is over" in consumer.load_error("d")
        assert consumer.invalid_block_ids == set(blocks)
        assert torch.equal(consumer.contents(range(32)), before)
        consumer.finish(request, blocks, "error")
        assert_whole(producer)
        assert_whole(consumer)

    def test_a_claim_keeps_the_lease_alive(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(options=SHORT_LEASE), make_node(options=SHORT_LEASE)
        offered, params = producer.prefill("p", 10, seed=7)
        expected = producer.contents(offered)
        request = Request("d", 10, params)
        consumer.scheduler.on_new_request(request)
        consumer.step()
        with pytest.raises(TimeoutError):  # it queues for three leases
            producer.step_until(is_freed(producer), consumer, timeout_s=0.6)
        blocks, _ = consumer.start_load(request)
        consumer.step_until(lambda: consumer.num_reports("d", "recving") > 0, producer)
        assert torch.equal(consumer.contents(blocks), expected)

    def test_two_consumers_cannot_have_one_offer(self, make_node: MakeNode) -> None:
        producer, first, second = make_node(), make_node(), make_node()
        _, params = producer.prefill("p", 10)
        first.scheduler.on_new_request(Request("d", 10, params))
        first.step()
        producer.step_until(lambda: len(producer.held) == 1, first)
        load(
            first, producer, Request("d2", 10, producer.prefill("p2", 10)[1])
        )  # so the first claim has arrived
        load(second, producer, Request("d", 10, params))
        assert "claimed by another" in second.load_error("d")

    def test_nobody_at_the_address(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node()
        _, params = producer.prefill("p", 10)
        producer.worker.shutdown()
        request = Request("d", 10, params)
        consumer.scheduler.on_new_request(request)
        blocks, _ = consumer.start_load(request)
        consumer.step_until(lambda: consumer.num_reports("d", "recving") > 0)
        assert consumer.load_error("d") != ""
        assert consumer.invalid_block_ids == set(blocks)

    def test_an_address_of_another_scheme(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node()
        _, params = producer.prefill("p", 10)
        request = Request("d", 10, {**(params or {}), "remote_addresses": ["carrier-pigeon://7"]})
        consumer.scheduler.on_new_request(request)
        consumer.start_load(request)
        consumer.step_until(lambda: consumer.num_reports("d", "recving") > 0)
        assert "carrier-pigeon" in consumer.load_error("d")

    def test_a_producer_that_shuts_down_is_told_at_once(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node()
        _, params = producer.prefill("p", 10)
        producer.step()
        request = Request("d", 10, params)
        consumer.scheduler.on_new_request(request)
        consumer.step()
        producer.worker.shutdown()
        consumer.start_load(request)
        consumer.step_until(lambda: consumer.num_reports("d", "recving") > 0, timeout_s=2)
        assert consumer.load_error("d") != ""

    def test_a_restarted_producer_is_another(self, make_node: MakeNode) -> None:
        consumer = make_node()
        first = make_node(engine_id="node-p")
        _, stale = first.prefill("p", 10)
        (address,) = stale["remote_addresses"]
        first.step()
        first.worker.shutdown()
        second = make_node(engine_id="node-p", options={"address": address})
        offered, fresh = second.prefill("p", 10, seed=8)
        expected = second.contents(offered)
        load(consumer, second, Request("d-stale", 10, stale))
        assert "epoch" in consumer.load_error("d-stale") or "restart" in consumer.load_error("d-stale")
        blocks = load(consumer, second, Request("d-fresh", 10, fresh))
        assert torch.equal(consumer.contents(blocks), expected)

    @pytest.mark.parametrize(
        ("shape", "fields", "named"),
        [
            (replace(UNIFORM, block_size=6), {}, "block_size"),
            (replace(UNIFORM, dtype=torch.bfloat16), {}, "cache_dtype"),
            (replace(UNIFORM, num_layers=4), {}, "num_layers"),
            (replace(UNIFORM, num_kv_heads=4), {}, "num_kv_heads"),
            (replace(UNIFORM, head_size=16), {}, "head_size"),
            (UNIFORM, {"model": "another"}, "model"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_a_node_that_is_not_alike_is_refused_by_name(
        self, make_node: MakeNode, shape: CacheShape, fields: dict[str, Any], named: str
    ) -> None:
        producer, consumer = make_node(), make_node(shape, **fields)
        _, params = producer.prefill("p", 10)
        producer.step()
        load(consumer, producer, Request("d", 10, params))
        assert f"{named} differs" in consumer.load_error("d")

    def test_a_lease_that_never_comes_is_waited_for_in_bounds(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(options={"early_claim_wait_s": 0.1}), make_node()
        _, params = producer.prefill("p", 10)
        load(consumer, producer, Request("d-bad", 10, {**(params or {}), "remote_lease": 2**40}))
        assert "was not made in time" in consumer.load_error("d-bad")
        offered, params = producer.prefill("p2", 10, seed=9)
        expected = producer.contents(offered)
        blocks = load(consumer, producer, Request("d-good", 10, params))
        assert torch.equal(consumer.contents(blocks), expected)


class TestAbort:
    """The consumer's client goes away; both sides are whole again."""

    def nodes(self, make_node: MakeNode) -> tuple[ModelFreeNode, ModelFreeNode, Request]:
        producer, consumer = make_node(), make_node()
        _, params = producer.prefill("p", 10)
        request = Request("d", 10, params)
        consumer.scheduler.on_new_request(request)
        return producer, consumer, request

    def assert_both_freed(self, producer: ModelFreeNode, consumer: ModelFreeNode) -> None:
        producer.step_until(is_freed(producer), consumer, timeout_s=2)
        assert_whole(producer)
        assert_whole(consumer)
        assert producer.num_reports("p", "sending") == 1
        assert consumer.num_reports("d", "recving") <= 1

    def test_before_anything_was_sent(self, make_node: MakeNode) -> None:
        producer, consumer, request = self.nodes(make_node)
        consumer.finish(request, [], "abort")
        self.assert_both_freed(producer, consumer)

    def test_before_the_producers_worker_half_knows_of_the_offer(self, make_node: MakeNode) -> None:
        producer, consumer, request = self.nodes(make_node)
        consumer.step()
        consumer.finish(request, [], "abort")
        consumer.step()
        self.assert_both_freed(producer, consumer)

    def test_while_claimed(self, make_node: MakeNode) -> None:
        producer, consumer, request = self.nodes(make_node)
        producer.step()
        consumer.step()
        consumer.finish(request, [], "abort")
        self.assert_both_freed(producer, consumer)

    @pytest.mark.parametrize("num_steps", [0, 1])
    def test_while_loading(self, make_node: MakeNode, num_steps: int) -> None:
        producer, consumer, request = self.nodes(make_node)
        producer.step()
        blocks, _ = consumer.start_load(request)
        for _ in range(num_steps):
            consumer.step()
        request.finish_reason = "abort"
        consumer.scheduler.request_finished(request, [blocks])
        consumer.step_until(lambda: consumer.num_reports("d", "recving") > 0, producer)
        consumer.free_blocks += blocks  # an engine keeps them until the report
        self.assert_both_freed(producer, consumer)

    def test_after_loading(self, make_node: MakeNode) -> None:
        producer, consumer, request = self.nodes(make_node)
        blocks, _ = consumer.start_load(request)
        consumer.step_until(lambda: consumer.num_reports("d", "recving") > 0, producer)
        consumer.finish(request, blocks, "abort")
        self.assert_both_freed(producer, consumer)

    def test_of_the_prefill_offers_nothing(self, make_node: MakeNode) -> None:
        producer = make_node()
        request = Request("p", 10, {"do_remote_decode": True}, 10)
        producer.scheduler.on_new_request(request)
        assert producer.finish(request, producer.allocate(10), "abort") is None
        producer.step()
        assert_whole(producer)
