"""Every state that two or three nodes can reach within a bound: breadth first, so that the first
counterexample is a shortest one.

`Explorer` drives `Simulation`, the world of the random schedules, through its operations. Nothing here models
the protocol: a state is the whole simulated world, with the real `NodeProtocol`s in it. After each operation
the promises of the world are checked. Then a copy of the state is driven to its end without further faults,
and must end with everything freed.

Two states count as one if they differ only in the numbers of connections and in the time that it is.
`fingerprint` walks over everything else, so a new attribute of the protocol is part of a state by itself.

    python -m tests.support.handoff_simulator.every_state --size large
"""

from __future__ import annotations

import argparse
import hashlib
import io
import marshal
import math
import pickle
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import product
from types import MethodType
from typing import Any, TextIO

import numpy as np

from kvferry.connector.handoff.config import HandoffConfig
from kvferry.connector.handoff.consumer import ConsumerProtocol
from kvferry.connector.handoff.events import Identity
from kvferry.connector.handoff.messages import Welcome, decode
from kvferry.connector.handoff.pairing import NodePlanners
from kvferry.connector.handoff.producer import ProducerProtocol
from kvferry.connector.planning.layout import KVLayout
from kvferry.transports.errors import KVTransferError
from kvferry.transports.regions import RegionPairs

from .simulated import PromiseBroken, SimulatedEngine, SimulatedRank, Spread
from .simulation import UPGRADED, Simulation, checked
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

#: An operation of `Simulation` and its arguments.
Choice = tuple[str, tuple[Any, ...]]


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
            f"{self.num_requests} requests ({', '.join(ways)}), {self.num_faults} faults, {self.num_ticks} ticks",
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


@dataclass
class State:
    """A simulated world, and how much of the bound is spent."""

    simulation: Simulation
    spent: Counter[str] = field(default_factory=Counter)
    has_fault: bool = False

    # -- what can happen next ------------------------------------------------------------------------

    def choices(self, bound: Bound) -> Iterator[Choice]:
        """Everything that can happen next."""
        world = self.simulation
        for kind, num in (
            ("carry_out", world.num_waiting),
            ("deliver", world.num_in_flight),
            ("copy", world.num_reads),
        ):
            yield from ((kind, (index,)) for index in range(num))
        yield from self._requests(bound)
        for which in self._living(bound.producers):
            if world.is_computing(which):
                yield "compute", (which, 0)
        for which in self._living(bound.consumers):
            engine = self._engines[which]
            waiting = len(set(engine.claims) - set(engine.loads))
            yield from (("load", (which, index, 0)) for index in range(waiting))
        yield from self._ticks(bound)
        if self.spent["faults"] < bound.num_faults:
            yield from (each for each in self._faults(bound) if each[0] in bound.faults)
        for which, engine in enumerate(self._engines):
            if engine.is_doomed:
                yield "kill", (which,)

    @property
    def _engines(self) -> list[SimulatedEngine]:
        return list(self.simulation.engines.values())

    def _living(self, nodes: Sequence[int]) -> list[int]:
        """Those of some nodes that are not down."""
        return [which for which in nodes if not self._engines[which].is_doomed]

    def _requests(self, bound: Bound) -> Iterator[Choice]:
        world = self.simulation
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
        yield from self.unclaimed(bound)

    def unclaimed(self, bound: Bound) -> list[Choice]:
        """Requests that may still arrive and name an offer, each at any consumer."""
        return [each for each in self._claims(bound) if self._is_expected(each)]

    def _claims(self, bound: Bound) -> list[Choice]:
        """Requests that name an offer, at any consumer but the node that made it."""
        made, addresses = self.simulation.made, list(self.simulation.engines)
        return [
            ("claim", (which, index, 0))
            for index, which in product(range(len(made)), self._living(bound.consumers))
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

    def _ticks(self, bound: Bound) -> Iterator[Choice]:
        world = self.simulation
        dues = world.deadlines()
        if any(due <= world.now for due in dues):
            yield "tick", (0.0, 0)  # a node that was late catches up
        later = [due for due in dues if world.now < due < math.inf]
        if later and self.spent["ticks"] < bound.num_ticks:
            seconds = min(later) - world.now
            yield "tick", (seconds, 0)
            if self.spent["faults"] < bound.num_faults and "late" in bound.faults:
                yield from (("tick", (seconds, 1 << index)) for index in range(len(world.ranks)))

    def _faults(self, bound: Bound) -> Iterator[Choice]:
        world = self.simulation
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
            yield from (each for each in self._claims(bound) if not self._is_expected(each))
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

    def take(self, choice: Choice) -> None:
        """Let it happen.

        Raises:
            PromiseBroken: a promise of the protocol does not hold.
        """
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

    def tell(self, choice: Choice) -> str:
        """Say in words what a choice is in this state."""
        name, args = choice
        return _TELLERS[name](self.simulation, *args)

    # -- copies ----------------------------------------------------------------------------------------

    def pack(self) -> bytes:
        """Keep a copy."""
        packed = io.BytesIO()
        _Pickler(packed, pickle.HIGHEST_PROTOCOL).dump(self)
        return packed.getvalue()

    @staticmethod
    def unpack(packed: bytes) -> State:
        """Make a state of a copy."""
        state: State = pickle.loads(packed)
        return state

    def fingerprint(self, with_spent: bool = True) -> bytes:
        """A digest of all that can make a difference to what happens from here on.

        Args:
            with_spent: Whether what is left of the bound counts, too.
        """
        world = self.simulation
        spent = sorted((key, num) for key, num in self.spent.items() if num) if with_spent else []
        walked = _Walk(world.now).of_world(world)
        return hashlib.blake2b(marshal.dumps((spent, self.has_fault, walked), 2), digest_size=16).digest()


def new_state(
    bound: Bound,
    producer_class: type[ProducerProtocol] = ProducerProtocol,
    consumer_class: type[ConsumerProtocol] = ConsumerProtocol,
    checks_after_copy: bool = True,
) -> State:
    """Return the state in which nothing has happened yet."""
    classes = (producer_class, consumer_class, checks_after_copy)
    simulation = ExploredSimulation(*classes, bound.spreads, bound.addresses, CONFIG)
    simulation.num_offered_loads = bound.num_loads
    return State(simulation)


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
        if kind is KVLayout or kind is HandoffConfig:
            if id(value) not in _index_of:
                _index_of[id(value)] = len(_shared)
                _shared.append(value)
            return _shared_at, (_index_of[id(value)],)
        if isinstance(
            value, KVTransferError
        ):  # some take their attributes by keyword, which pickle cannot know
            return _error, (kind, value.args), vars(value)
        return NotImplemented


#: Attributes that make no difference to what happens: constants, caches, statistics, and the parts of the
#: world itself that `_Walk.of_world` names one by one.
_IGNORED = frozenset(
    {
        "_config",
        "_planners",
        "outcomes",
        "_shared",
        "_layout",
        "_welcome",
        "_classes",
        "traceparent",
        "spread",
    }
)
#: Types whose values stand for themselves.
_PLAIN = frozenset({str, bytes, bool, type(None)})
#: Numbers of seconds that are no points in time.
_DURATIONS = frozenset({"timeout_s"})


class _Walk:
    """One walk over a world, from object to object, in an order that depends only on the state.

    Args:
        now: Times count from here.
    """

    def __init__(self, now: float) -> None:
        self._now = now
        self._peers: dict[int, int] = {}
        self._seen: dict[int, int] = {}

    def of_world(self, world: Simulation) -> Any:
        """Walk over everything that is there."""
        names = (world.made, world._meetings, world._loaded, world._weights, list(world._contents))
        return self.of([list(world.engines.values()), *names])

    def of(self, value: Any) -> Any:
        """Turn a value into one of plain tuples, strings and numbers."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            if FIRST_PEER_ID < value < 2**40:
                return ("peer", self._peers.setdefault(value, len(self._peers)))
            return value
        if kind is float:
            return value - self._now if math.isfinite(value) else str(value)
        if kind is tuple or kind is list or kind is deque:
            return [self.of(each) for each in value]
        if kind is dict or kind is defaultdict:
            return [(self.of(key), self.of(each)) for key, each in value.items()]
        if kind is set or kind is frozenset:
            return sorted(map(self.of, value))
        if kind is np.ndarray:
            return value.tobytes()
        if kind is RegionPairs:
            return value.table.tobytes()
        if kind is Identity or kind is Welcome:
            return (value.engine_id, value.epoch, value.digest)
        if kind is KVLayout or kind is range:
            return None  # of the node, as its address says
        if kind is partial:
            return (self.of(value.func), self.of(value.args))
        if kind is MethodType:
            owner = value.__self__
            return (value.__name__, None if isinstance(owner, Simulation) else self.of(owner))
        if isinstance(value, KVTransferError):
            return kind.__name__  # nothing depends on its text
        if isinstance(value, Enum):
            return value.name
        return self._of_object(value)

    def _of_object(self, value: Any) -> Any:
        if id(value) in self._seen:
            return ("again", self._seen[id(value)])
        self._seen[id(value)] = len(self._seen)
        if isinstance(value, SimulatedRank) and value.is_dead:
            # Only its memory still counts, for peers that are reading it.
            return ("dead", value.identity.epoch, value.pool.tobytes(), tuple(value.guards), value.number)
        return (
            type(value).__name__,
            [
                each if name in _DURATIONS else self.of(each)
                for name, each in vars(value).items()
                if name not in _IGNORED
            ],
        )


# -- words ---------------------------------------------------------------------------------------------


def _engine(world: Simulation, which: int) -> SimulatedEngine:
    return list(world.engines.values())[which]


def _node(world: Simulation, which: int) -> str:
    return _engine(world, which).address.removeprefix("sim://")


def _waiting(world: Simulation, which: int) -> list[str]:
    engine = _engine(world, which)
    return sorted(set(engine.claims) - set(engine.loads))


def _rank_name(rank: SimulatedRank) -> str:
    name = rank.engine.address.removeprefix("sim://")
    return f"{name}/{rank.number}" if len(rank.engine.ranks) > 1 else name


def _tell_order(world: Simulation, which: int) -> str:
    rank = [rank for rank in world.ranks if rank.orders][which]
    order: Any = rank.orders[0]
    names = [str(arg) for arg in order.args if isinstance(arg, str) and arg]
    return f"{_rank_name(rank)} carries out the order {order.func.__name__.strip('_')} {' '.join(names)}".rstrip()


def _tell_delivery(world: Simulation, which: int) -> str:
    waiting = [(rank, peer) for rank in world.ranks for peer, box in rank.inbox.items() if box]
    rank, peer_id = waiting[which]
    event = rank.inbox[peer_id][0]
    if isinstance(event, bool):
        return f"{_rank_name(rank)} learns that {'a consumer' if event else 'its producer'} is connected"
    if isinstance(event, bytes):
        try:
            message = decode(event, rank.protocol.version_with(peer_id), rank.protocol.producer.spoken)
        except KVTransferError as error:
            return f"{_rank_name(rank)} gets a message that it refuses: {error}"
        shown = {
            name: getattr(message, name)
            for name in ("request_id", "num_ready", "delivered", "reason")
            if hasattr(message, name)
        }
        words = ", ".join(f"{name}={each!r}" for name, each in shown.items())
        return f"{_rank_name(rank)} receives {type(message).__name__}({words})"
    return f"{_rank_name(rank)} learns that a connection is lost: {event}"


def _tell_copy(world: Simulation, which: int) -> str:
    rank, key = [(rank, key) for rank in world.ranks for key in rank.reads][which]
    read = rank.reads[key]
    if read.error is not None:
        return f"{_rank_name(rank)}'s read for {key[0]} fails: {read.error}"
    if read.num_copied < len(read.order.pairs):
        return (
            f"{_rank_name(rank)} copies region {read.num_copied + 1} of {len(read.order.pairs)} for {key[0]}"
        )
    return f"{_rank_name(rank)} checks the guard of its read for {key[0]}"


def _tell_offer(world: Simulation, which: int, kind: int) -> str:
    num_blocks = 1 + kind % 3
    what = "announces and withdraws an offer" if kind >= WITHDRAWN else "offers a prompt"
    how = "that is still being computed" if EARLY <= kind < WITHDRAWN else ""
    return f"{_node(world, which)}'s engine {what} of {num_blocks} block(s) {how}".rstrip()


def _tell_claim(world: Simulation, which: int, offer: int, change: int) -> str:
    tampered = {
        0: "",
        OTHER_EPOCH: ", with the epoch of another start",
        OTHER_REQUEST: ", under the name of another request",
        OTHER_PROMPT: ", with another prompt",
    }[change]
    return f"{_node(world, which)}'s engine gets a request that names {world.made[-1 - offer].request_id}{tampered}"


def _tell_tick(world: Simulation, seconds: float, late: int = 0) -> str:
    names = [_rank_name(rank) for index, rank in enumerate(world.ranks) if late >> index & 1]
    return f"{seconds:g} s pass" + (f", and {', '.join(names)} does not run meanwhile" if names else "")


def _tell_break(world: Simulation, which: int, lost: int) -> str:
    rank, peer_id = world.links()[which]
    ends = (rank, rank.links[peer_id][0])
    names = [_rank_name(end) for bit, end in enumerate(ends) if lost >> bit & 1]
    losses = f", with what is in flight to {' and '.join(names)}" if names else ""
    return f"the connection of {_rank_name(ends[0])} and {_rank_name(ends[1])} breaks{losses}"


_TELLERS: Mapping[str, Callable[..., str]] = {
    "carry_out": _tell_order,
    "deliver": _tell_delivery,
    "copy": _tell_copy,
    "offer": _tell_offer,
    "claim": _tell_claim,
    "tick": _tell_tick,
    "meet": lambda world, which, producer, num: (
        f"{_node(world, which)}'s engine gets a request for a rendezvous at {_node(world, producer)}, of {1 + num % 3} block(s)"
    ),
    "compute": lambda world, which, _: f"{_node(world, which)}'s engine computes one more block",
    "load": lambda world, which, request, _: (
        f"{_node(world, which)}'s engine gives blocks to {_waiting(world, which)[request]}"
    ),
    "abort": lambda world, which, offer: (
        f"{_node(world, which)}'s engine aborts {sorted(_engine(world, which).offers)[offer]}"
    ),
    "preempt": lambda world, which, _: f"{_node(world, which)}'s engine preempts a request that it offers",
    "give_up": lambda world, which, offer: (
        f"the router tells {_node(world, which)} that no consumer comes for {world.made[-1 - offer].request_id}"
    ),
    "drop": lambda world, which, request: (
        f"{_node(world, which)}'s engine aborts {sorted(_engine(world, which).claims)[request]}"
    ),
    "change_weights": lambda world, which, _: f"{_node(world, which)}'s weights change",
    "sever": _tell_break,
    "crash": lambda world, which, is_mute: (
        f"{_node(world, which)} crashes{', and what it sent last is lost' if is_mute else ''}"
    ),
    "kill": lambda world, which: f"{_node(world, which)} starts again",
}


def _tell_all(state: State) -> list[str]:
    """Write in words what happens to a state from now on."""
    told: list[str] = []
    for name in _TELLERS:
        operation = partial(_tell_and_do, state.simulation, name, getattr(state.simulation, name), told)
        setattr(state.simulation, name, operation)
    return told


def _tell_and_do(
    world: Simulation, name: str, operation: Callable[..., Any], told: list[str], *args: Any
) -> Any:
    try:
        told.append(_TELLERS[name](world, *args))
    except IndexError:
        pass  # there is nothing that it could happen to
    return operation(*args)


# -- exploration ---------------------------------------------------------------------------------------


#: How much of the completion a counterexample shows; one that never ends repeats itself.
_MOST_TOLD = 40


class Counterexample(AssertionError):
    """A shortest way to a state in which a promise does not hold, or from which a fair completion does not
    end well.

    Attributes:
        promise: The promise.
        steps: What happened, in words.
        completion: What happened after that, without further faults, until the promise was broken.
    """

    def __init__(self, promise: str, steps: list[str], completion: list[str], states: str) -> None:
        lines = [f"{number:3}. {step}" for number, step in enumerate([*steps, *completion[:_MOST_TOLD]], 1)]
        if completion:
            lines.insert(len(steps), "from here on without further faults:")
        if len(completion) > _MOST_TOLD:
            lines.append(f"and so on, {len(completion) - _MOST_TOLD} more")
        super().__init__("\n".join([promise, *lines, f"states: {states}"]))
        self.promise = promise
        self.steps = steps
        self.completion = completion


@dataclass
class Explored:
    """What an exploration saw.

    Attributes:
        num_states: Different states.
        num_steps: Events that were tried, from all states.
        num_ends: Different states in which a fair completion began to wait for deadlines.
        depth: Events in the longest of the shortest ways to a state.
        outcomes: Ends of offers and loads, of all that were tried.
        is_whole: Whether every state within the bound was seen.
    """

    num_states: int = 0
    num_steps: int = 0
    num_ends: int = 0
    depth: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    is_whole: bool = True


class Explorer:
    """Goes through every state within a bound.

    Args:
        producer_class, consumer_class, checks_after_copy: As for `Simulation`.
        max_states: Stop after so many states; then the result is not whole.
        progress: Where to write a line every few seconds.
    """

    def __init__(
        self,
        bound: Bound,
        producer_class: type[ProducerProtocol] = ProducerProtocol,
        consumer_class: type[ConsumerProtocol] = ConsumerProtocol,
        checks_after_copy: bool = True,
        *,
        max_states: float = math.inf,
        progress: TextIO | None = None,
    ) -> None:
        self._bound = bound
        self._max_states = max_states
        self._progress = progress
        self._seen: dict[bytes, int] = {}
        self._ways: list[
            tuple[int, Choice | None]
        ] = []  # by state: the one before it, and what happened there
        self._ended: set[bytes] = set()
        self._explored = Explored()
        self._make = partial(new_state, bound, producer_class, consumer_class, checks_after_copy)

    def run(self) -> Explored:
        """Explore.

        Raises:
            Counterexample: a promise does not hold.
        """
        started = last = time.monotonic()
        explored = self._explored
        first = self._make()
        waiting = deque([(0, 0, first.pack())])
        self._note(first.fingerprint(), 0, None)
        while waiting and len(self._ways) < self._max_states:
            number, depth, packed = waiting.popleft()
            explored.depth = depth
            choices = list(State.unpack(packed).choices(self._bound))
            for choice in choices:
                state = State.unpack(packed)
                explored.num_steps += 1
                try:
                    state.take(choice)
                    found = state.fingerprint()
                    if found in self._seen:
                        continue
                    explored.outcomes.update(state.simulation.outcomes)
                    state.simulation.outcomes.clear()
                    new = self._note(found, number, choice)
                    copy = state.pack()
                    self._complete_in_time(state)
                    if not state.has_fault:
                        self._complete_at_once(State.unpack(copy))
                except PromiseBroken as broken:
                    raise self._counterexample(number, choice, broken) from broken
                waiting.append((new, depth + 1, copy))
            if self._progress is not None and time.monotonic() - last > 5.0:
                last = time.monotonic()
                self._progress.write(
                    f"{last - started:6.0f} s: {len(self._ways)} states, {len(waiting)} still to be looked at, depth {depth}\n"
                )
                self._progress.flush()
        explored.is_whole = not waiting
        explored.num_states, explored.num_ends = len(self._ways), len(self._ended)
        explored.seconds = time.monotonic() - started
        return explored

    def _note(self, found: bytes, before: int, choice: Choice | None) -> int:
        self._seen[found] = number = len(self._ways)
        self._ways.append((before, choice))
        return number

    # From each state on, all that can happen without time passing happens first. Many states then are one,
    # whose end is tried once. Both use the state up.

    def _complete_at_once(self, state: State) -> None:
        """Let every request arrive; then each handoff ends although no time passes."""
        world = state.simulation
        while claims := state.unclaimed(self._bound):
            state.take(claims[0])
        checked(world, world.settle)
        if self._is_new_end(state, b"at once"):
            checked(world, world.finish_at_once)
            checked(world, world.finish)

    def _complete_in_time(self, state: State) -> None:
        """Give no more orders, and let time pass until nothing is left."""
        world = state.simulation
        checked(world, world.finish_orders)
        if self._is_new_end(state, b"in time"):
            checked(world, world.wait_for_the_end)

    def _is_new_end(self, state: State, kind: bytes) -> bool:
        found = kind + state.fingerprint(with_spent=False)
        is_new = found not in self._ended
        self._ended.add(found)
        return is_new

    def _counterexample(self, number: int, choice: Choice, broken: PromiseBroken) -> Counterexample:
        choices = [choice]
        while (way := self._ways[number])[1] is not None:
            choices.append(way[1])
            number = way[0]
        state, steps = self._make(), []
        told: list[str] = []
        try:
            for each in reversed(choices):
                steps.append(state.tell(each))
                state.take(each)
            packed = state.pack()
            self._ended.clear()
            for complete in (self._complete_in_time, self._complete_at_once):
                state = State.unpack(packed)
                told = _tell_all(state)
                complete(state)
        except PromiseBroken:
            pass  # it was broken before, so it is broken again
        return Counterexample(broken.promise, steps, told, broken.args[0].partition("; ")[2])


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Go through every state of two nodes within some bounds.")
    parser.add_argument(
        "--size", choices=("small", "large"), default="small", help="which bounds; default: small"
    )
    parser.add_argument("--max-states", type=int, default=10**9, help="stop each bound after so many states")
    args = parser.parse_args()
    rows = []
    for bound in SMALL if args.size == "small" else LARGE:
        print(f"{bound}:", flush=True)
        explored = Explorer(bound, max_states=args.max_states, progress=sys.stdout).run()
        states = f"{explored.num_states:,}" if explored.is_whole else f"{explored.num_states:,} (stopped)"
        rows.append(
            f"| {bound} | {states} | {explored.num_steps:,} | {explored.num_ends:,} | {explored.depth} "
            f"| {explored.seconds:.0f} s |"
        )
    print(
        "\n| bound | states | events tried | different ends | longest way | time |\n|---|---|---|---|---|---|"
    )
    print("\n".join(rows))


if __name__ == "__main__":
    main()
