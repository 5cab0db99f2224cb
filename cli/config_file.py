"""The configuration file: defaults for the options of each command, in TOML.

    [doctor]
    path = ["shm", "tcp"]
    options = { tcp = { tls_cert = "/etc/kvferry/node.pem" } }

    [router]
    prefill = ["http://10.0.0.7:8100", "http://10.0.0.8:8100"]

A table names a command, a key one of its long options without the dashes. What the command line says wins.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvferry.router.http.files import text_of

from .errors import UsageError

#: The variable that names the file.
VARIABLE: Final = "KVFERRY_CONFIG"


def default_path() -> Path:
    """Return where the file is looked for if no one names it."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base, "kvferry", "config.toml")


def read(path: str) -> Mapping[str, Any]:
    """Read the file that the user named by `--config` or the variable, or the default one if it exists.

    Args:
        path: What `--config` says; empty if it was not given.

    Raises:
        UsageError: a file that was named cannot be read, or the file is no TOML.
    """
    named = path or os.environ.get(VARIABLE, "")
    file = Path(named) if named else default_path()
    try:
        text = text_of(file)
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: not TOML: {error}") from error
    except OSError as error:
        if not named:
            return {}
        by = "--config" if path else VARIABLE
        raise UsageError(f"{by}={named!r} cannot be read: {error.strerror}; correct the path") from error
    # Not above, because it brings NumPy, which most commands do not need.
    from kvferry.transports.checked import Refused, toml_of

    try:
        return toml_of(text)
    except Refused as refused:
        raise UsageError(f"configuration file {str(file)!r} {refused.why}; correct it") from refused


def apply(tables: Mapping[str, Any], commands: Mapping[str, argparse.ArgumentParser], command: str) -> None:
    """Make the file's values the defaults of a command's options.

    Args:
        commands: All commands, so that a table of none of them is refused.

    Raises:
        UsageError: a table names no command, or a key of this command's table no option, or a value is wrong.
    """
    for name, table in tables.items():
        if name not in commands or not isinstance(table, dict):
            raise UsageError(f"configuration file: [{name}] names no command{_known(name, commands)}")
    parser = commands[command]
    options = {
        long_name(action).removeprefix("--"): action
        for action in parser._actions
        if action.option_strings and action.dest != "help"
    }
    for key, value in tables.get(command, {}).items():
        if key not in options:
            raise UsageError(f"configuration file: [{command}] has no option {key!r}{_known(key, options)}")
        action = options[key]
        parser.set_defaults(**{action.dest: _value(f"[{command}] {key}", action, value)})


def long_name(action: argparse.Action) -> str:
    """Return an option's name in the file: the first of its long names, as `--help` shows it."""
    return next((name for name in action.option_strings if name.startswith("--")), action.option_strings[-1])


class _Replaced(list[object]):
    """The file's value of an option that may be repeated. argparse copies it before it adds what the command
    line says.
    """

    def __copy__(self) -> list[object]:
        return []


def _value(place: str, action: argparse.Action, value: object) -> object:
    """Turn a value of the file into what argparse would have made of the same text."""
    from kvferry.transports.checked import shown

    wrong = f"configuration file: {place}={shown(value)}"
    if action.nargs == 0:  # a flag
        if not isinstance(value, bool):
            raise UsageError(f"{wrong}: it must be true or false")
        return value
    if action.nargs == "+":
        if not isinstance(value, list) or not value:
            raise UsageError(f"{wrong}: it must be a list that is not empty")
        return [_one(wrong, action, item) for item in value]
    if isinstance(action, argparse._AppendAction):
        return _Replaced(
            _one(wrong, action, item) for item in (value if isinstance(value, list) else [value])
        )
    if isinstance(value, dict):
        try:
            value = json.dumps(value)
        except (TypeError, ValueError) as error:  # a date, or a number of very many digits
            raise UsageError(f"{wrong}: it must be what JSON has as well: {error}") from error
    return _one(wrong, action, value)


def _one(wrong: str, action: argparse.Action, value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(f"{wrong}: it must be a text or a number")
    convert: Any = action.type or str
    try:
        made = convert(str(value))
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise UsageError(f"{wrong}: {error}") from error
    if action.choices is not None and made not in action.choices:
        raise UsageError(f"{wrong}: it must be one of {', '.join(map(str, action.choices))}")
    return made


def _known(name: str, names: Mapping[str, object]) -> str:
    nearest = difflib.get_close_matches(name, names, n=1)
    return f": did you mean {nearest[0]!r}?" if nearest else f"; known: {', '.join(names)}"
