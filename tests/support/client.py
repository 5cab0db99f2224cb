"""A blocking client of running nodes, and waiting with a deadline."""

from __future__ import annotations

import http.client
import json
import select
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvferry.lab import client
from kvferry.lab.client import events_of, exchange, totals_of
from kvferry.lab.demo import near_tie
from kvferry.lab.demo.near_tie import AskAlone
from kvferry.lab.servers import LaunchedProcess
from tests.support.answers import Answer
from tests.support.patience import DEADLINE_S
from tests.support.same_answer import assert_same_answer

#: The `kv_transfer_params` of a router's request to a prefill node.
DO_REMOTE_DECODE = {"do_remote_decode": True}
#: Seconds for one answer. Without it, a hung node would hang the tests.
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Reply:
    """An HTTP answer whose body is JSON."""

    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[int]:
        """The token ids of a completion that asked for them."""
        ids: list[int] = self.body["choices"][0]["token_ids"]
        return ids

    @property
    def logprobs(self) -> list[float]:
        """The log probability of each token of a completion that asked for them by `logprobs`; otherwise
        empty.
        """
        told = self.body["choices"][0]["logprobs"]
        return list(told["token_logprobs"]) if told else []

    @property
    def answer(self) -> Answer:
        """Tokens and log probabilities together."""
        return Answer(self.token_ids, self.logprobs)

    @property
    def transfer(self) -> Mapping[str, Any]:
        """How the KV cache was transferred. Empty if it was not."""
        return self.body["metrics"]["transfer"] or {}

    @property
    def error(self) -> str:
        """The message of an OpenAI error object."""
        return str(self.body["error"]["message"])


class Client:
    """A client of one node or router."""

    def __init__(self, process: LaunchedProcess) -> None:
        self.process = process

    def get(self, path: str) -> tuple[int, bytes]:
        """GET a path. Returns the status and the raw body."""
        with self._exchange("GET", path, b"") as response:
            return response.status, response.read()

    def post(self, path: str, body: Mapping[str, Any] | bytes) -> Reply:
        """POST a JSON object, or bytes that need not be JSON."""
        with self._exchange("POST", path, body) as response:
            return Reply(response.status, json.loads(response.read()), dict(response.getheaders()))

    def complete(self, prompt: str | Sequence[int], **fields: Any) -> Reply:
        """Ask for a greedy completion. `fields` are added to the body."""
        return self.post("/v1/completions", completion_body(prompt, fields))

    def offer(self, prompt: str | Sequence[int], **fields: Any) -> dict[str, Any]:
        """Let a prefill node compute a prompt. Returns the params for a decode node."""
        reply = self.complete(prompt, max_tokens=1, kv_transfer_params=DO_REMOTE_DECODE, **fields)
        assert reply.status == 200, reply.body
        params: dict[str, Any] = reply.body["kv_transfer_params"]
        return params

    @contextmanager
    def streaming(self, prompt: str | Sequence[int], **fields: Any) -> Iterator[Iterator[Mapping[str, Any]]]:
        """Ask for a streamed greedy completion.

        Yields its events. Leaving the block closes the connection.
        """
        body = completion_body(prompt, fields) | {"stream": True}
        with self._exchange("POST", "/v1/completions", body) as response:
            assert response.status == 200, response.read()
            yield events_of(response)

    def hang_up_during(
        self, condition: Callable[[], bool], prompt: str | Sequence[int], **fields: Any
    ) -> None:
        """Send a completion, wait until `condition` holds, and disconnect without reading the answer.

        A busy machine may look at the condition too late, when the request has been answered. Then it is sent
        again.
        """
        body = json.dumps(completion_body(prompt, fields))
        with ExitStack() as connections:
            connection = None

            def holds() -> bool:
                nonlocal connection
                if connection is None or select.select([connection.sock], [], [], 0)[0]:
                    connection = http.client.HTTPConnection(
                        self.process.host, self.process.port, timeout=TIMEOUT_S
                    )
                    connections.callback(connection.close)
                    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                return condition()

            wait_until(holds)

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        page = self.get("/metrics")[1].decode()
        found = totals_of(page)
        assert name in found, f"{name} is not among the metrics:\n{page}"
        return found[name]

    def is_whole(self) -> bool:
        """Whether every block is free and there are no requests."""
        busy = sum(
            self.metric(f"kvferry_engine_{state}_requests")
            for state in ("waiting", "loading", "running", "offered")
        )
        return busy == 0 and self.metric("kvferry_engine_free_blocks") == self.metric("kvferry_engine_blocks")

    def requesting(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AbstractContextManager[http.client.HTTPResponse]:
        """POST a JSON object with headers. Leaving the block closes the connection."""
        return self._exchange("POST", path, body, headers)

    def _exchange(
        self, method: str, path: str, body: object, headers: Mapping[str, str] = MappingProxyType({})
    ) -> AbstractContextManager[http.client.HTTPResponse]:
        return exchange(method, self.process.url, path, body, headers, TIMEOUT_S)


def ask_alone(single: Client, **fields: Any) -> AskAlone:
    """See `near_tie.ask_alone`."""
    return near_tie.ask_alone(single.process.port, **fields)


def streamed_answer(events: Iterable[Mapping[str, Any]]) -> Answer:
    """Return the answer of a stream; it has log probabilities if the request asked for them by `logprobs`."""
    answer = client.Answer()
    for event in events:
        answer.add(event)
    return Answer(answer.token_ids, answer.logprobs)


def assert_answers_like(
    single: Client,
    prompt: str | Sequence[int],
    answer: Answer,
    max_tokens: int,
    **fields: Any,
) -> None:
    """Fail unless a single node gives the same answer to the prompt, apart from near-ties of logits.

    Args:
        answer: A greedy answer of at most `max_tokens`. If it has log probabilities, they are compared as
            well: a wrong cache often changes no token. Ask for them, unless the test is about what a request
            without them does.
        fields: The other fields of its request.
    """
    ask = ask_alone(single, **fields)
    expected = ask(prompt, max_tokens)
    assert_same_answer(
        prompt,
        answer,
        expected.token_ids,
        ask,
        logprobs=answer.logprobs,
        expected_logprobs=expected.logprobs,
    )


def completion_body(prompt: str | Sequence[int], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a greedy completion that returns its token ids."""
    return {"prompt": prompt, "temperature": 0, "return_token_ids": True, **fields}


def wait_until(condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
    """Return once `condition` holds.

    Raises:
        TimeoutError: It did not hold within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the condition did not hold within {timeout_s:g} s")
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    """Return the ids of a process's children, sorted."""
    children: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        # A thread may end after it was listed.
        with suppress(FileNotFoundError, ProcessLookupError):
            children.update(map(int, (task / "children").read_text().split()))
    return sorted(children)


def is_alive(pid: int) -> bool:
    """Whether a process runs. One that has ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
