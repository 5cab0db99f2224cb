"""Which fault befalls whom, and when. Pure: a seed in, a list out."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Act = Callable[["Fault"], None]

#: `kill` and `terminate` (SIGKILL and SIGTERM; started again where it was), `pause` (SIGSTOP), `cut` (it cannot be connected to).
Kind = Literal["kill", "terminate", "pause", "cut"]

#: How long each lasts, from and to, in seconds. A process that is started again is back some time after that.
_LASTS_S: Mapping[Kind, tuple[float, float]] = {
    "kill": (0.05, 1.5),
    "terminate": (0.05, 1.5),
    "pause": (0.1, 8.0),
    "cut": (0.2, 4.0),
}
#: Between two faults, on average.
_GAP_S = 1.0
#: A target is left alone for so long after a fault of its own.
_REST_S = 0.5


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        at_s: When it begins, from the beginning of the run.
        target: Whom it befalls.
        lasts_s: For how long.
    """

    at_s: float
    kind: Kind
    target: str
    lasts_s: float

    @property
    def ends_s(self) -> float:
        return self.at_s + self.lasts_s

    def __str__(self) -> str:
        return f"{self.at_s:7.2f} s  {self.kind} {self.target} for {self.lasts_s:.2f} s"


def schedule(seed: int, seconds: float, kinds: Mapping[str, Sequence[Kind]]) -> tuple[Fault, ...]:
    """Draw the faults of a run, in the order in which they begin.

    Args:
        seconds: No fault begins later.
        kinds: What can befall each target. No two faults of a target overlap.
    """
    return tuple(_faults(random.Random(seed), seconds, kinds))


def timeline(faults: Sequence[Fault], begin: Act, end: Act) -> list[tuple[float, Act, Fault]]:
    """What to do with which fault, and when, in order."""
    steps = [(fault.at_s, begin, fault) for fault in faults] + [
        (fault.ends_s, end, fault) for fault in faults
    ]
    return sorted(steps, key=lambda step: step[0])


def _faults(dice: random.Random, seconds: float, kinds: Mapping[str, Sequence[Kind]]) -> Iterator[Fault]:
    free_at = dict.fromkeys(kinds, 0.0)
    at_s = dice.expovariate(1 / _GAP_S)
    while at_s < seconds:
        free = [target for target in kinds if free_at[target] <= at_s]
        if free:
            target = dice.choice(free)
            kind = dice.choice(kinds[target])
            fault = Fault(at_s, kind, target, _drawn(dice, *_LASTS_S[kind]))
            free_at[target] = fault.ends_s + _REST_S
            yield fault
        at_s += dice.expovariate(1 / _GAP_S)


def _drawn(dice: random.Random, low: float, high: float) -> float:
    """A time between the two; half of all are below their geometric mean."""
    return low * math.exp(dice.uniform(0.0, math.log(high / low)))
