"""The promises of any connector (see `suite`): the contract of `connector/base.py`, however it is implemented."""

from __future__ import annotations

import pickle

import pytest
import torch

from ...transports.errors import ConfigurationError
from ..base import KVConnectorRole
from ..factory import KVConnectorFactory
from .harness import PER_LAYER, UNIFORM, MakeNode, assert_whole, by_token, is_freed, load
from .node import CacheShape, Request, Step


class ConnectorPromises:
    """A prompt that one node computed is loaded by another: exactly its bytes, and once."""

    def test_what_one_node_computed_another_loads(self, make_node: MakeNode) -> None:
        _assert_loads(make_node, PER_LAYER)

    def test_the_uniform_layout(self, make_node: MakeNode) -> None:
        if not make_node(PER_LAYER).worker.prefer_cross_layer_blocks:
            pytest.skip("this connector wants per-layer caches")
        _assert_loads(make_node, UNIFORM)

    def test_asking_changes_nothing(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER)
        _, params = producer.prefill("p", 18)
        producer.step()
        request, ask = Request("d", 18, params), consumer.scheduler.get_num_new_matched_tokens
        consumer.scheduler.on_new_request(request)
        answers = {ask(request, 0) for _ in range(3)}
        assert len(answers) == 1
        (num_tokens, _) = answers.pop()
        assert ask(request, 8)[0] == (num_tokens or 0) - 8
        assert consumer.start_load(request)[1] == num_tokens

    def test_what_is_here_already_is_not_loaded(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER)
        _, params = producer.prefill("p", 18, seed=1)
        producer.step()
        cached = consumer.allocate(8)
        consumer.fill(cached, seed=2)
        before = consumer.contents(range(consumer.shape.num_blocks))
        table = load(consumer, producer, Request("d", 18, params), cached)
        assert table[:2] == cached
        others = [block for block in range(consumer.shape.num_blocks) if block not in table[2:]]
        assert torch.equal(consumer.contents(others), before[:, others])

    def test_a_prompt_that_no_node_computed_is_not_loaded(self, make_node: MakeNode) -> None:
        node = make_node(PER_LAYER)
        request = Request("d", 18)
        node.scheduler.on_new_request(request)
        assert node.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        assert node.step().is_empty()

    def test_another_models_cache_is_not_loaded(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER, model="another")
        _, params = producer.prefill("p", 18)
        producer.step()
        request = Request("d", 18, params)
        consumer.scheduler.on_new_request(request)
        if consumer.scheduler.get_num_new_matched_tokens(request, 0)[0]:
            table, _ = consumer.start_load(request)
            consumer.step_until(lambda: bool(consumer.invalid_block_ids), producer)
            assert consumer.invalid_block_ids <= set(table)
        assert consumer.is_poison(range(consumer.shape.num_blocks))

    @pytest.mark.parametrize("reason", ["abort", "error"])
    def test_a_prompt_that_was_not_finished_frees_its_blocks(self, make_node: MakeNode, reason: str) -> None:
        node = make_node(PER_LAYER)
        request = Request("p", 18, {"do_remote_decode": True}, 9)
        node.scheduler.on_new_request(request)
        node.scheduler.update_state_after_alloc(request, [blocks := node.allocate(18)], 0)
        node.finish(request, blocks, reason)
        node.step_until(is_freed(node))
        assert_whole(node)

    def test_a_load_that_is_aborted_frees_its_blocks_once(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER)
        _, params = producer.prefill("p", 18)
        producer.step()
        request = Request("d", 18, params)
        consumer.scheduler.on_new_request(request)
        _, is_async = consumer.scheduler.get_num_new_matched_tokens(request, 0)
        blocks, _ = consumer.start_load(request)
        consumer.step()
        request.finish_reason = "abort"
        consumer.scheduler.request_finished(request, [blocks])
        consumer.step_until(lambda: not is_async or consumer.num_reports("d", "recving") > 0, producer)
        producer.step_until(is_freed(producer), consumer)
        assert consumer.num_reports("d", "recving") == is_async
        assert producer.num_reports("p", "sending") <= 1
        assert_whole(producer)

    def test_orders_may_travel_between_processes(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER)
        _, params = producer.prefill("p", 18)
        request = Request("d", 18, params)
        consumer.scheduler.on_new_request(request)
        consumer.scheduler.get_num_new_matched_tokens(request, 0)
        for node in (producer, consumer):
            orders = node.scheduler.build_connector_meta(Step())
            assert pickle.loads(pickle.dumps(orders)) == orders

    def test_an_unknown_option_is_named(self, make_node: MakeNode) -> None:
        with pytest.raises(ConfigurationError, match="no_such_option"):
            make_node(PER_LAYER, options={"no_such_option": 1})

    def test_shutting_down_is_harmless_at_any_time(self, make_node: MakeNode) -> None:
        node = make_node(PER_LAYER)
        node.prefill("p", 18)
        for role in KVConnectorRole:
            fresh = KVConnectorFactory.create_connector(node.config, role, node.kv_cache_config)
            fresh.shutdown()  # nothing was registered
        for half in (node.worker, node.scheduler):
            half.shutdown()
            half.shutdown()


def _assert_loads(make_node: MakeNode, shape: CacheShape) -> None:
    producer, consumer = make_node(shape), make_node(shape)
    offered, params = producer.prefill("p", 18, seed=1)
    expected = by_token(producer, offered)
    producer.step()
    request = Request("d", 18, params)
    blocks = load(consumer, producer, request)
    assert _num_equal_tokens(by_token(consumer, blocks), expected) >= 16  # the last token may be computed
    assert not consumer.invalid_block_ids
    producer.step_until(is_freed(producer), consumer)
    consumer.finish(request, blocks, "stop")
    consumer.step_until(is_freed(consumer), producer)
    for node, name in ((producer, "p"), (consumer, "d")):
        assert_whole(node)
        assert node.num_reports(name, "sending") <= 1
        assert node.num_reports(name, "recving") <= 1


def _num_equal_tokens(loaded: torch.Tensor, expected: torch.Tensor) -> int:
    """Return how many tokens from the beginning are equal; see `by_token` for the axes."""
    is_equal = (loaded == expected).transpose(0, 2).flatten(1).all(dim=1)
    return int(is_equal.cumprod(0).sum())
