"""vLLM splits a request for several samples into requests with the same offer.

One loads it, the others wait.
"""

from __future__ import annotations

import pytest

from .test_failures import VALID

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def queued(pair):
    """Start three requests with the same offer while the decode node has no free request slot."""

    def start(tokens, params):
        names = [next(pair.names) for _ in range(3)]
        for name in names:
            pair.decode.start(name, tokens, 8, params)
        return names

    return start


def test_one_loads_for_all(pair, prompt, queued):
    tokens = prompt(200)
    before = pair.decode.order("figures")
    with pair.busy(pair.decode):
        names = queued(tokens, pair.prefilled(tokens))
    answers = [pair.decode.result(name) for name in names]
    after = pair.decode.order("figures")
    assert (after["num_loads"] - before["num_loads"], after["num_failures"]) == (1, before["num_failures"])
    for answer in answers:
        pair.assert_like_alone(tokens, answer)


def test_the_policy_holds_for_all(pair, prompt, policy, queued):
    tokens = prompt(100)
    with pair.busy(pair.decode):
        names = queued(tokens, VALID)
    for name in names:
        pair.assert_ended_by(policy, pair.decode.result(name), tokens)


def test_the_one_that_loads_is_aborted(pair, prompt, policy, queued):
    tokens = prompt(100)
    with pair.busy(pair.decode):
        first, *others = queued(tokens, pair.prefilled(tokens))
        pair.decode.order("abort", request=first)
    for name in others:
        pair.assert_ended_by(policy, pair.decode.result(name), tokens)


def test_one_that_waits_is_aborted(pair, prompt, queued):
    tokens = prompt(100)
    with pair.busy(pair.decode):
        first, second, third = queued(tokens, pair.prefilled(tokens))
        pair.decode.order("abort", request=second)
    answers = [pair.decode.result(name) for name in (first, third)]
    for answer in answers:
        pair.assert_like_alone(tokens, answer)


def test_another_prompt_does_not_wait(pair, prompt):
    """A request with another prompt is treated like any second reader of the offer."""
    tokens, others = prompt(100, seed=1), prompt(100, seed=2)
    with pair.busy(pair.decode):
        params = pair.prefilled(tokens)
        first, second = next(pair.names), next(pair.names)
        pair.decode.start(first, tokens, 8, params)
        pair.decode.start(second, others, 8, params)
    assert pair.decode.result(second)["reason"] == "error"
    pair.assert_like_alone(tokens, pair.decode.result(first))
