"""`vllm serve` as users run it: the decode server while the prefill server dies at each stage or stops."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.client import children_of, wait_until
from tests.support.metrics_page import assert_promtool_is_content
from tests.support.vllm_servers import FAILURES, LOADS, Reply, Server, VllmService

from .conftest import START_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: Seconds within which a request must end if its prompt's cache cannot be loaded, and a stopped server after
#: its offers are delivered. It is less than an offer's lease of 30 s.
SOON_S = 20.0


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """In place of the check of each test: the servers are the session's, and a test starts those anew that it
    has ended.
    """


@dataclass(frozen=True)
class Killed:
    """Requests to the decode server while the prefill server was killed, and their replies.

    Attributes:
        prompts: By stage of the request at that moment: "loaded", "asked" or "later".
        stale: The params of an offer that the decode server never read.
    """

    prompts: dict[str, list[int]]
    replies: dict[str, Reply]
    stale: dict[str, Any]


@pytest.fixture(scope="module")
def decode(served: list[VllmService]) -> Server:
    return Server(served[1].process)


@pytest.fixture(scope="module")
def killed(served: list[VllmService], decode: Server, prompt) -> Killed:
    """Kill the prefill server while requests that need it are at every stage, and start it again."""
    prefill = Server(served[0].process)
    prompts = {stage: prompt(100, seed) for seed, stage in enumerate(("loaded", "asked", "later"))}
    told = {stage: prefill.offer(tokens) for stage, tokens in prompts.items()}
    stale = prefill.offer(prompt(200))

    def ask(stage: str, max_tokens: int = 8) -> Reply:
        return decode.complete(prompts[stage], max_tokens, kv_transfer_params=told[stage])

    with ThreadPoolExecutor() as clients:
        before = decode.metric(LOADS)
        replies = {"loaded": clients.submit(ask, "loaded", 1200)}
        decode.wait_for(LOADS, lambda loads: loads == before + 1)
        prefill.process.send_signal(signal.SIGSTOP)
        replies["asked"] = clients.submit(ask, "asked")
        decode.wait_for("vllm:num_requests_kv_fetch_by_stage", lambda num_loading: num_loading == 1)
        prefill.process.kill()
        replies["later"] = clients.submit(ask, "later")
        answers = {stage: reply.result() for stage, reply in replies.items()}
    decode.assert_no_block_is_in_use()
    assert decode.complete(prompts["later"]).status == 200
    start_again(served[0])
    return Killed(prompts, answers, stale)


@pytest.fixture
def restarted(killed: Killed, served: list[VllmService]) -> Server:
    """The prefill server, restarted at the same port and address."""
    return Server(served[0].process)


def start_again(server: VllmService) -> None:
    server.start()
    server.wait_ready(START_S)


def test_a_request_that_was_loaded_before_continues(killed, decode):
    (answer,) = killed.replies["loaded"].choices
    decode.assert_like_alone(killed.prompts["loaded"], answer, 1200)


@pytest.mark.parametrize("stage", ["asked", "later"])
def test_other_requests_end_soon_as_the_policy_says(killed, stage):
    assert killed.replies[stage].status == 500
    assert killed.replies[stage].seconds < SOON_S


def test_an_offer_from_before_the_servers_restart(killed, restarted, decode, prompt):
    reply = decode.complete(prompt(200), kv_transfer_params=killed.stale)
    assert reply.status == 500
    assert reply.seconds < SOON_S
    decode.assert_no_block_is_in_use()


def test_after_the_restart_prompts_are_handed_over_again(restarted, decode, prompt):
    tokens = prompt(300)
    before = decode.metric(LOADS)
    reply = decode.complete(tokens, kv_transfer_params=restarted.offer(tokens))
    assert decode.metric(LOADS) == before + 1
    decode.assert_like_alone(tokens, *reply.choices)
    for server in (decode, restarted):
        server.assert_no_block_is_in_use()
        assert_promtool_is_content(server.metrics_page())


@pytest.mark.parametrize("greedy", [False, True])
def test_several_samples_of_one_prompt_load_it_once(restarted, decode, prompt, greedy):
    """vLLM refuses several samples at temperature 0. With `top_k` 1 each of them is the greedy answer."""
    tokens = prompt(400 + greedy)
    before = decode.metric(LOADS), decode.metric(FAILURES)
    how = {"n": 3, "temperature": 1, **({"top_k": 1} if greedy else {"seed": 7})}
    reply = decode.complete(tokens, kv_transfer_params=restarted.offer(tokens), **how)
    assert (decode.metric(LOADS), decode.metric(FAILURES)) == (before[0] + 1, before[1])
    assert len({tuple(sample) for sample in reply.tokens}) == (1 if greedy else 3)
    for sample in reply.choices if greedy else ():
        decode.assert_like_alone(tokens, sample)
    decode.assert_no_block_is_in_use()


def test_a_prefill_server_that_is_stopped_ends_as_soon_as_its_offers_are_delivered(served, decode, prompt):
    prefill, tokens = Server(served[0].process), prompt(301)
    params, before = prefill.offer(tokens), decode.metric(LOADS)
    (server,) = children_of(prefill.process.pid)
    os.kill(server, signal.SIGTERM)  # as Kubernetes does: only the first process
    wait_until(lambda: "mode=drain" in prefill.process.log_tail, SOON_S)
    began = time.monotonic()
    reply = decode.complete(tokens, kv_transfer_params=params)
    assert (reply.status, decode.metric(LOADS)) == (200, before + 1)
    decode.assert_like_alone(tokens, *reply.choices)
    assert prefill.process.wait(SOON_S) == 0
    assert time.monotonic() - began < SOON_S
    start_again(served[0])
