"""Two `vllm serve` with kvferry behind vllm-router, and behind what llm-d's sidecar sends.

`tests/control_planes` has more of it, with reference nodes. `make control-planes` gets vllm-router.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvferry.lab.demo.near_tie import ask_alone, assert_same_answer
from kvferry.lab.servers import (
    KVFERRY,
    LaunchedProcess,
    Launcher,
    find_vllm_router,
    start_vllm,
    start_vllm_router,
)
from tests.support.llm_d import PREFILL_HEADER, Answer, Sidecar
from tests.support.vllm_servers import LOADS, Server, logprobs_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

START_S = 400.0
ARGUMENTS = (
    *("--dtype", "float32", "--block-size", "32", "--max-model-len", "1536", "--max-num-seqs", "4"),
    *("--enforce-eager", "--num-gpu-blocks-override", "128"),
)
MAX_TOKENS = 8
PROMPT = "A ferry takes what others have packed; it does not open the boxes. " * 3
needs_vllm_router = pytest.mark.skipif(
    find_vllm_router() is None, reason="vllm-router is not installed; `make control-planes` gets it"
)


@dataclass(frozen=True)
class Pair:
    """A prefill server and a decode server, which fails a request if it cannot load its prompt."""

    prefill: LaunchedProcess
    decode: LaunchedProcess

    @property
    def num_loads(self) -> float:
        """How many prompts the decode server has loaded so far."""
        return Server(self.decode).metric(LOADS)

    def assert_like_alone(self, prompt: str, answer: Answer) -> None:
        """Fail unless this is the decode server's own answer to a prompt that it has computed itself, apart
        from near-ties.
        """
        alone = {"cache_salt": "alone", "ignore_eos": True}
        (found,) = answer.body["choices"]
        (expected,) = complete(self.decode, prompt, **alone).body["choices"]
        assert_same_answer(
            prompt,
            found["token_ids"],
            expected["token_ids"],
            ask_alone(self.decode.port, **alone),
            logprobs=logprobs_of(found),
            expected_logprobs=logprobs_of(expected),
        )


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Pair]:
    transfer = {**KVFERRY, "kv_load_failure_policy": "fail"}
    with Launcher() as launcher:
        servers = [
            start_vllm(launcher, f"{role} server", str(model), ARGUMENTS, transfer)
            for role in ("prefill", "decode")
        ]
        launcher.wait_ready(servers, START_S)
        yield Pair(*servers)


@pytest.fixture(scope="module")
def router(pair: Pair) -> Iterator[LaunchedProcess]:
    with Launcher() as launcher:
        yield start_vllm_router(launcher, "vllm-router", [pair.prefill], [pair.decode]).wait_ready(START_S)


def host_of(server: LaunchedProcess) -> str:
    return f"127.0.0.1:{server.port}"


def body_of(prompt: Any, **fields: Any) -> dict[str, Any]:
    wanted = {"model": "model", "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
    scores = {"logprobs": 0, "return_tokens_as_token_ids": True}
    return {"prompt": prompt, "ignore_eos": True, **wanted, **scores, **fields}


def complete(server: LaunchedProcess, prompt: Any, **fields: Any) -> Answer:
    return post(server, "/v1/completions", body_of(prompt, **fields))


def post(server: LaunchedProcess, path: str, body: Mapping[str, Any]) -> Answer:
    """Ask a server directly. A sidecar passes on a request without the header that names a prefill node."""
    return Sidecar(host_of(server)).post(path, body, [("content-type", "application/json")])


def chat_of(content: str) -> dict[str, Any]:
    return {
        "model": "model",
        "messages": [{"role": "user", "content": content}],
        "max_completion_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_llm_ds_requests_are_handoffs(pair: Pair) -> None:
    sidecar, before = Sidecar(host_of(pair.decode)), pair.num_loads
    headers = [("content-type", "application/json"), (PREFILL_HEADER, host_of(pair.prefill))]
    answer = sidecar.post("/v1/completions", body_of(PROMPT), headers)
    assert answer.status == 200, answer.payload
    # The params have become Go's sorted keys and 64-bit floats on the way.
    assert json.loads(sidecar.bodies[1])["kv_transfer_params"]["do_remote_prefill"] is True
    pair.assert_like_alone(PROMPT, answer)
    chat = sidecar.post("/v1/chat/completions", chat_of(PROMPT), headers)
    assert chat.events[-1]["usage"]["completion_tokens"] == MAX_TOKENS
    assert pair.num_loads == before + 2


@needs_vllm_router
def test_requests_through_vllm_router_are_handoffs(pair: Pair, router: LaunchedProcess) -> None:
    before, prompt = pair.num_loads, f"Through vllm-router. {PROMPT}"
    answer = complete(router, prompt)
    assert answer.status == 200, answer.payload
    pair.assert_like_alone(prompt, answer)
    chat = post(router, "/v1/chat/completions", chat_of(prompt))
    assert chat.events[-1]["usage"]["completion_tokens"] == MAX_TOKENS
    assert pair.num_loads == before + 2


@needs_vllm_router
def test_a_prefill_server_that_dies_in_the_middle_of_a_prefill(pair: Pair, router: LaunchedProcess) -> None:
    """The last test: it ends the prefill server. The client gets an error, and the decode server goes on."""
    prompt = f"Lost. {PROMPT}"
    pair.prefill.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(complete, router, prompt)
        pair.prefill.kill()
        assert asked.result().status in (500, 503)
    answer = complete(pair.decode, prompt)
    assert answer.status == 200
    pair.assert_like_alone(prompt, answer)
