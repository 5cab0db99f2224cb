"""What work takes, learnt from measurements, and how likely a limit is missed.

Pure. An estimate may be wrong, but never infinite or negative, so that no node is shut out for ever by what
it has once shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

#: What a new measurement makes of the weight of the earlier ones.
FADING = 0.97
#: Tokens of an answer whose length nothing is known about.
ANSWER_TOKENS = 64.0
#: The same for steps: about `ANSWER_TOKENS` follow each prompt, and steps differ more than nodes.
FADING_OF_STEPS = FADING ** (1 / ANSWER_TOKENS)
#: A measurement outside these is a clock's jump or a lie, and is cut off.
MIN_S, MAX_S = 1e-7, 600.0
#: Estimates are uncertain: up to this share of a limit it is surely kept.
SURELY_KEPT = 0.7
#: Missed limits that weigh as much as a request's whole allowance of time, or as a fully used node.
WEIGHT = 0.1
#: Requests that came more seconds ago say little about the next ones.
LATELY_S = 20.0
#: Choices are alike that differ by fewer missed limits: equal nodes never measure the same.
ALIKE = 0.03


class Rate:
    """Seconds per unit of work, of which later measurements count more.

    Args:
        seconds: Per unit, before the first measurement.
        weight: Units that this guess counts as.
    """

    __slots__ = ("_seconds", "_units")

    def __init__(self, seconds: float, weight: float) -> None:
        self._seconds, self._units = seconds * weight, weight

    @property
    def seconds(self) -> float:
        """Per unit."""
        return self._seconds / self._units

    def add(self, seconds: float, units: float) -> None:
        """Take in a measurement. One without work, or without a finite time, says nothing."""
        if units <= 0 or not math.isfinite(seconds):
            return
        seconds = min(max(seconds, MIN_S), MAX_S)
        self._seconds = self._seconds * FADING + seconds
        self._units = self._units * FADING + units


class Line:
    """Seconds as a straight line over a number, of which later measurements count more.

    Args:
        guesses: Points before the first measurement.
        weight: Measurements that each of them counts as.
        fading: What a new measurement makes of the weight of the earlier ones.
    """

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y", "fading", "slope", "start")

    def __init__(self, guesses: Sequence[tuple[float, float]], weight: float, fading: float = FADING) -> None:
        self.fading = fading
        self._n = self._x = self._xx = self._xy = self._y = 0.0
        for x, y in guesses:
            self._sum(x, y, weight)

    def add(self, x: float, seconds: float) -> None:
        """Take in a measurement. One without a finite time says nothing."""
        if not math.isfinite(seconds):
            return
        fading = self.fading
        self._n, self._x, self._xx = self._n * fading, self._x * fading, self._xx * fading
        self._xy, self._y = self._xy * fading, self._y * fading
        self._sum(x, min(max(seconds, MIN_S), MAX_S), 1.0)

    def _sum(self, x: float, y: float, weight: float) -> None:
        self._n += weight
        self._x += weight * x
        self._xx += weight * x * x
        self._xy += weight * x * y
        self._y += weight * y
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        # The line never falls, because more work takes no less time, and it begins at no less than nothing.
        slope = max(0.0, (self._xy / self._n - mean_x * mean_y) / spread) if spread > 1e-9 else 0.0
        self.slope = min(slope, mean_y / mean_x) if mean_x > 0 else slope
        self.start = max(MIN_S, mean_y - self.slope * mean_x)

    def at(self, x: float) -> float:
        """Return the seconds at `x`."""
        return self.start + self.slope * x

    def rescale(self, x: float, seconds: float) -> None:
        """Keep the shape, and pass through a point.

        Beside one fast measurement, slow guesses at other places would make a line on which length costs
        nothing.
        """
        if math.isfinite(seconds):
            factor = min(max(seconds, MIN_S), MAX_S) / self.at(x)
            self._y, self._xy, self.start, self.slope = (
                each * factor for each in (self._y, self._xy, self.start, self.slope)
            )


def chance_to_miss(estimate_s: float, limit_s: float) -> float:
    """Return how likely a limit is missed."""
    if limit_s <= 0:
        return 1.0
    share = (estimate_s / limit_s - SURELY_KEPT) / (1 - SURELY_KEPT)
    return min(1.0, max(0.0, share))


def chance_of_more(mean: float, number: float) -> float:
    """Return how likely more than a number of things happen that happen so often on average, independently of
    each other.
    """
    if number > 20:  # near enough, and no sum of a thousand terms
        return float(mean > number)
    chance = term = math.exp(-mean)
    for each in range(1, int(number) + 1):
        term *= mean / each
        chance += term
    return max(0.0, 1.0 - chance)
