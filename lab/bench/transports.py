"""Measure how fast KV blocks move between two processes: kvferry's transports, memcpy, plain sockets, NIXL
and Mooncake.

    python -m kvferry.lab.bench.transports [--seconds N] [--only TEXT ...] [--json FILE]

The shapes are blocks of two models, in the uniform and in the per-layer layout. Each read takes different
blocks, scattered over pools that are much larger than any cache. Each contender has two processes, which are
stopped while others are measured. In each round every contender moves every shape. The figures to look at are
the medians of the ratios to memcpy and to plain sockets in the same round. Every region that arrives is
checked. NIXL and Mooncake take part if `nixl-cu12` and `mooncake-transfer-engine-non-cuda` are installed.

Reads are timed from the call to their end. Unlike a memcpy they need other threads to be scheduled, so on a
busy machine the processor time is more reliable than the elapsed time.
"""

from __future__ import annotations

import argparse
import json
import secrets
import tempfile
from pathlib import Path

from kvferry.lab.machine import about
from kvferry.lab.moving.contender import Contender
from kvferry.lab.moving.field import MEMCPY, SOCKETS, all_contenders, ours
from kvferry.lab.moving.report import json_lines, results_of, table
from kvferry.lab.moving.rounds import measure, show
from kvferry.lab.moving.shapes import Shape, shapes_of
from kvferry.transports.testing.certificates import Authority


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=120,
        help="duration of the measurement in seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="measure contenders whose name contains one of these texts (default: all)",
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="measure shapes whose name contains one of these texts (default: all)",
    )
    parser.add_argument(
        "--blocks", type=int, default=64, help="blocks of the larger shapes (default: %(default)s)"
    )
    parser.add_argument(
        "--pool-mib", type=int, default=256, help="pool of each process in MiB (default: %(default)s)"
    )
    parser.add_argument(
        "--variant",
        action="append",
        nargs=3,
        default=[],
        metavar=("NAME", "SCHEME", "OPTIONS"),
        help="add a contender: a transport with options as JSON; may be repeated",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as JSON lines")
    arguments = parser.parse_args()
    needed_mib = max(shape.num_bytes for shape in shapes_of(max(1, arguments.blocks))) >> 20
    if arguments.blocks < 1 or arguments.pool_mib < needed_mib:
        parser.error(
            f"--blocks must be at least 1, and --pool-mib at least {needed_mib} for --blocks {arguments.blocks}"
        )
    return arguments


def chosen(
    arguments: argparse.Namespace, secret_file: Path, certificates: Path
) -> tuple[list[Contender], list[Shape]]:
    """Return the contenders and shapes to measure.

    Memcpy and plain sockets are always among the contenders.
    """
    contenders = [
        contender
        for contender in all_contenders(secret_file, certificates)
        if contender.name in (MEMCPY, SOCKETS) or any(text in contender.name for text in arguments.only)
    ]
    contenders += [ours(name, scheme, json.loads(options)) for name, scheme, options in arguments.variant]
    shapes = [s for s in shapes_of(arguments.blocks) if any(text in str(s) for text in arguments.shapes)]
    return contenders, shapes


def main() -> None:
    arguments = parse_arguments()
    machine = about()
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "secret")
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        Authority.make(Path(folder)).issue("node")
        contenders, shapes = chosen(arguments, secret, Path(folder))
        measured = measure(contenders, shapes, arguments.pool_mib << 20, arguments.seconds, show)
    results = results_of(contenders, shapes, measured)
    show("")
    print(
        *table(results), "", *(f"not measured: {n}: {why}" for n, why in measured.failures.items()), sep="\n"
    )
    if arguments.json:
        figures = [result.to_json() for result in results]
        arguments.json.write_text(json_lines(machine, measured.failures, figures))


if __name__ == "__main__":
    main()
