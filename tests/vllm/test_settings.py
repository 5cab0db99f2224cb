"""vLLM settings that change what a step computes: chunked prompts, speculative tokens, preemption before an
offer.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GUESSES = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def running_pair(start_module_pair):
    return start_module_pair(max_num_batched_tokens=128, speculative_config=GUESSES, extra={"lease_s": 60})


@pytest.mark.parametrize("num_tokens", [5, 128, 500])
def test_tokens_equal_those_of_one_node(pair, prompt, num_tokens):
    tokens = prompt(num_tokens)
    answer = pair.hand_over(tokens)
    assert answer["reason"] == "length"
    pair.assert_like_alone(tokens, answer)


def test_speculative_tokens_that_are_accepted(pair):
    tokens = [1, 2, 3, 4] * 40
    answer = pair.hand_over(tokens, max_tokens=40)
    pair.assert_like_alone(tokens, answer, max_tokens=40)


def test_an_offer_that_was_already_read(pair, prompt, policy):
    tokens = prompt(200)
    params = pair.prefilled(tokens)
    pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.decode.order("forget")
    answer = pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.assert_ended_by(policy, answer, tokens)


def test_requests_that_were_preempted_before_they_are_offered(pair, prompt):
    """Four sequences of 34 blocks in a pool of 127: one of them computes its prompt twice, and offers it
    once.
    """
    prompts = [prompt(900, seed) for seed in range(4)]
    names = [next(pair.names) for _ in prompts]
    before = pair.prefill.order("figures")["num_preemptions"]
    for name, tokens in zip(names, prompts, strict=True):
        pair.prefill.start(name, tokens, 160, {"do_remote_decode": True})
    answers = []
    for name, tokens in zip(names, prompts, strict=True):
        # Load each offer at once, because offered blocks are not available to the other requests.
        told = pair.prefill.result(name)["params"]
        answers.append(pair.decode.ask(next(pair.names), tokens, 8, told))
    assert pair.prefill.order("figures")["num_preemptions"] > before
    for tokens, answer in zip(prompts, answers, strict=True):
        pair.assert_like_alone(tokens, answer)
