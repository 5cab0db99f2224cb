"""Nodes of several ranks: no handoff waits until a deadline ends it, and a rank that is late frees its blocks
soon.

KVFERRY_HANDOFFS is how many handoffs each shape does.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvferry.lab.servers import LaunchedProcess, Launcher
from tests.support.client import DO_REMOTE_DECODE, Client, children_of, wait_until
from tests.support.tiny_models import write_tiny_model
from tests.support.vllm_servers import Server

#: How many requests each test sends.
NUM_HANDOFFS = int(os.environ.get("KVFERRY_HANDOFFS", "100"))
#: Tensor-parallel ranks of the prefill and of the decode node.
SHAPES = {"two ranks and one": (2, 1), "one rank and two": (1, 2), "four ranks and two": (4, 2)}
#: With chunks of 128 tokens a prompt is computed in three to five steps.
CHUNK_TOKENS = 128
NUM_CLIENTS = 2
#: Longest time of a request beyond four times the median, which is what computing takes at most on a busy
#: machine. A wait that a deadline of the protocol ends takes longer.
LONGEST_WAIT_S = 5.0
ENDED_BY_A_DEADLINE = (
    "kvferry_load_failures_total",
    "kvferry_rendezvous_failures_total",
    "kvferry_unmet_claims_total",
    "kvferry_offers_expired_total",
    "kvferry_offers_aborted_total",
)
START_S = 400.0
#: Well below the 30 s of a lease.
SOON_S = 12.0

pytestmark = [pytest.mark.full, pytest.mark.timeout(600 + 10 * NUM_HANDOFFS)]


def _start(launcher: Launcher, folder: Path, shape: tuple[int, int], *options: str) -> list[LaunchedProcess]:
    """Start a prefill and a decode node of so many ranks."""
    model = write_tiny_model(folder / "model", num_key_value_heads=4, max_position_embeddings=1024)
    arguments = ("--model", str(model), "--served-model-name", "model", "--threads", "1", *options)
    chunks = ("--max-num-batched-tokens", str(CHUNK_TOKENS))
    ranks = [("--tensor-parallel-size", str(num)) if num > 1 else () for num in shape]
    nodes = [
        launcher.start_node("prefill", "prefill", *arguments, *chunks, *ranks[0]),
        launcher.start_node("decode", "decode", *arguments, *ranks[1]),
    ]
    launcher.wait_ready(nodes, START_S)
    return nodes


def hand_over_many(router: Server, prefill: Server, decode: Server) -> None:
    """Send `NUM_HANDOFFS` requests to a router.

    Fail if one took too long, or was not loaded as it should be.
    """
    router.complete([7] * 2 * CHUNK_TOKENS, 4)  # the answer says where the prefill node is
    nodes = (prefill, decode)
    before = _ended_by_a_deadline(nodes)
    num_met = router.metric("kvferry_router_rendezvous_total")
    seconds = sorted(_ask_many(router))
    median = statistics.median(seconds)
    print(
        f"{len(seconds)} handoffs: median {median:.2f} s, "
        f"99% {seconds[len(seconds) * 99 // 100]:.2f} s, longest {seconds[-1]:.2f} s"
    )
    # These do not depend on how busy the machine is.
    assert _ended_by_a_deadline(nodes) == before
    assert router.metric("kvferry_router_rendezvous_total") - num_met == NUM_HANDOFFS
    assert seconds[-1] < 4 * median + LONGEST_WAIT_S


def _ended_by_a_deadline(nodes: tuple[Server, ...]) -> list[dict[str, float]]:
    return [{name: node.metric(name) for name in ENDED_BY_A_DEADLINE} for node in nodes]


def _ask_many(router: Server) -> list[float]:
    numbers = itertools.count()
    lock = threading.Lock()
    seconds: list[float] = []

    def ask(client: int) -> None:
        drawn = random.Random(client)
        while next(numbers) < NUM_HANDOFFS:
            prompt = drawn.choices(range(1, 250), k=drawn.randrange(300, 600))
            began = time.monotonic()
            reply = router.complete(prompt, 4)
            assert reply.status == 200, reply
            with lock:
                seconds.append(time.monotonic() - began)

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        asking: list[Any] = [threads.submit(ask, client) for client in range(NUM_CLIENTS)]
        for each in asking:
            each.result()
    return seconds


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_handoff_waits_for_a_deadline(shape: Any, launcher: Launcher, tmp_path: Path) -> None:
    nodes = _start(launcher, tmp_path, shape)
    router = launcher.start_router("router", [nodes[0]], [nodes[1]]).wait_ready(START_S)
    hand_over_many(Server(router), Server(nodes[0]), Server(nodes[1]))


def test_a_rank_that_is_late_frees_its_blocks_soon(launcher: Launcher, tmp_path: Path) -> None:
    """The decode node gives up waiting for it, and tells it so as soon as it answers."""
    nodes = _start(launcher, tmp_path, (2, 1), "--connector-option", "connect_timeout_s=3")
    prefill, decode = map(Client, nodes)
    prompt = "One of two keepers sleeps, and the lamp waits for both. " * 4
    offer = prefill.complete(prompt, max_tokens=1, kv_transfer_params=DO_REMOTE_DECODE)
    rank = children_of(nodes[0].pid)[-1]
    os.kill(rank, signal.SIGSTOP)
    try:
        params = offer.body["kv_transfer_params"]
        reply = decode.complete(prompt, max_tokens=1, kv_transfer_params=params)
    finally:
        os.kill(rank, signal.SIGCONT)
    assert "timed out waiting for" in reply.transfer["error"]
    wait_until(prefill.is_whole, SOON_S)
