"""A fleet of nodes in virtual time: what requests take, by where each one's prompt is computed and answered.

A node works in steps, as vLLM and the reference engine do: in each one it computes a token of every answer and, with what is
left of the step's tokens, chunks of the prompts that wait, the oldest first. It keeps what it has computed or loaded. A step's
time is a straight line over its tokens. Ways to choose nodes differ only in what they know: balancers see requests in flight,
the router's `Fleet` sees what it sees in production, through the same calls, and `best_known` sees the future.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.router.fleet import Fleet, Progress
from kvferry.router.placement import Limits
from kvferry.router.prefixes import PIECE_TOKENS, keys_of


@dataclass(frozen=True)
class Costs:
    """What a node takes: seconds per step, and per prompt token and answer in it; tokens of a step; and what a handover takes.

    The default was measured with vLLM 0.32 and SmolLM2-135M on one core.
    """

    step_s: float = 0.024
    prompt_token_s: float = 0.0009
    answer_s: float = 0.005
    chunk_tokens: int = 512
    handover_s: float = 0.03
    handed_token_s: float = 2e-5

    def unloaded_ttft_s(self, num_tokens: int) -> float:
        """Return what the first token takes at an idle node that has cached nothing."""
        num_steps = -(-num_tokens // self.chunk_tokens)
        return num_steps * self.step_s + num_tokens * self.prompt_token_s

    @property
    def unloaded_itl_s(self) -> float:
        return self.step_s + self.answer_s


@dataclass(frozen=True)
class Arrival:
    """A request to come.

    Attributes:
        at: In seconds; with `after`, from the end of that answer.
        after: The request before it in its conversation, by its place among the arrivals.
    """

    at: float
    prompt: Sequence[int]
    num_answer_tokens: int
    after: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        return {"prompt": list(self.prompt), "max_tokens": self.num_answer_tokens, "stream": True}


@dataclass
class Outcome:
    """What the client saw of a request: when it was due, and when each token came."""

    due: float
    num_prompt_tokens: int
    token_times: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.due

    @property
    def mean_itl_s(self) -> float:
        steps = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / steps if steps else 0.0

    def is_good(self, costs: Costs, factor: float) -> bool:
        """Return whether it keeps both limits, which are multiples of what an idle node takes."""
        is_prompt = self.ttft_s <= factor * costs.unloaded_ttft_s(self.num_prompt_tokens)
        return is_prompt and self.mean_itl_s <= factor * costs.unloaded_itl_s


@dataclass(eq=False)
class _Job:
    """A request under way."""

    number: int
    arrival: Arrival
    outcome: Outcome
    keys: list[int]
    prefill: int
    decode: int
    left: int = 0  # tokens to compute before the first token
    num_to_come: int = 0  # tokens of the answer
    has_begun: bool = False  # at the node that answers
    progress: Progress | None = None


class _Node:
    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.prompts: deque[_Job] = deque()
        self.answers: list[_Job] = []
        self.cached: set[int] = set()
        self.is_busy = False

    def num_cached(self, job: _Job) -> int:
        held = sum(1 for _ in itertools.takewhile(self.cached.__contains__, job.keys))
        return min(held * PIECE_TOKENS, len(job.arrival.prompt) - 1)

    def step(self) -> tuple[float, list[_Job], list[_Job]]:
        """Do a step. Returns its seconds, the prompts that it completes, and the answers that get a token."""
        answers = list(self.answers)
        left, done = max(1, self.costs.chunk_tokens - len(answers)), []
        num_tokens = 0
        while self.prompts and left:
            job = self.prompts[0]
            part = min(job.left, left)
            job.left, left, num_tokens = job.left - part, left - part, num_tokens + part
            if not job.left:
                done.append(self.prompts.popleft())
        seconds = (
            self.costs.step_s + num_tokens * self.costs.prompt_token_s + len(answers) * self.costs.answer_s
        )
        return seconds, done, answers


#: By the number of a request: the node that computes its prompt, and the one that answers.
Chosen = dict[int, tuple[int, int]]
#: (the request's number, nodes' requests in flight) → the node that computes the prompt, and the one that answers.
Way = Callable[[int, Sequence[int]], tuple[int, int]]


class FleetSimulation:
    """One run of a load over a fleet.

    Args:
        way: Chooses the nodes.
        fleet: The router's, which chooses instead. Its clock must be `clock`.
        first_token_passes: The client receives the first token from the node that has computed the prompt, and the others after
            the handover; otherwise it waits for that with all of them.
    """

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        costs: Sequence[Costs],
        way: Way | None = None,
        fleet: Callable[[Callable[[], float]], Fleet] | None = None,
        *,
        first_token_passes: bool = True,
    ) -> None:
        self.now = 0.0
        self.arrivals = arrivals
        self.nodes = [_Node(each) for each in costs]
        self.urls = [f"http://node-{number}" for number in range(len(costs))]
        self.outcomes: dict[int, Outcome] = {}
        self.chosen: Chosen = {}
        self._way = way
        self._first_token_passes = first_token_passes
        self._fleet = None if fleet is None else fleet(lambda: self.now)
        self._in_flight = [0] * len(costs)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._later = {each.after: number for number, each in enumerate(arrivals) if each.after is not None}

    def run(self) -> list[Outcome]:
        """Run it to the end."""
        for number, each in enumerate(self.arrivals):
            if each.after is None:
                self._at(each.at, self._arrive, number)
        while self._heap:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        return [self.outcomes[number] for number in range(len(self.arrivals))]

    def _at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (when, next(self._order), lambda: action(*arguments)))

    def _arrive(self, number: int) -> None:
        arrival = self.arrivals[number]
        self.outcomes[number] = outcome = Outcome(self.now, len(arrival.prompt))
        if self._fleet is not None:
            progress = Progress(self._fleet, arrival.body)
            choice = self._fleet.choose(progress, self.urls, self.urls)
            assert choice is not None
            prefill, decode = self.urls.index(choice.prefill.url), self.urls.index(choice.decode.url)
            progress.prompt_asked(choice.prefill.url)
            keys = progress.keys
        else:
            assert self._way is not None
            prefill, decode = self._way(number, self._in_flight)
            progress, keys = None, _keys(arrival)
        self.chosen[number] = prefill, decode
        job = _Job(number, arrival, outcome, keys, prefill, decode, progress=progress)
        node = self.nodes[prefill]
        job.left = len(arrival.prompt) - node.num_cached(job)
        node.prompts.append(job)
        for each in {prefill, decode}:
            self._in_flight[each] += 1
        self._start(prefill)

    def _start(self, where: int) -> None:
        node = self.nodes[where]
        if node.is_busy or not (node.prompts or node.answers):
            return
        node.is_busy = True
        seconds, done, answers = node.step()
        self._at(self.now + seconds, self._end_step, where, done, answers)

    def _end_step(self, where: int, done: list[_Job], answers: list[_Job]) -> None:
        node = self.nodes[where]
        node.is_busy = False
        for job in answers:
            self._token(job)
        for job in done:
            node.cached.update(job.keys)
            if job.progress is not None:
                job.progress.prompt_ended(is_computed=True)
            job.num_to_come = job.arrival.num_answer_tokens
            if job.prefill == job.decode:
                node.answers.append(job)
                self._token(job)
                continue
            self._in_flight[where] -= 1
            if self._first_token_passes:
                self._token(job)
                if not job.num_to_come:
                    continue
            num_moved = len(job.arrival.prompt) - self.nodes[job.decode].num_cached(job)
            took = node.costs.handover_s + num_moved * node.costs.handed_token_s
            self._at(self.now + took, self._loaded, job)
        self._start(where)

    def _loaded(self, job: _Job) -> None:
        # The last block is computed again, within the next step.
        node = self.nodes[job.decode]
        node.cached.update(job.keys)
        node.answers.append(job)
        self._start(job.decode)

    def _token(self, job: _Job) -> None:
        answers = self.nodes[job.decode].answers
        if job.progress is not None and job in answers:
            if not job.has_begun:
                job.progress.answer_began(self.urls[job.decode])
            else:
                job.progress.tokens_came(1)
            job.has_begun = True
        job.outcome.token_times.append(self.now)
        job.num_to_come -= 1
        if job.num_to_come:
            return
        if job in answers:
            answers.remove(job)
        self._in_flight[job.decode] -= 1
        if job.progress is not None:
            job.progress.ended()
        if (later := self._later.get(job.number)) is not None:
            self._at(self.now + self.arrivals[later].at, self._arrive, later)


def _keys(arrival: Arrival) -> list[int]:
    return keys_of(arrival.body)


def fixed_ways(num_nodes: int) -> dict[str, Way]:
    """Return the ways that `auto` is compared with."""

    def least(nodes: range, in_flight: Sequence[int]) -> int:
        return min(nodes, key=lambda each: in_flight[each])

    def least_load(number: int, in_flight: Sequence[int]) -> tuple[int, int]:
        node = least(range(num_nodes), in_flight)
        return node, node

    ways: dict[str, Way] = {
        "round-robin": lambda number, in_flight: (number % num_nodes, number % num_nodes),
        "least-load": least_load,
    }
    for num_prefill in range(1, num_nodes):

        def pair(number: int, in_flight: Sequence[int], split: int = num_prefill) -> tuple[int, int]:
            return least(range(split), in_flight), least(range(split, num_nodes), in_flight)

        ways[f"pair-{num_prefill}+{num_nodes - num_prefill}"] = pair
    return ways


def goodput(outcomes: Sequence[Outcome], costs: Costs, factor: float = 3.0) -> float:
    """Return good requests per second."""
    seconds = max(each.token_times[-1] for each in outcomes)
    return sum(each.is_good(costs, factor) for each in outcomes) / seconds


def best_known(
    arrivals: Sequence[Arrival],
    costs: Sequence[Costs],
    starts: Sequence[Chosen],
    seed: int,
    tries: int,
) -> float:
    """Return the goodput of the best assignment that a search over the whole load finds: it knows the future.

    Args:
        starts: Assignments to begin from, such as those of other ways.
    """
    chance = random.Random(seed)
    pairs = [(prefill, decode) for prefill in range(len(costs)) for decode in range(len(costs))]

    def rate(chosen: Chosen) -> float:
        run = FleetSimulation(arrivals, costs, lambda number, in_flight: chosen[number]).run()
        return goodput(run, costs[0]) - 1e-6 * sum(each.ttft_s for each in run)

    best, highest = max(((dict(each), rate(each)) for each in starts), key=lambda each: each[1])
    for _ in range(tries):
        changed = dict(best)
        for number in chance.sample(range(len(arrivals)), min(len(arrivals), chance.choice((1, 1, 2, 3)))):
            changed[number] = chance.choice(pairs)
        if (rated := rate(changed)) >= highest:
            best, highest = changed, rated
    return highest


def routed(limits: Limits | None = None) -> Callable[[Callable[[], float]], Fleet]:
    """Return what makes the router's fleet with a clock."""
    return lambda clock: Fleet("auto", limits or Limits(), clock)
