"""What tests of running nodes need: a plain blocking client, and waiting with a deadline."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reference.demo import client
from reference.demo.launcher import LaunchedProcess
from reference.demo.near_tie import AskAlone, assert_same_answer

#: What a router asks a prefill node for.
DO_REMOTE_DECODE = {"do_remote_decode": True}
#: No answer of a test takes longer; without it a hung node would hang the tests.
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Reply:
    """An HTTP answer whose body is JSON."""

    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[int]:
        """Of a completion that asked for them."""
        ids: list[int] = self.body["choices"][0]["token_ids"]
        return ids

    @property
    def transfer(self) -> Mapping[str, Any]:
        """How the KV cache came, empty when nothing was moved."""
        return self.body["metrics"]["transfer"] or {}

    @property
    def error(self) -> str:
        """The message of an OpenAI error object."""
        return str(self.body["error"]["message"])


class Client:
    """Talks to one node or router."""

    def __init__(self, process: LaunchedProcess) -> None:
        self.process = process

    def get(self, path: str) -> tuple[int, bytes]:
        """GET; the status and the body as it is."""
        with self._exchange("GET", path, b"") as response:
            return response.status, response.read()

    def post(self, path: str, body: Mapping[str, Any] | bytes) -> Reply:
        """POST JSON, or bytes that pretend to be."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        with self._exchange("POST", path, raw) as response:
            return Reply(response.status, json.loads(response.read()), dict(response.getheaders()))

    def complete(self, prompt: str | Sequence[int], **fields: Any) -> Reply:
        """Ask for a greedy completion; `fields` go into the body."""
        return self.post("/v1/completions", completion_body(prompt, fields))

    @contextmanager
    def streaming(self, prompt: str | Sequence[int], **fields: Any) -> Iterator[Iterator[Mapping[str, Any]]]:
        """Ask for a streamed greedy completion: its events one by one. Leaving the block hangs up."""
        body = json.dumps(completion_body(prompt, fields) | {"stream": True}).encode()
        with self._exchange("POST", "/v1/completions", body) as response:
            assert response.status == 200, response.read()
            yield _events(response)

    def hang_up_during(
        self, condition: Callable[[], bool], prompt: str | Sequence[int], **fields: Any
    ) -> None:
        """Send a completion, wait until `condition` holds, and hang up without having read an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.process.port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(completion_body(prompt, fields)))
            wait_until(condition)
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """One figure of `/metrics`, without labels."""
        text = self.get("/metrics")[1].decode()
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found is not None, f"{name} is not among the metrics:\n{text}"
        return float(found[1])

    def is_whole(self) -> bool:
        """Whether every block is free and no request is alive."""
        busy = sum(
            self.metric(f"kvferry_engine_{state}_requests")
            for state in ("waiting", "loading", "running", "offered")
        )
        return busy == 0 and self.metric("kvferry_engine_free_blocks") == self.metric("kvferry_engine_blocks")

    @contextmanager
    def _exchange(self, method: str, path: str, body: bytes) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.process.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                yield response
        finally:
            connection.close()


def ask_alone(single: Client, **fields: Any) -> AskAlone:
    """See `reference.demo.client.ask_alone`."""
    return client.ask_alone(single.process.port, **fields)


def assert_answers_like(
    single: Client, prompt: str | Sequence[int], token_ids: Sequence[int], max_tokens: int, **fields: Any
) -> None:
    """Fail unless an answer is what a single node answers to the same prompt, near-ties of logits apart.

    Args:
        token_ids: A greedy answer of at most `max_tokens`.
        fields: What else the answer was asked with.
    """
    ask = ask_alone(single, **fields)
    assert_same_answer(prompt, token_ids, ask(prompt, max_tokens).token_ids, ask)


def completion_body(prompt: str | Sequence[int], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a greedy completion whose tokens come back."""
    return {"prompt": prompt, "temperature": 0, "return_token_ids": True, **fields}


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Return once `condition` holds.

    Raises:
        TimeoutError: it did not within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s")
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    """The processes that a process started, in the order of their ids."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())


def _events(response: http.client.HTTPResponse) -> Iterator[Mapping[str, Any]]:
    for raw in response:
        line = raw.decode().strip()
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")
