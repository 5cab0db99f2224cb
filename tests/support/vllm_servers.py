"""Clients of servers that run as processes of their own: `vllm serve`, and a router in front of such
servers.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvferry.lab.demo.near_tie import Expectation, ask_alone
from kvferry.lab.servers import LaunchedProcess, Launcher, run_program, start_vllm
from tests.support.chaos.services import Service
from tests.support.same_answer import assert_same_answer

ANSWER_S = 120.0
USAGE = "vllm:kv_cache_usage_perc"
LOADS, FAILURES = "kvferry_load_seconds_count", "kvferry_load_failures_total"


@dataclass(frozen=True)
class Reply:
    """A server's answer.

    Attributes:
        seconds: Time until the answer.
        content: The JSON object. Empty for an error.
    """

    status: int
    seconds: float
    content: dict[str, Any]

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each sample."""
        return [choice["token_ids"] for choice in self.content["choices"]]

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The samples, for `Server.assert_like_alone`."""
        found: list[dict[str, Any]] = self.content["choices"]
        return found

    @property
    def params(self) -> dict[str, Any]:
        found: dict[str, Any] = self.content["kv_transfer_params"]
        return found


@dataclass(frozen=True)
class Server:
    """One `vllm serve`. Of a router, only the metrics are of use."""

    process: LaunchedProcess

    def complete(
        self, prompt: list[int], max_tokens: int = 8, *, rank: int | None = None, **more: Any
    ) -> Reply:
        """Ask for an answer; `rank` is the engine's in a server with several. None: the server chooses."""
        body = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True}
        body |= {
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
            "return_tokens_as_token_ids": True,
            **more,
        }
        request = urllib.request.Request(
            f"{self.process.url}/v1/completions",
            json.dumps(body).encode(),
            {
                "Content-Type": "application/json",
                **({} if rank is None else {"X-data-parallel-rank": str(rank)}),
            },
        )
        started = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
                return Reply(response.status, time.monotonic() - started, json.load(response))
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, time.monotonic() - started, {})

    def alone(self, prompt: list[int], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
        """Return the server's answer without cached blocks."""
        content = self.complete(prompt, max_tokens, cache_salt=os.urandom(8).hex(), **more).content
        choice: dict[str, Any] = content["choices"][0]
        return choice

    def assert_like_alone(self, prompt: list[int], answer: Mapping[str, Any], max_tokens: int = 8) -> None:
        """Fail unless an answer is the server's own answer without cached blocks, apart from near-ties of
        logits.

        Args:
            answer: Its choice, with log probabilities.
        """

        def ask(prompt: str | Sequence[int], max_tokens: int) -> Expectation:
            alone = {"ignore_eos": True, "cache_salt": os.urandom(8).hex()}
            return ask_alone(self.process.port, **alone)(prompt, max_tokens)

        alone, tokens, logprobs = self.alone(prompt, max_tokens), answer["token_ids"], logprobs_of(answer)
        assert_same_answer(
            prompt, tokens, alone["token_ids"], ask, logprobs=logprobs, expected_logprobs=logprobs_of(alone)
        )
        # A near-tie at the last token must not hide that the answer ends too early.
        assert len(tokens) == len(logprobs) == max_tokens, f"{len(tokens)} tokens instead of {max_tokens}"

    def offer(self, prompt: list[int], *, rank: int | None = None, **wish: Any) -> dict[str, Any]:
        """Compute a prompt for another server. Returns the params for that server."""
        wished = {"do_remote_decode": True, **wish}
        return self.complete(prompt, 1, rank=rank, kv_transfer_params=wished).params

    def metrics_page(self) -> str:
        with urllib.request.urlopen(f"{self.process.url}/metrics", timeout=ANSWER_S) as response:
            page: str = response.read().decode()
            return page

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's values that have these labels."""
        families = text_string_to_metric_families(self.metrics_page())
        samples = (sample for family in families for sample in family.samples if sample.name == name)
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def wait_for(self, name: str, is_so: Callable[[float], bool], timeout_s: float = ANSWER_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so(value := self.metric(name)):
            assert time.monotonic() < deadline, f"{name} is still {value}"
            time.sleep(0.02)

    def assert_no_block_is_in_use(self) -> None:
        self.wait_for(USAGE, lambda usage: usage == 0.0)


class VllmService(Service):
    """A `vllm serve` that is started again at its port.

    Args:
        arguments: Of `vllm serve`.
        transfer: Its KV transfer configuration. None: no connector.
    """

    def __init__(
        self, name: str, model: Path, arguments: Sequence[str], transfer: Mapping[str, Any] | None
    ) -> None:
        super().__init__(name, run_program, "", arguments, Path())
        self._model, self._arguments, self._transfer = str(model), arguments, transfer

    def _launch(self, launcher: Launcher, name: str) -> LaunchedProcess:
        return start_vllm(launcher, name, self._model, self._arguments, self._transfer, port=self.port)


def logprobs_of(choice: Mapping[str, Any]) -> list[float]:
    """Return the log probability of each token of a choice of a completion or of a chat."""
    told = choice["logprobs"]
    return (
        list(told["token_logprobs"])
        if "token_logprobs" in told
        else [each["logprob"] for each in told["content"]]
    )
