"""Part of the suite for connectors between nodes (see `suite`): what arrives, and what is reported
about it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ..p2p.params import draw_offer_name, rendezvous_params
from ..stats import COUNTERS, TransferRecord
from .broken import promise
from .harness import (
    FOREIGN,
    PER_LAYER,
    UNIFORM,
    MakeNode,
    assert_whole,
    begin_load,
    by_token,
    check_contents,
    check_counts,
    eventually,
    finish,
    is_freed,
    load,
    settle,
)
from .node import ModelFreeNode
from .shapes import CacheShape, Request


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
        check_contents(consumer, blocks, expected, "every offered byte arrives in the right block")
        check_counts("a load that succeeds gives no error", consumer.load_error("d"), "")
        producer.step_until(is_freed(producer), consumer)
        consumer.finish("d", "stop")
        assert_whole(producer)
        assert_whole(consumer)

    @pytest.mark.parametrize("num_tokens", [2, 3, 4, 5, 8, 17])
    def test_any_length_arrives(self, make_node: MakeNode, num_tokens: int) -> None:
        producer, consumer = make_node(), make_node()
        offered, params = producer.prefill("p", num_tokens, seed=2)
        expected = producer.contents(offered)
        blocks = load(consumer, producer, Request("d", num_tokens, params))
        check_contents(consumer, blocks, expected, "every offered byte arrives in the right block")

    def test_other_blocks_are_left_alone(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node(PER_LAYER)
        everything = list(range(consumer.shape.num_blocks))
        consumer.pool.fill(everything, seed=3)
        before = consumer.contents(everything)
        _, params = producer.prefill("p", 10)
        blocks = load(consumer, producer, Request("d", 10, params))
        others = [block for block in everything if block not in blocks]
        check_contents(consumer, others, before[:, others], "only the blocks of a load are written")

    def test_only_missing_blocks_move(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node()
        offered, params = producer.prefill("p", 18, seed=4)
        expected = producer.contents(offered)
        # The node writes other values into the blocks that it has already, and notices if they change.
        blocks = load(consumer, producer, Request("d", 18, params), num_local_tokens=8)
        check_contents(consumer, blocks[2:], expected[:, 2:], "every offered byte arrives in the right block")
        promise(
            "blocks that are here already are not written",
            kept=not torch.equal(consumer.contents(blocks[:2]), expected[:, :2]),
            seen=f"blocks {blocks[:2]} have what the other node offered",
        )
        check_counts("figures count the blocks that moved", _only_record(consumer).num_blocks, 3)

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
        promise(
            "nodes with other block sizes get each token's keys and values",
            kept=torch.equal(by_token(consumer, blocks)[:, :, :18], expected),
            seen=f"with {consumer_block_size} tokens per block at the consumer, the loaded tokens differ",
        )
        record = _only_record(consumer)
        num_bytes = expected.numel() * expected.element_size()
        check_counts("figures count the bytes that moved", record.num_bytes, num_bytes)
        promise(
            "figures count regions",
            kept=record.num_regions_per_layer >= record.num_regions > 0,
            seen=f"{record.num_regions} regions, {record.num_regions_per_layer} without joining layers",
        )

    def test_a_prompt_that_is_here_moves_nothing_and_frees_the_producer(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node()
        _, params = producer.prefill("p", 9)
        consumer.add(Request("d", 9, params), num_local_tokens=8, computes=False)
        producer.step_until(is_freed(producer), consumer)
        check_counts("a prompt that is here is not loaded", consumer.num_loaded_tokens, {})
        consumer.finish("d", "stop")
        num_reports = consumer.num_reports("d", "recving")
        check_counts("a request that loaded nothing is not named in finished_recving", num_reports, 0)
        assert_whole(producer)
        assert_whole(consumer)

    def test_many_at_once(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node()
        expected, blocks = {}, {}
        for index in range(7):
            offered, params = producer.prefill(f"p{index}", 13, seed=index)
            expected[f"d{index}"] = producer.contents(offered)
            request = Request(f"d{index}", 13, params)
            blocks[request.request_id] = begin_load(consumer, request)
        consumer.step_until(lambda: all(consumer.num_reports(d, "recving") for d in expected), producer)
        for request_id, table in blocks.items():
            check_contents(
                consumer, table, expected[request_id], "every offered byte arrives in the right block"
            )
        producer.step_until(is_freed(producer), consumer)
        assert_whole(producer)

    def test_two_nodes_hand_over_both_ways(self, make_node: MakeNode) -> None:
        one, two = make_node(), make_node()
        for producer, consumer in ((one, two), (two, one), (one, two)):
            offered, params = producer.prefill("p", 10, seed=5)
            expected = producer.contents(offered)
            blocks = load(consumer, producer, Request("d", 10, params))
            check_contents(consumer, blocks, expected, "every offered byte arrives in the right block")
            producer.step_until(is_freed(producer), consumer)
            consumer.outputs.clear()
            producer.outputs.clear()

    def test_a_claim_may_come_before_its_offer(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node()
        offered, params = producer.prefill("p", 10, seed=6)
        expected = producer.contents(offered)
        request = Request("d", 10, params)
        blocks = begin_load(consumer, request)  # the producer's worker half does not have the offer yet
        consumer.step_until(lambda: consumer.num_reports("d", "recving") > 0, producer)
        check_contents(consumer, blocks, expected, "every offered byte arrives in the right block")


class RendezvousPromises:
    """In a rendezvous, a prompt is read while it is still computed: what is computed, and nothing of what is
    not.
    """

    def test_a_prompt_is_loaded_while_it_is_computed(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node()
        everything = range(consumer.shape.num_blocks)
        for number, num_tokens_per_step in enumerate((5, 6, 7)):  # no chunk ends where a block ends
            producer.max_step_tokens = num_tokens_per_step
            name, first = f"p{number}", 100 * number
            wish, params = rendezvous_of(producer)
            producer.add(Request(name, 18, wish, first_token_id=first))
            producer.step()
            producer.max_step_tokens = 0  # the rest is computed later
            consumer.add(Request(f"d{number}", 18, params, first_token_id=first))
            eventually(
                "blocks are loaded as soon as they are computed",
                lambda: not consumer.is_poison(everything),
                consumer,
                producer,
            )
            producer.max_step_tokens = num_tokens_per_step
            finish(producer, name, consumer)
            finish(consumer, f"d{number}", producer)
            check_counts(
                "a load of a prompt that is computed succeeds", consumer.load_error(f"d{number}"), ""
            )
            settle(producer, consumer)

    def test_a_prompt_that_is_preempted_while_it_is_read_is_a_failed_load(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(max_step_tokens=5), make_node()
        wish, params = rendezvous_of(producer)
        producer.add(Request("p", 18, wish))
        producer.step()
        consumer.add(Request("d", 18, params))
        for _ in range(5):
            consumer.step()
        producer.preempt("p")
        finish(producer, "p", consumer)
        finish(consumer, "d", producer)
        check_counts("a load whose offer was lost fails", consumer.failed_loads, {"d"})
        settle(producer, consumer)


def rendezvous_of(producer: ModelFreeNode) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the params of a rendezvous at a producer: for the producer, and for the consumer."""
    name = draw_offer_name()
    wish = {"do_remote_decode": True, "rendezvous": name}
    return wish, rendezvous_params(name, producer.scheduler.describe())


class FigurePromises:
    """A connector's figures match what it did."""

    def test_neighbours_in_the_uniform_layout_are_one_region(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node()
        _, params = producer.prefill("p", 18)
        load(consumer, producer, Request("d", 18, params))
        record = _only_record(consumer)
        check_counts("figures name the request", (record.request_id, record.error), ("d", ""))
        promise("figures name what moved the bytes", kept=bool(record.transport), seen=record)
        check_counts("figures name the layout", record.layout, "uniform")
        regions = (record.num_blocks, record.num_regions, record.num_regions_per_layer)
        check_counts("neighbours in the uniform layout are one region", regions, (5, 1, UNIFORM.num_layers))
        num_bytes = 5 * UNIFORM.num_layers * UNIFORM.spec.page_size_bytes
        check_counts("figures count the bytes that moved", record.num_bytes, num_bytes)
        promise("figures say how long it took", kept=record.seconds > 0, seen=record)

    def test_the_per_layer_layout_needs_a_region_per_layer(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER)
        _, params = producer.prefill("p", 18)
        load(consumer, producer, Request("d", 18, params))
        record = _only_record(consumer)
        seen, expected = (record.layout, record.num_regions), ("per-layer", PER_LAYER.num_layers)
        check_counts("the per-layer layout needs a region per layer", seen, expected)

    def test_the_counters_count(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node()
        _, params = producer.prefill("p", 18)
        load(consumer, producer, Request("d", 18, params))
        producer.step_until(is_freed(producer), consumer)
        consumer.step()  # it is told what its scheduler half has counted
        consumer.step()  # and reports it
        moved = [(record.num_blocks, record.error) for record in consumer.stats.transfers]
        check_counts("each load has one record", moved, [(5, "")])
        loaded = {"offered_requests_total/loaded": 1}
        check_counts("only what happened is counted", consumer.stats.counters, loaded)
        check_counts(
            "an offer that was loaded is counted", producer.stats.counters, {"offers_delivered_total": 1}
        )
        unknown = producer.stats.counters.keys() - COUNTERS.keys()
        promise("every counter is one of COUNTERS", kept=not unknown, seen=f"unknown: {unknown}")
        figures = consumer.step().kv_connector_stats
        check_counts("figures are given once", figures, None)


def _only_record(node: ModelFreeNode) -> TransferRecord:
    records = node.stats.transfers
    promise("each load has one record", kept=len(records) == 1, seen=f"{len(records)} records: {records}")
    return records[0]
