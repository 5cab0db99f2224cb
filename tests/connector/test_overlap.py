"""A prompt's blocks are read while it is still being computed: finished blocks arrive, and no others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from kvferry.connector.identity.content import content_digest
from kvferry.connector.kv_cache_specs import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from kvferry.connector.p2p.orders import ExtendOrder, HandoffMetadata, OfferOrder, OpenOrder, RequestOrders
from kvferry.connector.p2p.params import rendezvous_params
from kvferry.connector.p2p.scheduler import HandoffScheduler
from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, Step, engine_config
from kvferry.connector.testing.harness import begin_load
from tests.support.handoff_orders import orders_of

SHAPE = CacheShape()
BLOCK = SHAPE.block_size
NUM_TOKENS = 18
NAME = "0123456789abcdef" * 2
WISH = {"do_remote_decode": True, "rendezvous": NAME}

MakeNode = Callable[..., ModelFreeNode]


UCX = pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")
#: The conformance suite tries the same with pools in main memory, over each transport.
CONNECTORS = [
    "inproc",
    "auto on GPUs",
    "zeromq on GPUs",
    "tcp on GPUs",
    pytest.param("ucx on GPUs", marks=UCX),
]


@pytest.fixture(params=CONNECTORS)
def make_node(request: pytest.FixtureRequest) -> Iterator[MakeNode]:
    """Make nodes with one connector."""
    name, _, are_on_gpus = request.param.partition(" ")
    if are_on_gpus:
        request.getfixturevalue("gpu_pools")
    with ExitStack() as stack:

        def make(shape: CacheShape = SHAPE, **options: Any) -> ModelFreeNode:
            config = engine_config(name, block_size=shape.block_size, kv_connector_extra_config=options)
            return stack.enter_context(ModelFreeNode(config, shape))

        yield make


@dataclass
class Prefill:
    """A prompt that a node computes chunk by chunk, with its blocks and the contents that they will have.

    Attributes:
        params: With which a consumer claims it, from the beginning.
    """

    node: ModelFreeNode
    request: Request
    blocks: list[int]
    expected: torch.Tensor
    params: dict[str, Any] | None

    @classmethod
    def begin(cls, node: ModelFreeNode, request_id: str = "p") -> Prefill:
        request = Request(request_id, NUM_TOKENS, WISH)
        node.scheduler.on_new_request(request)
        blocks = node.pool.allocate(-(-NUM_TOKENS // BLOCK))
        node.scheduler.update_state_after_alloc(request, [blocks], 0)
        node.step()
        node.pool.fill(blocks, seed=5)
        expected = node.contents(blocks)
        node.pool.poison(blocks)
        return cls(node, request, blocks, expected, rendezvous_params(NAME, node.scheduler.describe()))

    def compute(self, num_tokens: int) -> dict[str, Any] | None:
        """Compute the first `num_tokens` tokens. Returns the params of the answer, if these are all."""
        self.request.num_computed_tokens = num_tokens
        num_blocks = -(-num_tokens // BLOCK)
        self.node.pool.write(self.blocks[:num_blocks], self.expected[:, :num_blocks])
        if num_tokens == NUM_TOKENS:
            return self.finish("length")
        self.node.scheduler.request_progressed(self.request, [self.blocks[:num_blocks]])
        return None

    def finish(self, reason: str) -> dict[str, Any] | None:
        self.request.finish_reason = reason
        is_held, params = self.node.scheduler.request_finished(self.request, [self.blocks])
        if is_held:
            self.node.held[self.request.request_id] = self.blocks
        return params


def start_load(consumer: ModelFreeNode, params: dict[str, Any] | None) -> list[int]:
    return begin_load(consumer, Request("d", NUM_TOKENS, params))


def has_arrived(consumer: ModelFreeNode, prefill: Prefill, blocks: list[int], num_blocks: int) -> bool:
    return torch.equal(consumer.contents(blocks[:num_blocks]), prefill.expected[:, :num_blocks])


def is_loaded(consumer: ModelFreeNode) -> bool:
    return consumer.num_reports("d", "recving") == 1


def test_each_chunk_arrives_before_the_next_is_computed(make_node: MakeNode) -> None:
    producer, consumer = make_node(), make_node()
    prefill = Prefill.begin(producer)
    prefill.compute(6)
    blocks = start_load(consumer, prefill.params)
    consumer.step_until(lambda: has_arrived(consumer, prefill, blocks, 1), producer)
    assert consumer.is_poison(blocks[1:])  # the second block is half computed
    prefill.compute(14)
    consumer.step_until(lambda: has_arrived(consumer, prefill, blocks, 3), producer)
    assert not is_loaded(consumer)
    before = time.monotonic()
    assert prefill.compute(NUM_TOKENS) is not None
    consumer.step_until(lambda: is_loaded(consumer) and not producer.held, producer)
    after = time.monotonic()
    assert consumer.load_error("d") == ""
    assert has_arrived(consumer, prefill, blocks, len(blocks))
    (record,) = consumer.stats.transfers
    assert 0 < record.exposed_seconds < after - before
    assert producer.num_reports("p", "sending") == 1


def test_a_prefill_that_is_preempted_is_never_read_again(make_node: MakeNode) -> None:
    producer, consumer = make_node(), make_node()
    prefill = Prefill.begin(producer)
    prefill.compute(8)
    blocks = start_load(consumer, prefill.params)
    consumer.step_until(lambda: has_arrived(consumer, prefill, blocks, 2), producer)
    metadata = producer.scheduler.build_connector_meta(Step(preempted_req_ids={"p"}))
    producer.worker.handle_preemptions({"p"})
    producer.pool.fill(prefill.blocks, seed=99)  # they are another request's now
    producer.worker.bind_connector_metadata(metadata)
    producer.worker.start_load_kv(None)
    consumer.step_until(lambda: is_loaded(consumer), producer)
    # The second reason if the first two blocks are in place but their read has not ended: its guard is looked
    # at last.
    error = consumer.load_error("d")
    assert "the offer was aborted" in error or "no longer holds" in error
    assert consumer.invalid_block_ids == set(blocks)
    # The prompt is computed again, but not offered again: no consumer would know of the offer, and its blocks
    # would be held until the lease expires.
    prefill.compute(8)
    assert prefill.compute(NUM_TOKENS) is None
    assert not producer.held
    assert producer.num_reports("p", "sending") == 0


class TestOrders:
    """The orders that the scheduler half gives its workers."""

    @pytest.fixture
    def scheduler(self) -> HandoffScheduler:
        config = engine_config("inproc").kv_transfer
        assert config is not None
        made = HandoffScheduler(config, SHAPE.kv_cache_config())
        with ModelFreeNode(engine_config("inproc"), SHAPE) as node:
            address = node.worker.get_handshake_metadata()
            made.set_handshake_metadata({0: address})  # type: ignore[dict-item]
        return made

    def progressed(self, scheduler: HandoffScheduler, request: Request, num_tokens: int) -> None:
        request.num_computed_tokens = num_tokens
        scheduler.request_progressed(request, [[5, 6, 7, 8, 9][: -(-num_tokens // BLOCK)]])

    def test_an_offer_is_opened_extended_and_completed(self, scheduler: HandoffScheduler) -> None:
        request = Request("p", NUM_TOKENS, WISH)
        scheduler.on_new_request(request)
        self.progressed(scheduler, request, 8)
        orders = scheduler.build_connector_meta()
        lease, content = orders_of(orders, "announcement")["p"].lease, content_digest(request, NUM_TOKENS)
        guard_value = orders_of(orders, "offer")["p"].guard_value
        assert orders_of(orders, "offer") == {
            "p": OpenOrder(lease, ((5, 6),), NUM_TOKENS, 8, content, guard_value)
        }
        self.progressed(scheduler, request, 12)
        assert orders_of(scheduler.build_connector_meta(), "extension") == {
            "p": ExtendOrder(((5, 6, 7),), 12)
        }
        request.num_computed_tokens, request.finish_reason = NUM_TOKENS, "length"
        assert scheduler.request_finished(request, [[5, 6, 7, 8, 9]])[0]
        assert orders_of(scheduler.build_connector_meta(), "completion") == {"p": ((5, 6, 7, 8, 9),)}

    def test_a_prompt_that_ends_before_its_open_order_is_sent_is_offered(
        self, scheduler: HandoffScheduler
    ) -> None:
        for name, wish in (("p", WISH), ("q", {**WISH, "rendezvous": NAME[::-1]})):
            scheduler.on_new_request(request := Request(name, NUM_TOKENS, wish))
            self.progressed(scheduler, request, 8)
        first = Request("p", NUM_TOKENS, WISH, NUM_TOKENS, "length")
        scheduler.request_finished(first, [[5, 6, 7, 8, 9]])
        orders = scheduler.build_connector_meta()
        assert [type(order) for order in orders_of(orders, "offer").values()] == [OfferOrder, OpenOrder]
        assert {name: order.lease for name, order in orders_of(orders, "offer").items()} == {
            name: announced.lease for name, announced in orders_of(orders, "announcement").items()
        }

    def test_an_offer_that_has_lost_its_blocks_is_withdrawn(self, scheduler: HandoffScheduler) -> None:
        scheduler.on_new_request(request := Request("p", NUM_TOKENS, WISH))
        lease = orders_of(scheduler.build_connector_meta(), "announcement")["p"].lease
        self.progressed(scheduler, request, 8)
        assert scheduler.build_connector_meta(Step(preempted_req_ids={"p"})) == HandoffMetadata(
            (RequestOrders("p", withdrawal=lease),)
        )
        assert scheduler.build_connector_meta(Step(preempted_req_ids={"p"})).is_empty()

    def test_an_offer_aborted_in_its_first_step_is_still_made_so_that_claimants_are_notified(
        self, scheduler: HandoffScheduler
    ) -> None:
        scheduler.on_new_request(request := Request("p", NUM_TOKENS, WISH))
        self.progressed(scheduler, request, 8)
        request.finish_reason = "abort"
        assert scheduler.request_finished(request, [[5, 6]]) == (True, None)
        orders = scheduler.build_connector_meta()
        assert list(orders_of(orders, "offer")) == list(orders_of(orders, "abort")) == ["p"]

    def test_nothing_is_offered_early_without_being_asked_for(self, scheduler: HandoffScheduler) -> None:
        scheduler.on_new_request(request := Request("p", NUM_TOKENS, {"do_remote_decode": True}))
        self.progressed(scheduler, request, 8)
        assert not orders_of(scheduler.build_connector_meta(), "offer")

    def test_a_group_that_frees_blocks_meanwhile_is_offered_only_at_the_end(self) -> None:
        spec = SlidingWindowSpec(BLOCK, 2, 8, torch.float32, sliding_window=8)
        config = engine_config("inproc").kv_transfer
        assert config is not None
        scheduler = HandoffScheduler(config, KVCacheConfig(8, (), (KVCacheGroupSpec(("a",), spec),)))
        scheduler.on_new_request(request := Request("p", NUM_TOKENS, WISH))
        self.progressed(scheduler, request, 8)
        assert not orders_of(scheduler.build_connector_meta(), "offer")
