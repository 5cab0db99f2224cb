"""Explore a world: every state within a bound, breadth first, or schedules that are drawn from seeds.

A world is anything that has choices and promises. Breadth first, the first counterexample is a shortest one.
A schedule that was drawn and that fails is shrunk to what it needs.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import MethodType
from typing import Any, Protocol, Self, TypeVar

T = TypeVar("T")
#: How many steps a counterexample shows. One that never ends repeats itself.
_MOST_TOLD = 80
_PROGRESS_S = 5.0


class PromiseBroken(AssertionError):
    """A world did what it must never do.

    Attributes:
        promise: What it must do instead.
        shown: The state of the world when it happened.
    """

    def __init__(self, promise: str, shown: str = "") -> None:
        super().__init__(f"{promise}; {shown}" if shown else promise)
        self.promise, self.shown = promise, shown


class Counterexample(AssertionError):
    """A shortest way to a state in which a promise does not hold.

    Attributes:
        promise: The promise.
        steps: What happened, in words. One that ends with a colon is a heading.
    """

    def __init__(self, promise: str, steps: list[str], shown: str) -> None:
        lines, number = [promise], 0
        for step in steps[:_MOST_TOLD]:
            number += not step.endswith(":")
            lines.append(step if step.endswith(":") else f"{number:3}. {step}")
        if len(steps) > _MOST_TOLD:
            lines.append(f"and so on, {len(steps) - _MOST_TOLD} more")
        super().__init__("\n".join([*lines, *([f"states: {shown}"] if shown else [])]))
        self.promise, self.steps = promise, steps


class World(Protocol):
    """A state of a world, from which it can go on in several ways. A promise that breaks raises
    `PromiseBroken`.
    """

    def choices(self) -> Iterable[Any]:
        """Everything that can happen next."""

    def do(self, choice: Any) -> Iterable[Any]:
        """Let something happen.

        Returns:
            What could have happened instead, if only doing it has shown that.
        """

    def fingerprint(self) -> Hashable | None:
        """Everything that can make a difference from here on. None: this is no state, but a beginning or an
        end.
        """

    def keep(self) -> Callable[[], Self]:
        """Return what makes this state again."""

    def check(self, again: Callable[[], Self]) -> None:
        """Check what must hold in a state that is new, and from it on. May use the world up.

        Args:
            again: Makes this state once more.
        """

    def labels(self) -> Mapping[str, int]:
        """What to count in states that are new."""

    def tell(self, choices: Sequence[Any]) -> list[str]:
        """Say in words what happens if a world that has just begun does this, until a promise breaks."""


@dataclass
class Explored:
    """What an exploration saw.

    Attributes:
        num_states: Different states.
        num_steps: Steps that were tried, from all states.
        num_ends: Different ends.
        depth: Steps of the longest of the shortest ways to a state.
        counts: Labels of all states.
    """

    num_states: int = 0
    num_steps: int = 0
    num_ends: int = 0
    depth: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)


def explore(
    begin: Callable[[], World],
    *,
    must_end: bool = False,
    shows_progress: bool = False,
) -> Explored:
    """Go through every state of a world.

    Args:
        must_end: Whether some end must be reachable from every state.

    Raises:
        Counterexample: a promise does not hold.
    """
    started = last = time.monotonic()
    explored, numbers = Explored(), dict[Hashable, int]()
    # By state: the one before it, and what happened there. The beginning counts as a state here.
    ways: list[tuple[int, Any]] = [(-1, None)]
    before, ends = [set[int]()], list[int]()

    def way_to(number: int) -> list[Any]:
        choices = []
        while number:
            number, choice = ways[number]
            choices.append(choice)
        return choices[::-1]

    first = begin()
    found = first.fingerprint()
    if found is not None:
        numbers[found] = 0
    # The depth of the first states is 0, also if the beginning is none.
    waiting = deque([(0, 0 if found is not None else -1, first.keep())])
    while waiting:
        number, depth, again = waiting.popleft()
        explored.depth = max(depth, explored.depth)
        choices = deque(again().choices())
        while choices:
            world, choice = again(), choices.popleft()
            explored.num_steps += 1
            try:
                choices.extend(world.do(choice))
                found = world.fingerprint()
                if found is None:
                    ends.append(number)
                    continue
                if found not in numbers:
                    explored.counts.update(world.labels())  # before the world is kept, which may count anew
                    numbers[found] = len(ways)
                    ways.append((number, choice))
                    before.append(set())
                    kept = world.keep()
                    waiting.append((numbers[found], depth + 1, kept))
                    world.check(kept)
                if must_end:
                    before[numbers[found]].add(number)
            except PromiseBroken as broken:
                steps = begin().tell([*way_to(number), choice])
                raise Counterexample(broken.promise, steps, broken.shown) from broken
        if shows_progress and time.monotonic() - last > _PROGRESS_S:
            last = time.monotonic()
            print(
                f"{last - started:6.0f} s: {len(numbers)} states, {len(waiting)} still to be looked at, depth {depth}",
                flush=True,
            )
    explored.num_states, explored.num_ends = len(numbers), len(ends)
    if must_end and (stuck := set(range(len(ways))) - _before(before, ends)):
        raise Counterexample("from every state some end can be reached", begin().tell(way_to(min(stuck))), "")
    explored.seconds = time.monotonic() - started
    return explored


def _before(before: Sequence[set[int]], ends: Iterable[int]) -> set[int]:
    """Return the states from which some end can be reached."""
    found = set(ends)
    to_see = list(found)
    while to_see:
        new = before[to_see.pop()] - found
        found |= new
        to_see += new
    return found


def print_table(
    small: Sequence[T], large: Sequence[T], explore_one: Callable[[T], Explored], what: str
) -> None:
    """Explore bounds as the command line says, and print a table of what was seen."""
    parser = argparse.ArgumentParser(description=f"Go through every state of {what} within some bounds.")
    sizes = {"small": small, "large": large}
    parser.add_argument("--size", choices=sizes, default="small", help="which bounds; default: small")
    rows = []
    for bound in sizes[parser.parse_args().size]:
        print(f"{bound}:", flush=True)
        seen = explore_one(bound)
        rows.append(
            f"| {bound} | {seen.num_states:,} | {seen.num_steps:,} | {seen.num_ends:,} | {seen.depth} "
            f"| {seen.seconds:.0f} s |"
        )
    print(
        "\n| bound | states | steps tried | different ends | longest way | time |\n|---|---|---|---|---|---|"
    )
    print("\n".join(rows))


def counted(num: int, noun: str) -> str:
    """Say how many of something there are."""
    return f"{num} {noun}{'s' * (num != 1)}"


# -- schedules from seeds ------------------------------------------------------------------------------


def first_broken(run: Callable[[int], object], seeds: Iterable[int]) -> PromiseBroken | None:
    """Run schedules from seeds; return the first promise that one of them breaks."""
    for seed in seeds:
        if broken := broken_by(partial(run, seed)):
            broken.add_note(f"seed {seed}")
            return broken
    return None


def broken_by(run: Callable[[], object]) -> PromiseBroken | None:
    """Run a schedule; return the promise that it breaks."""
    try:
        run()
    except PromiseBroken as broken:
        return broken
    return None


def shrink(schedule: T, smaller: Callable[[T], Iterable[T]], fails: Callable[[T], object], tries: int) -> T:
    """Make a schedule that fails smaller while it still does.

    Args:
        smaller: Returns what to try instead of a schedule, the smallest first.
    """
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for other in smaller(schedule):
            if tries <= 0:
                break
            tries -= 1
            if fails(other):
                schedule, is_smaller = other, True
                break
    return schedule


def without_some(items: tuple[T, ...]) -> Iterator[tuple[T, ...]]:
    """Leave out all of some items, then each half, each quarter, and so on."""
    size = len(items)
    while size > 0:
        for first in range(0, len(items), size):
            yield items[:first] + items[first + size :]
        size //= 2


# -- fingerprints --------------------------------------------------------------------------------------


class Walk:
    """One walk over a world, from object to object, in an order that depends only on the state.

    Every attribute counts, apart from those that are `ignored`. So a new attribute is part of a state by
    itself. An object that is met again is a number.
    """

    #: Attributes that make no difference to what happens: constants, caches and statistics.
    ignored: frozenset[str] = frozenset()
    #: Types whose values stand for themselves.
    plain: frozenset[type] = frozenset({str, bytes, bool, int, float, type(None)})

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def of(self, value: Any) -> Any:
        """Turn a value into one of plain lists, strings and numbers."""
        kind = type(value)
        if kind in self.plain:
            return value
        if kind is tuple or kind is list or kind is deque:
            return [self.of(each) for each in value]
        if isinstance(value, dict):
            return [(self.of(key), self.of(each)) for key, each in value.items()]
        if kind is set or kind is frozenset:
            return sorted(map(self.of, value))
        if isinstance(value, Enum):
            return value.name
        if kind is MethodType:
            return (value.__name__, self.of(value.__self__))
        if id(value) in self._seen:
            return ("again", self._seen[id(value)])
        self._seen[id(value)] = len(self._seen)
        return (kind.__name__, self.of_object(value))

    def of_object(self, value: Any) -> Any:
        """Turn an object that is met for the first time into plain values."""
        return [(name, self.of(each)) for name, each in vars(value).items() if name not in self.ignored]


def digest(walked: bytes) -> bytes:
    """Return what stands for a state; two states with the same one are taken for one."""
    return hashlib.blake2b(walked, digest_size=16).digest()
