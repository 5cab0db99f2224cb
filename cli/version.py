"""`kvferry version`: the versions of everything that takes part in a handoff, found without importing it."""

from __future__ import annotations

import argparse
from typing import Any

from kvferry.lab.versions import versions
from kvferry.router.seen.columns import columns

from .errors import OK
from .output import add_json, print_json


def add(commands: Any) -> argparse.ArgumentParser:
    """Declare the command."""
    text = "print the versions of kvferry, the kernel, and the libraries that kvferry can use"
    parser: argparse.ArgumentParser = commands.add_parser(
        "version", help=text, description=text, allow_abbrev=False
    )
    add_json(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the versions."""
    found = versions()
    if arguments.json:
        print_json(found)
    else:
        print("\n".join(columns((name, value or "not installed") for name, value in found.items())))
    return OK
