"""What clients of a pair of `vllm serve` are told of cached tokens, beside a single server's own count."""

from __future__ import annotations

import json
import os
import urllib.request

import pytest

from kvferry.lab.client import events_of
from kvferry.lab.servers import Launcher
from tests.support.vllm_servers import ANSWER_S

from .conftest import START_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
PROMPT = [(7 * position) % 190 + 3 for position in range(220)]


def cached_tokens(url, salt, **fields):
    """Return the count of an answer; None if it has none."""
    body = {
        "model": "model",
        "prompt": PROMPT,
        "cache_salt": salt,
        "max_tokens": 4,
        "ignore_eos": True,
        **fields,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        if not fields:
            usage = json.load(response)["usage"]
        else:
            usage = [event["usage"] for event in events_of(response) if event.get("usage")][-1]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 4)
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


@pytest.mark.parametrize("rendezvous", ["auto", "off"])
def test_a_pair_counts_as_a_single_server_does(served, rendezvous):
    prefill, first, second = (server.process for server in served)
    with Launcher() as launcher:

        def route(name, prefill, decode):
            return launcher.start_router(name, [prefill], [decode], "--rendezvous", rendezvous)

        to_first, to_second = route("to-first", prefill, first), route("to-second", prefill, second)
        # The server that computes the prompts of this one does not count what it finds.
        untold = route("untold", second, first)
        launcher.wait_ready([to_first, to_second, untold], START_S)
        for fields in ({}, STREAM):
            salt = os.urandom(8).hex()
            alone = [cached_tokens(first.url, salt, **fields) for _ in range(2)]
            assert alone[0] == 0 < alone[1]
            salt = os.urandom(8).hex()
            pair = [cached_tokens(router.url, salt, **fields) for router in (to_first, to_second)]
            assert pair == alone
            assert cached_tokens(to_first.url, salt, **fields) == alone[1]
            salt = os.urandom(8).hex()
            assert [cached_tokens(untold.url, salt, **fields) for _ in range(2)] == [None, None]
