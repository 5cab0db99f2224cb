"""The command line: `kvferry COMMAND`, one subparser per command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from . import bench, doctor, explain, top, version
from .errors import OK, CommandError

#: The commands, in the order of `kvferry --help`.
COMMANDS: tuple[ModuleType, ...] = (doctor, bench, top, explain, version)


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="kvferry",
        description="Check, measure and watch the handoff of KV caches between nodes.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in COMMANDS:
        command = module.add(commands)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status. argparse itself exits with 2 if the command line is wrong."""
    arguments = make_parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except CommandError as error:
        print(f"kvferry: {error}", file=sys.stderr)
        return error.status
    except BrokenPipeError:
        # The reader of our output left, as `head` does. Python would complain again when it flushes at its exit.
        sys.stdout = None
        return OK
    except KeyboardInterrupt:
        return 130
