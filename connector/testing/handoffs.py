"""Part of the suite for connectors between nodes (see `suite`): what arrives, and what is reported about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ..stats import COUNTERS
from .harness import FOREIGN, PER_LAYER, UNIFORM, MakeNode, assert_whole, by_token, is_freed, load
from .node import CacheShape, Request


class DeliveryPromises:
    """Every byte of a prompt arrives in the right blocks, whatever the layouts of the two nodes."""

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


class FigurePromises:
    """A connector's figures match what it did."""

    def test_neighbours_in_the_uniform_layout_are_one_region(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node()
        _, params = producer.prefill("p", 18)
        load(consumer, producer, Request("d", 18, params))
        (record,) = consumer.stats.transfers
        assert (record.request_id, record.error) == ("d", "")
        assert record.transport
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
        assert [(record.num_blocks, record.error) for record in consumer.stats.transfers] == [(5, "")]
        assert consumer.stats.counters == {}
        assert producer.stats.counters == {"offers_delivered_total": 1}
        assert producer.stats.counters.keys() <= COUNTERS.keys()
        assert consumer.step().kv_connector_stats is None
