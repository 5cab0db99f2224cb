"""Real Ray Serve with real vLLM: the answers are those of one engine, and nothing is left."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.support.ray_serving import Serving, prompts, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.filterwarnings("default")]


def test_answers_are_those_of_one_engine(serving: Serving) -> None:
    before = serving.metric("kvferry_load_seconds_count")
    asked = list(islice(prompts(1), 6))
    assert [serving.pair.ask(prompt) for prompt in asked] == [serving.alone.ask(prompt) for prompt in asked]
    wait_until(lambda: serving.metric("kvferry_load_seconds_count") - before == len(asked))
    wait_until(lambda: serving.metric("kvferry_live_leases") == 0)


def test_both_replicas_are_asked_at_once_when_they_know_each_other(serving: Serving) -> None:
    """The cache crosses while the prompt is computed: a load lasts longer than what of it the answer waits
    for.
    """
    for prompt in islice(prompts(2, 900), 2):
        before = serving.load_seconds()
        assert serving.pair.ask(prompt) == serving.alone.ask(prompt)
        wait_until(lambda before=before: serving.load_seconds() != before)
        after = serving.load_seconds()
    assert after[0] - before[0] > 2 * (after[1] - before[1])


def test_params_of_a_client_reach_no_engine(serving: Serving) -> None:
    prompt = next(prompts(4))
    foreign = {
        "do_remote_prefill": True,
        "remote_engine_id": "another",
        "remote_request_id": "of another client",
    }
    assert serving.pair.ask(prompt, kv_transfer_params=foreign) == serving.alone.ask(prompt)
