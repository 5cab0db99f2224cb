"""`kvferry completion`: scripts that complete the command line in bash, zsh and fish.

They are made from the parser itself, so they name exactly its commands, options and choices. Nothing runs while a user
completes.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Mapping
from typing import Any, Final

from .errors import OK, CommandError
from .programs import PROGRAMS

SHELLS: Final = ("bash", "zsh", "fish")

_DESCRIPTION: Final = """\
Print a script that completes the command line.

  bash   eval "$(kvferry completion bash)"                 in ~/.bashrc
  zsh    eval "$(kvferry completion zsh)"                  in ~/.zshrc, after compinit
  fish   kvferry completion fish | source                  in ~/.config/fish/config.fish
"""

_BASH: Final = """\
_kvferry() {
  local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} command= at
  for ((at = 1; at < COMP_CWORD; at++)); do
    case ${COMP_WORDS[at]} in %(commands)s) command=${COMP_WORDS[at]}; break;; esac
  done
  COMPREPLY=()
  case $command:$previous in
%(values)s
  esac
  case $command in
%(options)s
    *) COMPREPLY=($(compgen -W '%(words)s' -- "$word"));;
  esac
}
complete -o default -F _kvferry kvferry
"""


def add(commands: Any) -> argparse.ArgumentParser:
    """Declare the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "completion",
        help="print a script that completes the command line in a shell",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell that will run the script")
    parser.set_defaults(commands=commands.choices)  # of all commands, when `run` is called
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    commands = arguments.commands
    for name, program in PROGRAMS.items():
        with contextlib.suppress(CommandError):  # its packages are not installed
            program.configure(commands[name])
    print(
        fish(commands) if arguments.shell == "fish" else bash(commands, is_zsh=arguments.shell == "zsh"),
        end="",
    )
    return OK


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings]


def _choices(parser: argparse.ArgumentParser) -> list[str]:
    """The values of a command's own arguments, if they are known."""
    arguments = [action for action in parser._actions if not action.option_strings]
    return [str(choice) for action in arguments for choice in action.choices or ()]


def bash(commands: Mapping[str, argparse.ArgumentParser], *, is_zsh: bool = False) -> str:
    """Make the script for bash, or for zsh, which can run completions of bash."""
    values, options = [], []
    for name, parser in commands.items():
        words = [
            text for action in _options(parser) for text in action.option_strings if text.startswith("--")
        ]
        options.append(
            f"    {name}) COMPREPLY=($(compgen -W '{' '.join([*words, *_choices(parser)])}' -- \"$word\"));;"
        )
        for action in _options(parser):
            if action.choices is None:
                continue
            choices = " ".join(map(str, action.choices))
            pattern = "|".join(f"{name}:{text}" for text in action.option_strings)
            values.append(f"    {pattern}) COMPREPLY=($(compgen -W '{choices}' -- \"$word\")); return;;")
    script = _BASH % {
        "commands": "|".join(commands),
        "values": "\n".join(values),
        "options": "\n".join(options),
        "words": " ".join([*commands, "--help", "--config"]),
    }
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if is_zsh else script


def fish(commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """Make the script for fish."""
    lines: list[str] = []
    for name, parser in commands.items():
        about = shlex.quote((parser.description or "").strip().partition("\n")[0])
        lines.append(f"complete -c kvferry -n __fish_use_subcommand -a {name} -d {about}")
        here = f"complete -c kvferry -n '__fish_seen_subcommand_from {name}'"
        if choices := _choices(parser):
            lines.append(f"{here} -f -a '{' '.join(choices)}'")
        for action in _options(parser):
            takes = "" if action.nargs == 0 else " -r"
            known = f" -f -a '{' '.join(map(str, action.choices))}'" if action.choices else ""
            text = (
                (action.help or "") % {"default": action.default}
                if action.dest != "help"
                else "show the help"
            )
            for name_of_it in action.option_strings:
                if name_of_it.startswith("--"):
                    long = name_of_it.removeprefix("--")
                    lines.append(f"{here} -l {long}{takes}{known} -d {shlex.quote(text)}")
    return "\n".join([*lines, ""])
