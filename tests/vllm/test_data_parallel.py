"""Several engines behind one address: each of them is a node of its own, and serves either half of a
handoff.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from kvferry.lab.client import call, samples_of
from kvferry.lab.servers import KVFERRY, Launcher, start_vllm
from tests.support.metrics_page import assert_promtool_is_content
from tests.support.vllm_servers import Server, logprobs_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

START_S = 600.0
SOON_S = 20.0
ANSWER_S = 120.0
#: On shared cores the signs of life of three engines can be late.
OPTIONS = {"transport": "shm", "lease_s": 60, "connect_timeout_s": 40, "claim_timeout_s": 40}
ARGUMENTS = (
    *("--dtype", "float32", "--block-size", "32", "--max-model-len", "1536", "--max-num-seqs", "4"),
    *("--enforce-eager", "--skip-tokenizer-init", "--num-gpu-blocks-override", "128"),
    *("--data-parallel-size", "2"),
)
RANKS = (0, 1)
#: vLLM's own balancer chooses the engine.
ANY = None


class Engines(Server):
    """A `vllm serve` with two engines."""

    def answer(self, prompt: list[int], params: Any, rank: int | None) -> dict[str, Any]:
        """Return the answer to a prompt that another engine computed, in the form of a `Node`'s."""
        (choice,) = self.complete(prompt, rank=rank, kv_transfer_params=params).choices
        return {"tokens": choice["token_ids"], "logprobs": logprobs_of(choice)}

    def by_engine(self, metric: str) -> Counter[str]:
        """Return a metric's values, by the label `engine`."""
        page = call("GET", self.process.url, "/metrics").decode()
        return Counter(
            {labels["engine"]: value for name, labels, value in samples_of(page) if name == metric}
        )


@pytest.fixture(scope="module")
def server(model):
    with Launcher() as launcher:
        transfer = {**KVFERRY, "kv_load_failure_policy": "fail", "kv_connector_extra_config": OPTIONS}
        process = start_vllm(launcher, "server", str(model), ARGUMENTS, transfer).wait_ready(START_S)
        yield Engines(process)


def test_an_offer_names_the_engine_that_holds_the_blocks(server, prompt):
    """vLLM gives each engine an id of its own, and each has addresses of its own."""
    offers = [server.offer(prompt(40, rank), rank=rank) for rank in RANKS]
    ids, addresses = (
        {str(offer[key]) for offer in offers} for key in ("remote_engine_id", "remote_addresses")
    )
    assert len(ids) == len(addresses) == len(RANKS)
    for rank, offer in enumerate(offers):
        assert offer["remote_engine_id"].endswith(f"_dp{rank}")
        server.answer(prompt(40, rank), offer, 1 - rank)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0), (1, 1), (ANY, ANY)])
def test_one_engine_continues_what_another_one_computed(server, shm_pair, prompt, first, second):
    tokens = prompt(300, f"{first} {second}")
    before = server.by_engine("kvferry_load_seconds_count")
    answer = server.answer(tokens, server.offer(tokens, rank=first), second)
    loads = server.by_engine("kvferry_load_seconds_count") - before
    assert sum(loads.values()) == 1
    assert second is ANY or loads[str(second)] == 1
    shm_pair.assert_like_alone(tokens, answer)


@pytest.mark.parametrize("rank", [*RANKS, ANY])
def test_an_engine_continues_what_a_single_node_computed(server, shm_pair, prompt, rank):
    tokens = prompt(302, rank)
    answer = server.answer(tokens, shm_pair.prefilled(tokens), rank)
    shm_pair.assert_like_alone(tokens, answer)


def test_several_samples_of_one_prompt_at_one_engine(server, prompt):
    """vLLM spreads samples over its engines, and only one engine can read an offer.

    So the request names the engine.
    """
    tokens = prompt(303)
    how = {"n": 3, "temperature": 1, "seed": 7, "kv_transfer_params": server.offer(tokens, rank=0)}
    before = server.by_engine("kvferry_load_seconds_count")
    assert len(server.complete(tokens, rank=1, **how).choices) == 3
    assert server.by_engine("kvferry_load_seconds_count") - before == {"1": 1}


def test_samples_at_all_engines_load_one_offer(server, prompt):
    """vLLM's balancer decides at how many, and what is left of the offer is given up then."""
    tokens = prompt(305)
    params = server.offer(tokens, rank=0, num_loads=2)
    before = server.by_engine("kvferry_load_seconds_count")
    how = {"n": 4, "temperature": 1, "seed": 7, "kv_transfer_params": params}
    ends = [choice["finish_reason"] for choice in server.complete(tokens, **how).choices]
    assert ends == ["length"] * 4
    loads = server.by_engine("kvferry_load_seconds_count") - before
    assert set(loads.values()) == {1}
    released = {**params, "do_remote_prefill": False, "do_release": True}
    server.complete([0], 1, rank=0, kv_transfer_params=released)
    deadline = time.monotonic() + SOON_S
    while any(server.by_engine("kvferry_live_leases").values()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_one_offer_is_loaded_by_each_of_two_engines(server, shm_pair, prompt):
    tokens = prompt(306)
    params = server.offer(tokens, rank=0, num_loads=3)
    before = server.by_engine("kvferry_load_seconds_count")
    for answer in (
        *(server.answer(tokens, params, rank) for rank in RANKS),
        shm_pair.decode.ask(next(shm_pair.names), tokens, 8, params),
    ):
        shm_pair.assert_like_alone(tokens, answer)
    assert (server.by_engine("kvferry_load_seconds_count") - before)["1"] == 1


def test_the_figures_of_each_engine_have_a_label_of_their_own(server):
    assert set(server.by_engine("kvferry_offers_delivered_total")) == {"0", "1"}
    assert_promtool_is_content(server.metrics_page())
