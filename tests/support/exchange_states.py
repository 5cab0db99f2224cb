"""Every state that a request's exchange can reach within a bound: breadth first, so that the first
counterexample is a shortest one.

`explore` lets the schedules of `exchange_simulator` draw everything that can be drawn. A state is a
whole schedule with the real `Exchange` in it. An exchange cannot be copied, so a state is kept as the draws
that lead to it, and made again from them. What each step promises is checked after it, and what the end
promises at each end. From every state some end must be reachable.

    python -m tests.support.exchange_states --size large
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from itertools import product
from types import BuiltinFunctionType, FunctionType
from typing import Any

from kvferry.router.answer.exchange import Action, Begun, Exchange
from kvferry.router.choice.ways import Offer
from kvferry.router.http.sse import Event

from .exchange_simulator import Draws, Node, Schedule, Setup, T
from .explore import Explored, PromiseBroken, Walk, counted, digest, explore, print_table

#: Draws, each as the index of what was picked.
Path = tuple[int, ...]
#: What happens to an exchange: the calls that a counterexample shows.
_EVENTS = [name for name, each in vars(Exchange).items() if isinstance(each, FunctionType) and name[0] != "_"]
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
        nodes = f"{self.num_prefills} and {counted(self.num_decodes, 'node')}"
        return f"{nodes}, {counted(self.num_faults, 'fault')}, {len(list(self.setups()))} setups"

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
    # A request gives up after three losses.
    Bound(3, 2, 1, dict.fromkeys(_FLAGS, False) | {"may_be_at_once": True}),
)


class _ListedDraws(Draws):
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

    @property
    def num_faults(self) -> int:
        """Faults that may still happen."""
        return self._num_faults


@dataclass
class ExchangeState:
    """A schedule after some steps, which is made again from its draws.

    Args:
        setup: The number of what it begins with. None: nothing has begun.
        path: All draws so far.
    """

    setups: Sequence[Setup]
    num_faults: int
    kind: type[Exchange] = Exchange
    setup: int | None = None
    path: Path = ()
    num_steps: int = -1
    goes_on: bool = False

    def choices(self) -> list[Path]:
        """The beginnings of what the next step can draw; before the first one the setup is drawn."""
        return [(number,) for number, _ in enumerate(self.setups)] if self.setup is None else [()]

    def do(self, choice: Path) -> list[Path]:
        """Draw so much, and then what comes first; return what else could have been drawn after that."""
        start, step = len(self.path), choice
        head = choice[:1] if self.setup is None else ()
        step = choice[len(head) :]
        self._run(choice)
        self.path, options = tuple(self._draws.taken), self._draws.options
        return [
            (*head, *self.path[start:position], index)
            for position in range(start + len(step), len(self.path))
            for index in range(1, options[position])
        ]

    def _run(self, choice: Path, told: list[str] | None = None) -> None:
        """Begin, make the steps until here, and another one that draws this."""
        if self.setup is None:
            self.setup, choice = choice[0], choice[1:]
        self.num_steps += 1
        self._draws = draws = _ListedDraws((*self.path, *choice), self.num_faults)
        self._schedule = schedule = Schedule(self.setups[self.setup], draws, self.kind)
        if told is not None:
            for name in _EVENTS:
                setattr(schedule.exchange, name, _told(name, getattr(schedule.exchange, name), told))
        self.goes_on = schedule.go(self.num_steps)

    def fingerprint(self) -> bytes | None:
        if not self.goes_on:
            return None
        walked = repr((self.setup, self._draws.num_faults, _Walk().of(self._schedule)))
        return digest(walked.encode())

    def keep(self) -> Callable[[], ExchangeState]:
        number = self.setup
        return partial(
            ExchangeState, self.setups, self.num_faults, self.kind, number, self.path, self.num_steps
        )

    def check(self, again: Callable[[], ExchangeState]) -> None:
        """There is nothing to check: that some end can be reached, `explore` does."""

    def labels(self) -> Mapping[str, int]:
        return {self._schedule.exchange.state.value: 1}

    def tell(self, choices: Sequence[Path]) -> list[str]:
        told = list[str]()
        for choice in choices[:-1]:
            self.do(choice)
        try:
            self._run(choices[-1], told)
        except PromiseBroken:
            pass  # it was broken before, so it is broken again
        return told


def explore_every(bound: Bound, kind: type[Exchange] = Exchange, *, shows_progress: bool = False) -> Explored:
    """Go through every state within a bound.

    Raises:
        Counterexample: a promise does not hold.
    """
    begin = partial(ExchangeState, tuple(bound.setups()), bound.num_faults, kind)
    return explore(begin, must_end=True, shows_progress=shows_progress)


def _told(name: str, event: Callable[..., Any], told: list[str]) -> Callable[..., Any]:
    def tell(*args: Any, **kwargs: Any) -> Any:
        words = ", ".join([*map(_words, args), *(f"{key}={_words(value)}" for key, value in kwargs.items())])
        position = len(told)
        told.append(f"{name}({words})")
        actions = event(*args, **kwargs)
        told[position] += "".join(f"\n       → {_words(action)}" for action in actions or ())
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


class _Walk(Walk):
    """One walk over a schedule."""

    # Nothing of what an exchange does depends on its bill.
    # `_plain` only remembers what it need not look at again, and `last` is one of several equal heads.
    ignored = frozenset({"drawn", "kind", "name", "setup", "_explain", "bill", "_plain", "last"})

    def of(self, value: Any) -> Any:
        kind = type(value)
        if kind in self.plain:
            return value
        if kind is set or kind is frozenset:
            return sorted(repr(self.of(each)) for each in value)
        if kind is BuiltinFunctionType or isinstance(value, type):
            return value.__name__
        return super().of(value)

    def of_object(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            return (value.__qualname__, [self.of(cell.cell_contents) for cell in value.__closure__ or ()])
        if type(value) is _ITERATOR:
            return self.of(value.__reduce__()[1:])
        if isinstance(value, BaseException):
            return self.of(value.args)
        if hasattr(value, "__dict__"):
            return super().of_object(value)
        names = [each.name for each in fields(value)] if is_dataclass(value) else []
        return [(name, self.of(getattr(value, name))) for name in names]


if __name__ == "__main__":
    explore_aloud = partial(explore_every, shows_progress=True)
    print_table(SMALL, LARGE, explore_aloud, "a request's exchange")
