"""A pair of `vllm serve` behind a router gives receipts, whole and streamed."""

from __future__ import annotations

import json
import os
import urllib.request

import pytest

from kvferry.lab.servers import Launcher
from tests.support.vllm_servers import ANSWER_S

from .conftest import START_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEXT = "A ferry carries what it was given, whole and once. " * 8
REQUESTS = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4},
}


def receipt_of(url, path, **fields):
    """Return the receipt of an answer. Of a stream it comes before the last event."""
    salt = {"cache_salt": os.urandom(8).hex()} if path != "/v1/messages" else {"system": os.urandom(8).hex()}
    body = {"model": "model", **REQUESTS[path], **salt, **fields}
    headers = {"Content-Type": "application/json", "X-KV-Receipt": "1"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        answer = response.read()
    if fields.get("stream"):
        *_, told, last = answer.strip().split(b"\n\n")
        assert b"kv_receipts" not in last
        answer = told.partition(b"data: ")[2]
    (receipt,) = json.loads(answer)["kv_receipts"]
    return receipt


def test_a_receipt_of_servers_of_vllm_says_what_one_of_reference_nodes_does(served):
    prefill, decode, other = (server.process for server in served)
    with Launcher() as launcher:
        router = launcher.start_router("router", [prefill], [decode], "--receipts", "asked")
        in_turn = launcher.start_router(
            "in-turn", [prefill], [other], "--receipts", "asked", "--rendezvous", "off"
        )
        launcher.wait_ready([router, in_turn], START_S)
        for door, node, way in ((router, decode, "rendezvous"), (in_turn, other, "in_turn")):
            for path in REQUESTS:
                for stream in (False, True):
                    found = receipt_of(door.url, path, stream=stream)
                    assert (found["way"], found["why_not_loaded"]) == (way, ""), (path, stream)
                    assert (found["prefill"], found["decode"]) == (prefill.url, node.url)
                    assert (found["transport"], found["checked"]) == ("shm", ["guard"])
                    assert found["mechanism"]
                    assert found["bytes"] > 0
                    assert 0 < found["ms"] < 60_000
                    assert found["loaded_tokens"] > 50
                    assert found["loaded_tokens"] + found["computed_tokens"] == found["prompt_tokens"]
