"""Measure in rounds. In each, every contender moves every shape, so that a disturbance of the machine affects all."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from kvferry.transports import RegionPairs

from .contender import Contender
from .processes import FailedError, Running, Timing
from .shapes import Shape

#: Rounds that are measured however long they take, after one that only warms up.
MIN_ROUNDS = 3

#: A batch moves about this many bytes, so that small transfers are measured often.
_BATCH_BYTES = 32 << 20
_MAX_READS = 16

#: Shows progress.
Progress = Callable[[str], None]


@dataclass
class Measured:
    """The measurements.

    Attributes:
        batches: By contender and shape, for each round the reads of one batch.
        left_out: Contenders that were not measured, and why.
    """

    batches: dict[tuple[str, Shape], list[list[Timing]]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def leave_out(self, name: str, reason: str) -> None:
        self.left_out[name] = reason
        self.batches = {key: batches for key, batches in self.batches.items() if key[0] != name}


def measure(
    contenders: Sequence[Contender], shapes: Sequence[Shape], pool_bytes: int, seconds: float, say: Progress
) -> Measured:
    """Measure for about `seconds` seconds, after a round that only warms up."""
    measured = Measured()
    with ExitStack() as stack:
        running = _start(contenders, pool_bytes, measured, stack, say)
        for number, where in _rounds(seconds):
            for name, shape, reads in _batches(running, shapes, pool_bytes, number):
                say(f"{where}: {name}, {shape}")
                try:
                    batch = running[name].batch(reads)
                except FailedError as error:
                    running.pop(name).close()
                    measured.leave_out(name, str(error))
                else:
                    if number:
                        measured.batches.setdefault((name, shape), []).append(batch[1:])
    return measured


def _start(
    contenders: Sequence[Contender], pool_bytes: int, measured: Measured, stack: ExitStack, say: Progress
) -> dict[str, Running]:
    """Start the contenders that can be started. Closing `stack` ends them."""
    running: dict[str, Running] = {}
    for contender in contenders:
        say(f"starting {contender.name}")
        try:
            require_installed(contender)
            running[contender.name] = Running(contender, pool_bytes)
        except FailedError as error:
            measured.leave_out(contender.name, str(error))
        else:
            stack.callback(running[contender.name].close)
    return running


def require_installed(contender: Contender) -> None:
    """Raise FailedError if the contender's distribution is not installed."""
    try:
        contender.version  # noqa: B018 - it raises
    except importlib.metadata.PackageNotFoundError:
        raise FailedError(f"{contender.distribution} is not installed") from None


def _rounds(seconds: float) -> Iterator[tuple[int, str]]:
    """Yield the number of each round, from 0, and the progress in words."""
    began, number = time.monotonic(), 0
    while number <= MIN_ROUNDS or time.monotonic() - began < seconds:
        yield (
            number,
            f"round {number}, {time.monotonic() - began:.0f} of {seconds:.0f} s" if number else "warming up",
        )
        number += 1


def _batches(
    running: Mapping[str, Running], shapes: Sequence[Shape], pool_bytes: int, number: int
) -> Iterator[tuple[str, Shape, list[RegionPairs]]]:
    """Yield the batches of a round: contender, shape and reads. The order is random; all contenders move the same blocks.

    The first read of a batch has one region and is not counted, because the processes have just been resumed.
    """
    for index, shape in enumerate(shapes):
        random = np.random.default_rng((number, index))
        count = max(1, min(_MAX_READS, _BATCH_BYTES // shape.num_bytes))
        reads = [shape.pairs(pool_bytes, random) for _ in range(count)]
        for name in random.permutation(list(running)).tolist():
            yield name, shape, [RegionPairs(reads[0].table[:1]), *reads]
