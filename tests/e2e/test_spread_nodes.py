"""Nodes that are spread over worker processes hand over to nodes with another number of them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvferry.connector.p2p.params import draw_offer_name, rendezvous_params
from kvferry.lab.servers import LaunchedProcess, Launcher
from tests.support.client import (
    DO_REMOTE_DECODE,
    Client,
    Reply,
    assert_answers_like,
    children_of,
    wait_until,
)
from tests.support.tiny_models import write_tiny_model

#: Each worker process imports PyTorch by itself.
pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

START_TIMEOUT_S = 200.0
PROMPT = "A ferry takes what others have packed; it does not open the boxes. " * 4


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four KV heads: enough for four ranks."""
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    return write_tiny_model(tmp_path_factory.mktemp("models") / "spread", **shape)


@pytest.fixture(scope="module")
def single_arguments(model: Path, tiny_single_arguments: Sequence[str]) -> tuple[str, ...]:
    return (*tiny_single_arguments, "--model", str(model))


@pytest.fixture(scope="module")
def arguments(single_arguments: Sequence[str], transport: str) -> tuple[str, ...]:
    return (*single_arguments, "--connector", transport)


@pytest.fixture(scope="module")
def single(start_single: Any, single_arguments: Sequence[str]) -> Client:
    client: Client = start_single(*single_arguments)
    return client


@pytest.fixture(scope="module")
def decodes(module_launcher: Launcher, arguments: Sequence[str]) -> list[LaunchedProcess]:
    """A decode node with two ranks, and one with a single process."""
    nodes = [
        module_launcher.start_node("decode by two", "decode", *arguments, "--tensor-parallel-size", "2"),
        module_launcher.start_node("decode by one", "decode", *arguments),
    ]
    module_launcher.wait_ready(nodes, START_TIMEOUT_S)
    return nodes


def start_prefill(launcher: Launcher, *arguments: str) -> LaunchedProcess:
    return launcher.start_node("prefill", "prefill", *arguments).wait_ready(START_TIMEOUT_S)


def assert_handed_over(prefill: Client, decode: Client, single: Client, prompt: str) -> Reply:
    """Check that the answer is the single node's, the whole cache was loaded, and all blocks are free
    again.
    """
    offered = prefill.complete(prompt, max_tokens=1, kv_transfer_params=DO_REMOTE_DECODE)
    params = offered.body["kv_transfer_params"]
    reply = decode.complete(prompt, max_tokens=8, logprobs=0, kv_transfer_params=params)
    assert_answers_like(single, prompt, reply.answer, 8)
    assert (reply.transfer["error"], reply.transfer["num_bytes"] > 0) == ("", True)
    wait_until(lambda: prefill.is_whole() and decode.is_whole())
    return reply


@pytest.mark.full
def test_four_ranks_hand_over_to_two_and_to_one(
    launcher: Launcher, arguments: Sequence[str], decodes: Sequence[LaunchedProcess], single: Client
) -> None:
    prefill = Client(start_prefill(launcher, *arguments, "--tensor-parallel-size", "4"))
    two_ranks, one_process = map(Client, decodes)
    by_two = assert_handed_over(prefill, two_ranks, single, PROMPT)
    by_one = assert_handed_over(prefill, one_process, single, PROMPT)
    assert by_one.transfer["mechanism"] == by_two.transfer["mechanism"]
    assert by_one.transfer["num_bytes"] == by_two.transfer["num_bytes"]


def test_two_ranks_hand_over_to_two_and_to_one_and_are_out_of_service_when_a_worker_is_killed(
    launcher: Launcher,
    arguments: Sequence[str],
    decodes: Sequence[LaunchedProcess],
    single: Client,
) -> None:
    node = start_prefill(launcher, *arguments, "--tensor-parallel-size", "2")
    prefill, two_ranks, one_process = map(Client, (node, *decodes))
    prompt = PROMPT[1:]
    assert_handed_over(prefill, two_ranks, single, prompt)
    assert_handed_over(prefill, one_process, single, prompt)
    router = launcher.start_router("router", [node], decodes, "--decode-alone", "never")
    launcher.wait_ready([router], START_TIMEOUT_S)
    assert_early(prefill, two_ranks, single, PROMPT[::-1])
    assert_killed(prefill, one_process, single, PROMPT.upper())
    refused = Client(router).complete(prompt, max_tokens=8)
    assert (refused.status, "no prefill node" in refused.error) == (503, True)
    assert two_ranks.is_whole()


def assert_early(prefill: Client, decode: Client, single: Client, prompt: str) -> None:
    """Check that both nodes can be asked at once."""
    told = json.loads(prefill.get("/ready")[1])["kv_transfer_params"]
    name = draw_offer_name()
    wish = {"do_remote_decode": True, "rendezvous": name}
    with ThreadPoolExecutor(1) as background:
        offered = background.submit(prefill.complete, prompt, max_tokens=1, kv_transfer_params=wish)
        params = rendezvous_params(name, told)
        reply = decode.complete(prompt, max_tokens=8, logprobs=0, kv_transfer_params=params)
        assert offered.result().status == 200
    assert_answers_like(single, prompt, reply.answer, 8)
    assert reply.transfer["error"] == ""
    assert reply.transfer["exposed_seconds"] <= reply.transfer["seconds"]


def assert_killed(prefill: Client, decode: Client, single: Client, prompt: str) -> None:
    """Kill one of two ranks while both are read.

    The load fails and the decode node recomputes the prompt. The prefill node says why it ends, and exits.
    """
    _, last_rank = children_of(prefill.process.pid)
    offered = prefill.complete(prompt, max_tokens=1, kv_transfer_params=DO_REMOTE_DECODE)
    params = offered.body["kv_transfer_params"]
    with ThreadPoolExecutor(1) as background:
        os.kill(last_rank, signal.SIGSTOP)  # it gets a claim, and never answers
        answer = background.submit(
            decode.complete, prompt, max_tokens=8, logprobs=0, kv_transfer_params=params
        )
        wait_until(lambda: decode.metric("kvferry_engine_loading_requests") == 1)
        os.kill(last_rank, signal.SIGKILL)
        reply = answer.result()
    assert_answers_like(single, prompt, reply.answer, 8)
    assert reply.transfer["error"]
    assert prefill.process.wait(60) == 1
    said = prefill.process.describe_end()
    assert "ended with status 1" in said
    assert "rank 1" in said
    assert "SIGKILL" in said
    wait_until(decode.is_whole)
