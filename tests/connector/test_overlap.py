"""A prompt's blocks are read while it is still being computed: finished blocks arrive, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from kvferry.connector.identity.content import content_digest
from kvferry.connector.kv_cache_specs import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from kvferry.connector.p2p.orders import ExtendOrder, HandoffMetadata, OfferOrder, OpenOrder, RequestOrders
from kvferry.connector.p2p.scheduler import HandoffScheduler
from kvferry.connector.testing import (
    CacheShape,
    MakeNode,
    ModelFreeNode,
    Request,
    Step,
    engine_config,
    node_maker,
)
from kvferry.connector.testing.handoffs import RendezvousPromises
from tests.support.gpu_pools import GpuPools
from tests.support.handoff_orders import orders_of

SHAPE = CacheShape()
BLOCK = SHAPE.block_size
NUM_TOKENS = 18
NAME = "0123456789abcdef" * 2
WISH = {"do_remote_decode": True, "rendezvous": NAME}

UCX = pytest.param("ucx", marks=pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed"))


class TestOnGpus(RendezvousPromises):
    """The suite of connectors tries the same with pools in main memory, over each transport."""

    @pytest.fixture(params=["auto", "zeromq", "tcp", UCX])
    def make_node(self, request: pytest.FixtureRequest, gpu_pools: GpuPools) -> Iterator[MakeNode]:
        with node_maker({"kv_connector": request.param}) as make:
            yield make


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
