"""What commands print: JSON for programs, aligned columns for people."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from typing import TextIO


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declare `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print a value as JSON. It is plain ASCII, because a terminal obeys some characters beyond it."""
    print(json.dumps(value, indent=indent), flush=True)


def say(*lines: str, start: str = "", file: TextIO | None = None) -> None:
    """Print lines, which may contain text of a server. No character of them moves the cursor or begins another line.

    Args:
        start: Written first, as it is.
        file: Standard output, if it is not given.
    """
    # Not above, because it brings NumPy, which most commands do not need.
    from kvferry.transports.checked import printable

    print(start + "\n".join(map(printable, lines)), file=file, flush=True)


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
