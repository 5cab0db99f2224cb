"""`kvferry bench`: how fast each path is, for shapes of reads that handoffs make."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

from kvferry.lab.moving.paths import PATHS
from kvferry.lab.versions import versions
from kvferry.router.seen.columns import columns

from .doctor import (
    add_path_options,
    path_finder,
    positive,
    report,
    to_doctor,
    version_line,
    warn_if_busy,
)
from .errors import UsageError
from .output import add_json

if TYPE_CHECKING:
    from kvferry.lab.moving.outcomes import Outcome
    from kvferry.lab.moving.shapes import Shape

#: The pool of each process: larger than most caches, and small enough for any machine.
POOL_BYTES: Final = 128 << 20

_DESCRIPTION: Final = """\
Measure how fast each path moves bytes between two processes of this machine, or to `kvferry doctor --listen` on another.

Each read takes other regions, scattered over pools that are larger than most caches. Every region that arrives is checked.
In the pauses between reads, a memcpy moves as many bytes; the figures are medians. Close other programs first: on a busy machine the
figures say more about those.
"""


def add(commands: Any) -> argparse.ArgumentParser:
    """Declare the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="measure how fast each path moves bytes, beside memcpy",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_path_options(parser)
    parser.add_argument("--peer", metavar="HOST:PORT", help="measure to the doctor that listens there")
    parser.add_argument(
        "--seconds",
        type=positive,
        default=20.0,
        help="time in seconds for all measurements (default: %(default)s)",
    )
    parser.add_argument(
        "--shape",
        nargs="+",
        default=["16x2048", "512x64", "1x64"],
        metavar="NxKIB",
        help="what a read moves: N regions of that many KiB (default: 16x2048 512x64 1x64)",
    )
    add_json(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print one line per path and shape."""
    from kvferry.lab.moving.outcomes import Measuring

    find = path_finder(arguments.options)
    shapes = [_shape(text) for text in arguments.shape]
    warn_if_busy()
    paths = [find(name) for name in arguments.path or PATHS]
    measuring = Measuring(paths, shapes, POOL_BYTES, arguments.seconds)
    found = versions()
    about: dict[str, object] = {"versions": found}
    if arguments.peer:
        outcomes, about["peer"] = to_doctor(arguments.peer, measuring)
    else:
        outcomes = measuring.here()
    return report(arguments, about, outcomes, [version_line(found), *_table(outcomes)])


def _shape(text: str) -> Shape:
    from kvferry.lab.moving.shapes import Shape

    count, _, kib = text.partition("x")
    if not (count.isdecimal() and kib.isdecimal() and int(count) and int(kib)):
        raise UsageError(f"--shape must be NxKIB, such as 512x64, got {text!r}")
    shape = Shape(int(count), int(kib) << 10)
    if shape.num_bytes > POOL_BYTES // 2:
        raise UsageError(
            f"--shape={text!r} takes {shape.num_bytes >> 20} MiB, and may take {POOL_BYTES >> 21}: choose a smaller shape"
        )
    return shape


def _table(outcomes: list[Outcome]) -> list[str]:
    rows = [("path", "moved by", "regions", "GB/s", "of memcpy", "microseconds")]
    left_out = []
    for outcome in outcomes:
        if outcome.status != "ok":
            left_out.append(f"not measured: {outcome.path}: {outcome.reason}")
        by = (
            outcome.mechanism
            if outcome.transport == outcome.path
            else f"{outcome.transport}: {outcome.mechanism}"
        )
        for speed in outcome.speeds:
            rows.append(
                (
                    outcome.path,
                    by,
                    str(speed.shape),
                    f"{speed.gb_per_s:.2f}",
                    f"{speed.to_memcpy:.2f}",
                    f"{speed.p50_ms * 1e3:.0f}",
                )
            )
    return [*columns(rows), *left_out]
