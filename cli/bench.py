"""`kvferry bench`: how fast each path is, for shapes of reads that handoffs make."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

from kvferry.web.columns import columns

from .doctor import add_path_options, on_this_machine, path_finder, positive, status_of, to_doctor
from .errors import OK, UsageError
from .output import add_json, print_json, say
from .path_table import PATHS
from .version import versions

if TYPE_CHECKING:
    from .paths import Outcome, Shape

_DESCRIPTION: Final = """\
Measure how fast each path moves bytes between two processes of this machine, or to `kvferry doctor --listen` on another.

Each read takes other regions, scattered over pools that are larger than most caches. Every region that arrives is checked.
After each read, a memcpy moves as many bytes; the figures are medians. Close other programs first: on a busy machine the
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
    parser.add_argument(
        "--pool-mib",
        type=int,
        default=128,
        help="pool of each process in MiB, at most 256 (default: %(default)s)",
    )
    add_json(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print one line per path and shape."""
    find = path_finder(arguments.options)
    if not 1 <= arguments.pool_mib <= 256:
        raise UsageError(f"--pool-mib must be 1 to 256, got {arguments.pool_mib}")
    pool_bytes = arguments.pool_mib << 20
    shapes = [_shape(text, pool_bytes) for text in arguments.shape]
    names = arguments.path or tuple(PATHS)
    found = versions()
    about: dict[str, object] = {"versions": found}
    if arguments.peer:
        outcomes, peer = to_doctor(arguments.peer, names, find, shapes, pool_bytes, arguments.seconds)
        about["peer"] = peer
    else:
        outcomes = on_this_machine(names, find, shapes, pool_bytes, arguments.seconds)
    status = status_of(outcomes, arguments.path, is_peer=bool(arguments.peer))
    if arguments.json:
        print_json({**about, "paths": [outcome.to_json() for outcome in outcomes], "ok": status == OK})
    else:
        say(", ".join(f"{name} {value}" for name, value in found.items() if value), *_table(outcomes))
    return status


def _shape(text: str, pool_bytes: int) -> Shape:
    from .paths import Shape

    count, _, kib = text.partition("x")
    if not (count.isdecimal() and kib.isdecimal() and int(count) and int(kib)):
        raise UsageError(f"--shape must be NxKIB, such as 512x64, got {text!r}")
    shape = Shape(int(count), int(kib) << 10)
    if shape.num_bytes > pool_bytes // 2:
        raise UsageError(
            f"--shape={text!r} takes {shape.num_bytes >> 20} MiB, and must fit into half a pool: "
            f"raise --pool-mib, now {pool_bytes >> 20}, or choose a smaller shape"
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
                    speed.shape,
                    f"{speed.num_bytes / speed.seconds / 1e9:.2f}",
                    f"{speed.memcpy_seconds / speed.seconds:.2f}",
                    f"{speed.seconds * 1e6:.0f}",
                )
            )
    return [*columns(rows), *left_out]
