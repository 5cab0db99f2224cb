"""One client of OpenAI's API: answers as streams or whole, for asyncio and for threads, errors, and pages of
metrics.

Only `ask` needs aiohttp, whose session it takes. The rest works without it, as `kvferry prove` does.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from ..transports.checked import Refused, json_of

if TYPE_CHECKING:
    import aiohttp

#: Seconds for a whole answer, or between two parts of a stream.
TIMEOUT_S: Final = 60.0
_DONE: Final = b"data: [DONE]"
_SAMPLE: Final = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)(?: \d+)?$", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class BrokenAnswerError(ConnectionError):
    """An answer is not JSON, or ended too early."""


@dataclass
class Answer:
    """What has arrived of an answer. The tokens of several choices are joined.

    Attributes:
        times: When each part with tokens came, by `time.perf_counter`. A busy server may send several tokens
            at once.
        sent: When the request was sent.
        reason: Why the answer ended; empty until then.
        metrics: The node's own figures of the request; empty if it sent none.
        params: The transfer params of a KV cache or of an encoder's output.
        error: Why the answer is missing or incomplete; otherwise empty.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Mapping[str, float]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    sent: float = 0.0
    reason: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] | None = None
    error: str = ""

    def add(self, part: Mapping[str, Any]) -> str:
        """Add an event of a stream, or a whole answer. Returns its text."""
        if "error" in part:
            self.error = message_of(part)
        text = ""
        for choice in part.get("choices") or ():
            message = choice.get("delta") or choice.get("message") or {}
            text += choice.get("text") or message.get("content") or ""
            # A server that was not asked for token ids sends none. An empty list is the end of an answer.
            if choice.get("token_ids") != []:
                self.times.append(time.perf_counter())
            self.token_ids += choice.get("token_ids") or ()
            scores = choice.get("logprobs") or {}
            self.logprobs += scores.get("token_logprobs") or ()
            self.logprobs += [each["logprob"] for each in scores.get("content") or ()]
            self.top_logprobs += scores.get("top_logprobs") or ()
            self.reason = choice.get("finish_reason") or self.reason
        self.text += text
        self.usage = part.get("usage") or self.usage
        self.metrics = part.get("metrics") or self.metrics
        self.params = part.get("kv_transfer_params") or part.get("ec_transfer_params") or self.params
        return text

    def require(self, num_tokens: int) -> None:
        """Raise `BrokenAnswerError` unless the answer is whole and has this many tokens."""
        if self.error:
            raise BrokenAnswerError(self.error)
        if not self.times or self.num_tokens != num_tokens:
            raise BrokenAnswerError(f"an answer has {self.num_tokens} tokens instead of {num_tokens}")

    @property
    def ttft_s(self) -> float:
        """Seconds from sending the request to the first token, as the client sees it; 0 if none came."""
        return self.times[0] - self.sent if self.times else 0.0

    @property
    def gaps(self) -> list[float]:
        """Seconds between one part and the next."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; 0 if the server did not tell."""
        return int(self.usage.get("prompt_tokens", 0))

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer; 0 if the server did not tell."""
        return int(self.usage.get("completion_tokens", 0))

    @property
    def likeliest(self) -> list[tuple[int, float]]:
        """The two likeliest tokens at the answer's first place with their log probabilities, the likeliest
        first.
        """
        first = self.top_logprobs[0] if self.top_logprobs else {}
        pairs = [(int(name.removeprefix("token_id:")), value) for name, value in first.items()]
        return sorted(pairs, key=lambda pair: -pair[1])[:2]

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


# -- server-sent events ------------------------------------------------------------------------------


def events_of(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream until `[DONE]`. Lines may have their ends or not.

    Raises:
        BrokenAnswerError: An event is not JSON, or the stream ended without `[DONE]`.
    """
    for line in lines:
        if line.startswith(_DONE):
            return
        if line.startswith(b"data:"):
            yield parsed(line[5:])
    raise BrokenAnswerError("the stream ended without [DONE]")


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    prompt: str | Sequence[int],
    max_tokens: int,
    *,
    answer: Answer | None = None,
    on_text: Callable[[str], None] = lambda text: None,
    **fields: Any,
) -> Answer:
    """Stream a greedy answer. This does not raise if the server fails: the answer's `error` says why.

    Args:
        answer: Is filled as the answer comes.
        on_text: Called with each piece of the answer.
        fields: Further fields of the request's body.
    """
    import aiohttp  # not above, because the rest works without it

    answer = Answer() if answer is None else answer
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer.sent = time.perf_counter()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {message_of(await response.read())}"
                return answer
            async for line in response.content:
                if line.startswith(_DONE):
                    return answer
                if line.startswith(b"data:"):
                    event = parsed(line[5:])
                    text = answer.add(event)
                    if event.get("choices"):
                        on_text(text)
    except (aiohttp.ClientError, TimeoutError, BrokenAnswerError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.error = answer.error or "the stream ended without [DONE]"
    return answer


# -- whole answers -----------------------------------------------------------------------------------


@contextmanager
def exchange(
    method: str,
    url: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] = _NO_HEADERS,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[http.client.HTTPResponse]:
    """Send a request, and yield the response. Leaving the block closes the connection.

    Args:
        body: Bytes, or a value to send as JSON; None: no body.

    Raises:
        OSError, http.client.HTTPException: The connection broke, or nothing came for `timeout_s`.
    """
    raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request(method, parts.path + path, raw, {"Content-Type": "application/json", **headers})
        with connection.getresponse() as response:
            yield response
    finally:
        connection.close()


def call(method: str, url: str, path: str, body: object = None, timeout_s: float = TIMEOUT_S) -> bytes:
    """Send a request as `exchange` does, and return the body of the answer.

    Raises:
        OSError: The server did not answer, or with another status than 200.
    """
    try:
        with exchange(method, url, path, body, timeout_s=timeout_s) as response:
            raw = response.read()
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
    if response.status != 200:
        raise OSError(f"{method} {path} answered {response.status}: {message_of(raw)[:300]}")
    return raw


def complete(port: int, prompt: str | Sequence[int], **fields: Any) -> dict[str, Any]:
    """Ask a server on this host for a whole greedy answer, and wait for it.

    Raises `OSError` as `call` does.
    """
    body = {"prompt": prompt, "temperature": 0, "return_token_ids": True, **fields}
    return parsed(call("POST", f"http://127.0.0.1:{port}", "/v1/completions", body))


def served_model(url: str) -> dict[str, Any]:
    """Return what a server says of its model. Raises OSError: it does not tell."""
    try:
        found: dict[str, Any] = parsed(call("GET", url, "/v1/models"))["data"][0]
    except (LookupError, TypeError) as error:
        raise BrokenAnswerError(f"{url}/v1/models names no model: {error!r}") from error
    return found


def parsed(raw: bytes) -> dict[str, Any]:
    """Return a JSON object that a server sent. Raises `BrokenAnswerError`."""
    try:
        found = json_of(raw)
    except Refused as error:
        raise BrokenAnswerError(f"the answer {error.why}") from error
    if not isinstance(found, dict):
        raise BrokenAnswerError("the answer is not a JSON object")
    return found


def message_of(error: bytes | Mapping[str, Any]) -> str:
    """Return the message of an error's body, in the form of OpenAI, of vLLM or of FastAPI, or the beginning
    of a plain text.
    """
    found: Any = error
    if isinstance(error, bytes):
        try:
            found = json_of(error)
        except Refused:
            return error.decode(errors="replace")[:300] or "an empty body"
    while isinstance(found, dict):
        found = found.get("error") or found.get("message") or found.get("detail") or str(found)
    return str(found)


# -- metrics -----------------------------------------------------------------------------------------


def samples_of(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield the name, the labels and the value of each sample of a page of metrics."""
    for name, labels, value in _SAMPLE.findall(page):
        yield name, dict(_LABEL.findall(labels)), float(value)


def totals_of(page: str) -> dict[str, float]:
    """Return the sum of each metric of a page over its labels; of each `source` as well, as `NAME SOURCE`."""
    found: dict[str, float] = {}
    for name, labels, value in samples_of(page):
        for key in (name, f"{name} {labels['source']}") if "source" in labels else (name,):
            found[key] = found.get(key, 0.0) + value
    return found


def pool_of(page: str) -> tuple[int, int]:
    """Return the number of blocks of a server's pool, and the tokens per block; 0 where its page of metrics
    does not tell.
    """
    told = next((labels for name, labels, _ in samples_of(page) if name == "vllm:cache_config_info"), {})
    numbers = [told.get(name, "") for name in ("num_gpu_blocks", "block_size")]
    blocks, tokens = (int(number) if re.fullmatch(r"\d{1,18}", number) else 0 for number in numbers)
    return blocks, tokens
