"""Ask a server for an answer, as a stream or as a whole."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from .near_tie import AskAlone, Expectation

#: Seconds for a whole answer.
WHOLE_ANSWER_TIMEOUT_S = 60.0

OnText = Callable[[str], None]


@dataclass
class Answer:
    """Hold what came back for one prompt.

    Attributes:
        ttft_s: Seconds from sending the request to the first text or token, as the client sees it; 0 if none
            came.
        metrics: The node's own figures of the request; empty if it sent none.
        error: Why the answer is missing or incomplete; otherwise empty.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    ttft_s: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def transfer_error(self) -> str:
        """Why the decode node could not load the KV cache and computed it instead; empty if nothing
        failed.
        """
        return str((self.metrics.get("transfer") or {}).get("error") or "")

    @property
    def loaded_tokens(self) -> int:
        """Prompt tokens whose KV cache the decode node loaded, also if its connector reported no figures."""
        return int(self.metrics.get("num_loaded_tokens", 0))

    @property
    def transfer(self) -> Mapping[str, Any]:
        """How the KV cache was transferred; empty if it was not, or the connector reported no figures."""
        transfer = self.metrics.get("transfer") or {}
        return {} if transfer.get("error") else transfer


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    prompt: str,
    max_tokens: int,
    on_text: OnText,
    cache_salt: str = "",
    *,
    ignore_eos: bool = False,
) -> Answer:
    """Continue `prompt` greedily. This does not raise: the answer's `error` says what failed.

    Args:
        on_text: Called with each piece of the answer.
        cache_salt: Nodes reuse cached blocks only of requests with the same salt.
        ignore_eos: Go on to `max_tokens`, whatever the model says.
    """
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if ignore_eos:
        body["ignore_eos"] = True
    if cache_salt:
        body["cache_salt"] = cache_salt  # vLLM refuses an empty one
    answer = Answer()
    started = time.monotonic()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                answer.error = _error_text(await response.read(), response.status)
                return answer
            is_done = await _read_stream(response, answer, started, on_text)
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = f"{type(error).__name__}: {error}"
        return answer
    if not is_done and not answer.error:
        answer.error = "the stream ended early"
    return answer


def complete(port: int, prompt: str | Sequence[int], **fields: Any) -> Any:
    """Ask a server on this host for a whole greedy answer, and wait for it.

    Args:
        fields: Further fields of the request's body.

    Returns:
        The body of the answer.

    Raises:
        ConnectionError: the server answered with an HTTP status other than 200.
    """
    body = {"prompt": prompt, "temperature": 0, "return_token_ids": True, **fields}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WHOLE_ANSWER_TIMEOUT_S)
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), headers={"Content-Type": "application/json"}
        )
        with connection.getresponse() as response:
            payload = response.read()
            if response.status != 200:
                raise ConnectionError(
                    f"the single node answered with {_error_text(payload, response.status)}"
                )
            return json.loads(payload)
    finally:
        connection.close()


def ask_alone(port: int, **fields: Any) -> AskAlone:
    """Return a function that asks a single node or `vllm serve` on this host for its answer and its log
    probabilities.

    It is for `near_tie.compare`. Log probabilities differ by as much as logits.

    Args:
        fields: Further fields of the body of every request.
    """

    def ask(prompt: str | Sequence[int], max_tokens: int) -> Expectation:
        asked = prompt if isinstance(prompt, str) else list(prompt)
        scores = {"logprobs": 2, "return_tokens_as_token_ids": True}
        (choice,) = complete(port, asked, max_tokens=max_tokens, **scores, **fields)["choices"]
        likely = choice["logprobs"]["top_logprobs"][0].items()
        top = sorted(
            ((int(name.removeprefix("token_id:")), value) for name, value in likely),
            key=lambda pair: -pair[1],
        )
        return Expectation(
            choice["prompt_token_ids"], choice["token_ids"], top[:2], choice["logprobs"]["token_logprobs"]
        )

    return ask


async def _read_stream(
    response: aiohttp.ClientResponse, answer: Answer, started: float, on_text: OnText
) -> bool:
    """Read events into `answer`. Return whether the stream ended as it should, with `[DONE]`."""
    async for raw in response.content:
        line = raw.decode().strip()
        if line == "data: [DONE]":
            return True
        if not line.startswith("data: "):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            answer.error = event["error"]["message"]
        for choice in event.get("choices", ()):
            if choice["token_ids"] and not answer.ttft_s:
                answer.ttft_s = time.monotonic() - started
            answer.text += choice["text"]
            answer.token_ids += choice["token_ids"]
            on_text(choice["text"])
        answer.metrics = event.get("metrics", answer.metrics)
        answer.prompt_tokens = event.get("usage", {}).get("prompt_tokens", answer.prompt_tokens)
    return False


def _error_text(payload: bytes, status: int) -> str:
    try:
        return f"HTTP {status}: {json.loads(payload)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}: {payload[:300].decode(errors='replace')}"
