"""Several ranks: each reads its heads from the ranks that keep them, and a request ends when all ranks report
it.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
# Workers busy-poll while they wait for each other, so on shared cores their signs of life can be late.
PATIENCE = {"lease_s": 60, "connect_timeout_s": 40, "claim_timeout_s": 40}


@pytest.fixture(scope="module")
def running_pair(start_module_pair):
    return start_module_pair(**TWO_RANKS, extra=PATIENCE)


@pytest.mark.parametrize("num_tokens", [5, 33, 400])
def test_tokens_equal_those_of_one_node(pair, prompt, num_tokens):
    tokens = prompt(num_tokens)
    answer = pair.hand_over(tokens)
    assert answer["reason"] == "length"
    pair.assert_like_alone(tokens, answer)


def test_an_offer_that_was_already_read(pair, prompt, policy):
    tokens = prompt(100)
    params = pair.prefilled(tokens)
    pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.decode.order("forget")
    answer = pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.assert_ended_by(policy, answer, tokens)
