"""Compute the figures from the measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .contender import Contender
from .field import MEMCPY, SOCKETS
from .processes import Timing
from .rounds import Measured
from .shapes import Shape


@dataclass(frozen=True)
class Result:
    """The figures of one contender for one shape.

    Attributes:
        to_memcpy: Speed relative to memcpy in the same round; median over rounds, 0 if memcpy was not measured.
        to_memcpy_quartiles: First and third quartile of the same ratio.
        to_sockets: Speed relative to plain sockets, likewise.
        twin: The contender that it is compared with; empty if none.
        to_twin: Speed relative to the twin, likewise; 0 if there is none or it was not measured.
        cpu_s_per_gb: Processor time of both processes per 10**9 bytes.
    """

    contender: str
    version: str
    mechanism: str
    model: str
    layout: str
    num_blocks: int
    num_regions: int
    num_bytes: int
    num_rounds: int
    p50_ms: float
    gb_per_s: float
    to_memcpy: float
    to_memcpy_quartiles: tuple[float, float]
    to_sockets: float
    twin: str
    to_twin: float
    to_twin_quartiles: tuple[float, float]
    cpu_s_per_gb: float


def results_of(contenders: Sequence[Contender], shapes: Sequence[Shape], measured: Measured) -> list[Result]:
    """Return all results, shape by shape."""
    return [
        _result(contender, shape, measured)
        for shape in shapes
        for contender in contenders
        if (contender.name, shape) in measured.batches
    ]


def _result(contender: Contender, shape: Shape, measured: Measured) -> Result:
    batches = measured.batches[contender.name, shape]
    reads = [read for batch in batches for read in batch]
    p50_s = statistics.median(read.seconds for read in reads)
    low, to_memcpy, high = _ratios(batches, measured.batches.get((MEMCPY, shape), []))
    twin_low, to_twin, twin_high = _ratios(batches, measured.batches.get((contender.twin, shape), []))
    return Result(
        contender=contender.name,
        version=contender.version,
        mechanism=reads[0].mechanism,
        model=shape.model,
        layout=shape.layout,
        num_blocks=shape.num_blocks,
        num_regions=shape.num_regions,
        num_bytes=shape.num_bytes,
        num_rounds=len(batches),
        p50_ms=p50_s * 1e3,
        gb_per_s=shape.num_bytes / p50_s / 1e9,
        to_memcpy=to_memcpy,
        to_memcpy_quartiles=(low, high),
        to_sockets=_ratios(batches, measured.batches.get((SOCKETS, shape), []))[1],
        twin=contender.twin if to_twin else "",
        to_twin=to_twin,
        to_twin_quartiles=(twin_low, twin_high),
        cpu_s_per_gb=statistics.fmean(read.cpu_seconds for read in reads) / shape.num_bytes * 1e9,
    )


def _ratios(batches: list[list[Timing]], others: list[list[Timing]]) -> tuple[float, float, float]:
    """Return the quartiles of the ratio of another contender's time to this one's, over rounds."""
    if not others:
        return 0.0, 0.0, 0.0
    ratios = [_typical(other) / _typical(batch) for batch, other in zip(batches, others, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, middle, high


def _typical(batch: list[Timing]) -> float:
    return statistics.median(read.seconds for read in batch)
