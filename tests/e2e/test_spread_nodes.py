"""A node of several worker processes, with a decode node of one and a router in front."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest

from demo.launcher import Launcher
from demo.testing import DO_REMOTE_DECODE, Client, children_of, wait_until

#: Worker processes import PyTorch, each for itself.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = "A ferry takes what others have packed; it does not open the boxes. " * 4


def test_it_answers_as_a_single_node_and_is_out_of_service_when_a_worker_is_killed(
    launcher: Launcher, tiny_arguments: Sequence[str], tiny_single: Client
) -> None:
    two = ("--tensor-parallel-size", "2")
    prefill = launcher.start_node("prefill of two", "prefill", *tiny_arguments, *two)
    decode = launcher.start_node("decode of one", "decode", *tiny_arguments)
    launcher.wait_listening([prefill, decode], 110)
    router = launcher.start_router("router", [prefill], [decode], "--overlap")
    launcher.wait_ready([prefill, decode, router], 110)

    reply = Client(router).complete(PROMPT, max_tokens=8)
    assert reply.token_ids == tiny_single.complete(PROMPT, max_tokens=8).token_ids
    assert (reply.transfer["error"], reply.transfer["num_bytes"] > 0) == ("", True)
    wait_until(lambda: Client(prefill).is_whole() and Client(decode).is_whole())

    other = PROMPT[::-1]
    wish = {**DO_REMOTE_DECODE, "overlap": True}
    with Client(prefill).streaming(other, max_tokens=1, kv_transfer_params=wish) as events:
        early = next(events)
        assert (early["choices"], early["kv_transfer_params"]["remote_num_tokens"]) == ([], len(other))
        reply = Client(decode).complete(other, max_tokens=8, kv_transfer_params=early["kv_transfer_params"])
        *_, last = events
    assert reply.token_ids == tiny_single.complete(other, max_tokens=8).token_ids
    assert reply.transfer["exposed_seconds"] <= reply.transfer["seconds"]
    assert last["kv_transfer_params"]["remote_lease"] == early["kv_transfer_params"]["remote_lease"]

    workers = children_of(prefill.pid)
    os.kill(workers[1], signal.SIGKILL)
    wait_until(lambda: Client(prefill).get("/health")[0] == 503)
    assert b"rank 1" in Client(prefill).get("/health")[1]
    assert b"SIGKILL" in Client(prefill).get("/health")[1]
    assert children_of(prefill.pid) == []
    refused = Client(router).complete(PROMPT, max_tokens=8)
    assert (refused.status, "no prefill node" in refused.error) == (503, True)
    assert Client(decode).is_whole()
