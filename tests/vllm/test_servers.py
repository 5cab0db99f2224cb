"""`vllm serve` as users run it: the decode server while the prefill server dies at each stage, and
restarts.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvferry.lab.servers import KVFERRY, Launcher, start_vllm
from tests.support.metrics_page import assert_promtool_is_content
from tests.support.vllm_servers import FAILURES, LOADS, Reply, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

START_S = 400.0
#: Seconds within which a request must end if its prompt's cache cannot be loaded.
SOON_S = 10.0
OPTIONS = {
    "lease_s": 3,
    "connect_timeout_s": 2,
    "claim_timeout_s": 2,
}
ARGUMENTS = (
    *("--dtype", "float32", "--block-size", "32", "--max-model-len", "1536", "--max-num-seqs", "4"),
    *("--enforce-eager", "--skip-tokenizer-init", "--num-gpu-blocks-override", "128"),
)


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
def start_server() -> Iterator[Callable[..., Server]]:
    """Start a server, which ends with the module. The caller waits until it is ready."""
    with Launcher() as launcher:

        def start(model: Path, port: int = 0, policy: str = "fail", **options: Any) -> Server:
            transfer = {**KVFERRY, "kv_load_failure_policy": policy}
            transfer["kv_connector_extra_config"] = {"transport": "shm", **OPTIONS, **options}
            name = f"server {len(launcher.processes)}"
            return Server(start_vllm(launcher, name, str(model), ARGUMENTS, transfer, port=port))

        yield start


@pytest.fixture(scope="module")
def address() -> dict[str, str]:
    """The option for the prefill server's address, which stays the same after its restart."""
    return {"address": f"shm://@kvferry-servers-{os.getpid()}"}


@pytest.fixture(scope="module")
def servers(start_server, model, tmp_path_factory, address) -> dict[str, Server]:
    """A prefill server, a decode server, and a server whose model has other weights."""
    from tests.support.tiny_models import scale_tensor

    other = Path(shutil.copytree(model, tmp_path_factory.mktemp("stranger") / "other"))
    scale_tensor(other, "model.layers.0.self_attn.v_proj.weight", 2.0)
    started = {
        "prefill": start_server(model, **address),
        "decode": start_server(model),
        "stranger": start_server(other, policy="recompute"),
    }
    for server in started.values():
        server.process.wait_ready(START_S)
    return started


@pytest.fixture(scope="module")
def decode(servers) -> Server:
    return servers["decode"]


@pytest.fixture(scope="module")
def killed(servers, decode, prompt) -> Killed:
    """Kill the prefill server while requests that need it are at every stage."""
    prefill = servers["prefill"]
    prompts = {stage: prompt(100, seed) for seed, stage in enumerate(("loaded", "asked", "later"))}
    told = {stage: prefill.offer(tokens) for stage, tokens in prompts.items()}
    stale = prefill.offer(prompt(200))

    def ask(stage: str, max_tokens: int = 8) -> Reply:
        return decode.complete(prompts[stage], max_tokens, kv_transfer_params=told[stage])

    with ThreadPoolExecutor() as clients:
        replies = {"loaded": clients.submit(ask, "loaded", 1200)}
        decode.wait_for(LOADS, lambda loads: loads == 1)
        prefill.process.send_signal(signal.SIGSTOP)
        replies["asked"] = clients.submit(ask, "asked")
        decode.wait_for("vllm:num_requests_kv_fetch_by_stage", lambda num_loading: num_loading == 1)
        prefill.process.kill()
        replies["later"] = clients.submit(ask, "later")
        return Killed(prompts, {stage: reply.result() for stage, reply in replies.items()}, stale)


@pytest.fixture(scope="module")
def restarted(killed, servers, start_server, model, address) -> Server:
    """The prefill server, restarted at the same port and address."""
    server = start_server(model, port=servers["prefill"].process.port, **address)
    server.process.wait_ready(START_S)
    return server


def test_a_request_that_was_loaded_before_continues(killed, decode):
    (answer,) = killed.replies["loaded"].choices
    decode.assert_like_alone(killed.prompts["loaded"], answer, 1200)


@pytest.mark.parametrize("stage", ["asked", "later"])
def test_other_requests_end_soon_as_the_policy_says(killed, stage):
    assert killed.replies[stage].status == 500
    assert killed.replies[stage].seconds < SOON_S


def test_the_decode_server_lives_and_its_blocks_are_free(killed, decode):
    decode.assert_no_block_is_in_use()
    assert decode.complete(killed.prompts["later"]).status == 200


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
    decode.assert_no_block_is_in_use()


def test_one_wrong_token_is_not_a_near_tie(decode, prompt):
    tokens = prompt(300)
    answer = decode.alone(tokens)
    answer["token_ids"][3] = (answer["token_ids"][3] + 1) % 256
    with pytest.raises(AssertionError, match="a mismatch at token 3 of the answer"):
        decode.assert_like_alone(tokens, answer)


def test_the_metrics_follow_prometheus_conventions(restarted, decode):
    assert_promtool_is_content(decode.metrics_page())


def test_several_samples_of_one_prompt_load_it_once(restarted, decode, prompt):
    tokens = prompt(400)
    before = decode.metric(LOADS), decode.metric(FAILURES)
    how = {"n": 3, "temperature": 1, "seed": 7}
    reply = decode.complete(tokens, kv_transfer_params=restarted.offer(tokens), **how)
    assert (decode.metric(LOADS), decode.metric(FAILURES)) == (before[0] + 1, before[1])
    assert len({tuple(sample) for sample in reply.tokens}) == 3
    decode.assert_no_block_is_in_use()


def test_each_of_several_samples_continues_the_prompt(restarted, decode, prompt):
    """vLLM refuses several samples at temperature 0. With `top_k` 1 each of them is the greedy answer."""
    tokens = prompt(401)
    before = decode.metric(LOADS), decode.metric(FAILURES)
    how = {"n": 3, "temperature": 1, "top_k": 1}
    reply = decode.complete(tokens, kv_transfer_params=restarted.offer(tokens), **how)
    assert (decode.metric(LOADS), decode.metric(FAILURES)) == (before[0] + 1, before[1])
    assert len(reply.choices) == 3
    for sample in reply.choices:
        decode.assert_like_alone(tokens, sample)


def test_a_server_of_another_model_computes_the_prompt_itself(restarted, servers, prompt):
    tokens, stranger = prompt(100), servers["stranger"]
    reply = stranger.complete(tokens, kv_transfer_params=restarted.offer(tokens))
    stranger.assert_like_alone(tokens, *reply.choices)
    assert (stranger.metric(LOADS), stranger.metric(FAILURES)) == (0, 1)
    stranger.assert_no_block_is_in_use()


def test_after_offers_end_the_prefill_servers_blocks_are_free(restarted, decode, prompt):
    tokens = prompt(500)
    decode.complete(tokens, kv_transfer_params=restarted.offer(tokens))
    restarted.assert_no_block_is_in_use()
