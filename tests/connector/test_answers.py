"""Offers of prompt and answer to the node that goes on: what they say, and when they are made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvferry.connector.config import KVRole
from kvferry.connector.handoff.messages import PROTOCOL_VERSION
from kvferry.connector.identity.content import content_digest
from kvferry.connector.kv_cache_specs import KVCacheGroupSpec, SlidingWindowSpec
from kvferry.connector.output import KVConnectorOutput
from kvferry.connector.p2p.orders import OfferOrder, WorkerAddress
from kvferry.connector.p2p.scheduler import HandoffScheduler
from kvferry.connector.testing import CacheShape, Request, engine_config
from tests.support.handoff_orders import orders_of

BLOCK_SIZE = 4
NUM_BLOCKS = 40
PROMPT = list(range(10))
ANSWER = [91, 92, 93]


def scheduler(role: KVRole = "kv_consumer", *, window: int = 0) -> HandoffScheduler:
    config = engine_config("inproc", role=role, engine_id=role).kv_transfer
    assert config is not None
    shape = CacheShape(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    cache = shape.kv_cache_config()
    if window:
        spec = SlidingWindowSpec(BLOCK_SIZE, 2, 8, torch.float32, sliding_window=window)
        cache = replace(cache, kv_cache_groups=(KVCacheGroupSpec(("layer",), spec),))
    made = HandoffScheduler(config, cache)
    made.set_handshake_metadata({0: WorkerAddress("inproc://w", epoch=77, rank=0)})
    return made


def test_a_request_can_ask_what_the_node_is() -> None:
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


class TestAnAnswerThatMoves:
    """It is offered as soon as its engine says that it stops."""

    @staticmethod
    def stopping(
        reason: str = "moved",
        *,
        num_computed: int = len(PROMPT) + len(ANSWER) - 1,
        window: int = 0,
        blocks: tuple[int, ...] = (1, 2, 3),
    ) -> tuple[HandoffScheduler, tuple[bool, dict[str, Any] | None]]:
        decoder = scheduler(window=window)
        request = Request("d", len(PROMPT), None, 11, None, answer_token_ids=ANSWER[:2])
        decoder.on_new_request(request)
        decoder.request_stopping(request)
        # The next node may claim before the offer is made, and its claim must be known by then.
        assert orders_of(decoder.build_connector_meta(), "announcement").keys() == {"d"}
        request.answer_token_ids, request.num_computed_tokens, request.finish_reason = (
            ANSWER,
            num_computed,
            reason,
        )
        return decoder, decoder.request_finished(request, [blocks])

    def test_prompt_and_answer_are_offered_for_a_node_that_loads_them_at_once(self) -> None:
        decoder, (held, params) = self.stopping()
        assert held
        assert params is not None
        assert params["remote_num_tokens"] == 12
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

    def test_a_token_that_a_step_still_computes_is_not_in_it(self) -> None:
        """An engine that schedules ahead counts it as computed."""
        _, (_, params) = self.stopping(num_computed=len(PROMPT) + len(ANSWER))
        assert params is not None
        assert params["remote_num_tokens"] == 12

    @pytest.mark.parametrize(("window", "is_offered"), [(5, True), (6, False)])
    def test_it_is_not_made_without_a_block_that_the_next_token_sees(
        self, window: int, is_offered: bool
    ) -> None:
        """An engine that drafts frees what only tokens before its last draft see.

        Token 12 sees token 8, or 7 as well.
        """
        num_computed = len(PROMPT) + len(ANSWER)
        decoder, (held, params) = self.stopping(num_computed=num_computed, window=window, blocks=(0, 0, 3, 4))
        assert (held, params is not None) == (is_offered, is_offered)
        assert decoder.num_requests == is_offered

    def test_another_answer_has_another_digest(self) -> None:
        decoder, (_, params) = self.stopping()
        (order,) = orders_of(decoder.build_connector_meta(), "offer").values()
        node = scheduler()
        node.on_new_request(Request("n", 13, params, token_ids=[*PROMPT, 91, 99, 93]))
        assert orders_of(node.build_connector_meta(), "claim")["n"].content != order.content

    @pytest.mark.parametrize(("window", "num_loaded"), [(0, 12), (4, 12)])
    def test_the_next_node_loads_what_it_knows_of_the_answer_as_well(
        self, window: int, num_loaded: int
    ) -> None:
        _, (_, params) = self.stopping()
        node = scheduler(window=window)
        request = Request("n", len(PROMPT), params, token_ids=PROMPT, answer_token_ids=ANSWER)
        node.on_new_request(request)
        assert node.get_num_new_matched_tokens(request, 0) == (num_loaded, True)
