"""A router follows what real nodes store and remove."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvferry.lab.servers import Launcher
from kvferry.router.kv_events import EventFollower
from kvferry.router.nodes import UpstreamNode
from kvferry.router.prefixes import Prefixes, keys_of
from tests.e2e.conftest import LEASE, START_TIMEOUT_S
from tests.support.client import Client, wait_until
from tests.support.patience import until

pytestmark = pytest.mark.full

#: Blocks of the pool, of which one is the null block.
NUM_BLOCKS = 33
BLOCK_SIZE = 16


def start(launcher: Launcher, num: int, *arguments: str) -> list[Client]:
    """Start nodes that publish."""
    started = [
        launcher.start_node(f"node-{number}", "both", *arguments, "--kv-events", "0", *LEASE)
        for number in range(num)
    ]
    launcher.wait_ready(started, START_TIMEOUT_S)
    return [Client(node) for node in started]


def prompt_of(number: int, num_blocks: int = 12) -> list[int]:
    return [(number * 31 + at) % 250 for at in range(num_blocks * BLOCK_SIZE)]


@asynccontextmanager
async def following(node: Client) -> AsyncIterator[tuple[Prefixes, str]]:
    """Yield an index that follows the node."""
    prefixes, upstream = Prefixes(), UpstreamNode("prefill", node.process.url)
    upstream.kv_events = json.loads(node.get("/ready")[1])["kv_transfer_params"]["kv_events"]
    task = asyncio.create_task(EventFollower(prefixes, "auto").run(lambda: [upstream]))
    try:
        yield prefixes, upstream.url
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_index_is_the_nodes_prefix_cache_while_it_stores_and_removes(
    launcher: Launcher, tiny_single_arguments: tuple[str, ...]
) -> None:
    (node,) = start(launcher, 1, *tiny_single_arguments, "--num-blocks", str(NUM_BLOCKS))
    async with following(node) as (prefixes, url):
        number = 0
        while not prefixes.followed:  # until the subscription has arrived
            await asyncio.to_thread(node.complete, prompt_of(900 + number, 1), max_tokens=1)
            number += 1
            await asyncio.sleep(0.05)
        draw, num_known_texts = random.Random(3), 0
        for step in range(60):
            number = draw.randrange(4) if step > 8 else step % 4
            # The last block is new, so that there is an event of each request.
            prompt, text = prompt_of(number, 11) + [step] * BLOCK_SIZE, f"{number:064d}" * 3
            known = prefixes.shares(keys_of({"prompt": prompt})).get(url, 0.0) * len(prompt)
            is_text_known = bool(prefixes.shares(keys_of({"prompt": text})))
            mark = prefixes.mark(url)
            reply = await asyncio.to_thread(node.complete, prompt, max_tokens=1)
            cached = reply.body["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == known
            assert not is_text_known or cached == len(prompt) - BLOCK_SIZE
            num_known_texts += is_text_known
            await until(lambda: prefixes.shares(keys_of({"prompt": prompt})) == {url: 1.0})  # noqa: B023
            prefixes.add(keys_of({"prompt": text}), url, mark)
        assert prefixes.num_blocks(url) == NUM_BLOCKS - 1
        assert num_known_texts > 5


def cached_blocks(router: Client) -> dict[str, Any]:
    return {node["url"]: node["cached_blocks"] for node in json.loads(router.get("/nodes")[1])["nodes"]}


def test_a_request_goes_to_the_node_that_says_that_it_has_the_prompt(
    launcher: Launcher, tiny_single_arguments: tuple[str, ...]
) -> None:
    nodes = start(launcher, 2, *tiny_single_arguments, "--num-blocks", "400")
    urls = [node.process.url for node in nodes]
    words = [word for url in urls for word in ("--node", url)]
    launched = launcher.start_router("router", [], [], *words).wait_ready(START_TIMEOUT_S)
    router, num_sent = Client(launched), iter(range(250))

    def all_followed() -> bool:
        number = next(num_sent)
        for node in nodes:
            node.complete([number] * BLOCK_SIZE, max_tokens=1)
        return all(cached_blocks(router)[url] for url in urls)

    wait_until(all_followed)
    assert "kvferry_router_nodes_with_kv_events 2.0" in router.get("/metrics")[1].decode()
    for number in range(6):
        prompt, node = prompt_of(number, 20), nodes[number % 2]
        expected = cached_blocks(router)[node.process.url] + 20
        node.complete(prompt, max_tokens=1)  # the router does not see this request
        wait_until(lambda node=node, expected=expected: cached_blocks(router)[node.process.url] == expected)
        reply = router.complete(prompt, max_tokens=2)
        assert reply.status == 200
        assert reply.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 19 * BLOCK_SIZE
        assert reply.headers["X-KV-Placement"].startswith("local")


def test_no_tenant_is_served_or_placed_by_what_another_has_cached(
    launcher: Launcher, tiny_single_arguments: tuple[str, ...]
) -> None:
    """The salt of a tenant is in each block's hash at both nodes, and in the router's keys of prefixes."""
    nodes = start(launcher, 2, *tiny_single_arguments, "--num-blocks", "400")
    words = [word for node in nodes for word in ("--node", node.process.url)]
    launched = launcher.start_router("router", [], [], *words).wait_ready(START_TIMEOUT_S)
    router, prompt = Client(launched), prompt_of(1, 20)

    def cached(salt: str) -> int:
        reply = router.complete(prompt, max_tokens=2, **({"cache_salt": salt} if salt else {}))
        assert reply.status == 200
        assert reply.body["metrics"]["num_loaded_tokens"] == 0
        number: int = reply.body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return number

    tenants = ("one", "another", "")
    # Whoever comes first leaves blocks at a node. The next tenant finds none of them, wherever it is sent.
    assert [cached(salt) for salt in tenants] == [0, 0, 0]
    # Each finds its own, at the node that has them: the placement knows them apart.
    assert [cached(salt) for salt in tenants] == [19 * BLOCK_SIZE] * 3
    for (
        node
    ) in nodes:  # and nobody who asks a node by itself finds those of a tenant that the node has served
        reply = node.complete(prompt, max_tokens=1, cache_salt="a stranger")
        assert reply.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
