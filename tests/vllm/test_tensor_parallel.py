"""Several ranks: each reads its heads from whoever keeps them, and a request has ended when all ranks say so."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
# Workers that wait for each other by spinning can be slow to say that they live.
PATIENCE = {"lease_s": 60, "connect_timeout_s": 40, "claim_timeout_s": 40}


@pytest.fixture(scope="module")
def running_pair(start_module_pair):
    return start_module_pair(**TWO_RANKS, extra=PATIENCE)


@pytest.mark.parametrize("num_tokens", [5, 33, 400])
def test_tokens_equal_those_of_one_node(pair, prompt, num_tokens):
    tokens = prompt(num_tokens)
    answer = pair.hand_over(tokens)
    assert answer["reason"] == "length"
    pair.assert_like_alone(tokens, answer["tokens"])


def test_an_offer_that_is_over(pair, prompt, policy):
    tokens = prompt(100)
    params = pair.prefilled(tokens)
    pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.decode.order("forget")
    answer = pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.assert_ended_by(policy, answer, tokens)


def test_heads_that_are_spread_otherwise_are_refused(shm_pair, pair, prompt):
    """How the heads lie inside a page is vLLM's secret, so a page is not put together from two ranks' halves."""
    tokens = prompt(100)
    mixed = type(pair)(shm_pair.prefill, pair.decode, pair.names)
    answer = mixed.hand_over(tokens)
    mixed.assert_ended_by("fail", answer, tokens)
    assert "self_attn.attn.page_format differs" in mixed.decode.log
