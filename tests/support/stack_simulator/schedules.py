"""Schedules: what arrives, what breaks and when.

They are drawn from a seed, run, checked, and shrunk if they fail.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from kvferry.connector.handoff.config import HandoffConfig
from kvferry.router.answer.exchange import Exchange

from ..explore import PromiseBroken, broken_by, shrink, without_some
from .client import Client, SimulatedRouter
from .network import Clock, Network, require
from .node import Parts, Shape, SimulatedNode, answer_to

#: After the last arrival and fault everything must be over within this many virtual seconds.
PATIENCE_S = 400.0
#: A node that drains is empty after this long. A load may wait 60 s for blocks, and its answer comes after
#: that.
_DRAIN_S = 90.0
#: Blocks of a pool that no schedule fills.
AMPLE = 160

Kind = Literal["kill", "drain", "cut"]
Roles = tuple[str, ...]
_TINY = HandoffConfig(
    lease_s=3.0, claim_timeout_s=2.0, load_wait_s=60.0, progress_wait_s=20.0, read_timeout_s=5.0
)


@dataclass(frozen=True)
class Arrival:
    """A request to come.

    Attributes:
        root: Seed of the prompt's tokens; prompts with the same one begin alike.
        num_shared: Tokens of the prompt that come from the root; the others are its own.
        leaves_s: Its client leaves after so many seconds; 0: it waits for the end.
        router: Where it arrives.
    """

    at: float
    root: int
    num_shared: int
    num_own: int
    num_answer_tokens: int
    leaves_s: float = 0.0
    router: int = 0

    def prompt(self, number: int) -> list[int]:
        """Return its tokens."""
        shared = random.Random(self.root)
        own = random.Random(number * 1_000_003 + self.root)
        tokens = [shared.randrange(50_000) for _ in range(self.num_shared)]
        return tokens + [own.randrange(50_000) for _ in range(self.num_own)]


@dataclass(frozen=True)
class Fault:
    """What breaks: a node (`kill`), its connection to another one (`cut`), or nothing: it is upgraded
    (`drain`).
    """

    at: float
    kind: Kind
    node: int
    other: int = 0
    seconds: float = 1.0


@dataclass(frozen=True)
class Schedule:
    """Everything that decides a run.

    Attributes:
        roles: Of each node.
        nodes_per_router: Each router has a fleet of its own of so many nodes.
    """

    seed: int
    roles: Roles
    arrivals: tuple[tuple[int, Arrival], ...]
    faults: tuple[Fault, ...] = ()
    shape: Shape = field(default_factory=Shape)
    nodes_per_router: int = 8
    bytes_per_s: float = 1e6
    may_ask_both: bool = True

    @property
    def is_quiet(self) -> bool:
        """Whether nothing breaks, no client leaves and no pool is full.

        Then nothing may fail or wait for a lease to run out.
        """
        leaves = any(arrival.leaves_s for _, arrival in self.arrivals)
        return not (self.faults or leaves or self.shape.num_blocks < AMPLE)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, nodes {' '.join(self.roles)}, {self.shape}"]
        lines += [f"  request {number}: {arrival}" for number, arrival in self.arrivals]
        lines += [f"  fault: {fault}" for fault in self.faults]
        return "\n".join(lines)


class Run:
    """One run of a schedule.

    Args:
        on_progress: Called every now and then with the number of requests that are over, and the virtual
            time.
    """

    def __init__(
        self,
        schedule: Schedule,
        parts: Parts | None = None,
        on_progress: Callable[[int, float], None] = lambda done, now: None,
    ) -> None:
        self.schedule, self.parts = schedule, parts or Parts()
        self.chance = random.Random(schedule.seed)
        self.clock = Clock()
        latency_s = 0.0003
        self.network = Network(self.clock, self.chance, latency_s, schedule.bytes_per_s)
        self.counts: Counter[str] = Counter()
        self.nodes: list[SimulatedNode] = []
        self.clients: list[Client] = []
        self.num_over = 0
        self.num_tokens = 0
        self.ttft_s: list[float] = []
        self.itl_s: list[float] = []
        self._epoch = 0
        self._on_progress = on_progress
        for number, role in enumerate(schedule.roles):
            self.nodes.append(self._start(number, role))
        size = schedule.nodes_per_router
        exchange = self.parts.exchange or Exchange
        self.routers = [
            SimulatedRouter(
                self.clock,
                self.network,
                self.chance,
                self._finder(first, first + size),
                exchange,
                self.counts,
                may_ask_both=schedule.may_ask_both,
            )
            for first in range(0, len(self.nodes), size)
        ]

    def _finder(self, first: int, end: int) -> Callable[[], Sequence[SimulatedNode]]:
        return lambda: self.nodes[first:end]

    def _start(self, number: int, role: str) -> SimulatedNode:
        self._epoch += 1
        return SimulatedNode(
            *(self.clock, self.network, f"node{number}", self._epoch, role, self.schedule.shape),
            *(self.parts, self.counts),
        )

    # -- what happens ----------------------------------------------------------------------------------

    def _arrive(self, place: int) -> None:
        arrivals = self.schedule.arrivals
        if place + 1 < len(arrivals):
            self.clock.after(arrivals[place + 1][1].at - self.clock.now, self._arrive, place + 1)
        number, arrival = arrivals[place]
        prompt = arrival.prompt(number)
        expected = answer_to(prompt, arrival.num_answer_tokens)
        body = {
            "prompt": prompt,
            "max_tokens": arrival.num_answer_tokens,
            "temperature": 0,
            "stream": True,
        }
        router = self.routers[arrival.router % len(self.routers)]
        client = Client(router, f"r{number}", body, expected, self._over)
        if arrival.leaves_s:
            self.clock.after(arrival.leaves_s, client.leave)
        self.clients.append(client)
        client.begin()

    def _over(self, client: Client) -> None:
        """Check what a client has got."""
        self.num_over += 1
        if client.failure is not None:
            self.counts["failed requests"] += 1
            is_excused = self.counts["kills"] > 0
            require(is_excused, "no request fails if no node was killed", (client.name, client.failure))
        elif not client.has_left:
            promise = "an answer has all of its tokens"
            require(client.tokens == list(client.expected), promise, (client.name, client.tokens))
            self.counts["answered"] += 1
            self.ttft_s.append(client.token_times[0] - client.began)
            if len(client.token_times) > 1:
                span = client.token_times[-1] - client.token_times[0]
                self.itl_s.append(span / (len(client.token_times) - 1))
        self.num_tokens += len(client.tokens)
        if self.num_over % 100 == 0:
            self._on_progress(self.num_over, self.clock.now)

    def _break(self, fault: Fault) -> None:
        node = self.nodes[fault.node % len(self.nodes)]
        match fault.kind:
            case "kill":
                self.counts["kills"] += 1
                self._end_node(fault.node, restart_s=fault.seconds)
            case "cut":
                other = self.nodes[fault.other % len(self.nodes)]
                if other is not node:
                    self.counts["cuts"] += 1
                    self.network.cut(f"sim:{node.name}", f"sim:{other.name}", fault.seconds)
            case "drain" if node.is_ready:
                self.counts["drains"] += 1
                node.is_draining = True
                self._router_of(fault.node).node_leaves(node)
                self._await_drained(fault.node, node, self.clock.now + _DRAIN_S)

    def _router_of(self, number: int) -> SimulatedRouter:
        return self.routers[number % len(self.nodes) // self.schedule.nodes_per_router]

    def _await_drained(self, number: int, node: SimulatedNode, until: float) -> None:
        if node.is_dead:
            return
        if node.is_empty:
            node.check_empty()
            self._end_node(number, restart_s=0.5)
        elif self.clock.now >= until:
            require(False, "a node that drains becomes empty", node)
        else:
            self.clock.after(0.2, self._await_drained, number, node, until)

    def _end_node(self, number: int, restart_s: float) -> None:
        number %= len(self.nodes)
        node = self.nodes[number]
        if node.is_dead:
            return
        node.kill()
        self._router_of(number).node_died(node)
        self.clock.after(restart_s, self._restart, number, node.role)

    def _restart(self, number: int, role: str) -> None:
        self.nodes[number] = self._start(number, role)

    # -- all of it -------------------------------------------------------------------------------------

    def run(self) -> Run:
        """Run to the end, and check that everything is over.

        Raises:
            PromiseBroken: something happened that must not, or is left over.
        """
        schedule = self.schedule
        if schedule.arrivals:
            self.clock.after(schedule.arrivals[0][1].at, self._arrive, 0)
        for fault in schedule.faults:
            self.clock.after(fault.at, self._break, fault)
        moments = [each.at for _, each in schedule.arrivals[-1:]] + [each.at for each in schedule.faults]
        with self.clock.rules_the_loop(), quiet():
            try:
                is_over = self.clock.run(max(moments, default=0.0) + PATIENCE_S)
            except PromiseBroken:
                raise
            except Exception as error:
                raise PromiseBroken(
                    f"nothing raises an exception: {type(error).__name__}: {error}"
                ) from error
        waiting = [name for router in self.routers for name in router.clients]
        require(not waiting, "each request ends", waiting)
        require(is_over, "everything is over in the end", self.clock.now)
        for node in self.nodes:
            node.check_empty()
        if schedule.is_quiet:
            require(not self.counts["loads failed"], "no load fails without a fault", self.counts)
            require(not self.counts["offers expired"], "no offer expires without a fault", self.counts)
        return self


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the parts from logging: what they warn of is what a schedule does on purpose."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


# -- drawing -------------------------------------------------------------------------------------------


def draw(seed: int) -> Schedule:
    """Draw a small schedule: a few nodes with small pools, and a dozen requests.

    Every second one has no faults.
    """
    chance = random.Random(seed)
    roles = chance.choice(
        (
            ("kv_producer", "kv_consumer"),
            ("kv_both", "kv_both"),
            ("kv_producer", "kv_consumer", "kv_consumer"),
            ("kv_producer", "kv_producer", "kv_consumer", "kv_consumer"),
            ("kv_both",) * 3,
        )
    )
    num = chance.randint(2, 14)
    rate = chance.choice((2.0, 8.0, 30.0))
    arrivals, at = [], 0.0
    for number in range(num):
        at += chance.expovariate(rate)
        leaves_s = chance.expovariate(1.0) if chance.random() < 0.1 else 0.0
        shared = chance.choice((0, 6, 12, 30))
        arrival = Arrival(
            at, chance.randrange(3), shared, chance.randint(1, 40), chance.randint(1, 16), leaves_s
        )
        arrivals.append((number, arrival))
    faults: list[Fault] = []
    kinds: tuple[Kind, ...] = ("kill", "drain", "cut")
    for _ in range(chance.randint(1, 3) if seed % 2 else 0):
        node, other = chance.sample(range(len(roles)), 2)
        moment, kind = chance.uniform(0.0, at + 0.5), chance.choice(kinds)
        faults.append(Fault(moment, kind, node, other, chance.choice((0.3, 2.0))))
    longest = 2 * (-(-(30 + 40 + 16) // 4) + 1)
    shape = Shape(
        num_blocks=chance.choice((longest + 4, longest + 30, AMPLE)),
        max_num_seqs=chance.choice((2, 4, 8)),
        chunk_tokens=chance.choice((8, 16, 64)),
        handoff=_TINY,
    )
    bytes_per_s = chance.choice((2e3, 2e4, 1e7))
    return Schedule(seed, roles, tuple(arrivals), tuple(faults), shape, 8, bytes_per_s, chance.random() < 0.7)


def failure_of(schedule: Schedule, parts: Parts | None = None) -> str:
    """Run a schedule; return the promise that it breaks, or nothing."""
    return str(broken_by(Run(schedule, parts).run) or "")


def shrunk(schedule: Schedule, parts: Parts | None = None) -> Schedule:
    """Drop requests and faults while a schedule that fails still does."""
    return shrink(schedule, _smaller, lambda each: failure_of(each, parts), tries=200)


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    yield from (replace(schedule, faults=left) for left in without_some(schedule.faults))
    yield from (replace(schedule, arrivals=left) for left in without_some(schedule.arrivals) if left)


def explain(schedule: Schedule, parts: Parts | None = None) -> str:
    """Shrink a schedule that fails, and say how to repeat it."""
    found = shrunk(schedule, parts)
    repeat = f"make simulate SEED={schedule.seed} SCHEDULES=1"
    return f"{failure_of(found, parts)}\nof seed {schedule.seed}, shrunk to:\n{found}\nrepeat: {repeat}"
