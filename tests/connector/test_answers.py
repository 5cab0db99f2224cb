"""Offers of prompt and answer: who makes them, what they say, and when they end for requests that need blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvferry.connector.config import KVRole
from kvferry.connector.handoff.events import GroupBlocks
from kvferry.connector.handoff.messages import PROTOCOL_VERSION
from kvferry.connector.identity.content import content_digest
from kvferry.connector.kv_cache_specs import KVCacheGroupSpec, SlidingWindowSpec
from kvferry.connector.output import KVConnectorOutput
from kvferry.connector.p2p.options import ConnectorOptions
from kvferry.connector.p2p.orders import OfferOrder, WorkerAddress
from kvferry.connector.p2p.scheduler import HandoffScheduler
from kvferry.connector.testing import CacheShape, Request, engine_config
from tests.support.handoff_orders import orders_of

BLOCK_SIZE = 4
NUM_BLOCKS = 40
PROMPT = list(range(10))
ANSWER = [91, 92, 93]


def scheduler(
    role: KVRole = "kv_consumer", *, offers: bool = True, percent: int = 50, window: int = 0
) -> HandoffScheduler:
    config = engine_config("inproc", role=role, engine_id=role).kv_transfer
    assert config is not None
    shape = CacheShape(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    options = ConnectorOptions(offer_answer=offers, answer_pool_percent=percent)
    cache = shape.kv_cache_config()
    if window:
        spec = SlidingWindowSpec(BLOCK_SIZE, 2, 8, torch.float32, sliding_window=window)
        cache = replace(cache, kv_cache_groups=(KVCacheGroupSpec(("layer",), spec),))
    made = HandoffScheduler(config, cache, options)
    made.set_handshake_metadata({0: WorkerAddress("inproc://w", epoch=77, rank=0)})
    return made


def prompt_params(request_id: str = "p") -> dict[str, Any]:
    """Return the params of an offered prompt."""
    producer = scheduler("kv_producer")
    producer.on_new_request(Request(request_id, 10, {"do_remote_decode": True}))
    _, params = producer.request_finished(
        Request(request_id, 10, {"do_remote_decode": True}, 10, "length"), [[7, 8, 9]]
    )
    assert params is not None
    return params


class FromClient(Request):
    """A request of a host that puts the client's id between `cmpl-` and a suffix."""

    @property
    def client_request_id(self) -> str:
        return self.request_id.rpartition("-")[0].partition("-")[2]


def _asked(decoder: HandoffScheduler, answered: str) -> tuple[bool, dict[str, Any] | None]:
    question = Request(f"asks for {answered}", 1, {"answer_of": answered}, 1, "length")
    decoder.on_new_request(question)
    return decoder.request_finished(question, [[5]])


def decode(
    decoder: HandoffScheduler,
    request_id: str = "d",
    *,
    reason: str = "stop",
    num_computed: int = len(PROMPT) + len(ANSWER) - 1,
    blocks: tuple[int, ...] = (1, 2, 3),
    request_type: type[Request] = Request,
    **params: Any,
) -> tuple[bool, dict[str, Any] | None]:
    """Answer one request to its end, with the prompt loaded."""
    request = request_type(request_id, len(PROMPT), {**prompt_params(), **params})
    decoder.on_new_request(request)
    decoder.get_num_new_matched_tokens(request, 0)
    decoder.update_state_after_alloc(request, [blocks], len(PROMPT))
    decoder.build_connector_meta()
    decoder.update_connector_output(KVConnectorOutput(finished_recving={request_id}))
    request.answer_token_ids, request.num_computed_tokens, request.finish_reason = (
        ANSWER,
        num_computed,
        reason,
    )
    return decoder.request_finished(request, [blocks])


class TestTheOffer:
    def test_it_has_prompt_and_answer_without_the_last_token(self) -> None:
        decoder = scheduler()
        held, params = decode(decoder)
        assert held
        assert params is not None
        assert (params["remote_num_tokens"], params["do_remote_prefill"]) == (12, True)
        (order,) = orders_of(decoder.build_connector_meta(), "offer").values()
        next_prompt = Request("next", 20, token_ids=[*PROMPT, *ANSWER, *range(50, 57)])
        lease = int(params["remote_lease"], 16)
        content = content_digest(next_prompt, 12)
        assert order == OfferOrder(lease, ((1, 2, 3),), 12, content, is_answer=True)

    def test_a_token_that_a_step_still_computes_is_not_in_it(self) -> None:
        """An engine that schedules ahead counts it as computed."""
        _, params = decode(scheduler(), num_computed=len(PROMPT) + len(ANSWER))
        assert params is not None
        assert params["remote_num_tokens"] == 12

    @pytest.mark.parametrize(("window", "is_offered"), [(5, True), (6, False)])
    def test_it_is_not_made_without_a_block_that_the_next_token_sees(
        self, window: int, is_offered: bool
    ) -> None:
        """An engine that drafts frees what only tokens before its last draft see: token 12 sees token 8, or 7 as well."""
        decoder = scheduler(window=window)
        held, params = decode(decoder, num_computed=len(PROMPT) + len(ANSWER), blocks=(0, 0, 3, 4))
        assert (held, params is not None) == (is_offered, is_offered)
        assert decoder.num_requests == is_offered

    def test_it_is_made_after_a_prompt_that_was_loaded_or_computed(self) -> None:
        decoder = scheduler()
        request = Request("alone", 10, {"offer_answer": True}, 12, "length", answer_token_ids=ANSWER)
        decoder.on_new_request(request)
        assert decoder.request_finished(request, [[1, 2, 3]])[0]

    def test_it_is_off_by_default_and_a_request_can_decline_it(self) -> None:
        assert decode(scheduler(offers=False)) == (False, None)
        assert decode(scheduler(offers=False), offer_answer=True) == (False, None)
        assert decode(scheduler(), offer_answer=False) == (False, None)

    @pytest.mark.parametrize("asked", ["cmpl", "id7", "cmpl-id7", "conv-id7", "id7-0", "0", "ab12cd34"])
    def test_only_the_whole_id_of_the_client_names_an_answer(self, asked: str) -> None:
        """The params name the offer, and who knows them can release it."""
        decoder = scheduler()
        decode(decoder, "cmpl-conv-id7-0-ab12cd34", request_type=FromClient)
        assert _asked(decoder, asked) == (False, None)

    def test_another_request_can_ask_for_its_params(self) -> None:
        """vLLM cannot put them into a stream."""
        decoder = scheduler()
        _, first = decode(decoder, "cmpl-id7-ab12cd34", request_type=FromClient)
        _, newest = decode(decoder, "cmpl-id7-ab12cd35", request_type=FromClient)
        assert first != newest
        assert _asked(decoder, "id7") == (False, newest)

    def test_another_request_can_ask_what_the_node_is(self) -> None:
        for role in ("kv_consumer", "kv_producer"):
            node = scheduler(role)
            question = Request("q", 1, {"describe": True}, 1, "length")
            node.on_new_request(question)
            assert not orders_of(node.build_connector_meta(), "announcement")
            keeps, params = node.request_finished(question, [[5]])
            assert not keeps
            assert params == {
                "kv_role": role,
                "load_failure_policy": "recompute",
                "protocol": PROTOCOL_VERSION,
                "remote_engine_id": role,
                "remote_epoch": f"{77:x}",
                "remote_addresses": ["inproc://w"],
                "tp_size": 1,
                **({"rendezvous_supported": True} if role == "kv_producer" else {}),
            }
            assert node.num_requests == 0

    def test_a_request_that_was_aborted_or_failed_makes_none(self) -> None:
        for reason in ("abort", "error"):
            decoder = scheduler()
            assert decode(decoder, reason=reason) == (False, None)
            assert not orders_of(decoder.build_connector_meta(), "offer")
            assert decoder.num_requests == 0

    def test_a_prefill_offers_its_prompt_only(self) -> None:
        node = scheduler("kv_both")
        request = Request("p", 10, {"do_remote_decode": True, "offer_answer": True}, 10, "length")
        request.answer_token_ids = ANSWER[:1]
        node.on_new_request(request)
        _, params = node.request_finished(request, [[1, 2, 3]])
        assert params is not None
        assert params["remote_num_tokens"] == 10


class TestAnAnswerThatMoves:
    """It is offered whether or not the node offers answers, as soon as its engine says that it stops."""

    @staticmethod
    def stopping(reason: str = "moved") -> tuple[HandoffScheduler, tuple[bool, dict[str, Any] | None]]:
        decoder = scheduler(offers=False)
        request = Request("d", len(PROMPT), None, 11, None, answer_token_ids=ANSWER[:2])
        decoder.on_new_request(request)
        decoder.request_stopping(request)
        # The next node may claim before the offer is made, and its claim must be known by then.
        assert orders_of(decoder.build_connector_meta(), "announcement").keys() == {"d"}
        request.answer_token_ids, request.num_computed_tokens, request.finish_reason = ANSWER, 12, reason
        return decoder, decoder.request_finished(request, [(1, 2, 3)])

    def test_prompt_and_answer_are_offered_for_a_node_that_loads_them_at_once(self) -> None:
        decoder, (held, params) = self.stopping()
        assert held
        assert params is not None
        assert params["remote_num_tokens"] == 12
        assert "answer_lease_s" not in params
        (order,) = orders_of(decoder.build_connector_meta(), "offer").values()
        content = content_digest(Request("n", 13, token_ids=[*PROMPT, *ANSWER]), 12)
        assert order == OfferOrder(int(params["remote_lease"], 16), ((1, 2, 3),), 12, content)
        release = {**params, "do_remote_prefill": False, "do_release": True}
        decoder.on_new_request(Request("r", 1, release))
        assert decoder.build_connector_meta().releases == (("d", int(params["remote_lease"], 16)),)
        decoder.update_connector_output(KVConnectorOutput(finished_sending={"d"}))
        assert decoder.num_requests == 0

    @pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
    def test_one_that_ends_otherwise_is_not_offered(self, reason: str) -> None:
        decoder, ended = self.stopping(reason)
        assert ended == (False, None)
        assert orders_of(decoder.build_connector_meta(), "withdrawal").keys() == {"d"}
        assert decoder.num_requests == 0

    def test_a_node_that_offers_answers_offers_this_one_for_the_other_node(self) -> None:
        decoder = scheduler(percent=5)  # more than the answer's share of blocks
        held, params = decode(decoder, reason="moved")
        assert held
        assert params is not None
        assert "answer_lease_s" not in params

    @pytest.mark.parametrize(("window", "num_loaded"), [(0, 12), (4, 12)])
    def test_the_next_node_loads_what_it_knows_of_the_answer_as_well(
        self, window: int, num_loaded: int
    ) -> None:
        _, (_, params) = self.stopping()
        node = scheduler(offers=False, window=window)
        request = Request("n", len(PROMPT), params, token_ids=PROMPT, answer_token_ids=ANSWER)
        node.on_new_request(request)
        assert node.get_num_new_matched_tokens(request, 0) == (num_loaded, True)


class TestTheNextTurn:
    def test_a_producer_loads_the_answer_past_its_own_prefix_and_then_offers_the_new_prompt(self) -> None:
        _, params = decode(scheduler())
        assert params is not None
        prefill = scheduler("kv_producer")
        tokens = [*PROMPT, *ANSWER, *range(50, 57)]
        request = Request("n", 20, {**params, "do_remote_decode": True}, token_ids=tokens)
        prefill.on_new_request(request)
        assert prefill.get_num_new_matched_tokens(request, 8) == (4, True)
        prefill.update_state_after_alloc(request, [[1, 2, 3]], 4)
        assert orders_of(prefill.build_connector_meta(), "load") == {"n": (GroupBlocks(2, (3,)),)}
        prefill.update_connector_output(KVConnectorOutput(finished_recving={"n"}))
        request.num_computed_tokens, request.finish_reason = 20, "length"
        _, offered = prefill.request_finished(request, [[1, 2, 3, 4, 5]])
        assert offered is not None
        assert offered["remote_num_tokens"] == 20

    def test_a_producer_without_the_option_computes_the_prompt(self) -> None:
        _, params = decode(scheduler())
        assert params is not None
        prefill = scheduler("kv_producer", offers=False)
        request = Request("n", 20, {**params, "do_remote_decode": True})
        prefill.on_new_request(request)
        assert prefill.get_num_new_matched_tokens(request, 8) == (0, False)
        assert not orders_of(prefill.build_connector_meta(), "claim")

    def test_an_edited_conversation_has_another_digest(self) -> None:
        decoder = scheduler()
        _, params = decode(decoder)
        (order,) = orders_of(decoder.build_connector_meta(), "offer").values()
        prefill = scheduler("kv_producer")
        tokens = [*PROMPT, 91, 99, 93, *range(50, 57)]
        prefill.on_new_request(Request("n", 20, {**params, "do_remote_decode": True}, token_ids=tokens))
        assert orders_of(prefill.build_connector_meta(), "claim")["n"].content != order.content


class TestBlocks:
    def test_the_oldest_offer_ends_when_answers_hold_more_than_their_share(self) -> None:
        decoder = scheduler(percent=20)  # 8 of 40 blocks
        leases = []
        for number in range(3):
            _, params = decode(decoder, f"d{number}")
            assert params is not None
            leases.append(int(params["remote_lease"], 16))
        assert decoder.build_connector_meta().releases == (("d0", leases[0]),)
        decoder.update_connector_output(KVConnectorOutput(finished_sending={"d0"}))
        assert decoder.num_requests == 2

    def test_an_answer_that_is_larger_than_the_share_is_not_offered(self) -> None:
        decoder = scheduler(percent=5)
        assert decode(decoder) == (False, None)
        assert decoder.num_requests == 0

    def test_an_offer_ends_for_each_step_in_which_a_request_gets_no_blocks(self) -> None:
        decoder = scheduler()
        for number in range(2):
            decode(decoder, f"d{number}")
        decoder.build_connector_meta()
        waiting = Request("w", 10)
        for oldest in ("d0", "d1"):
            decoder.get_num_new_matched_tokens(waiting, 0)
            assert [request_id for request_id, _ in decoder.build_connector_meta().releases] == [oldest]
        decoder.get_num_new_matched_tokens(waiting, 0)
        assert not decoder.build_connector_meta().releases

    def test_offers_stay_while_requests_get_their_blocks(self) -> None:
        decoder = scheduler()
        decode(decoder)
        decoder.build_connector_meta()
        arriving = Request("w", 10)
        decoder.get_num_new_matched_tokens(arriving, 0)
        decoder.update_state_after_alloc(arriving, [[4, 5, 6]], 0)
        assert not decoder.build_connector_meta().releases

    def test_a_router_can_release_an_answer(self) -> None:
        decoder = scheduler()
        _, params = decode(decoder)
        assert params is not None
        decoder.build_connector_meta()
        decoder.on_new_request(Request("r", 1, {**params, "do_remote_prefill": False, "do_release": True}))
        assert decoder.build_connector_meta().releases == (("d", int(params["remote_lease"], 16)),)
