"""Nodes of several ranks: no handoff waits until a deadline ends it, and a rank that is late frees its blocks
soon.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kvferry.lab.servers import LaunchedProcess, Launcher
from tests.support.client import DO_REMOTE_DECODE, Client, children_of, wait_until
from tests.support.many_handoffs import CHUNK_TOKENS, NUM_HANDOFFS, SHAPES, hand_over_many
from tests.support.tiny_models import write_tiny_model
from tests.support.vllm_servers import Server

pytestmark = [pytest.mark.full, pytest.mark.timeout(600 + 10 * NUM_HANDOFFS)]

START_S = 400.0


#: Well below the 30 s of a lease.
SOON_S = 12.0


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


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.full
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
