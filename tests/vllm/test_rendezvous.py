"""Both nodes are asked at once, by a name: the cache crosses while vLLM computes the prompt, and every wait
ends.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.connector.p2p.params import draw_offer_name, rendezvous_params

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_TOKENS = 1200
#: Ten chunks per prompt.
CHUNKS = {"max_num_batched_tokens": 128}
WAIT_S = 4
LOADED, FAILED = "kvferry_load_seconds_count", "kvferry_rendezvous_failures_total"


@pytest.fixture(scope="module")
def running_pair(start_module_pair):
    return start_module_pair(prefill=CHUNKS, extra={"rendezvous_wait_s": WAIT_S})


class Meeting:
    """The two requests of one rendezvous."""

    def __init__(self, pair, tokens, where=None):
        self._pair, self._tokens = pair, tokens
        self.name = draw_offer_name()
        # Any earlier answer says where the prefill node can be reached.
        self.params = rendezvous_params(self.name, where or pair.prefilled([7] * 40))
        assert self.params is not None
        self.prefill_id, self.decode_id = next(pair.names), next(pair.names)

    def start_prefill(self, tokens=None):
        wish = {"do_remote_decode": True, "rendezvous": self.name}
        self._pair.prefill.start(self.prefill_id, tokens or self._tokens, 1, wish)

    def start_decode(self):
        self._pair.decode.start(self.decode_id, self._tokens, 8, self.params)


@pytest.fixture
def meet(pair):
    """Make a rendezvous for a prompt. The offers that say where the prefill node is are released."""

    def make(tokens, where=None):
        offer = pair.prefilled([7] * 40) if where is None else where
        release = {**offer, "do_remote_prefill": False, "do_release": True}
        pair.prefill.ask(next(pair.names), [3], params=release)
        return Meeting(pair, tokens, offer)

    return make


@pytest.mark.parametrize("first", ["decode", "prefill"])
def test_the_cache_crosses_while_the_prompt_is_computed(first, meet, pair, prompt):
    tokens = prompt(NUM_TOKENS, seed=hash(first) % 7)
    before = {name: pair.decode.metric(f"kvferry_load_{name}_sum") for name in ("seconds", "exposed_seconds")}
    meeting = meet(tokens)
    starts = [meeting.start_decode, meeting.start_prefill]
    for start in starts if first == "decode" else starts[::-1]:
        start()
    answer = pair.decode.result(meeting.decode_id)
    assert pair.prefill.result(meeting.prefill_id)["reason"] == "length"
    whole, exposed = (pair.decode.metric(f"kvferry_load_{name}_sum") - before[name] for name in before)
    # The first read began before the whole prompt was computed.
    assert 0 < exposed < whole
    pair.assert_like_alone(tokens, answer)


def test_a_short_prompt_needs_no_early_offer(meet, pair, prompt):
    tokens = prompt(40)
    meeting = meet(tokens)
    meeting.start_decode()
    meeting.start_prefill()
    answer = pair.decode.result(meeting.decode_id)
    pair.prefill.result(meeting.prefill_id)
    pair.assert_like_alone(tokens, answer)


def test_many_at_once_with_cached_beginnings(meet, pair, prompt):
    """The prompts share a beginning, which vLLM enters into its prefix cache before it is computed."""
    begun = prompt(300)
    prompts = [begun + prompt(250, seed) for seed in range(4)]
    meetings = [meet(tokens) for tokens in prompts]
    for meeting in meetings:
        meeting.start_prefill()
        meeting.start_decode()
    answers = [pair.decode.result(meeting.decode_id) for meeting in meetings]
    for meeting in meetings:
        pair.prefill.result(meeting.prefill_id)
    for tokens, answer in zip(prompts, answers, strict=True):
        pair.assert_like_alone(tokens, answer)


def test_a_prefill_that_never_comes_ends_by_policy(meet, pair, prompt, policy):
    tokens = prompt(200)
    before = pair.decode.metric(FAILED)
    meeting = meet(tokens)
    began = time.monotonic()
    meeting.start_decode()
    answer = pair.decode.result(meeting.decode_id)
    assert time.monotonic() - began >= WAIT_S * 0.9
    pair.assert_ended_by(policy, answer, tokens)
    assert "no request named it within 4 s" in pair.decode.log
    assert pair.decode.metric(FAILED) == before + 1
    pair.prefill.ask(next(pair.names), [3])  # a node's figures come with its next step
    assert pair.prefill.metric("kvferry_unmet_claims_total") >= 1


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_prefill_that_is_aborted_ends_by_policy(when, meet, pair, prompt, policy):
    tokens = prompt(NUM_TOKENS, seed=9)
    meeting = meet(tokens)
    with ThreadPoolExecutor(1) as thread:
        if when == "before":
            # Nothing of it is computed: other requests have all slots.
            with pair.busy(pair.prefill):
                meeting.start_prefill()
                meeting.start_decode()
                pair.prefill.order("abort", request=meeting.prefill_id)
                answer = thread.submit(pair.decode.result, meeting.decode_id).result()
        else:
            meeting.start_decode()
            meeting.start_prefill()
            pair.decode.wait_for_status(lambda status: status["num_remembered"] > 0)
            pair.prefill.order("abort", request=meeting.prefill_id)
            answer = pair.decode.result(meeting.decode_id)
    pair.assert_ended_by(policy, answer, tokens)


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_decode_request_that_is_aborted_frees_both_nodes(when, meet, pair, prompt):
    meeting = meet(prompt(NUM_TOKENS, seed=10))
    if when == "during":
        meeting.start_prefill()
    meeting.start_decode()
    pair.decode.order("abort", request=meeting.decode_id)
    if when == "before":
        meeting.start_prefill()
    pair.prefill.result(meeting.prefill_id)  # and the fixture waits until every block is free


def test_a_preempted_prefill_ends_by_policy(meet, pair, prompt, policy):
    """vLLM preempts every running request when its prefix cache is reset in this way."""
    tokens = prompt(NUM_TOKENS, seed=11)
    meeting = meet(tokens)
    meeting.start_decode()
    meeting.start_prefill()
    while not pair.prefill.metric(
        "kvferry_live_leases"
    ):  # until it is open: before that, it would be offered later
        assert not pair.prefill.has_finished(meeting.prefill_id)
    pair.prefill.order("preempt")
    answer = pair.decode.result(meeting.decode_id)
    assert pair.prefill.result(meeting.prefill_id)["reason"] == "length"
    pair.assert_ended_by(policy, answer, tokens)


def test_halves_with_unlike_prompts_are_not_mixed_up(meet, pair, prompt, policy):
    tokens = prompt(300, seed=12)
    meeting = meet(tokens)
    meeting.start_prefill(prompt(300, seed=13))
    meeting.start_decode()
    answer = pair.decode.result(meeting.decode_id)
    pair.assert_ended_by(policy, answer, tokens)
    pair.prefill.result(meeting.prefill_id)
    assert "was not computed from this request's prompt" in pair.decode.log


def test_a_name_that_is_used_twice_is_refused(meet, pair, prompt):
    tokens = prompt(300, seed=14)
    meeting = meet(tokens)
    meeting.start_decode()
    meeting.start_prefill()
    wish = {"do_remote_decode": True, "rendezvous": meeting.name}
    again = pair.prefill.ask(next(pair.names), tokens, params=wish)
    assert (again["reason"], again["params"]) == ("error", None)
    assert "was used already" in pair.prefill.log
    answer = pair.decode.result(meeting.decode_id)
    pair.prefill.result(meeting.prefill_id)
    pair.assert_like_alone(tokens, answer)


def test_a_claim_with_the_epoch_of_an_earlier_start_ends_by_policy(meet, pair, prompt, policy):
    tokens = prompt(200, seed=15)
    meeting = meet(tokens)
    meeting.params["remote_epoch"] = "5"
    meeting.start_decode()
    answer = pair.decode.result(meeting.decode_id)
    pair.assert_ended_by(policy, answer, tokens)
    assert "it was restarted" in pair.decode.log
