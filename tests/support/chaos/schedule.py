"""Draw faults and their times from a seed. Pure functions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Act = Callable[["Fault"], None]

#: `kill` and `terminate` (SIGKILL and SIGTERM, then a restart), `pause` (SIGSTOP), `cut` (peers cannot
#: connect to it).
Kind = Literal["kill", "terminate", "pause", "cut"]

#: Shortest and longest duration, in seconds. A restarted process needs additional time to become ready.
_LASTS_S: Mapping[Kind, tuple[float, float]] = {
    "kill": (0.05, 1.5),
    "terminate": (0.05, 1.5),
    "pause": (0.1, 8.0),
    "cut": (0.2, 4.0),
}
#: Time without a fault after each fault of a target.
_REST_S = 0.5


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        at_s: Seconds from the start of the run to the start of the fault.
        target: Name of the service.
        lasts_s: Duration in seconds.
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


def schedule(
    seed: int, seconds: float, kinds: Mapping[str, Sequence[Kind]], gap_s: float = 1.0
) -> tuple[Fault, ...]:
    """Draw the faults of a run, sorted by start. Two faults of one target never overlap.

    Args:
        seconds: No fault begins later.
        kinds: The kinds of faults for each target.
        gap_s: Mean time between two faults.
    """
    return tuple(_faults(random.Random(seed), seconds, kinds, gap_s))


def timeline(faults: Sequence[Fault], begin: Act, end: Act) -> list[tuple[float, Act, Fault]]:
    """Return the start and the end of each fault as `(time, act, fault)`, sorted by time."""
    steps = [(fault.at_s, begin, fault) for fault in faults] + [
        (fault.ends_s, end, fault) for fault in faults
    ]
    return sorted(steps, key=lambda step: step[0])


def _faults(
    dice: random.Random, seconds: float, kinds: Mapping[str, Sequence[Kind]], gap_s: float
) -> Iterator[Fault]:
    free_at = dict.fromkeys(kinds, 0.0)
    at_s = dice.expovariate(1 / gap_s)
    while at_s < seconds:
        free = [target for target in kinds if free_at[target] <= at_s]
        if free:
            target = dice.choice(free)
            kind = dice.choice(kinds[target])
            fault = Fault(at_s, kind, target, _drawn(dice, *_LASTS_S[kind]))
            free_at[target] = fault.ends_s + _REST_S
            yield fault
        at_s += dice.expovariate(1 / gap_s)


def _drawn(dice: random.Random, low: float, high: float) -> float:
    """Draw a time between the two, log-uniformly."""
    return low * math.exp(dice.uniform(0.0, math.log(high / low)))
