"""What commands print: JSON for programs, lines for people."""

from __future__ import annotations

import argparse
import json
from typing import TextIO


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declare `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print a value as JSON. It is plain ASCII, because a terminal obeys some characters beyond it."""
    print(json.dumps(value, indent=indent), flush=True)


def say(*lines: str, start: str = "", file: TextIO | None = None) -> None:
    """Print lines, which may contain text of a server.

    No character of them moves the cursor or begins another line.

    Args:
        start: Written first, as it is.
        file: Standard output, if it is not given.
    """
    # Not above, because it brings NumPy, which most commands do not need.
    from kvferry.transports.checked import printable

    print(start + "\n".join(map(printable, lines)), file=file, flush=True)
