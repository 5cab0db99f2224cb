"""Measure in rounds.

In each, every contender moves every shape, so that a disturbance of the machine affects all.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from kvferry.transports import RegionPairs

from .contender import Contender, FailedError, Route
from .processes import Running, Timing
from .shapes import Shape

#: Rounds that are measured however long they take, after one that only warms up.
MIN_ROUNDS = 3

#: A batch moves about this many bytes, so that small transfers are measured often.
_BATCH_BYTES = 32 << 20
_MAX_READS = 16

#: Shows progress.
Progress = Callable[[str], None]


def show(what: str) -> None:
    """Show progress on one line, if stderr is a terminal. Empty text removes the line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)


@dataclass
class Measured:
    """The measurements.

    Attributes:
        batches: By contender and shape, for each round the reads of one batch.
        failures: By contender that was not measured, why.
        routes: By contender that was started, how its reader reached its owner.
    """

    batches: dict[tuple[str, Shape], list[list[Timing]]] = field(default_factory=dict)
    failures: dict[str, FailedError] = field(default_factory=dict)
    routes: dict[str, Route] = field(default_factory=dict)

    def leave_out(self, name: str, why: FailedError) -> None:
        self.failures[name] = why
        self.batches = {key: batches for key, batches in self.batches.items() if key[0] != name}


def measure(
    contenders: Sequence[Contender],
    shapes: Sequence[Shape],
    pool_bytes: int,
    seconds: float,
    say: Progress,
    addresses: Mapping[str, str] = MappingProxyType({}),
) -> Measured:
    """Measure for about `seconds` seconds, after a round that only warms up.

    Args:
        addresses: By contender, where its owner serves already, for example on another host.
    """
    measured = Measured()
    running: dict[str, Running] = {}
    with ExitStack() as stack:
        for contender in contenders:
            say(f"starting {contender.name}")
            try:
                contender.version  # noqa: B018 - it raises
                pair = Running(contender, pool_bytes, addresses.get(contender.name, ""))
            except FailedError as error:
                measured.failures[contender.name] = error
            else:
                running[contender.name] = stack.enter_context(pair)
                measured.routes[contender.name] = pair.route
        began, number = time.monotonic(), 0
        # One alone is not measured: without the others its figures say nothing.
        while len(running) > 1 and (number <= MIN_ROUNDS or time.monotonic() - began < seconds):
            at = f"round {number}, {time.monotonic() - began:.1f} of {seconds:g} s" if number else "warm-up"
            for name, shape, reads in _batches(running, shapes, pool_bytes, number):
                say(f"{at}: {name}, {shape}")
                try:
                    batch = running[name].batch(reads)
                except FailedError as error:
                    running.pop(name).close()
                    measured.leave_out(name, error)
                else:
                    if number:
                        measured.batches.setdefault((name, shape), []).append(batch[1:])
            number += 1
    return measured


def _batches(
    running: Mapping[str, Running], shapes: Sequence[Shape], pool_bytes: int, number: int
) -> Iterator[tuple[str, Shape, list[RegionPairs]]]:
    """Yield the batches of a round: contender, shape and reads.

    The order is random; all contenders move the same blocks.

    The first read of a batch has one region and is not counted, because the processes have just been resumed.
    """
    for index, shape in enumerate(shapes):
        random = np.random.default_rng((number, index))
        count = max(1, min(_MAX_READS, _BATCH_BYTES // shape.num_bytes))
        reads = [shape.pairs(pool_bytes, random) for _ in range(count)]
        for name in random.permutation(list(running)).tolist():
            yield name, shape, [RegionPairs(reads[0].table[:1]), *reads]
