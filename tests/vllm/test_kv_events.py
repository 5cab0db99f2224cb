"""A router follows what a real vLLM server stores in its prefix cache and removes from it."""

from __future__ import annotations

import asyncio
import json
import random

import aiohttp
import pytest

from kvferry.lab.engine.default_model import default_model_folder
from kvferry.lab.servers import VLLM_ARGUMENTS, Launcher, free_port, start_vllm
from kvferry.router.choice.kv_events import EventFollower
from kvferry.router.choice.prefixes import Prefixes, keys_of
from kvferry.router.nodes.pool import NodePool
from tests.support.patience import until
from tests.support.vllm_servers import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

START_S = 400.0
#: Blocks of the pool, of which one is the null block.
NUM_BLOCKS, BLOCK_SIZE = 17, 32


@pytest.fixture(scope="module")
def server():
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{free_port()}",
        "replay_endpoint": f"tcp://*:{free_port()}",
        "topic": "kv",
    }
    arguments = [*VLLM_ARGUMENTS, "--kv-events-config", json.dumps(events), "--enable-prompt-tokens-details"]
    arguments += ["--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-model-len", "512"]
    with Launcher() as launcher:
        process = start_vllm(launcher, "server", str(default_model_folder()), arguments).wait_ready(START_S)
        yield Server(process)


async def test_the_index_is_the_servers_prefix_cache(server):
    def ask(prompt):
        return server.complete(prompt, 1)

    def share(prompt):
        return prefixes.shares(keys_of({"prompt": prompt})).get(url, 0.0)

    url, prefixes = server.process.url, Prefixes()
    pool = NodePool("prefill", [url])
    early = [7] * 4 * BLOCK_SIZE
    await asyncio.to_thread(ask, early)  # before anything follows the server
    async with aiohttp.ClientSession() as session, pool.watching(session, 0.25, 30.0):
        follower = asyncio.create_task(EventFollower(prefixes, "auto").run(lambda: pool.nodes))
        try:
            await until(lambda: share(early) == 1.0)  # the server has sent it again
            draw, num_known_texts, seen = random.Random(3), 0, set()
            for step in range(40):
                number = draw.randrange(4)
                # The last block is new, so that there is an event of each request.
                prompt = [1000 * number + 3 + at for at in range(5 * BLOCK_SIZE)] + [step + 3] * BLOCK_SIZE
                text = f"{number:064d}" * 3
                known, is_text_known = share(prompt) * len(prompt), bool(share(text))
                mark = prefixes.mark(url)
                reply = await asyncio.to_thread(ask, prompt)
                cached = (reply.content["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
                assert cached == known
                assert not is_text_known or cached == 5 * BLOCK_SIZE
                num_known_texts += is_text_known
                seen.add(cached)
                await until(lambda: share(prompt) == 1.0)  # noqa: B023
                prefixes.add(keys_of({"prompt": text}), url, mark)
            assert num_known_texts > 5
            assert {0, 5 * BLOCK_SIZE} <= seen
            assert share(early) == 0.0
            assert prefixes.own_models[url] == {"model"}
        finally:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)
