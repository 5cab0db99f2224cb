"""What all measurements share: percentiles and Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def percentile(figures: Sequence[float], share: float) -> float:
    """Return the figure below which that share of the figures is, between two of them on the straight line; 0
    for none.
    """
    return float(np.quantile(figures, share)) if len(figures) else 0.0


def line(*cells: str) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join([line(*titles), line(*("---",) * len(titles)), *(line(*row) for row in rows)])
