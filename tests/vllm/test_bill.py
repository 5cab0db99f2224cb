"""A pair of `vllm serve` reports as many cached prompt tokens as a single server does."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Mapping
from typing import Any

import pytest

from kvferry.lab.client import events_of
from kvferry.lab.servers import Launcher
from tests.support.vllm_servers import ANSWER_S

from .conftest import START_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
PROMPT = [(7 * position) % 190 + 3 for position in range(220)]


TEXT = "Tell me of the river, and of its ferries, in as many words as there are ferries on it. " * 3


def generate(salt: str, stream: bool) -> dict[str, Any]:
    sampling = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    return {"token_ids": PROMPT, "cache_salt": salt, "sampling_params": sampling, **options}


#: Of each endpoint: the body for a salt, the names of the counts of its prompt, of all but the cached tokens,
#: and of its answer.
OTHERS: Mapping[str, Any] = {
    "/v1/responses": (
        lambda salt, stream: {"model": "model", "input": f"{salt} {TEXT}", "max_output_tokens": 4},
        ("input_tokens",),
        "output_tokens",
    ),
    "/v1/messages": (
        lambda salt, stream: {
            "model": "model",
            "messages": [{"role": "user", "content": f"{salt} {TEXT}"}],
            "max_tokens": 4,
        },
        ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"),
        "output_tokens",
    ),
    "/inference/v1/generate": (generate, ("prompt_tokens",), "completion_tokens"),
}


def counts_of(url: str, path: str, salt: str, stream: bool) -> tuple[int, int | None]:
    """Return how many tokens a prompt has, and how many were cached; None: the answer does not say."""
    body, in_prompt, in_answer = OTHERS[path]
    request = urllib.request.Request(
        url + path,
        json.dumps({**body(salt, stream), "stream": stream}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        lines = [line.removeprefix(b"data: ") for line in response]
    contents = [json.loads(line) for line in lines if line.startswith(b"{")]
    contents += [event["response"] for event in contents if "response" in event]
    usage = [content["usage"] for content in contents if content.get("usage")][-1]
    assert usage[in_answer] == 4
    details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens", usage.get("cache_read_input_tokens"))
    return sum(usage.get(name) or 0 for name in in_prompt), cached


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


@pytest.mark.parametrize("path", OTHERS)
def test_a_pair_counts_as_a_single_server_does_at_each_endpoint(served, path):
    prefill, first, second = (server.process for server in served)
    with Launcher() as launcher:
        pair = launcher.start_router("pair", [prefill], [first])
        untold = launcher.start_router("untold", [second], [first])
        launcher.wait_ready([pair, untold], START_S)
        for stream in (False, True):
            salt = os.urandom(8).hex()
            alone = [counts_of(prefill.url, path, salt, stream) for _ in range(2)]
            assert alone[0][1] == 0 < alone[1][1]
            salt = os.urandom(8).hex()
            assert [counts_of(pair.url, path, salt, stream) for _ in range(2)] == alone
            # A server of Responses always counts. Others leave out what the prefill server does not say.
            salt = os.urandom(8).hex()
            told = alone if path == "/v1/responses" else [(alone[0][0], None)] * 2
            assert [counts_of(untold.url, path, salt, stream) for _ in range(2)] == told
