"""Both nodes are asked at once, by a name: the cache crosses while vLLM computes the prompt, and every wait
ends.
"""

from __future__ import annotations

import time

import pytest

from kvferry.connector.p2p.params import draw_offer_name, rendezvous_params
from tests.support.client import wait_until
from tests.support.collector import collecting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_TOKENS = 1200
#: Ten chunks per prompt.
CHUNKS = {"max_num_batched_tokens": 128}
WAIT_S = 4
LOADED, FAILED = "kvferry_load_seconds_count", "kvferry_rendezvous_failures_total"


@pytest.fixture(scope="module")
def collector():
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def running_pair(collector, start_module_pair):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds
        extra = {"rendezvous_wait_s": WAIT_S}
        return start_module_pair(prefill=CHUNKS, extra=extra, otlp_traces_endpoint=collector.url)


class Meeting:
    """The two requests of one rendezvous."""

    def __init__(self, pair, tokens, where):
        self._pair, self._tokens = pair, tokens
        self.name = draw_offer_name()
        # Any earlier answer says where the prefill node can be reached.
        self.params = rendezvous_params(self.name, where)
        self.prefill_id, self.decode_id = next(pair.names), next(pair.names)

    def start_prefill(self):
        wish = {"do_remote_decode": True, "rendezvous": self.name}
        self._pair.prefill.start(self.prefill_id, self._tokens, 1, wish)

    def start_decode(self):
        self._pair.decode.start(self.decode_id, self._tokens, 8, self.params)


@pytest.fixture
def meet(pair):
    """Make a rendezvous for a prompt. The offers that say where the prefill node is are released."""

    def make(tokens):
        offer = pair.prefilled([7] * 40)
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


def test_a_prefill_that_is_aborted_ends_by_policy(meet, pair, prompt, policy):
    tokens = prompt(NUM_TOKENS, seed=9)
    meeting = meet(tokens)
    meeting.start_decode()
    meeting.start_prefill()
    pair.decode.wait_for_status(lambda status: status["num_remembered"] > 0)
    pair.prefill.order("abort", request=meeting.prefill_id)
    pair.assert_ended_by(policy, pair.decode.result(meeting.decode_id), tokens)


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


def test_spans_of_both_nodes_are_in_the_trace_of_the_params(pair, collector, prompt):
    """Of any handoff. They leave through the exporter that vLLM sets up."""
    trace_id, router_span = "4" * 32, "7" * 16

    def spans():
        return {span.name: span for span in collector.spans if span.trace_id == trace_id}

    wish = {"do_remote_decode": True, "traceparent": f"00-{trace_id}-{router_span}-01"}
    offered = pair.prefill.ask("p", prompt(100), params=wish)["params"]
    pair.decode.ask("d", prompt(100), 2, offered)
    names = {f"kvferry.{name}" for name in ("offer", "grant", "claim", "load", "read")}
    wait_until(lambda: spans().keys() >= names, timeout_s=20)
    found = spans()
    assert found["kvferry.grant"].parent_id == found["kvferry.claim"].span_id
    assert found["kvferry.offer"].parent_id == found["kvferry.load"].parent_id == router_span
    assert found["kvferry.load"].attributes["kvferry.outcome"] == "loaded"
