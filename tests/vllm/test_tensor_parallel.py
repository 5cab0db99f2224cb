"""Two ranks on either side: each reads its own heads from its like, and a request has ended when both say so."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def running_pair(start_pair):
    # Four workers that wait for each other by spinning can be slow to say that they live.
    patience = {"lease_s": 30, "connect_timeout_s": 20, "claim_timeout_s": 20}
    return start_pair(tensor_parallel_size=2, distributed_executor_backend="mp", extra=patience)


@pytest.mark.parametrize("num_tokens", [5, 33, 400])
def test_tokens_equal_those_of_one_node(pair, prompt, num_tokens):
    tokens = prompt(num_tokens)
    answer = pair.hand_over(tokens)
    assert answer["reason"] == "length"
    assert answer["tokens"] == pair.alone(tokens)


def test_an_offer_that_is_over(pair, prompt, policy):
    tokens = prompt(100)
    params = pair.prefilled(tokens)
    pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.decode.order("forget")
    answer = pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.assert_ended_by(policy, answer, tokens)


def test_a_node_with_another_number_of_ranks(shm_pair, pair, prompt):
    tokens = prompt(100)
    mixed = type(pair)(shm_pair.prefill, pair.decode, pair.names)
    answer = mixed.hand_over(tokens)
    mixed.assert_ended_by("fail", answer, tokens)
