"""Aligned columns of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def columns(rows: Iterable[Sequence[str]], *, indent: str = "") -> list[str]:
    """Align the cells of rows with spaces. The last cell of a row may have any length."""
    rows = [list(row) for row in rows]
    num_aligned = max((len(row) for row in rows), default=1) - 1
    widths = [max((len(row[at]) for row in rows if at < len(row)), default=0) for at in range(num_aligned)]
    return [
        (
            indent
            + "  ".join(cell.ljust(widths[at]) if at < num_aligned else cell for at, cell in enumerate(row))
        ).rstrip()
        for row in rows
    ]
