"""The command line: `kvferry COMMAND`, one subparser per command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from . import bench, completion, config_file, doctor, explain, top, version
from .errors import OK, CommandError

#: The commands, in the order of `kvferry --help`.
COMMANDS: tuple[ModuleType, ...] = (doctor, bench, top, explain, version, completion)

#: What a shell reports for a program that was interrupted.
_INTERRUPTED = 130


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="kvferry",
        description="Check, measure and watch the handoff of KV caches between nodes.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        default="",
        metavar="FILE",
        help=f"defaults of options, in TOML (default: ${config_file.VARIABLE}, or ~/.config/kvferry/config.toml)",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for module in COMMANDS:
        command = module.add(commands)
        command.set_defaults(run=module.run)
    return parser


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the parser of each command, by its name."""
    (found,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return found.choices


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status. argparse itself exits with 2 if the command line is wrong."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        if tables := config_file.read(arguments.config):
            config_file.apply(tables, commands_of(parser), arguments.command)
            arguments = parser.parse_args(argv)
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except CommandError as error:
        print(f"kvferry: {error}", file=sys.stderr)
        return error.status
    except BrokenPipeError:
        # The reader of our output left, as `head` does. Python would complain again when it flushes at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return _INTERRUPTED
