"""Two `vllm serve` with kvferry behind vllm-router, and behind what llm-d's sidecar sends.

`tests/control_planes` has more of it, with reference nodes. `make tools` gets vllm-router.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from kvferry.lab.bench.vllm_router import find_vllm_router, start_vllm_router
from kvferry.lab.servers import LaunchedProcess, Launcher
from tests.support.llm_d import PREFILL_HEADER, Answer, Headers, Sidecar
from tests.support.vllm_servers import LOADS, Server, VllmService

from .conftest import START_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MAX_TOKENS = 8
TEXT = b"A ferry takes what others have packed; it does not open the boxes. " * 3


def host_of(server: LaunchedProcess) -> str:
    return f"127.0.0.1:{server.port}"


class Front:
    """What a client asks: llm-d's sidecar, or a router, for which a sidecar without a prefill node stands.

    Such a sidecar passes on each request as it is.
    """

    def __init__(self, asked: LaunchedProcess, prefill: LaunchedProcess | None = None) -> None:
        self.sidecar = Sidecar(host_of(asked))
        named = [] if prefill is None else [(PREFILL_HEADER, host_of(prefill))]
        self._headers: Headers = [("content-type", "application/json"), *named]

    def post(self, path: str, prompt: Mapping[str, Any], **fields: Any) -> Answer:
        body = {"model": "model", "temperature": 0, "ignore_eos": True, **prompt, **fields}
        answer = self.sidecar.post(path, body, self._headers)
        assert answer.status == 200, answer.payload
        return answer

    def assert_hands_over(self, name: str, decode: Server) -> None:
        """Check that a completion and a chat are handed over, and that the completion is right.

        Both begin with `name`, so that no cache has them.
        """
        before, prompt = decode.metric(LOADS), [*name.encode(), *TEXT]
        wanted = {"max_tokens": MAX_TOKENS, "return_token_ids": True}
        scores = {"logprobs": 0, "return_tokens_as_token_ids": True}
        (choice,) = self.post("/v1/completions", {"prompt": prompt}, **wanted, **scores).body["choices"]
        decode.assert_like_alone(prompt, choice)
        messages = [{"role": "user", "content": name + TEXT.decode()}]
        wanted = {"max_completion_tokens": MAX_TOKENS, "stream": True}
        usage = {"stream_options": {"include_usage": True}}
        chat = self.post("/v1/chat/completions", {"messages": messages}, **wanted, **usage)
        assert chat.events[-1]["usage"]["completion_tokens"] == MAX_TOKENS
        assert decode.metric(LOADS) == before + 2


def test_llm_ds_requests_are_handoffs(served: list[VllmService]) -> None:
    prefill, decode = (server.process for server in served[:2])
    front = Front(decode, prefill)
    front.assert_hands_over("llm-d", Server(decode))
    # The params have become Go's sorted keys and 64-bit floats on the way.
    assert json.loads(front.sidecar.bodies[1])["kv_transfer_params"]["do_remote_prefill"] is True


@pytest.mark.skipif(
    find_vllm_router() is None,
    reason="vllm-router is not installed; `make tools` gets it",
)
def test_requests_through_vllm_router_are_handoffs(served: list[VllmService]) -> None:
    prefill, decode = (server.process for server in served[:2])
    with Launcher() as launcher:
        router = start_vllm_router(launcher, "vllm-router", [prefill], [decode]).wait_ready(START_S)
        Front(router).assert_hands_over("vllm-router", Server(decode))
