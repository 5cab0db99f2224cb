"""What the scheduler half promises about each request, when an engine calls it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.connector import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVConnectorFactory,
    KVConnectorOutput,
    KVConnectorRole,
    MambaSpec,
    SlidingWindowSpec,
)
from kvferry.connector.config import KVRole
from kvferry.connector.errors import ConnectorError, InvalidTransferParamsError, RendezvousError
from kvferry.connector.handoff.events import GroupBlocks
from kvferry.connector.identity.content import content_digest
from kvferry.connector.p2p import scheduler as p2p_scheduler
from kvferry.connector.p2p.orders import Announcement, HandoffMetadata, OfferOrder, WorkerAddress
from kvferry.connector.p2p.params import parse_transfer_params, rendezvous_lease, rendezvous_params
from kvferry.connector.p2p.scheduler import _NEXT, HandoffScheduler, RequestState
from kvferry.connector.testing import CacheShape, Request, Step, engine_config
from kvferry.transports.errors import ConfigurationError, KVTransferStateError

BLOCK_SIZE = 4
WORKER = WorkerAddress("inproc://p", epoch=77, rank=0)
OFFER_PARAMS = {"do_remote_decode": True}
#: One group with attention, and one with a recurrent state.
WITH_STATE = KVCacheConfig(
    num_blocks=40,
    kv_cache_tensors=(),
    kv_cache_groups=(
        KVCacheGroupSpec(("layers.0",), FullAttentionSpec(BLOCK_SIZE, 2, 8, torch.float32)),
        KVCacheGroupSpec(("layers.1",), MambaSpec(BLOCK_SIZE, ((3,),), (torch.float32,))),
    ),
)
from tests.support.handoff_orders import ordered, orders_of


def scheduler(role: KVRole = "kv_both", kv_cache_config: KVCacheConfig | None = None) -> HandoffScheduler:
    config = engine_config("inproc", role=role, engine_id="node-p").kv_transfer
    assert config is not None
    made = HandoffScheduler(config, kv_cache_config or CacheShape(block_size=BLOCK_SIZE).kv_cache_config())
    made.set_handshake_metadata({0: WORKER})
    return made


def offered(num_tokens: int, request_id: str = "p-1") -> dict[str, Any]:
    """Return a producer's params for a prompt of `num_tokens`."""
    producer = scheduler()
    _, params = run_producer(producer, request_id, num_tokens)
    assert params is not None
    return params


def run_producer(
    producer: HandoffScheduler, request_id: str = "p-1", num_tokens: int = 10, **final: Any
) -> tuple[bool, dict[str, Any] | None]:
    final = {"finish_reason": "length", "num_computed_tokens": num_tokens, **final}
    producer.on_new_request(Request(request_id, num_tokens, OFFER_PARAMS))
    return producer.request_finished(Request(request_id, num_tokens, OFFER_PARAMS, **final), [[7, 8, 9]])


def arrived(consumer: HandoffScheduler, num_prompt: int = 10, num_offered: int = 10) -> Request:
    request = Request("d-1", num_prompt, offered(num_offered))
    consumer.on_new_request(request)
    return request


class TestProducer:
    def test_a_finished_prompt_is_offered_and_held(self) -> None:
        producer = scheduler("kv_producer")
        held, params = run_producer(producer)
        assert held
        assert params is not None
        assert params["remote_engine_id"] == "node-p"
        assert params["remote_addresses"] == ["inproc://p"]
        assert params["remote_num_tokens"] == 10
        orders = producer.build_connector_meta()
        lease = orders_of(orders, "announcement")["p-1"].lease
        assert params["remote_lease"] == f"{lease:x}"
        content = content_digest(Request("p-1", 10), 10)
        assert orders_of(orders, "offer") == {"p-1": OfferOrder(lease, ((7, 8, 9),), 10, content)}
        assert producer.build_connector_meta().is_empty()

    def test_no_two_offers_have_the_same_lease_number(self) -> None:
        producer = scheduler()
        for request_id in ("a", "b"):
            run_producer(producer, request_id)
        leases = [order.lease for order in orders_of(producer.build_connector_meta(), "offer").values()]
        producer.update_connector_output(KVConnectorOutput(finished_sending={"a", "b"}))
        run_producer(producer, "a")
        leases.append(orders_of(producer.build_connector_meta(), "offer")["a"].lease)
        assert len(set(leases)) == 3

    def test_an_offer_is_announced_to_workers_when_its_request_arrives(self) -> None:
        """A consumer that claims before the offer is made can then wait, however long the prefill takes."""
        producer = scheduler()
        producer.on_new_request(Request("p-1", 10, OFFER_PARAMS))
        orders = producer.build_connector_meta()
        assert list(orders_of(orders, "announcement")) == ["p-1"]
        final = Request("p-1", 10, OFFER_PARAMS, 10, "length")
        producer.request_finished(final, [[7, 8, 9]])
        assert (
            orders_of(producer.build_connector_meta(), "offer")["p-1"].lease
            == orders_of(orders, "announcement")["p-1"].lease
        )

    @pytest.mark.parametrize("reason", ["abort", "error"])
    def test_an_announced_offer_that_will_not_be_made_is_withdrawn(self, reason: str) -> None:
        producer = scheduler()
        producer.on_new_request(Request("p-1", 10, OFFER_PARAMS))
        lease = orders_of(producer.build_connector_meta(), "announcement")["p-1"].lease
        assert producer.request_finished(Request("p-1", 10, OFFER_PARAMS, 4, reason), [[7]]) == (False, None)
        assert producer.build_connector_meta() == ordered("p-1", withdrawal=lease)
        assert producer.num_requests == 0

    def test_a_router_can_release_an_offer_of_this_node(self) -> None:
        producer = scheduler()
        _, params = run_producer(producer)
        lease = orders_of(producer.build_connector_meta(), "announcement")["p-1"].lease
        release = {**(params or {}), "do_remote_prefill": False, "do_release": True}
        producer.on_new_request(Request("router-1", 1, release))
        producer.on_new_request(Request("router-2", 1, {**release, "remote_engine_id": "another"}))
        producer.on_new_request(Request("router-3", 1, {**release, "remote_epoch": "7"}))
        assert producer.build_connector_meta() == HandoffMetadata(releases=(("p-1", lease),))

    def test_a_router_can_release_an_offer_of_which_it_has_not_heard(self) -> None:
        producer, name = scheduler(), "5" * 32
        wish = {**OFFER_PARAMS, "release_as": name}
        producer.on_new_request(Request("p-1", 10, wish))
        lease = orders_of(producer.build_connector_meta(), "announcement")["p-1"].lease
        is_held, _ = producer.request_finished(Request("p-1", 10, wish, 10, "length"), [[7, 8, 9]])
        assert is_held
        producer.build_connector_meta()
        for number, known in enumerate((name, "6" * 32)):
            release = {"do_release": True, "release_as": known}
            producer.on_new_request(Request(f"router-{number}", 1, release))
        assert producer.build_connector_meta() == HandoffMetadata(releases=(("p-1", lease),))

    def test_an_offer_that_is_released_before_it_is_made_is_not_made(self) -> None:
        """The engine may learn only later, or too late, that the request's connection was closed."""
        producer, name = scheduler(), "5" * 32
        wish = {**OFFER_PARAMS, "release_as": name}
        producer.on_new_request(Request("p-1", 10, wish))
        lease = orders_of(producer.build_connector_meta(), "announcement")["p-1"].lease
        producer.on_new_request(Request("router-1", 1, {"do_release": True, "release_as": name}))
        finished = Request("p-1", 10, wish, 10, "length")
        assert producer.request_finished(finished, [[7, 8, 9]]) == (False, None)
        assert producer.build_connector_meta() == ordered("p-1", withdrawal=lease)
        assert producer.num_requests == 0

    def test_a_node_that_makes_no_offers_ignores_the_name_of_one(self) -> None:
        consumer = scheduler("kv_consumer")
        consumer.on_new_request(Request("p-1", 10, {**OFFER_PARAMS, "release_as": "5" * 32}))
        assert consumer.num_requests == 0

    def test_a_release_does_nothing_else(self) -> None:
        _, params = run_producer(scheduler())
        with pytest.raises(InvalidTransferParamsError, match="do_release"):
            scheduler().on_new_request(Request("router", 1, {**(params or {}), "do_release": True}))

    def test_tokens_of_the_answer_are_not_offered(self) -> None:
        producer = scheduler()
        run_producer(producer, num_computed_tokens=14, num_tokens=10)
        assert orders_of(producer.build_connector_meta(), "offer")["p-1"].num_tokens == 10

    @pytest.mark.parametrize(
        "final", [{"finish_reason": "abort"}, {"finish_reason": "error"}, {"num_computed_tokens": 9}]
    )
    def test_half_a_prompt_is_not_offered(self, final: dict[str, Any]) -> None:
        producer = scheduler()
        assert run_producer(producer, **final) == (False, None)
        assert producer.build_connector_meta().is_empty()
        assert producer.num_requests == 0

    def test_nothing_is_offered_without_a_request_for_it(self) -> None:
        producer = scheduler()
        request = Request("r", 10, None, 10, "stop")
        producer.on_new_request(request)
        assert producer.request_finished(request, [[1, 2, 3]]) == (False, None)

    def test_a_consumer_offers_nothing_and_logs_it_at_a_limited_rate(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        consumer = scheduler("kv_consumer")
        for number in range(100):
            assert run_producer(consumer, f"p-{number}") == (False, None)
        (line,) = caplog.messages
        assert "ignoring 'do_remote_decode' of request 'p-0'" in line
        assert "kv_role 'kv_consumer' does not support it" in line
        assert "send such requests to a node with kv_role 'kv_producer' or 'kv_both'" in line

    def test_nothing_is_left_when_the_blocks_are_free(self) -> None:
        producer = scheduler()
        run_producer(producer)
        assert producer.num_requests == 1
        producer.update_connector_output(KVConnectorOutput(finished_sending={"p-1"}))
        assert producer.num_requests == 0

    def test_an_id_cannot_be_reused_while_its_blocks_are_held(self) -> None:
        producer = scheduler()
        run_producer(producer)
        with pytest.raises(ConnectorError, match=r"'p-1' is in use: .* which is 'offered'; use another id"):
            producer.on_new_request(Request("p-1", 10, OFFER_PARAMS))
        producer.on_new_request(Request("p-1", 10, None))  # harmless, because it is not handed over

    def test_an_offer_without_an_address_is_an_error(self) -> None:
        config = engine_config("inproc").kv_transfer
        assert config is not None
        with pytest.raises(KVTransferStateError, match="set_handshake_metadata"):
            run_producer(HandoffScheduler(config, CacheShape().kv_cache_config()))

    def test_the_addresses_of_ranks_are_in_order(self) -> None:
        producer = scheduler()
        producer.set_handshake_metadata({1: WorkerAddress("inproc://b", 77, 1), 0: WORKER})
        _, params = run_producer(producer)
        assert params is not None
        assert params["remote_addresses"] == ["inproc://p", "inproc://b"]
        assert params["tp_size"] == 2

    def test_ranks_with_different_epochs_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="one epoch"):
            scheduler().set_handshake_metadata({0: WORKER, 1: WorkerAddress("inproc://b", 78, 1)})


class TestConsumer:
    def test_an_offer_is_claimed_while_the_request_queues(self) -> None:
        consumer = scheduler("kv_consumer")
        arrived(consumer)
        orders = consumer.build_connector_meta()
        assert orders_of(orders, "claim")["d-1"].request_id == "p-1"
        assert orders_of(orders, "claim")["d-1"].epoch == 77
        assert not orders_of(orders, "load")

    @pytest.mark.parametrize(
        ("num_prompt", "num_offered", "num_here", "expected"),
        [
            (10, 10, 0, 10),
            (10, 10, 4, 6),
            (10, 10, 8, 2),
            (9, 9, 8, 0),  # the last token is computed here in any case
            (10, 6, 0, 6),
            (10, 6, 4, 2),
            (10, 6, 8, 0),
            (6, 10, 0, 6),
            (1, 1, 0, 0),
        ],
    )
    def test_missing_tokens_can_be_loaded(
        self, num_prompt: int, num_offered: int, num_here: int, expected: int
    ) -> None:
        consumer = scheduler()
        request = arrived(consumer, num_prompt, num_offered)
        for _ in range(3):  # asking changes nothing
            assert consumer.get_num_new_matched_tokens(request, num_here) == (expected, expected > 0)

    @pytest.mark.parametrize(
        "spec",
        [
            SlidingWindowSpec(BLOCK_SIZE, 2, 8, torch.float32, sliding_window=6),
            ChunkedLocalAttentionSpec(BLOCK_SIZE, 2, 8, torch.float32, attention_chunk_size=8),
        ],
    )
    def test_the_last_token_is_not_loaded_where_layers_forget(self, spec: KVCacheSpec) -> None:
        """An engine keeps only what the token after the loaded ones sees, and it computes the last token
        again.
        """
        full = KVCacheGroupSpec(("layers.0",), FullAttentionSpec(BLOCK_SIZE, 2, 8, torch.float32))
        config = KVCacheConfig(40, (), (full, KVCacheGroupSpec(("layers.1",), spec)))
        for num_prompt, num_offered, expected in ((10, 10, 9), (9, 9, 8), (12, 10, 10), (2, 2, 1), (1, 1, 0)):
            consumer = scheduler(kv_cache_config=config)
            request = arrived(consumer, num_prompt, num_offered)
            assert consumer.get_num_new_matched_tokens(request, 0) == (expected, expected > 0)
        consumer = scheduler(kv_cache_config=config)
        request = arrived(consumer, 9, 9)
        consumer.update_state_after_alloc(request, [[1, 2], [0, 3]], 8)
        load = orders_of(consumer.build_connector_meta(), "load")["d-1"]
        assert load == (GroupBlocks(0, (1, 2)), GroupBlocks(0, (0, 3)))
        # If the first token of the answer is known, that is the one to compute.
        consumer = scheduler(kv_cache_config=config)
        request = Request("d-1", 10, offered(10), answer_token_ids=[5])
        consumer.on_new_request(request)
        assert consumer.get_num_new_matched_tokens(request, 0) == (10, True)

    @pytest.mark.parametrize(
        ("num_offered", "expected"), [(10, GroupBlocks(1, (21, 22))), (6, GroupBlocks(0, (20, 21)))]
    )
    def test_blocks_that_are_here_or_past_the_end_of_the_offer_are_not_loaded(
        self, num_offered: int, expected: GroupBlocks
    ) -> None:
        consumer = scheduler()
        request = arrived(consumer, num_offered=num_offered)
        consumer.update_state_after_alloc(request, [[20, 21, 22]], 6)
        assert orders_of(consumer.build_connector_meta(), "load") == {"d-1": (expected,)}

    def test_each_group_has_its_own_blocks(self) -> None:
        groups = tuple(
            KVCacheGroupSpec((name,), FullAttentionSpec(size, 1, 8, CacheShape().dtype))
            for name, size in (("a", 4), ("b", 8))
        )
        consumer = scheduler(kv_cache_config=KVCacheConfig(32, (), groups))
        request = arrived(consumer, num_prompt=17, num_offered=17)
        consumer.update_state_after_alloc(request, [[1, 2, 3, 4, 5], [6, 7, 8]], 9)
        loads = orders_of(consumer.build_connector_meta(), "load")["d-1"]
        assert loads == (GroupBlocks(2, (3, 4, 5)), GroupBlocks(1, (7, 8)))

    def test_a_load_is_ordered_once(self) -> None:
        consumer = scheduler()
        request = arrived(consumer)
        consumer.update_state_after_alloc(request, [[20, 21, 22]], 10)
        consumer.build_connector_meta()
        assert consumer.get_num_new_matched_tokens(request, 0) == (0, False)
        consumer.update_connector_output(KVConnectorOutput(finished_recving={"d-1"}))
        # An engine calls this again after the load.
        consumer.update_state_after_alloc(request, [[20, 21, 22]], 0)
        assert consumer.get_num_new_matched_tokens(request, 0) == (0, False)
        assert consumer.build_connector_meta() == HandoffMetadata(counts={"offered_requests_total/loaded": 1})
        assert consumer.request_finished(request, [[20, 21, 22]]) == (False, None)
        assert consumer.build_connector_meta().is_empty()
        assert consumer.num_requests == 0

    @pytest.mark.parametrize("invalid", [set(), {31}])
    @pytest.mark.parametrize("errors", [{}, {"d-1": "the offer is over"}])
    def test_a_load_counts_as_failed_if_it_ended_with_an_error_or_a_block_is_invalid(
        self, errors: dict[str, str], invalid: set[int]
    ) -> None:
        consumer = scheduler()
        request = arrived(consumer)
        assert consumer.get_num_new_matched_tokens(request, 0) == (10, True)
        consumer.update_state_after_alloc(request, [[30, 31, 32]], 10)
        consumer.update_connector_output(
            KVConnectorOutput(finished_recving={"d-1"}, load_errors=errors, invalid_block_ids=invalid)
        )
        outcome = "failed" if errors or invalid else "loaded"
        assert consumer.build_connector_meta().counts == {f"offered_requests_total/{outcome}": 1}

    def test_a_prompt_that_is_already_cached_frees_the_producer(self) -> None:
        consumer = scheduler()
        request = arrived(consumer, num_prompt=9, num_offered=9)
        consumer.update_state_after_alloc(request, [[20, 21, 22]], 0)
        orders = consumer.build_connector_meta()
        assert list(orders_of(orders, "claim")) == list(orders_of(orders, "drop")) == ["d-1"]
        assert consumer.num_requests == 0

    def test_an_abort_while_queueing_drops_the_offer_and_frees_the_id(self) -> None:
        consumer = scheduler()
        request = arrived(consumer)
        assert consumer.request_finished(request, [[]]) == (False, None)
        assert consumer.num_requests == 0
        consumer.on_new_request(request)
        first, again = consumer.build_connector_meta().requests
        assert first.claim == again.claim is not None
        assert (first.drop, again.drop) == (True, False)

    def test_an_abort_while_loading_waits_for_the_report(self) -> None:
        consumer = scheduler()
        request = arrived(consumer)
        consumer.update_state_after_alloc(request, [[20, 21, 22]], 10)
        request.finish_reason = "abort"
        assert consumer.request_finished(request, [[20, 21, 22]]) == (False, None)
        assert list(orders_of(consumer.build_connector_meta(), "drop")) == ["d-1"]
        with pytest.raises(ConnectorError, match="in use"):
            consumer.on_new_request(request)
        consumer.update_connector_output(KVConnectorOutput(finished_recving={"d-1"}))
        assert consumer.num_requests == 0

    def test_a_producer_loads_nothing_and_logs_it(self, caplog: pytest.LogCaptureFixture) -> None:
        producer = scheduler("kv_producer")
        request = arrived(producer)
        assert f"ignoring 'do_remote_prefill' of request {request.request_id!r}" in caplog.text
        assert "with kv_role 'kv_consumer' or 'kv_both'" in caplog.text
        assert producer.get_num_new_matched_tokens(request, 0) == (0, False)
        assert producer.build_connector_meta() == HandoffMetadata(counts={"offered_requests_total/role": 1})

    def test_malformed_params_are_refused_and_forgotten(self) -> None:
        consumer = scheduler()
        with pytest.raises(InvalidTransferParamsError, match="remote_lease"):
            consumer.on_new_request(Request("d-1", 10, {**offered(10), "remote_lease": -1}))
        assert consumer.num_requests == 0
        assert consumer.build_connector_meta().is_empty()

    def test_a_request_can_load_and_then_offer(self) -> None:
        node = scheduler()
        request = Request("d-1", 10, {**offered(10), "do_remote_decode": True})
        node.on_new_request(request)
        node.update_state_after_alloc(request, [[20, 21, 22]], 10)
        node.build_connector_meta()
        node.update_connector_output(KVConnectorOutput(finished_recving={"d-1"}))
        request.num_computed_tokens, request.finish_reason = 10, "stop"
        held, params = node.request_finished(request, [[20, 21, 22]])
        assert held
        assert params is not None
        orders = node.build_connector_meta()
        assert orders_of(orders, "offer")["d-1"].block_ids == ((20, 21, 22),)
        assert not orders_of(orders, "drop")


class TestRecurrentState:
    """A recurrent state covers all tokens so far. It is offered and loaded for exactly those tokens."""

    def test_a_prompt_is_not_offered_after_further_tokens_were_computed(self) -> None:
        producer = scheduler(kv_cache_config=WITH_STATE)
        producer.on_new_request(Request("p-1", 10, OFFER_PARAMS))
        request = Request("p-1", 10, OFFER_PARAMS, num_computed_tokens=11, finish_reason="stop")
        assert producer.request_finished(request, [[7, 8, 9], [5]]) == (False, None)
        assert producer.build_connector_meta().is_empty()

    def test_a_prompt_is_not_offered_while_it_is_computed(self) -> None:
        """Each step advances the state, so a consumer that reads early would not get the state of the whole
        prompt.
        """
        connector = KVConnectorFactory.create_connector(
            engine_config("inproc", role="kv_producer"), KVConnectorRole.SCHEDULER, WITH_STATE
        )
        connector.set_handshake_metadata({0: WORKER})
        request = Request("p-1", 10, {**OFFER_PARAMS, "rendezvous": "0123456789abcdef" * 2})
        connector.on_new_request(request)
        for num_computed_tokens in (4, 8):
            request.num_computed_tokens = num_computed_tokens
            connector.request_progressed(request, [[7, 8], [5]])
            orders = connector.build_connector_meta(Step())
            assert isinstance(orders, HandoffMetadata)
            assert not orders_of(orders, "offer")
        connector.shutdown()

    @pytest.mark.parametrize(
        ("num_prompt", "num_offered", "expected"),
        [(10, 9, 9), (10, 4, 4), (10, 10, 0), (9, 10, 0), (1, 1, 0)],
    )
    def test_only_a_state_from_before_the_last_prompt_token_is_loaded(
        self, num_prompt: int, num_offered: int, expected: int
    ) -> None:
        consumer = scheduler(kv_cache_config=WITH_STATE)
        request = arrived(consumer, num_prompt, num_offered)
        assert consumer.get_num_new_matched_tokens(request, 0) == (expected, expected > 0)
        if expected:
            consumer.update_state_after_alloc(request, [[20, 21, 22], [23]], expected)
            attention, state = orders_of(consumer.build_connector_meta(), "load")["d-1"]
            assert state == GroupBlocks(0, (23,))
            assert attention == GroupBlocks(0, (20, 21, 22)[: -(-expected // BLOCK_SIZE)])
        else:
            consumer.update_state_after_alloc(request, [[20, 21, 22], [23]], 0)
            assert list(orders_of(consumer.build_connector_meta(), "drop")) == ["d-1"]


def test_the_design_has_each_state_and_each_step_between_states() -> None:
    design = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
    section = design.split("### Scheduler half, one request")[1].split("###")[0]
    states, steps, *_ = (table.splitlines()[2:] for table in section.split("\n\n") if table.startswith("|"))
    assert {row.split("|")[1].strip() for row in states} == {state.value for state in RequestState}
    drawn = {
        (before, after)
        for row in steps
        for before in [row.split("|")[1].strip()]
        for after in [state.value for state in RequestState if state.value in row.split("|")[3]]
        if before not in ("–", after)
    }
    assert drawn == {(state.value, after.value) for state, nexts in _NEXT.items() for after in nexts}


def test_an_id_is_free_again_once_its_offer_was_withdrawn() -> None:
    producer = scheduler()
    run_producer(producer, finish_reason="abort")
    assert run_producer(producer)[0]
    assert list(orders_of(producer.build_connector_meta(), "offer")) == ["p-1"]


def test_orders_travel_between_processes() -> None:
    node = scheduler()
    run_producer(node)
    request = arrived(node)
    node.update_state_after_alloc(request, [[20, 21, 22]], 10)
    orders = node.build_connector_meta()
    assert pickle.loads(pickle.dumps(orders)) == orders
    assert pickle.loads(pickle.dumps(WORKER)) == WORKER


class TestRendezvous:
    NAME = "0123456789abcdef" * 2

    def test_it_is_offered_by_the_routers_name_and_guarded_by_a_number_of_our_own(self) -> None:
        producer = scheduler()
        request = Request("p-1", 10, {"do_remote_decode": True, "rendezvous": self.NAME})
        producer.on_new_request(request)
        announced = orders_of(producer.build_connector_meta(), "announcement")["p-1"]
        assert announced == Announcement(rendezvous_lease(self.NAME), self.NAME)
        # The consumer knows the name, so a chunk that is computed opens the offer without an answer.
        request.num_computed_tokens = 4
        producer.request_progressed(request, [[7]])
        opened = orders_of(producer.build_connector_meta(), "offer")["p-1"]
        assert opened.lease == announced.lease
        assert opened.guard_value not in (0, announced.lease)

    def test_its_consumer_expects_as_many_tokens_as_its_prompt_has(self) -> None:
        producer, consumer = scheduler(), scheduler("kv_consumer")
        _, answer = run_producer(producer)
        params = rendezvous_params(self.NAME, answer or {})
        assert params is not None
        consumer.on_new_request(request := Request("d-1", 10, params))
        claim = orders_of(consumer.build_connector_meta(), "claim")["d-1"]
        assert (claim.request_id, claim.num_tokens, claim.is_rendezvous) == (self.NAME, 10, True)
        assert claim.content == content_digest(request, 10)
        assert consumer.get_num_new_matched_tokens(request, 0) == (10, True)

    def test_a_name_is_used_once(self) -> None:
        producer = scheduler()
        wish = {"do_remote_decode": True, "rendezvous": self.NAME}
        producer.on_new_request(Request("p-1", 10, wish))
        producer.request_finished(Request("p-1", 10, wish, 10, "abort"), [[7, 8, 9]])
        with pytest.raises(RendezvousError, match="draw a new name"):
            producer.on_new_request(Request("p-2", 10, wish))

    def test_the_latest_names_are_remembered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(p2p_scheduler, "_MAX_USED_NAMES", 2)
        producer = scheduler()
        names = [f"{number:032x}" for number in (1 << 64, 2 << 64, 3 << 64)]
        wishes = [{"do_remote_decode": True, "rendezvous": name} for name in names]
        for number, wish in enumerate(wishes):
            producer.on_new_request(Request(f"p-{number}", 10, wish))
        for number in (1, 2):
            with pytest.raises(RendezvousError, match="draw a new name"):
                producer.on_new_request(Request("again", 10, wishes[number]))

    def test_a_request_that_ends_early_is_withdrawn_although_it_was_never_announced(self) -> None:
        """The consumer knows the name already, and must not wait for it."""
        producer = scheduler()
        wish = {"do_remote_decode": True, "rendezvous": self.NAME}
        producer.on_new_request(Request("p-1", 10, wish))
        producer.request_finished(Request("p-1", 10, wish, 0, "abort"), [[]])
        orders = producer.build_connector_meta()
        assert list(orders_of(orders, "announcement")) == ["p-1"]
        assert orders_of(orders, "withdrawal") == {"p-1": rendezvous_lease(self.NAME)}

    def test_a_router_can_release_it(self) -> None:
        producer = scheduler()
        _, answer = run_producer(producer)
        producer.build_connector_meta()
        params = {
            **(rendezvous_params(self.NAME, answer or {}) or {}),
            "do_remote_prefill": False,
            "do_release": True,
        }
        producer.on_new_request(Request("router-1", 1, params))
        assert producer.build_connector_meta().releases == ((self.NAME, rendezvous_lease(self.NAME)),)

    @pytest.mark.parametrize("name", ["", "5", "g" * 32, "0" * 16 + "5" * 16, "A" * 32, 5, True])
    def test_a_malformed_name_is_refused(self, name: object) -> None:
        where = {key: value for key, value in offered(10).items() if key != "do_remote_prefill"}
        for wish in ("do_remote_decode", "do_remote_prefill"):
            with pytest.raises(InvalidTransferParamsError) as caught:
                parse_transfer_params({**where, wish: True, "rendezvous": name})
            assert caught.value.key == "rendezvous"
