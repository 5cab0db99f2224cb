"""What all measurements share: percentiles, tables and lines of progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence

import numpy as np

from ..transports.checked import printable


class Progress:
    """Print lines on stderr, each with the time since the start."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, text: str) -> None:
        text = printable(text, keep="\n")
        print(f"{time.monotonic() - self._started:7.1f} s  {text}", file=sys.stderr, flush=True)


def percentile(figures: Sequence[float], share: float) -> float:
    """Return the figure below which that share of the figures is, between two of them on the straight line; 0
    for none.
    """
    return float(np.quantile(figures, share)) if len(figures) else 0.0


def line(*cells: str) -> str:
    """Return a line of a Markdown table."""
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join([line(*titles), line(*("---",) * len(titles)), *(line(*row) for row in rows)])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table for people: the first column to the left, the others to the right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join([first.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]).rstrip()
        for first, *cells in rows
    ]
