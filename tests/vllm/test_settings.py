"""Ways of running vLLM that change what a step computes: chunks of a prompt, guessed tokens."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GUESSES = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def running_pair(start_module_pair):
    return start_module_pair(max_num_batched_tokens=128, speculative_config=GUESSES)


@pytest.mark.parametrize("num_tokens", [5, 128, 500])
def test_tokens_equal_those_of_one_node(pair, prompt, num_tokens):
    tokens = prompt(num_tokens)
    answer = pair.hand_over(tokens)
    assert answer["reason"] == "length"
    assert answer["tokens"] == pair.alone(tokens)


def test_guesses_that_come_true(pair):
    tokens = [1, 2, 3, 4] * 40
    answer = pair.hand_over(tokens, max_tokens=40)
    assert answer["tokens"] == pair.alone(tokens, max_tokens=40)


def test_an_offer_that_is_over(pair, prompt, policy):
    tokens = prompt(200)
    params = pair.prefilled(tokens)
    pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.decode.order("forget")
    answer = pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.assert_ended_by(policy, answer, tokens)
