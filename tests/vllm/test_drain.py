"""A vLLM server that is stopped with `--shutdown-timeout` delivers its offers before it ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from kvferry.lab.servers import KVFERRY, Launcher, start_vllm
from tests.support.client import children_of, wait_until
from tests.support.vllm_servers import LOADS, Server
from tests.vllm.test_servers import ARGUMENTS, OPTIONS, START_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: Longer than the test takes, so that only the delivery of the offer can end the drain before the end of the
#: lease.
LEASE_S = 60
END_S = 30.0


@pytest.fixture
def pair(model) -> Iterator[tuple[Server, Server]]:
    with Launcher() as launcher:
        extra = {"transport": "shm", **OPTIONS, "lease_s": LEASE_S}
        transfer = {**KVFERRY, "kv_load_failure_policy": "fail", "kv_connector_extra_config": extra}
        arguments = (*ARGUMENTS, "--shutdown-timeout", str(LEASE_S))
        servers = [
            start_vllm(launcher, name, str(model), arguments, transfer) for name in ("prefill", "decode")
        ]
        launcher.wait_ready(servers, START_S)
        yield Server(servers[0]), Server(servers[1])


def test_a_prefill_server_that_is_stopped_ends_as_soon_as_its_offers_are_delivered(pair, prompt):
    prefill, decode = pair
    tokens = prompt(300)
    params = prefill.offer(tokens)
    (server,) = children_of(prefill.process.pid)
    os.kill(server, signal.SIGTERM)  # as Kubernetes does: only the first process
    wait_until(lambda: "mode=drain" in prefill.process.log_tail, END_S)
    began = time.monotonic()
    reply = decode.complete(tokens, kv_transfer_params=params)
    assert (reply.status, decode.metric(LOADS)) == (200, 1)
    decode.assert_like_alone(tokens, *reply.choices)
    assert prefill.process.wait(END_S) == 0
    assert time.monotonic() - began < END_S
