"""Ask a node, or a pair, what their work costs.

It takes a minute or two, and the nodes must have nothing else to do.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import aiohttp
import numpy as np

from ...router.answer.bodies import DO_REMOTE_DECODE
from ...router.http.access import NodeAccess
from ...router.nodes.reading import node_session
from ...transports.checked import Refused, json_of
from ..client import Answer, ask, pool_of
from .costs import Costs

#: Tokens below this number may be special ones; every model has the others.
TOKENS = range(100, 250)
#: Requests of a kind. Their mean counts: in a queue the slow ones delay the others.
REPEATS = 3
#: The longest prompt that is tried, and the shortest one. Longer ones are on the same lines.
LONGEST, SHORTEST = 4096, 16
#: Seconds for one answer, also of a batch on a slow machine.
TIMEOUT_S = 300.0
#: Stop lengthening prompts after one that takes this many seconds.
LONG_S = 2.0
BATCHES = (1, 2, 4, 8, 16)
ANSWER_TOKENS = 32
#: Of the contexts that make a batch of answers slow, so that the prompts for it are no long wait.
LONG_BATCHES = (1, 4)
#: Answers that run while prompts are computed, and the chunks of such a prompt.
MIXED_BATCHES, MIXED_CHUNKS = (1, 4), 4
#: Of each of these answers: more than it gives until the last of the prompts is computed.
MIXED_TOKENS = 128
#: Tokens that each answer gives between two of the prompts.
BETWEEN = 4
HANDOVERS = (64, 512, 2048)


class MeasuringError(Exception):
    """A node did not answer as it should."""


@dataclass(frozen=True)
class Measured:
    """One measured figure, and the sum of costs that should equal it.

    Attributes:
        times: Name of a cost → how often it is in the sum.
    """

    what: str
    seconds: float
    times: Mapping[str, float]

    def predicted(self, costs: Costs) -> float:
        return float(sum(number * getattr(costs, name) for name, number in self.times.items()))


async def measure(
    urls: Sequence[str], costs: Costs, say: Callable[[str], None], access: NodeAccess
) -> tuple[Costs, list[Measured]]:
    """Return the costs of a node, and of handing over to another one if there are two.

    Args:
        urls: A node that computes and answers, and a node that loads from it.
        costs: What cannot be measured from outside: `chunk_tokens` and `max_requests`. The costs of a
            handover, if there is one node.

    Raises:
        MeasuringError: A node cannot be reached, or does not hand over.
    """
    async with node_session(access, (access.present,)) as session:
        node = _Node(session, urls[0])
        max_tokens = await node.look()
        longest = min(LONGEST, max_tokens - ANSWER_TOKENS - 1)
        if longest < 4 * SHORTEST:
            raise MeasuringError(f"{urls[0]} takes only {max_tokens} tokens; measure a node with more")
        costs = replace(costs, pool_tokens=node.pool_tokens or costs.pool_tokens)
        found = await _measure_node(node, costs, longest, say)
        fitted = fit(
            costs, found, ("step_s", "prompt_token_s", "answer_s", "request_s", "mixed_s", *_CONTEXT)
        )
        if len(urls) > 1:
            other = _Node(session, urls[1])
            await other.look()
            handed = await _measure_handovers(node, other, fitted, longest, say)
            fitted = fit(fitted, handed, ("handover_s", "handed_token_s"))
            found += handed
    return fitted, found


_CONTEXT = ("context_s", "answer_context_s")


async def _measure_node(
    node: _Node, costs: Costs, longest: int, say: Callable[[str], None]
) -> list[Measured]:
    found = []
    lengths = [SHORTEST]
    while lengths[-1] < longest:
        lengths.append(min(longest, 4 * lengths[-1]))
    for number in (SHORTEST, *lengths):  # the first one only warms up
        answers = [await node.ask(number, 2) for _ in range(REPEATS)]
        seconds = statistics.fmean(answer.ttft_s for answer in answers)
        times: dict[str, float] = {"request_s": 1, "step_s": costs.chunks(number)}
        # The pairs of a token and one before it are as many in one chunk as in several.
        times |= {"prompt_token_s": number, "context_s": number * number / 2}
        found.append(Measured(f"TTFT of {number} prompt tokens", seconds, times))
        say(f"{found[-1].what}: {seconds * 1e3:.1f} ms")
        longest = number
        if seconds > LONG_S:
            break
    del found[0]
    context = max(SHORTEST, min(longest // 2, 1024))
    shapes = [(batch, SHORTEST) for batch in BATCHES] + [(batch, context) for batch in LONG_BATCHES]
    for batch, length in shapes:
        if batch > costs.max_requests or batch * (length + ANSWER_TOKENS) > costs.pool_tokens:
            continue
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(node.ask(length, 2 * ANSWER_TOKENS)) for _ in range(batch)]
        answers = [task.result() for task in tasks]
        # Only while all of them are being given.
        begin, end = max(each.times[0] for each in answers), min(each.times[-1] for each in answers)
        gaps = [
            later - earlier
            for each in answers
            for earlier, later in pairwise(each.times)
            if begin <= earlier and later <= end
        ]
        if not gaps:
            continue
        known = length + ANSWER_TOKENS
        times = {"step_s": 1, "answer_s": batch, "answer_context_s": batch * known}
        found.append(Measured(f"ITL of {batch} answers after {length} tokens", statistics.fmean(gaps), times))
        say(f"{found[-1].what}: {found[-1].seconds * 1e3:.1f} ms")
    for batch in MIXED_BATCHES:
        if batch < min(costs.max_requests, costs.chunk_tokens):
            found += await _measure_mixed(node, costs, longest, batch, say)
    return found


async def _measure_mixed(
    node: _Node, costs: Costs, longest: int, batch: int, say: Callable[[str], None]
) -> list[Measured]:
    """Measure the steps of a prompt while answers are given; nothing if the answers end too early."""
    number = min(longest, MIXED_CHUNKS * costs.chunk_tokens)
    if number + batch * (SHORTEST + MIXED_TOKENS) > costs.pool_tokens:
        return []
    num_steps = -(-number // (costs.chunk_tokens - batch))
    running = [Answer() for _ in range(batch)]
    took: list[float] = []
    async with asyncio.TaskGroup() as group:
        answers = [
            group.create_task(node.ask_for(node.prompt(SHORTEST), MIXED_TOKENS, None, answer))
            for answer in running
        ]
        for _ in range(REPEATS):
            wanted = min(len(each.times) for each in running) + BETWEEN
            # Ends at the latest with the answers, which have a timeout.
            while min(len(each.times) for each in running) < wanted and not any(
                map(asyncio.Task.done, answers)
            ):
                await asyncio.sleep(0.002)
            computed_at = (await node.ask(number, 1)).times[0]
            for times in [each.times for each in running if each.times]:
                # The prompt's last step gave a token to each answer as well, and so did its other steps. An
                # answer that began later or has ended was not in all of them.
                last = min(range(len(times)), key=lambda index: abs(times[index] - computed_at))
                if num_steps <= last < MIXED_TOKENS - 1:
                    took.append(times[last] - times[last - num_steps])
    if not took:
        return []
    known = SHORTEST + MIXED_TOKENS // 2
    sums = {
        "step_s": num_steps,
        "mixed_s": num_steps,
        "prompt_token_s": number,
        "context_s": number * number / 2,
        "answer_s": num_steps * batch,
        "answer_context_s": num_steps * batch * known,
    }
    found = Measured(f"{number} prompt tokens beside {batch} answers", statistics.fmean(took), sums)
    say(f"{found.what}: {found.seconds * 1e3:.1f} ms")
    return [found]


async def _measure_handovers(
    first: _Node, second: _Node, costs: Costs, longest: int, say: Callable[[str], None]
) -> list[Measured]:
    found = []
    for number in (SHORTEST, *(each for each in HANDOVERS if each <= longest)):
        took = []
        for _ in range(REPEATS):
            prompt = first.prompt(number)
            params = await first.offer(prompt)
            answer = await second.ask_for(prompt, 2, params)
            # One more request and one more step than a single node takes.
            took.append(answer.ttft_s - costs.request_s - costs.unloaded_itl_s)
        seconds = max(0.0, statistics.fmean(took))
        found.append(
            Measured(
                f"handover of {number} tokens", seconds, {"handover_s": 1, "handed_token_s": float(number)}
            )
        )
        say(f"{found[-1].what}: {seconds * 1e3:.1f} ms")
    return found[1:]  # the first one connects the nodes


def fit(costs: Costs, measured: Sequence[Measured], names: Sequence[str]) -> Costs:
    """Return costs that fit best, by relative errors. No cost is negative: one that would be is left out."""
    names = list(names)
    while True:
        rows = [[each.times.get(name, 0.0) / max(each.seconds, 1e-6) for name in names] for each in measured]
        ones = [1.0 if each.seconds > 0 else 0.0 for each in measured]
        # Scaled, because a token before another one costs a millionth of a step.
        matrix = np.array(rows)
        scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
        solution = np.linalg.lstsq(matrix / scale, np.array(ones), rcond=None)[0] / scale
        least = int(np.argmin(solution * scale))
        if solution[least] >= 0:
            values: dict[str, Any] = {name: float(value) for name, value in zip(names, solution, strict=True)}
            return replace(costs, **values)
        nothing: dict[str, Any] = {names.pop(least): 0.0}
        costs = replace(costs, **nothing)


class _Node:
    """A node of the OpenAI API, vLLM's or ours."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        self._chance = random.Random()
        self._model = ""
        self.pool_tokens = 0

    def prompt(self, num_tokens: int) -> list[int]:
        """Return a prompt that is in no cache."""
        return self._chance.choices(TOKENS, k=num_tokens)

    async def look(self) -> int:
        """Find the name of the model and the size of the pool. Returns the most tokens of a request."""
        try:
            (told,) = json_of(await self._text("GET", "/v1/models"))["data"][:1]
            self._model, limit = str(told["id"]), told.get("max_model_len")
        except (Refused, ValueError, KeyError, TypeError, AttributeError) as error:
            raise MeasuringError(f"{self._url}/v1/models names no model: {error!r}") from error
        self.pool_tokens = math.prod(pool_of(await self._text("GET", "/metrics")))
        return limit if type(limit) is int else LONGEST

    async def ask(self, num_tokens: int, max_tokens: int) -> Answer:
        return await self.ask_for(self.prompt(num_tokens), max_tokens, None)

    async def ask_for(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        params: dict[str, Any] | None,
        answer: Answer | None = None,
    ) -> Answer:
        """Ask for an answer, which is filled as it comes."""
        fields: dict[str, Any] = {"model": self._model, "ignore_eos": True}
        if params is not None:
            fields["kv_transfer_params"] = params
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await ask(self._session, self._url, prompt, max_tokens, answer=answer, **fields)
        except TimeoutError as error:
            raise MeasuringError(f"{self._url} did not answer within {TIMEOUT_S:g} s") from error
        if answer.error or not answer.times:
            raise MeasuringError(f"{self._url} failed: {answer.error or 'it answered no token'}")
        return answer

    async def offer(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Let the node compute a prompt for another one."""
        fields = {"model": self._model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
        body = {**fields, "ignore_eos": True, "kv_transfer_params": dict(DO_REMOTE_DECODE)}
        try:
            params = json_of(await self._text("POST", "/v1/completions", body)).get("kv_transfer_params")
        except (Refused, AttributeError) as error:
            raise MeasuringError(f"{self._url} answered no JSON: {error!r}") from error
        if not isinstance(params, dict):
            raise MeasuringError(f"{self._url} offers no cache; start it with a connector, or give one URL")
        return params

    async def _text(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        url = self._url + path
        try:
            async with self._session.request(method, url, json=body, timeout=self._timeout) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise MeasuringError(f"{url} cannot be asked: {error!r}; is the node running?") from error
        if answer.status != 200:
            raise MeasuringError(f"{url} answered {answer.status}: {text[:300]}")
        return text
