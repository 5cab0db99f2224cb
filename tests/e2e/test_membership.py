"""A router that learns real nodes from a file while it runs, and sends each prefix to the node that has it cached."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.lab.servers import Launcher
from tests.e2e.conftest import LEASE, START_TIMEOUT_S, Fleet
from tests.support.client import Client, assert_answers_like, wait_until

pytestmark = pytest.mark.full

BLOCK_SIZE = 16
MAX_TOKENS = 3
#: An odd number: if two nodes took turns, the two prompts with a prefix would go to different nodes.
PREFIXES = [f"Harbour {name}: every passenger shows a ticket at the pier. " * 2 for name in "ABC"]


@pytest.fixture
def other_prefill(launcher: Launcher, tiny_arguments: Sequence[str]) -> Client:
    node = launcher.start_node("other prefill", "prefill", *tiny_arguments, *LEASE)
    launcher.wait_ready([node], START_TIMEOUT_S)
    return Client(node)


def states_of(router: Client) -> dict[str, str]:
    return {node["url"]: node["state"] for node in json.loads(router.get("/nodes")[1])["nodes"]}


def cached_tokens(nodes: Sequence[Client]) -> float:
    return sum(node.metric("kvferry_engine_cached_tokens_total") for node in nodes)


def test_the_second_prompt_with_a_prefix_finds_it_in_the_cache_of_its_prefill_node(
    tiny_fleet: Fleet, other_prefill: Client, launcher: Launcher, tmp_path: Path
) -> None:
    prefills = [tiny_fleet.prefill, other_prefill]
    urls: dict[str, Any] = {
        "prefill": [node.process.url for node in prefills],
        "decode": [tiny_fleet.decode.process.url],
    }
    path = tmp_path / "nodes.json"
    path.write_text("{}")
    options = ("--nodes-file", str(path), "--prefill-policy", "prefix", "--prefix-length", "64")
    process = launcher.start_router("router", [], [], *options)
    launcher.wait_listening([process], START_TIMEOUT_S)
    router = Client(process)

    refused = router.complete(PREFIXES[0], max_tokens=1)
    assert (refused.status, "knows no decode node" in refused.error) == (503, True)
    assert int(refused.headers["Retry-After"]) > 0
    path.write_text(json.dumps(urls))
    launcher.wait_ready([process], START_TIMEOUT_S)
    wait_until(lambda: list(states_of(router).values()) == ["ready"] * 3)

    asked = [
        prefix + tail for tail in ("The first one boards.", "The next one waits.") for prefix in PREFIXES
    ]
    before = 0.0
    for number, prompt in enumerate(asked):
        if number == len(PREFIXES):
            before = cached_tokens(prefills)
        reply = router.complete(prompt, max_tokens=MAX_TOKENS, logprobs=0)
        assert_answers_like(tiny_fleet.single, prompt, reply.answer, MAX_TOKENS)
    num_prefix_tokens = len(PREFIXES) * 2 * BLOCK_SIZE
    assert cached_tokens(prefills) - before >= num_prefix_tokens
    policy = json.loads(router.get("/nodes")[1])["prefill_policy"]
    assert (policy["num_at_first_node"], policy["num_at_later_node"]) == (len(asked), 0)

    path.write_text(json.dumps({**urls, "prefill": urls["prefill"][1:]}))
    wait_until(lambda: urls["prefill"][0] not in states_of(router))
    for prompt in asked:
        assert router.complete(prompt, max_tokens=MAX_TOKENS).status == 200
