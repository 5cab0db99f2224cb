"""A fleet of nodes in virtual time: what requests take, by where each one's prompt is computed and answered.

A node works in steps, as vLLM and the reference engine do: in each one it computes a token of every answer
and, with what is left of the step's tokens, chunks of the prompts that it has begun, the oldest first. A
request waits until the node's pool has room for it, and no later one overtakes it. What has been computed or
loaded stays in the prefix cache until its room is needed. A step's time is a sum of straight lines; see
`Costs`. Ways to choose nodes differ only in what they know: balancers see requests in flight, and the
router's `Fleet` sees what it sees in production, through the same calls.

Not simulated: preemption (a request reserves the room of its whole answer instead), failures, and the
router's own time.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...router.choice.fleet import Fleet, Progress
from ...router.choice.prefixes import PIECE_TOKENS
from .costs import Costs
from .loads import Arrival


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

    def keeps(self, ttft_s: float, itl_s: float) -> bool:
        """Return whether the first token came in time, and the others did on average."""
        return self.ttft_s <= ttft_s and self.mean_itl_s <= itl_s


@dataclass(eq=False)
class _Job:
    """A request under way."""

    number: int
    arrival: Arrival
    outcome: Outcome
    prefill: int
    decode: int
    num_left: int = 0  # tokens of the prompt to compute
    num_to_come: int = 0  # tokens of the answer
    is_computed: bool = False  # the prompt
    has_begun: bool = False  # at the node that answers
    progress: Progress | None = None

    @property
    def num_known(self) -> int:
        """Tokens of the prompt that are computed, and tokens of the answer."""
        return self.arrival.num_tokens - self.num_left + len(self.outcome.token_times)


class _Node:
    """A node.

    Attributes:
        waiting: Requests without room in the pool.
        prompts: Those whose prompts are being computed.
        answers: Those that get a token in each step.
        num_admitted: Requests that have room, also those that are being loaded or handed over.
        link_free_at: When its link has sent all that it was given.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.waiting: deque[_Job] = deque()
        self.prompts: deque[_Job] = deque()
        self.answers: dict[_Job, None] = {}
        self.num_admitted = self.num_reserved = 0
        self.link_free_at = 0.0
        self.is_busy = False
        self._cached: OrderedDict[int, None] = OrderedDict()

    def num_cached(self, job: _Job) -> int:
        """Return the tokens of a prompt that need not be computed. The last one always is."""
        held = sum(1 for _ in itertools.takewhile(self._cached.__contains__, job.arrival.keys))
        return min(held * PIECE_TOKENS, job.arrival.num_tokens - 1)

    def remember(self, job: _Job) -> None:
        """Keep a prompt in the prefix cache, instead of what was not used for longest."""
        for key in job.arrival.keys:
            self._cached[key] = None
            self._cached.move_to_end(key)
        while len(self._cached) > self.costs.pool_tokens // PIECE_TOKENS:
            self._cached.popitem(last=False)

    def admit(self, num_tokens: int) -> bool:
        """Reserve room; return False if there is none. One request always has room, however long it is."""
        is_full = self.num_reserved + num_tokens > self.costs.pool_tokens
        if self.num_admitted and (is_full or self.num_admitted >= self.costs.max_requests):
            return False
        self.num_admitted += 1
        self.num_reserved += num_tokens
        return True

    def release(self, num_tokens: int) -> None:
        self.num_admitted -= 1
        self.num_reserved -= num_tokens

    def step(self) -> tuple[float, list[_Job], list[_Job]]:
        """Do a step. Returns its seconds, the prompts that it completes, and the answers that get a token."""
        costs, answers = self.costs, list(self.answers)
        num_before = sum(job.num_known for job in answers) if costs.answer_context_s else 0
        seconds = costs.step_s + len(answers) * costs.answer_s + num_before * costs.answer_context_s
        seconds += costs.mixed_s if answers and self.prompts else 0.0
        room, done = max(1, costs.chunk_tokens - len(answers)), []
        while self.prompts and room:
            job = self.prompts[0]
            part = min(job.num_left, room)
            seconds += costs.step_of_prompt_s(part, job.num_known)
            job.num_left, room = job.num_left - part, room - part
            if not job.num_left:
                done.append(self.prompts.popleft())
        return seconds, done, answers


#: By the number of a request: the node that computes its prompt, and the one that answers.
Chosen = dict[int, tuple[int, int]]
#: (the request's number, nodes' requests in flight) → the node that computes the prompt, and the one that
#: answers.
Way = Callable[[int, Sequence[int]], tuple[int, int]]


class FleetSimulation:
    """One run of a load over a fleet.

    Args:
        way: Chooses the nodes.
        fleet: The router's, which chooses instead. Its clock must be `clock`.
    """

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        costs: Sequence[Costs],
        way: Way | None = None,
        fleet: Callable[[Callable[[], float]], Fleet] | None = None,
    ) -> None:
        self.now = 0.0
        self.arrivals = arrivals
        self.nodes = [_Node(each) for each in costs]
        self.urls = [f"http://node-{number}" for number in range(len(costs))]
        self.outcomes: dict[int, Outcome] = {}
        self.chosen: Chosen = {}
        self._way = way
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

    # -- a request, in the order of its life -----------------------------------------------------------

    def _arrive(self, number: int) -> None:
        arrival = self.arrivals[number]
        self.outcomes[number] = outcome = Outcome(self.now, arrival.num_tokens)
        progress = None
        if self._fleet is not None:
            progress = Progress(self._fleet, {"max_tokens": arrival.num_answer_tokens, "stream": True})
            # Instead of a prompt, from which it would find the same.
            progress.num_tokens, progress.keys = arrival.num_tokens, list(arrival.keys)
            choice = self._fleet.choose(progress, *[dict.fromkeys(self.urls, 0)] * 2)
            assert choice is not None
            prefill, decode = self.urls.index(choice.prefill.url), self.urls.index(choice.decode.url)
            progress.prompt_asked(choice.prefill.url)
        else:
            assert self._way is not None
            prefill, decode = self._way(number, self._in_flight)
        self.chosen[number] = prefill, decode
        for each in {prefill, decode}:
            self._in_flight[each] += 1
        job = _Job(number, arrival, outcome, prefill, decode, progress=progress)
        self._at(self.now + self.nodes[prefill].costs.request_s, self._wait, prefill, job)

    def _wait(self, where: int, job: _Job) -> None:
        self.nodes[where].waiting.append(job)
        self._start(where)

    def _start(self, where: int) -> None:
        """Give room to the requests that wait, and begin a step if there is something to do."""
        node = self.nodes[where]
        while node.waiting and node.admit(self._reserved(node.waiting[0], where)):
            job = node.waiting.popleft()
            if job.is_computed:
                self._load(job)
            else:
                job.num_left = job.arrival.num_tokens - node.num_cached(job)
                node.prompts.append(job)
        if not node.is_busy and (node.prompts or node.answers):
            node.is_busy = True
            seconds, done, answers = node.step()
            self._at(self.now + seconds, self._end_step, where, done, answers)

    def _reserved(self, job: _Job, where: int) -> int:
        return job.arrival.num_tokens + (job.arrival.num_answer_tokens if where == job.decode else 0)

    def _end_step(self, where: int, done: list[_Job], answers: list[_Job]) -> None:
        node = self.nodes[where]
        node.is_busy = False
        for job in answers:
            self._token(job)
        for job in done:
            node.remember(job)
            job.is_computed = True
            if job.progress is not None:
                job.progress.prompt_ended(is_computed=True)
            job.num_to_come = job.arrival.num_answer_tokens
            if job.prefill == job.decode:
                node.answers[job] = None
                self._token(job)
                continue
            self._in_flight[where] -= 1
            self._wait(job.decode, job)
        self._start(where)

    def _load(self, job: _Job) -> None:
        """Hand the prompt over. Room for it has been reserved at the node that answers."""
        sender, receiver = self.nodes[job.prefill], self.nodes[job.decode]
        num_moved = job.arrival.num_tokens - receiver.num_cached(job)
        sender.link_free_at = max(self.now, sender.link_free_at) + num_moved * receiver.costs.handed_token_s
        self._at(sender.link_free_at + receiver.costs.handover_s, self._loaded, job)

    def _loaded(self, job: _Job) -> None:
        # The last block is computed again, within the next step.
        node = self.nodes[job.decode]
        node.remember(job)
        node.answers[job] = None
        self._handed_over(job)
        self._start(job.decode)

    def _handed_over(self, job: _Job) -> None:
        self.nodes[job.prefill].release(self._reserved(job, job.prefill))
        self._start(job.prefill)

    def _token(self, job: _Job) -> None:
        node = self.nodes[job.decode]
        is_at_decode = job in node.answers
        if job.progress is not None and is_at_decode:
            if not job.has_begun:
                job.progress.answer_began(self.urls[job.decode])
            else:
                job.progress.tokens_came(1)
            job.has_begun = True
        job.outcome.token_times.append(self.now)
        job.num_to_come -= 1
        if job.num_to_come:
            return
        if is_at_decode:
            del node.answers[job]
            node.release(self._reserved(job, job.decode))
        self._in_flight[job.decode] -= 1
        if job.progress is not None:
            job.progress.ended()
        if (later := self._later.get(job.number)) is not None:
            self._at(self.now + self.arrivals[later].at, self._arrive, later)


# -- ways to choose nodes ----------------------------------------------------------------------------


def least_load(num_nodes: int) -> Way:
    """Return a balancer over plain nodes: the one with the fewest requests in flight."""

    def choose(number: int, in_flight: Sequence[int]) -> tuple[int, int]:
        node = min(range(num_nodes), key=in_flight.__getitem__)
        return node, node

    return choose


def fixed_roles(num_prefill: int, num_decode: int) -> Way:
    """Return a balancer over prefill nodes, and another one over decode nodes, which hand every
    prompt over.
    """

    def choose(number: int, in_flight: Sequence[int]) -> tuple[int, int]:
        first, total = range(num_prefill), num_prefill + num_decode
        return (
            min(first, key=in_flight.__getitem__),
            min(range(num_prefill, total), key=in_flight.__getitem__),
        )

    return choose
