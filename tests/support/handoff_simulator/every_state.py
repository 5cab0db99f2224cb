"""Every state that two or three nodes can reach within a bound: breadth first, so that the first
counterexample is a shortest one.

`State` lets `explore` drive `Simulation`, the world of the random schedules, through its operations.
Nothing here models the protocol: a state is the whole simulated world, with the real `NodeProtocol`s in it.
After each operation the promises of the world are checked. Then a copy of the state is driven to its end
without further faults, and must end with everything freed.

Two states count as one if they differ only in the numbers of connections and in the time that it is.
`fingerprint` walks over everything else, so a new attribute of the protocol is part of a state by itself.

    python -m tests.support.handoff_simulator.every_state --size large
"""

from __future__ import annotations

import io
import marshal
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from kvferry.connector.handoff.config import HandoffConfig
from kvferry.connector.handoff.events import Identity
from kvferry.connector.handoff.messages import Welcome
from kvferry.connector.handoff.pairing import NodePlanners
from kvferry.connector.planning.layout import KVLayout
from kvferry.transports.errors import KVTransferError
from kvferry.transports.regions import RegionPairs

from ..explore import Explored, PromiseBroken, Walk, counted, digest, explore, print_table
from .planted import CORRECT, Planted
from .simulated import SimulatedEngine, SimulatedRank, Spread
from .simulation import UPGRADED, Choice, Simulation, checked
from .world import FIRST_PEER_ID

#: Deadlines like the default ones, but without rounding: all times of a schedule are exact, so equal states
#: have equal times.
CONFIG = HandoffConfig(
    lease_s=30.0,
    connect_timeout_s=4.0,
    claim_timeout_s=12.0,
    load_wait_s=64.0,
    progress_wait_s=32.0,
    read_timeout_s=32.0,
    backoff_s=0.125,
    max_backoff_s=2.0,
    rendezvous_wait_s=28.0,
)

#: What `Simulation.offer` is told: a prompt of one block that is computed, one of two blocks of which none is
#: yet, and an offer that is announced and then withdrawn.
COMPUTED, EARLY, WITHDRAWN = 0, 40, 60
#: What `Simulation.claim` is told: the epoch of another start, another request, and another prompt.
OTHER_EPOCH, OTHER_REQUEST, OTHER_PROMPT = 2, 3, 8


@dataclass(frozen=True)
class Bound:
    """How far to go.

    Attributes:
        num_requests: Requests that are handed over, in either way.
        num_faults: Events of `faults` in one schedule.
        num_ticks: How often time passes, each time up to the next deadline.
        offers: The kinds of offers that a request may begin with.
        with_rendezvous: Whether a request may also begin at its consumer, before it is offered.
        faults: The kinds of events that are counted by `num_faults`.
        num_loads: Requests that name the same offer, each at another consumer. A further one is a fault.
        producers, consumers: The nodes that offer, and those that claim. A node may do both.
        addresses: Of the nodes.
        spreads: How each node's model is spread over ranks.
    """

    num_requests: int = 1
    num_faults: int = 1
    num_ticks: int = 0
    offers: tuple[int, ...] = (COMPUTED, EARLY)
    with_rendezvous: bool = False
    faults: frozenset[str] = frozenset(
        {"abort", "preempt", "drop", "give_up", "claim", "sever", "crash", "late", "change_weights"}
    )
    num_loads: int = 1
    producers: tuple[int, ...] = (0,)
    consumers: tuple[int, ...] = (1,)
    addresses: tuple[str, ...] = ("sim://a", "sim://c")
    spreads: tuple[Spread, ...] = (Spread(), Spread())

    def __str__(self) -> str:
        names = {COMPUTED: "computed", EARLY: "early", WITHDRAWN: "withdrawn"}
        ways = [names[kind] for kind in self.offers] + ["rendezvous"] * self.with_rendezvous
        ranks = " to ".join(str(spread.num_ranks) for spread in self.spreads)
        roles = {
            (1, 2): "1 producer, 2 consumers",
            (2, 1): "2 producers, 1 consumer",
            (2, 2): "each node in both roles",
        }
        parts = [
            f"{counted(self.num_requests, 'request')} ({', '.join(ways)})",
            counted(self.num_faults, "fault"),
            counted(self.num_ticks, "tick"),
            f"{ranks} ranks" if self.spreads != (Spread(),) * len(self.spreads) else "",
            roles.get((len(self.producers), len(self.consumers)), ""),
            f"{self.num_loads} loads of an offer" if self.num_loads > 1 else "",
        ]
        for role, nodes in (("producer", self.producers), ("consumer", self.consumers)):
            parts += [f"upgraded {role}" for node in nodes if self.addresses[node] == UPGRADED]
        return ", ".join(filter(None, parts))


class ExploredSimulation(Simulation):
    """A simulation in which names depend on as little as possible."""

    numbers_by_kind = True


@dataclass(eq=False)
class Exploration:
    """What all states of one exploration have in common.

    Attributes:
        ended: Fingerprints of the states whose fair completions were tried.
    """

    bound: Bound
    ended: set[bytes] = field(default_factory=set)


@dataclass
class State:
    """A simulated world, and how much of the bound is spent."""

    simulation: Simulation
    exploration: Exploration
    spent: Counter[str] = field(default_factory=Counter)
    has_fault: bool = False

    # -- what can happen next ------------------------------------------------------------------------

    def choices(self) -> Iterator[Choice]:
        """Everything that can happen next."""
        world, bound = self.simulation, self.exploration.bound
        for kind, num in (
            ("carry_out", world.num_waiting),
            ("deliver", world.num_in_flight),
            ("copy", world.num_reads),
        ):
            yield from ((kind, (index,)) for index in range(num))
        yield from self._requests()
        for which in self._living(bound.producers):
            if world.is_computing(which):
                yield "compute", (which, 0)
        for which in self._living(bound.consumers):
            engine = self._engines[which]
            waiting = len(set(engine.claims) - set(engine.loads))
            yield from (("load", (which, index, 0)) for index in range(waiting))
        yield from self._ticks()
        if self.spent["faults"] < bound.num_faults:
            yield from (each for each in self._faults() if each[0] in bound.faults)
        for which, engine in enumerate(self._engines):
            if engine.is_doomed:
                yield "kill", (which,)

    @property
    def _engines(self) -> list[SimulatedEngine]:
        return list(self.simulation.engines.values())

    def _living(self, nodes: Sequence[int]) -> list[int]:
        """Those of some nodes that are not down."""
        return [which for which in nodes if not self._engines[which].is_doomed]

    def _requests(self) -> Iterator[Choice]:
        world, bound = self.simulation, self.exploration.bound
        may_begin = self.spent["requests"] < bound.num_requests
        for which in self._living(bound.producers):
            # The request of a rendezvous comes to the producer, too, and is the same one.
            kinds = [kind for kind in bound.offers if may_begin or world.is_awaited(which, kind)]
            yield from (("offer", (which, kind)) for kind in kinds)
        if bound.with_rendezvous and may_begin:
            sizes = sorted({kind % 3 for kind in bound.offers})
            for which, producer, size in product(self._living(bound.consumers), bound.producers, sizes):
                if which != producer:
                    yield "meet", (which, producer, size)
        yield from self.unclaimed()

    def unclaimed(self) -> list[Choice]:
        """Requests that may still arrive and name an offer, each at any consumer."""
        return [each for each in self._claims() if self._is_expected(each)]

    def _claims(self) -> list[Choice]:
        """Requests that name an offer, at any consumer but the node that made it."""
        made, addresses = self.simulation.made, list(self.simulation.engines)
        consumers = self._living(self.exploration.bound.consumers)
        return [
            ("claim", (which, index, 0))
            for index, which in product(range(len(made)), consumers)
            if made[-1 - index].engine_id != addresses[which]
        ]

    def _claims_of(self, claim: Choice) -> str:
        """How `spent` counts the requests that name the same offer."""
        return f"claims of {self.simulation.num_made - claim[1][1]}"

    def _claims_at(self, claim: Choice) -> str:
        """How `spent` counts those of them at the same consumer."""
        return f"{self._claims_of(claim)} by {claim[1][0]}"

    def _is_expected(self, claim: Choice) -> bool:
        """Whether a request that names an offer is one of those that a router sends."""
        num = self.spent[self._claims_of(claim)]
        return num < self.simulation.num_offered_loads and not self.spent[self._claims_at(claim)]

    def _ticks(self) -> Iterator[Choice]:
        world, bound = self.simulation, self.exploration.bound
        dues = world.deadlines()
        if any(due <= world.now for due in dues):
            yield "tick", (0.0, 0)  # a node that was late catches up
        later = [due for due in dues if world.now < due < math.inf]
        if later and self.spent["ticks"] < bound.num_ticks:
            seconds = min(later) - world.now
            yield "tick", (seconds, 0)
            if self.spent["faults"] < bound.num_faults and "late" in bound.faults:
                yield from (("tick", (seconds, 1 << index)) for index in range(len(world.ranks)))

    def _faults(self) -> Iterator[Choice]:
        world, bound = self.simulation, self.exploration.bound
        for which in self._living(bound.producers):
            yield from (("abort", (which, index)) for index in range(len(self._engines[which].offers)))
            if world.is_computing(which):
                yield "preempt", (which, 0)
            yield from (
                ("give_up", (which, index))
                for index in range(world.num_made)
                if world.made[-1 - index].engine_id == self._engines[which].address
            )
        for which in self._living(bound.consumers):
            yield from (("drop", (which, index)) for index in range(len(self._engines[which].claims)))
            if world.num_made:
                changes = (OTHER_EPOCH, OTHER_REQUEST, OTHER_PROMPT)
                yield from (("claim", (which, 0, change)) for change in changes)
        if len(bound.consumers) > 1:
            # A router that has lost an answer asks another node.
            yield from (each for each in self._claims() if not self._is_expected(each))
        yield from (("sever", args) for args in self._breaks())
        for index, engine in enumerate(self._engines):
            if not engine.is_doomed:
                sent = [end for rank in engine.ranks for end in rank.links.values()]
                yield "crash", (index, False)
                if any(world.has_messages(*end) for end in sent):
                    yield "crash", (index, True)
                yield "change_weights", (index, 1)

    def _breaks(self) -> Iterator[tuple[int, int]]:
        """Arguments of `Simulation.sever`: each connection once, with every loss that makes a difference."""
        world, seen = self.simulation, set[int]()
        for index, (rank, peer_id) in enumerate(world.links()):
            if peer_id in seen:
                continue
            remote, remote_peer_id = rank.links[peer_id]
            seen.add(remote_peer_id)
            both = world.has_messages(rank, peer_id) | world.has_messages(remote, remote_peer_id) << 1
            yield from ((index, lost) for lost in range(4) if not lost & ~both)

    def do(self, choice: Choice) -> tuple[()]:
        """Let it happen."""
        name, args = choice
        world = self.simulation
        is_fault = name in ("abort", "preempt", "drop", "give_up", "sever", "crash", "change_weights")
        is_fault |= name == "tick" and args[1] != 0
        is_fault |= name == "claim" and (args[2] != 0 or not self._is_expected(choice))
        self.spent["faults"] += is_fault
        # After any other fault, a handoff may have to wait for a deadline.
        is_ordered = name in ("abort", "preempt", "drop")
        self.has_fault |= (is_fault and not is_ordered) or (name == "tick" and args[0] > 0)
        self.spent["ticks"] += name == "tick" and args[0] > 0
        if name == "meet" or (name == "offer" and not world.is_awaited(*args)):
            self.spent["requests"] += 1
        if name == "claim" and args[2] == 0 and self._is_expected(choice):
            self.spent[self._claims_of(choice)] += 1
            if world.num_offered_loads > 1:  # otherwise it makes no difference
                self.spent[self._claims_at(choice)] = 1
        checked(world, partial(getattr(world, name), *args))
        if name == "offer" and world.made[-1].is_rendezvous:
            self.spent[f"claims of {world.num_made}"] += 1  # it was claimed before it was made
        return ()

    def labels(self) -> Counter[str]:
        """The ends of offers and loads since the state before."""
        found = self.simulation.outcomes.copy()
        self.simulation.outcomes.clear()
        return found

    def tell(self, choices: Sequence[Choice]) -> list[str]:
        """Write in words what happens, and what a fair completion does then."""
        told = self.simulation.told = []
        try:
            for choice in choices:
                self.do(choice)
            again, num_told = self.keep(), len(told)
            self.exploration.ended.clear()
            for complete in (State._complete_in_time, State._complete_at_once):
                state = again()
                told = [*told[:num_told], "from here on without further faults:"]
                state.simulation.told = told
                complete(state)
        except PromiseBroken:
            pass  # it was broken before, so it is broken again
        return told

    # From each state on, all that can happen without time passing happens first. Many states then are one,
    # whose end is tried once. Both use the state up.

    def check(self, again: Callable[[], State]) -> None:
        """Try both fair completions of a state."""
        self._complete_in_time()
        if not self.has_fault:
            again()._complete_at_once()

    def _complete_at_once(self) -> None:
        """Let every request arrive; then each handoff ends although no time passes."""
        world = self.simulation
        while claims := self.unclaimed():
            self.do(claims[0])
        checked(world, world.settle)
        if self._is_new_end(b"at once"):
            checked(world, world.finish_at_once)
            checked(world, world.finish)

    def _complete_in_time(self) -> None:
        """Give no more orders, and let time pass until nothing is left."""
        world = self.simulation
        checked(world, world.finish_orders)
        if self._is_new_end(b"in time"):
            checked(world, world.wait_for_the_end)

    def _is_new_end(self, kind: bytes) -> bool:
        found, ended = kind + self.fingerprint(with_spent=False), self.exploration.ended
        is_new = found not in ended
        ended.add(found)
        return is_new

    # -- copies ----------------------------------------------------------------------------------------

    def keep(self) -> Callable[[], State]:
        """Return what makes a copy of this state."""
        packed = io.BytesIO()
        _Pickler(packed, pickle.HIGHEST_PROTOCOL).dump(self)
        return partial(pickle.loads, packed.getvalue())

    def fingerprint(self, with_spent: bool = True) -> bytes:
        """A digest of all that can make a difference to what happens from here on.

        Args:
            with_spent: Whether what is left of the bound counts, too.
        """
        world = self.simulation
        spent = sorted((key, num) for key, num in self.spent.items() if num) if with_spent else []
        walked = _Walk(world.now).of_world(world)
        return digest(marshal.dumps((spent, self.has_fault, walked), 2))


def new_state(bound: Bound, planted: Planted = CORRECT) -> State:
    """Return the state in which nothing has happened yet."""
    classes = (planted.producer, planted.consumer, planted.checks_after_copy)
    simulation = ExploredSimulation(*classes, bound.spreads, bound.addresses, CONFIG)
    simulation.num_offered_loads = bound.num_loads
    return State(simulation, Exploration(bound))


def explore_bound(bound: Bound, planted: Planted = CORRECT, *, shows_progress: bool = False) -> Explored:
    """Go through every state within a bound.

    Raises:
        Counterexample: a promise does not hold.
    """
    begun = new_state(bound, planted)
    again = begun.keep()
    explored = explore(again, shows_progress=shows_progress)
    explored.num_ends = len(begun.exploration.ended)
    return explored


# -- copies and fingerprints ---------------------------------------------------------------------------

#: Values that never change and are large: copies of a state share them.
_shared: list[Any] = []
_index_of: dict[int, int] = {}


def _shared_at(index: int) -> Any:
    return _shared[index]


def _error(kind: type[KVTransferError], args: tuple[Any, ...]) -> KVTransferError:
    return kind.__new__(kind, *args)


class _Pickler(pickle.Pickler):
    """Copies a state, except for what never changes, and for planners, which are made again when they are
    needed.
    """

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is NodePlanners:
            return NodePlanners, (value._local, value._rank)
        if kind in (KVLayout, HandoffConfig, Exploration):
            if id(value) not in _index_of:
                _index_of[id(value)] = len(_shared)
                _shared.append(value)
            return _shared_at, (_index_of[id(value)],)
        if isinstance(
            value, KVTransferError
        ):  # some take their attributes by keyword, which pickle cannot know
            return _error, (kind, value.args), vars(value)
        return NotImplemented


#: Numbers of seconds that are no points in time.
_DURATIONS = frozenset({"timeout_s"})


class _Walk(Walk):
    """One walk over a simulated world.

    Args:
        now: Times count from here.
    """

    ignored = frozenset(
        {
            *("_config", "_planners", "outcomes", "_shared", "_layout", "_welcome", "_classes"),
            *("traceparent", "spread"),
        }
    )
    plain = frozenset({str, bytes, bool, type(None)})

    def __init__(self, now: float) -> None:
        super().__init__()
        self._now = now
        self._peers: dict[int, int] = {}

    def of_world(self, world: Simulation) -> Any:
        """Walk over everything that is there."""
        names = (world.made, world._meetings, world._loaded, world._weights, list(world._contents))
        return self.of([list(world.engines.values()), *names])

    def of(self, value: Any) -> Any:
        kind = type(value)
        if kind is int:
            if FIRST_PEER_ID < value < 2**40:
                return ("peer", self._peers.setdefault(value, len(self._peers)))
            return value
        if kind is float:
            return value - self._now if math.isfinite(value) else str(value)
        if kind is np.ndarray:
            return value.tobytes()
        if kind is RegionPairs:
            return value.table.tobytes()
        if kind is Identity or kind is Welcome:
            return (value.engine_id, value.epoch, value.digest)
        if kind is KVLayout or kind is range or isinstance(value, Simulation):
            return None  # of the node, as its address says
        if kind is partial:
            return (self.of(value.func), self.of(value.args))
        if isinstance(value, KVTransferError):
            return kind.__name__  # nothing depends on its text
        return super().of(value)

    def of_object(self, value: Any) -> Any:
        if isinstance(value, SimulatedRank) and value.is_dead:
            # Only its memory still counts, for peers that are reading it.
            return ("dead", value.identity.epoch, value.pool.tobytes(), tuple(value.guards), value.number)
        return [
            each if name in _DURATIONS else self.of(each)
            for name, each in vars(value).items()
            if name not in self.ignored
        ]


def three_nodes(num_requests: int, num_faults: int, num_ticks: int, **more: Any) -> Bound:
    """Three nodes of one rank."""
    addresses = ("sim://a", "sim://c", "sim://d")
    return Bound(
        num_requests, num_faults, num_ticks, (COMPUTED,), addresses=addresses, spreads=(Spread(),) * 3, **more
    )


#: Bounds that `make test` goes through, in seconds.
SMALL = (
    Bound(1, 0, 1, (COMPUTED, EARLY, WITHDRAWN)),
    Bound(1, 0, 1, (COMPUTED,), with_rendezvous=True),
    Bound(1, 1, 0, (COMPUTED,)),
    three_nodes(1, 0, 1, producers=(0,), consumers=(1, 2), with_rendezvous=True),
)
#: Bounds that `make prove` goes through, in minutes.
LARGE = (
    *SMALL,
    Bound(2, 0, 0, (COMPUTED,), with_rendezvous=True),
    Bound(1, 1, 1, (COMPUTED,), with_rendezvous=True),
    Bound(1, 2, 0, (COMPUTED,)),
    Bound(1, 1, 0, (COMPUTED,), addresses=(UPGRADED, "sim://c")),
    Bound(1, 1, 0, (COMPUTED,), addresses=("sim://a", UPGRADED)),
    Bound(1, 0, 0, (COMPUTED, EARLY), spreads=(Spread(2), Spread(1))),
    three_nodes(1, 1, 0, producers=(0,), consumers=(1, 2)),
    three_nodes(1, 0, 0, producers=(0,), consumers=(1, 2), num_loads=2),
    three_nodes(1, 0, 1, producers=(0,), consumers=(1, 2), num_loads=2),
    three_nodes(2, 0, 0, producers=(0,), consumers=(1, 2)),
    three_nodes(2, 0, 0, producers=(0, 1), consumers=(2,)),
    Bound(2, 0, 0, (COMPUTED,), producers=(0, 1), consumers=(0, 1)),
)


if __name__ == "__main__":
    explore_aloud = partial(explore_bound, shows_progress=True)
    print_table(SMALL, LARGE, explore_aloud, "two or three nodes")
