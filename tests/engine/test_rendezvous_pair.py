"""Both nodes are asked at once: the answer is that of one node, or the policy decides."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvferry.connector.p2p.params import draw_offer_name, rendezvous_params

PROMPT = [3, *range(20, 79)]
WAIT_S = 0.2


@pytest.fixture(params=["recompute", "fail"])
def policy(request: pytest.FixtureRequest) -> str:
    word: str = request.param
    return word


class Pair:
    """A prefill and a decode node, and where the first one can be reached."""

    def __init__(self, make_node: Any, drive: Any, policy: str = "fail") -> None:
        extra = {"rendezvous_wait_s": WAIT_S, "claim_timeout_s": 0.3, "lease_s": 1.0}
        options = {"kv_connector_extra_config": extra}
        self.prefill = make_node(connector="inproc", role="kv_producer", options=options)
        self.decode = make_node(
            connector="inproc",
            role="kv_consumer",
            options={**options, "kv_load_failure_policy": policy},
        )
        self._drive = drive
        self.prefill.add("first", [1, 2, 3], max_tokens=1, kv_transfer_params={"do_remote_decode": True})
        drive(self.prefill, until=lambda: self.prefill.is_over("first"))
        self.where = self.prefill.last("first").kv_transfer_params
        self.prefill.add(
            "release",
            [0],
            max_tokens=1,
            kv_transfer_params={**self.where, "do_remote_prefill": False, "do_release": True},
        )

    def ask_prefill(self, request_id: str, name: str) -> None:
        wish = {"do_remote_decode": True, "rendezvous": name}
        self.prefill.add(request_id, PROMPT, max_tokens=1, kv_transfer_params=wish)

    def ask_decode(self, request_id: str, name: str) -> None:
        params = rendezvous_params(name, self.where)
        self.decode.add(request_id, PROMPT, max_tokens=9, kv_transfer_params=params)

    def drive(self, until: Any) -> None:
        self._drive(self.prefill, self.decode, until=until)

    def settle(self) -> None:
        self.drive(lambda: self.prefill.is_whole and self.decode.is_whole)

    def ended_by(self, policy: str, request_id: str, assert_same: Any) -> None:
        self.drive(lambda: self.decode.is_over(request_id))
        if policy == "recompute":
            assert_same(self.decode.tokens(request_id), "llama", PROMPT, 9)
        else:
            assert "could not be loaded" in self.decode.last(request_id).error
        self.settle()


def test_the_decode_node_reads_computed_blocks_early_and_answers_like_one_node(
    make_node: Any, drive: Any, assert_same: Any
) -> None:
    pair, name = Pair(make_node, drive), draw_offer_name()
    pair.ask_decode("d", name)
    drive(pair.decode, until=lambda: pair.decode.core.is_loading)
    pair.ask_prefill("p", name)
    pair.drive(lambda: pair.decode.is_over("d"))
    assert_same(pair.decode.tokens("d"), "llama", PROMPT, 9)
    metrics = pair.decode.last("d").metrics
    assert (metrics.num_loaded_tokens, metrics.transfer.error) == (60, "")
    pair.settle()
    # No early answer is needed: the decode node has claimed by the name.
    assert len(pair.prefill.outputs["p"]) == 1


def test_a_prefill_that_never_comes_ends_by_policy(
    make_node: Any, drive: Any, assert_same: Any, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(make_node, drive, policy)
    with caplog.at_level(logging.WARNING):
        pair.ask_decode("d", draw_offer_name())
        pair.ended_by(policy, "d", assert_same)
    assert "denied the claim of rendezvous" in caplog.text
    assert "did the router send the prefill request to this node?" in caplog.text
    pair.prefill.answer([1, 2], max_tokens=1)  # a node's figures come with its next step
    for node, name in ((pair.prefill, "unmet_claims_total"), (pair.decode, "rendezvous_failures_total")):
        assert sum(stats.counters.get(name, 0) for stats in node.handoffs) == 1
