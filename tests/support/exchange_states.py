"""Every state that a request's exchange can reach within a bound: breadth first, so that the first
counterexample is a shortest one.

`explore_every` lets the schedules of `exchange_simulator` draw everything that can be drawn. A state is a
whole schedule with the real `Exchange` in it. An exchange cannot be copied, so a state is kept as the draws
that lead to it, and made again from them. What each step promises is checked after it, and what the end
promises at each end. From every state some end must be reachable.

    python -m tests.support.exchange_states --faults 3
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from itertools import product
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TextIO

from kvferry.router.answer.exchange import Action, Begun, Exchange
from kvferry.router.choice.ways import Offer
from kvferry.router.http.sse import Event

from .exchange_simulator import Node, PromiseBrokenError, Schedule, Setup, T

#: Draws, each as the index of what was picked.
Path = tuple[int, ...]
#: What happens to an exchange: the calls that a counterexample shows.
_EVENTS = (
    "begin",
    "placed",
    "placed_at",
    "prefill_answered",
    "prefill_lost",
    "prefill_refused",
    "no_prefill_node",
    "decode_chosen",
    "no_decode_node",
    "decode_lost",
    "decode_answered",
    "events_arrived",
    "decode_broke",
    "decode_ended",
    "client_left",
    "failed",
)
_ITERATOR: type[Any] = type(iter([]))


_FLAGS = (
    "may_be_at_once",
    "may_be_local",
    "may_decode_alone",
    "follows",
    "is_stream",
    "wants_usage",
)


@dataclass(frozen=True)
class Bound:
    """How far to go.

    Attributes:
        num_faults: Most losses, refusals, stops, errors and departures in one schedule.
        num_prefills, num_decodes: Nodes.
        fixed: Flags of the setup that are not varied.
    """

    num_faults: int
    num_prefills: int = 1
    num_decodes: int = 1
    fixed: Mapping[str, bool] = field(default_factory=dict)

    def __str__(self) -> str:
        nodes = f"{self.num_prefills} + {self.num_decodes} nodes"
        return f"{nodes}, {self.num_faults} faults, {'all' if not self.fixed else len(list(self.setups()))} setups"

    def setups(self) -> Iterator[Setup]:
        """Everything that a schedule can begin with.

        Decode nodes of the same abilities are alike, so their order is left out.
        """
        both = (False, True)
        for num_able in range(self.num_decodes + 1):
            abilities = (True,) * num_able + (False,) * (self.num_decodes - num_able)
            for values in product(*[(self.fixed[name],) if name in self.fixed else both for name in _FLAGS]):
                flags = dict(zip(_FLAGS, values, strict=True))
                setup = Setup(self.num_prefills, abilities, **flags, p_loss=0.5, p_stop=0.5, p_leave=0.5)
                if setup.is_stream or not setup.follows:  # which matters to streams only
                    yield setup


#: A stream that another node could go on with.
_STREAM = {"follows": True, "is_stream": True, "wants_usage": True}
#: Bounds that `make test` goes through, in seconds.
SMALL = (
    Bound(1, 1, 1, {"wants_usage": True}),
    Bound(1, 1, 2, _STREAM | {"may_be_local": False, "may_decode_alone": False}),
)
#: Bounds that `make prove` goes through, in minutes.
LARGE = (
    *SMALL,
    Bound(1, 2, 2, _STREAM),
    Bound(2, 1, 2, _STREAM | {"may_be_local": False, "may_decode_alone": False}),
)


class _ListedDraws:
    """Repeats draws, and then picks what comes first."""

    def __init__(self, path: Path, num_faults: int) -> None:
        self.taken = list[int]()
        self.options = list[int]()
        self._path = path
        self._num_faults = num_faults

    def pick(self, options: Sequence[T]) -> T:
        if len(options) == 1:
            return options[0]
        position = len(self.taken)
        index = self._path[position] if position < len(self._path) else 0
        self.taken.append(index)
        self.options.append(len(options))
        return options[index]

    def part(self, least: int, most: int) -> int:
        # One, or all: what comes together or apart, without every way to cut a stream.
        return self.pick(sorted({least, min(1, most), most}))

    def chance(self, p: float) -> bool:
        return p > 0.0 and self.pick((False, True))

    def fault(self, p: float) -> bool:
        has_happened = self._num_faults > 0 and self.chance(p)
        self._num_faults -= has_happened
        return has_happened

    def next_path(self, start: int) -> Path | None:
        """What to draw next, if the draws from `start` on are all to be tried. None: they were."""
        taken, options = list(self.taken), list(self.options)
        while len(taken) > start and taken[-1] + 1 == options[-1]:
            taken.pop()
            options.pop()
        return None if len(taken) == start else (*taken[:-1], taken[-1] + 1)

    @property
    def num_faults(self) -> int:
        """Faults that may still happen."""
        return self._num_faults


class Counterexample(AssertionError):
    """A shortest schedule that breaks a promise.

    Attributes:
        promise: The promise.
        steps: What happened to the exchange, and what it wanted done.
    """

    def __init__(self, promise: str, setup: Setup, steps: list[str]) -> None:
        lines = [f"{number:3}. {step}" for number, step in enumerate(steps, 1)]
        super().__init__("\n".join([promise, str(setup), *lines]))
        self.promise, self.steps = promise, steps


@dataclass
class Explored:
    """What an exploration saw.

    Attributes:
        num_states: Different states.
        num_steps: Steps that were tried, from all states.
        num_ends: Different ends.
        depth: Steps of the longest of the shortest ways to a state.
        states: How often an exchange was in each of its states.
    """

    num_setups: int = 0
    num_states: int = 0
    num_steps: int = 0
    num_ends: int = 0
    depth: int = 0
    seconds: float = 0.0
    states: Counter[str] = field(default_factory=Counter)


def explore_every(
    bound: Bound, kind: type[Exchange] = Exchange, *, progress: TextIO | None = None
) -> Explored:
    """Go through every state within a bound, for one setup after the other.

    Raises:
        Counterexample: a promise does not hold.
    """
    started = last = time.monotonic()
    explored = Explored()
    for setup in bound.setups():
        _explore_setup(setup, bound.num_faults, kind, explored)
        explored.num_setups += 1
        if progress is not None and time.monotonic() - last > 5.0:
            last = time.monotonic()
            progress.write(
                f"{last - started:6.0f} s: {explored.num_setups} setups, {explored.num_states} states\n"
            )
            progress.flush()
    explored.seconds = time.monotonic() - started
    return explored


def _explore_setup(setup: Setup, num_faults: int, kind: type[Exchange], explored: Explored) -> None:
    numbers: dict[bytes, int] = {}
    before: list[set[int]] = []  # by state: those from which it was reached
    ends = list[int]()
    #: Draws of the way to each state, and how many steps they are.
    ways = list[tuple[Path, int]]()
    waiting = deque[int]()

    def note(schedule: Schedule, draws: _ListedDraws, num_steps: int) -> int:
        found = fingerprint(schedule, draws.num_faults)
        number = numbers.setdefault(found, len(numbers))
        if number == len(before):
            before.append(set())
            ways.append((tuple(draws.taken), num_steps))
            waiting.append(number)
            explored.states[schedule.exchange.state.value] += 1
            explored.depth = max(explored.depth, num_steps)
        return number

    def each(path: Path, num_steps: int) -> Iterator[tuple[Schedule, _ListedDraws, bool]]:
        """Try everything that the next step can be: yield the schedule after it, and whether there was a
        step.
        """
        next_path: Path | None = path
        while next_path is not None:
            draws = _ListedDraws(next_path, num_faults)
            schedule = Schedule(setup, draws, kind)
            explored.num_steps += 1
            try:
                goes_on = _run(schedule, num_steps)
                if not goes_on:
                    schedule.check_end()
            except AssertionError as broken:
                raise _counterexample(
                    setup, tuple(draws.taken), num_faults, kind, num_steps, broken
                ) from broken
            yield schedule, draws, goes_on
            next_path = draws.next_path(len(path))

    for schedule, draws, _ in each((), 0):
        note(schedule, draws, 0)
    while waiting:
        number = waiting.popleft()
        path, num_steps = ways[number]
        for schedule, draws, goes_on in each(path, num_steps + 1):
            if goes_on:
                before[note(schedule, draws, num_steps + 1)].add(number)
            else:
                ends.append(number)
    explored.num_states += len(numbers)
    explored.num_ends += len(ends)
    can_end, to_see = set(ends), list(ends)
    while to_see:
        new = before[to_see.pop()] - can_end
        can_end |= new
        to_see += new
    if stuck := set(range(len(numbers))) - can_end:
        path, num_steps = ways[min(stuck)]
        never = PromiseBrokenError("from every state some end can be reached")
        raise _counterexample(setup, path, num_faults, kind, num_steps, never)


def _run(schedule: Schedule, num_steps: int) -> bool:
    """Begin and make so many steps. False: before the last one nothing could happen any more."""
    schedule.begin()
    return all(schedule.step() for _ in range(num_steps))


def _counterexample(
    setup: Setup, path: Path, num_faults: int, kind: type[Exchange], num_steps: int, broken: AssertionError
) -> Counterexample:
    schedule = Schedule(setup, _ListedDraws(path, num_faults), kind)
    told = list[str]()
    for name in _EVENTS:
        setattr(schedule.exchange, name, _told(name, getattr(schedule.exchange, name), told))
    try:
        _run(schedule, num_steps)
    except AssertionError:
        pass  # it was broken before, so it is broken again
    return Counterexample(str(broken).partition(" (")[0], setup, told)


def _told(name: str, event: Callable[..., Any], told: list[str]) -> Callable[..., Any]:
    def tell(*args: Any, **kwargs: Any) -> Any:
        words = ", ".join([*map(_words, args), *(f"{key}={_words(value)}" for key, value in kwargs.items())])
        position = len(told)
        told.append(f"{name}({words})")
        actions = event(*args, **kwargs)
        told[position] += "".join(f"\n       → {_words(action)}" for action in actions)
        return actions

    return tell


def _words(value: Any) -> str:
    """Show a value as a person wants to read it."""
    match value:
        case Node():
            return f"{value.role} {value.number}"
        case Event():
            return repr(value.raw.decode().removeprefix("data: ").strip())
        case list() | tuple():
            return f"[{', '.join(map(_words, value))}]"
        case Offer() | Begun() | Action():
            shown = {each.name: getattr(value, each.name) for each in fields(value)}  # type: ignore[arg-type]
            words = [
                f"{name}={_words(each)}" for name, each in shown.items() if each not in ("", None, {}, ())
            ]
            return f"{type(value).__name__}({', '.join(words)})"
        case _:
            return repr(value)


# -- fingerprints --------------------------------------------------------------------------------------

_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
#: What is no part of a state.
_IGNORED = frozenset({"drawn", "kind", "name", "setup", "_explain"})


def fingerprint(schedule: Schedule, num_faults: int) -> bytes:
    """A digest of everything that can make a difference to what happens from here on."""
    walked = repr((num_faults, _walk(schedule, {})))
    return hashlib.blake2b(walked.encode(), digest_size=16).digest()


def _walk(value: Any, seen: dict[int, int]) -> Any:
    """Turn a value into one of plain lists, strings and numbers, in which one object is one number."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (tuple, list, deque):
        return [_walk(each, seen) for each in value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, type):
        return value.__name__
    if kind is BuiltinFunctionType:
        return value.__name__
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, dict):
        return [(_walk(key, seen), _walk(each, seen)) for key, each in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(repr(_walk(each, seen)) for each in value)
    if kind is MethodType:
        return (value.__name__, _walk(value.__self__, seen))
    if kind is FunctionType:
        return (value.__qualname__, [_walk(cell.cell_contents, seen) for cell in value.__closure__ or ()])
    if kind is _ITERATOR:
        return _walk(value.__reduce__()[1:], seen)
    if isinstance(value, BaseException):
        return (kind.__name__, [_walk(each, seen) for each in value.args])
    names = [each.name for each in fields(value)] if is_dataclass(value) else []
    inside = vars(value) if hasattr(value, "__dict__") else {name: getattr(value, name) for name in names}
    return (
        kind.__name__,
        [(name, _walk(each, seen)) for name, each in inside.items() if name not in _IGNORED],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Go through every state of a request's exchange within some bounds."
    )
    parser.add_argument(
        "--size", choices=("small", "large"), default="small", help="which bounds; default: small"
    )
    args = parser.parse_args()
    rows = []
    for bound in SMALL if args.size == "small" else LARGE:
        print(f"{bound}:", flush=True)
        explored = explore_every(bound, progress=sys.stdout)
        rows.append(
            f"| {bound} | {explored.num_states:,} | {explored.num_steps:,} | {explored.num_ends:,} | {explored.depth} "
            f"| {explored.seconds:.0f} s |"
        )
    print("\n| bound | states | steps tried | ends | longest way | time |\n|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
