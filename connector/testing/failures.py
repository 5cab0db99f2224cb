"""Part of the suite for connectors between nodes (see `suite`): handoffs that end early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ..errors import InvalidTransferParamsError
from .broken import promise
from .harness import (
    UNIFORM,
    MakeNode,
    assert_whole,
    begin_load,
    check_contents,
    check_counts,
    check_failed_blocks,
    check_load_error,
    is_freed,
    load,
)
from .node import ModelFreeNode
from .shapes import CacheShape, Request

SHORT_LEASE = {"lease_s": 0.2}

#: Shorter than any deadline of the protocol: what ends within this time ended without waiting for one.
AT_ONCE_S = 8.0


class FailurePromises:
    """If a peer is gone or is not the one expected, the load fails in time, gives the reason and touches no
    block.
    """

    def test_malformed_params_are_refused_when_the_request_comes(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node()
        _, params = producer.prefill("p", 10)
        key = None
        try:
            consumer.scheduler.on_new_request(Request("d", 10, {**(params or {}), "remote_lease": "x"}))
        except InvalidTransferParamsError as error:
            key = error.key
        check_counts("on_new_request refuses malformed params, and names the key", key, "remote_lease")

    @pytest.mark.parametrize(
        "other",
        [{"first_token_id": 1}, {"cache_salt": "s"}, {"lora_id": "adapter"}, {"num_prompt_tokens": 9}],
        ids=["another prompt", "another salt", "another adapter", "a shorter prompt"],
    )
    def test_an_offer_of_something_else_is_not_read(self, make_node: MakeNode, other: dict[str, Any]) -> None:
        producer, consumer = make_node(), make_node()
        _, params = producer.prefill("p", 10, seed=3)
        before = consumer.contents(range(32))
        request = replace(Request("d", 10, params), **other)
        blocks = load(consumer, producer, request)
        check_load_error(consumer, "d", "was not computed from this request's prompt")
        check_failed_blocks(consumer, blocks)
        check_contents(consumer, range(32), before, "an offer that cannot be used is not read")
        producer.step_until(is_freed(producer), consumer, timeout_s=AT_ONCE_S)
        consumer.finish("d", "error")
        assert_whole(producer)
        assert_whole(consumer)

    def test_an_offer_that_no_consumer_can_load_is_released_by_its_router(self, make_node: MakeNode) -> None:
        producer = make_node()
        _, params = producer.prefill("p", 10)
        release = {**(params or {}), "do_remote_prefill": False, "do_release": True}
        request = Request("router", 1, release)
        producer.add(request, is_queued=True)
        producer.finish("router", "length")
        producer.step_until(is_freed(producer), timeout_s=AT_ONCE_S)
        check_counts("the end of an offer is counted", producer.stats.counters, {"offers_aborted_total": 1})
        assert_whole(producer)

    def test_a_lease_that_ran_out_is_stale(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(options=SHORT_LEASE), make_node()
        _, params = producer.prefill("p", 10)
        producer.step_until(is_freed(producer))
        check_counts("the end of an offer is counted", producer.stats.counters, {"offers_expired_total": 1})
        producer.pool.fill(range(1, 32), seed=66)  # the blocks now belong to another request
        before = consumer.contents(range(32))
        request = Request("d", 10, params)
        blocks = load(consumer, producer, request)
        check_load_error(consumer, "d", "the offer is over")
        check_failed_blocks(consumer, blocks)
        check_contents(consumer, range(32), before, "an offer that cannot be used is not read")
        consumer.finish("d", "error")
        assert_whole(producer)
        assert_whole(consumer)

    def test_a_claim_keeps_the_lease_alive(self, make_node: MakeNode) -> None:
        # Long enough that heartbeats arrive in time even if this process has to wait for a core.
        options = {"lease_s": 1.5}
        producer, consumer = make_node(options=options), make_node(options=options)
        offered, params = producer.prefill("p", 10, seed=7)
        expected = producer.contents(offered)
        request = Request("d", 10, params)
        consumer.add(request, is_queued=True, computes=False)
        consumer.step()
        try:  # it queues for longer than a lease
            producer.step_until(is_freed(producer), consumer, timeout_s=2.0)
        except TimeoutError:
            pass
        else:
            promise(
                "a claim keeps the lease alive", kept=False, seen="the offer ended although it was claimed"
            )
        consumer.start("d")
        consumer.step_until(lambda: consumer.num_reports("d", "recving") > 0, producer)
        blocks = consumer.blocks_of("d")
        check_contents(consumer, blocks, expected, "every offered byte arrives in the right block")

    def test_two_consumers_cannot_have_one_offer(self, make_node: MakeNode) -> None:
        producer, first, second = make_node(), make_node(), make_node()
        _, params = producer.prefill("p", 10)
        first.add(Request("d", 10, params), is_queued=True)
        first.step()
        producer.step_until(lambda: len(producer.held) == 1, first)
        # After this load the first claim has arrived.
        load(first, producer, Request("d2", 10, producer.prefill("p2", 10)[1]))
        load(second, producer, Request("d", 10, params))
        check_load_error(second, "d", "claimed by another")

    def test_an_offer_that_is_never_made_is_given_up(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node(options={"claim_timeout_s": 0.2})
        _, params = producer.prefill("p", 10)
        request = Request("d", 10, params)
        blocks = begin_load(consumer, request)
        # The producer's engine does not step meanwhile.
        consumer.step_until(lambda: consumer.num_reports("d", "recving") > 0)
        check_load_error(consumer, "d", "timed out")
        check_failed_blocks(consumer, blocks)

    def test_no_node_at_the_address(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node()
        _, params = producer.prefill("p", 10)
        producer.worker.shutdown()
        request = Request("d", 10, params)
        blocks = begin_load(consumer, request)
        consumer.step_until(lambda: consumer.num_reports("d", "recving") > 0)
        check_load_error(consumer, "d")
        check_failed_blocks(consumer, blocks)

    def test_an_address_of_another_scheme(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node()
        _, params = producer.prefill("p", 10)
        request = Request("d", 10, {**(params or {}), "remote_addresses": ["carrier-pigeon://7"]})
        consumer.add(request, computes=False)
        consumer.step_until(lambda: consumer.num_reports("d", "recving") > 0)
        check_load_error(consumer, "d", "carrier-pigeon")

    def test_a_consumer_learns_at_once_that_its_producer_shuts_down(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node()
        _, params = producer.prefill("p", 10)
        producer.step()
        request = Request("d", 10, params)
        consumer.add(request, is_queued=True, computes=False)
        consumer.step()
        producer.worker.shutdown()
        consumer.start("d")
        consumer.step_until(lambda: consumer.num_reports("d", "recving") > 0, timeout_s=AT_ONCE_S)
        check_load_error(consumer, "d")

    def test_a_restarted_producer_is_another(self, make_node: MakeNode) -> None:
        consumer = make_node()
        first = make_node(engine_id="node-p")
        _, stale = first.prefill("p", 10)
        (address,) = (stale or {})["remote_addresses"]
        first.step()
        first.worker.shutdown()
        second = make_node(engine_id="node-p", options={"address": address})
        offered, fresh = second.prefill("p", 10, seed=8)
        expected = second.contents(offered)
        load(consumer, second, Request("d-stale", 10, stale))
        check_load_error(consumer, "d-stale", "epoch", "restart")
        blocks = load(consumer, second, Request("d-fresh", 10, fresh))
        check_contents(consumer, blocks, expected, "every offered byte arrives in the right block")

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
        check_load_error(consumer, "d", f"{named} differs")

    def test_a_lease_that_was_never_made_is_refused_at_once(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(), make_node()
        _, params = producer.prefill("p", 10)
        load(consumer, producer, Request("d-bad", 10, {**(params or {}), "remote_lease": "1234abcd"}))
        check_load_error(consumer, "d-bad", "was never made")
        offered, params = producer.prefill("p2", 10, seed=9)
        expected = producer.contents(offered)
        blocks = load(consumer, producer, Request("d-good", 10, params))
        check_contents(consumer, blocks, expected, "every offered byte arrives in the right block")


class AbortPromises:
    """If the consumer's client goes away, both nodes get all their blocks back."""

    def nodes(self, make_node: MakeNode) -> tuple[ModelFreeNode, ModelFreeNode]:
        producer, consumer = make_node(), make_node()
        _, params = producer.prefill("p", 10)
        consumer.add(Request("d", 10, params), is_queued=True, computes=False)
        return producer, consumer

    def assert_both_freed(self, producer: ModelFreeNode, consumer: ModelFreeNode) -> None:
        producer.step_until(is_freed(producer), consumer, timeout_s=AT_ONCE_S)
        assert_whole(producer)
        assert_whole(consumer)
        sent, received = producer.num_reports("p", "sending"), consumer.num_reports("d", "recving")
        promise(
            "the end of an offer is reported once, and that of a load at most once",
            kept=sent == 1 and received <= 1,
            seen=f"{sent} times in finished_sending, {received} times in finished_recving",
        )

    def test_before_anything_was_sent(self, make_node: MakeNode) -> None:
        producer, consumer = self.nodes(make_node)
        consumer.finish("d")
        self.assert_both_freed(producer, consumer)

    def test_before_the_producers_worker_half_has_the_offer(self, make_node: MakeNode) -> None:
        producer, consumer = self.nodes(make_node)
        consumer.step()
        consumer.finish("d")
        consumer.step()
        self.assert_both_freed(producer, consumer)

    def test_while_claimed(self, make_node: MakeNode) -> None:
        producer, consumer = self.nodes(make_node)
        producer.step()
        consumer.step()
        consumer.finish("d")
        self.assert_both_freed(producer, consumer)

    def test_while_loading(self, make_node: MakeNode) -> None:
        producer, consumer = self.nodes(make_node)
        producer.step()
        consumer.start("d")
        consumer.step()
        consumer.finish("d")
        consumer.step_until(lambda: consumer.num_reports("d", "recving") > 0, producer)
        self.assert_both_freed(producer, consumer)

    def test_after_loading(self, make_node: MakeNode) -> None:
        producer, consumer = self.nodes(make_node)
        consumer.start("d")
        consumer.step_until(lambda: consumer.num_reports("d", "recving") > 0, producer)
        consumer.finish("d")
        self.assert_both_freed(producer, consumer)

    def test_of_the_prefill_offers_nothing(self, make_node: MakeNode) -> None:
        producer = make_node()
        producer.add(Request("p", 10, {"do_remote_decode": True}), max_answer_tokens=5)
        producer.step()
        params = producer.finish("p")
        check_counts("a prefill that was aborted offers nothing", params, None)
        producer.step()
        assert_whole(producer)
