"""The command line: `kvferry COMMAND`, one subparser per command."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Container, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from kvferry.router.seen.columns import columns

from . import bench, config_file, doctor, explain, version
from .errors import OK, CommandError
from .output import say
from .programs import PROGRAMS


class Command(Protocol):
    """A module of this package, or a program of `kvferry.lab`."""

    def add(self, commands: Any) -> argparse.ArgumentParser:
        """Declare the command, and return its parser."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; return the exit status."""


#: The commands, in the groups and in the order of `kvferry --help`.
GROUPS: Mapping[str, tuple[Command, ...]] = {
    "run nodes": tuple(PROGRAMS.values()),
    "look at a machine": (doctor, bench),
    "look at running nodes": (explain,),
    "about the command": (version,),
}

#: What a shell reports for a program that was interrupted.
_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """A parser whose errors show the words of the command line without what would move the terminal's
    cursor.
    """

    def error(self, message: str) -> NoReturn:
        from kvferry.transports.checked import printable

        super().error(printable(message, keep="\n"))


def make_parser(with_options: Container[str] = ()) -> argparse.ArgumentParser:
    """Build the parser of the whole command line.

    Args:
        with_options: The programs of `PROGRAMS` whose options to declare, which imports them.

    Raises:
        CommandError: a package that one of these programs needs is not installed.
    """
    parser = _Parser(
        prog="kvferry",
        description="Run, check, measure and watch nodes that hand over KV caches. `kvferry COMMAND --help` shows the "
        "options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        default="",
        metavar="FILE",
        help=f"defaults of options, in TOML (default: ${config_file.VARIABLE}, or ~/.config/kvferry/config.toml)",
    )
    commands = parser.add_subparsers(
        metavar="COMMAND", required=True, dest="command", help="one of those below"
    )
    listing: list[str] = []
    for title, group in GROUPS.items():
        commands_before = len(commands._choices_actions)
        for each in group:
            command = each.add(commands)
            command.set_defaults(run=each.run)
        added = commands._choices_actions[commands_before:]
        listing += [f"{title}:", *columns([(one.dest, one.help or "") for one in added], indent="  "), ""]
    # argparse would list all commands in one block, without a word about what belongs together.
    commands._choices_actions.clear()
    parser.epilog = "\n".join(listing)
    for name, program in PROGRAMS.items():
        if name in with_options:
            program.configure(commands.choices[name])
    return parser


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the parser of each command, by its name."""
    (found,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return found.choices


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status. argparse itself exits with 2 if the command line is wrong."""
    words = sys.argv[1:] if argv is None else argv
    try:
        parser = make_parser(with_options=(_command_in(words),))
        arguments, unknown = parser.parse_known_args(words)
        if unknown:
            _refuse(unknown, commands_of(parser)[arguments.command])
        if tables := config_file.read(arguments.config):
            config_file.apply(tables, commands_of(parser), arguments.command)
            arguments = parser.parse_args(words)
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except CommandError as error:
        say(f"kvferry: {error}", file=sys.stderr)
        return error.status
    except BrokenPipeError:
        # The reader of our output left, as `head` does. Python would complain again when it flushes at its
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return _INTERRUPTED


def _refuse(unknown: Sequence[str], command: argparse.ArgumentParser) -> NoReturn:
    """Exit with 2, after an error that names the options most like the unknown ones."""
    known = command._option_string_actions
    nearest = {each: difflib.get_close_matches(each.partition("=")[0], known, n=1) for each in unknown}
    hints = [f"did you mean {found[0]}?" for found in nearest.values() if found]
    command.error(": ".join([f"unrecognized arguments: {' '.join(unknown)}", *hints[:1]]))


def _command_in(words: Sequence[str]) -> str:
    """Return the command that a command line names; empty if it names none."""
    rest = iter(words)
    for word in rest:
        if word == "--config":
            next(rest, "")
        elif not word.startswith("-"):
            return word
    return ""
