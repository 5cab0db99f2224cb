"""Writes the reference pages from the code: options of connectors and transports, and the command line.

    python docs/site/reference.py            # write docs/reference/*.md
    python docs/site/reference.py --check    # exit with 1 if a page is not what it would write

The pages are kept in the repository, because they are read there as well. A test makes sure that they are up
to date.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final

from kvferry.cli.main import commands_of, make_parser
from kvferry.cli.programs import PROGRAMS
from kvferry.connector.handoff.config import HandoffConfig
from kvferry.connector.p2p.options import ConnectorOptions
from kvferry.transports.checked import Refused, record
from kvferry.transports.network import NetworkOptions, PlaintextOptions
from kvferry.transports.options import option_names
from kvferry.transports.registry import BUILT_IN, load_transport
from kvferry.transports.serving import HandshakeOptions

FOLDER: Final = Path(__file__).parents[1] / "reference"

#: The options of each transport by scheme. `inproc`, which tests use, has only those of `EndpointOptions`.
TRANSPORTS: Final[Mapping[str, Any]] = {
    scheme: load_transport(scheme).options_type for scheme in BUILT_IN if scheme != "inproc"
}

_NOTE: Final = (
    "<!-- Written by docs/site/reference.py from the code. Change the code, then run `make format`. -->"
)


# -- what an option is -------------------------------------------------------------------------------


def meanings(cls: type) -> dict[str, str]:
    """Read the section `Attributes:` of the docstrings of a class and of its bases."""
    found: dict[str, str] = {}
    for kind in reversed(cls.__mro__):
        _, _, section = (inspect.getdoc(kind) or "").partition("Attributes:\n")
        section = re.split(r"\n(?=\S)", section)[0]
        entries = re.findall(r"^ {4}([\w, ]+): (.+(?:\n {5,}.+)*)", section, flags=re.MULTILINE)
        for names, text in entries:
            found.update(dict.fromkeys(names.split(", "), " ".join(text.split())))
    return found


def must_be(cls: type, name: str) -> str:
    """Say what a value must be, in the words of the error that refuses another one."""
    try:
        record(cls).checked({name: object()})
    except Refused as refused:
        return re.sub(r"^must be (an? )?|, got .*$", "", refused.why, flags=re.DOTALL)
    raise AssertionError(f"{cls.__name__}.{name} accepts any value")


def shown(name: str, value: object) -> str:
    """Show the default of an option as a user would write it in JSON, and a number of bytes also in
    its unit.
    """
    if value == MISSING or value == "":
        return "–" if value == MISSING else '`""`'
    if isinstance(value, int) and name.endswith("_bytes") and value >= 1 << 16 and value % (1 << 10) == 0:
        unit = ("MiB", 20) if value % (1 << 20) == 0 else ("KiB", 10)
        return f"`{value}` ({value >> unit[1]} {unit[0]})"
    return f"`{json.dumps(value)}`"


def option_rows(cls: type, names: list[str]) -> Iterator[str]:
    """Yield a table row for each option."""
    texts = meanings(cls)
    for field in fields(cls):
        if field.name not in names:
            continue
        made = field.default_factory() if field.default_factory is not MISSING else field.default
        default = shown(field.name, made if not isinstance(made, Mapping | tuple) else type(made)())
        cells = (f"`{field.name}`", default, must_be(cls, field.name), plain(texts[field.name]))
        yield "| " + " | ".join(cells) + " |"


def plain(text: str) -> str:
    """Escape what would end a cell of a table, or start a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def option_table(cls: type, without: type | None = None) -> str:
    """Return the table of the options of a class, without those that another class has with the same
    meaning.
    """
    inherited = (
        {} if without is None else {f.name: (f.default, meanings(without)[f.name]) for f in fields(without)}
    )
    texts = meanings(cls)
    options = set(option_names(cls))
    own = [
        f.name
        for f in fields(cls)
        if f.name in options and inherited.get(f.name) != (f.default, texts[f.name])
    ]
    return table(option_rows(cls, own))


def table(rows: Iterable[str]) -> str:
    """Return a table of options."""
    return "\n".join(["| option | default | value | meaning |", "|---|---|---|---|", *rows])


# -- the pages ---------------------------------------------------------------------------------------


_CONFIGURATION_HEAD: Final = """\
The options of a connector are the keys of `kv_connector_extra_config`. Inside vLLM that is a part of
`--kv-transfer-config`; a reference node also takes each as `--connector-option KEY=VALUE`. The options of
a transport are the keys of its option `transport_options`. An unknown key, and a value that is not
allowed, end the start with a message that names the key.

```json
{"kv_connector": "KvferryConnector", "kv_role": "kv_both",
 "kv_connector_extra_config": {
   "transport": "tcp", "lease_s": 60,
   "transport_options": {
     "bind_host": "10.0.0.7", "tls_cert": "node.pem", "tls_key": "node.key", "tls_ca": "ca.pem"}}}
```

Names that end in `_s` are in seconds, in `_us` in microseconds, and in `_bytes` in bytes."""

_HANDOFF_HEAD: Final = """\
They are options of the connector too, beside the others. [Operations](../operations.md#leases) says
which to change, and when."""

_EVERY_HEAD: Final = """\
`auto` has options of its own only; it passes `local_options` and `network_options` on."""

_NETWORK_HEAD: Final = """\
`tcp`, `zeromq`, `ucx` and `nixl` have these as well. A transport with another default or another meaning
lists the option again."""

_COMMAND_LINE_HEAD: Final = """\
All options of `kvferry`. [The command kvferry](../operations.md#the-command-kvferry) explains what the commands do, and the
configuration file that may hold any of these options."""


def configuration() -> str:
    """Return the page of the options."""
    own = [field.name for field in fields(ConnectorOptions) if field.name != "handoff"]
    parts = ["# Options of connectors and transports", _NOTE, _CONFIGURATION_HEAD]
    parts += ["## Connector", table(option_rows(ConnectorOptions, own))]
    parts += ["## Deadlines and bounds of the handoff", _HANDOFF_HEAD, option_table(HandoffConfig)]
    parts += ["## Every transport", _EVERY_HEAD, option_table(HandshakeOptions)]
    parts += [
        "## Transports between hosts",
        _NETWORK_HEAD,
        option_table(NetworkOptions, without=HandshakeOptions),
    ]
    parts += ["## `ucx` and `nixl`", option_table(PlaintextOptions, without=NetworkOptions)]
    for scheme, cls in TRANSPORTS.items():
        bases = (PlaintextOptions, NetworkOptions, HandshakeOptions)
        base = next((kind for kind in bases if issubclass(cls, kind)), None)
        parts += [f"## `{scheme}`", option_table(cls, without=base)]
    return "\n\n".join(parts) + "\n"


def command_line() -> str:
    """Return the page of the command line."""
    parser = make_parser(with_options=PROGRAMS)
    parts = ["# Command line", _NOTE, _COMMAND_LINE_HEAD]
    parts += ["\n".join(_argument_table(parser._actions, parser))]
    for name, command in commands_of(parser).items():
        about = (command.description or "").strip().partition("\n\n")[0]
        parts += [f"## `kvferry {name}`", plain(about[:1].upper() + about[1:].rstrip(".") + ".")]
        for group in command._action_groups:
            rows = _argument_table(group._group_actions, command)
            if len(rows) > 2:
                title = group.title or ""
                parts += [] if title in _USUAL_GROUPS else [f"**{title[:1].upper()}{title[1:]}**"]
                parts += ["\n".join(rows)]
    return "\n\n".join(parts) + "\n"


_USUAL_GROUPS: Final = ("options", "positional arguments")


def _argument_table(actions: list[argparse.Action], parser: argparse.ArgumentParser) -> list[str]:
    formatter: Any = parser._get_formatter()
    rows = ["| option | meaning |", "|---|---|"]
    for action in actions:
        if action.dest in ("help", "command") or action.help == argparse.SUPPRESS:
            continue
        value = "" if action.nargs == 0 else formatter._format_args(action, _metavar(action))
        names = ", ".join(action.option_strings)
        text = formatter._expand_help(action) if action.help else ""
        rows.append(
            f"| `{' '.join(filter(None, (names, value)))}` | {plain(' '.join(text.split()))} |".replace(
                "`|`", "or"
            )
        )
    return rows


def _metavar(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    return "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()


PAGES: Final = {"configuration.md": configuration, "command-line.md": command_line}


def written() -> Iterator[tuple[Path, str]]:
    """Yield each page that the code writes, with the text that it should have."""
    for name, make in PAGES.items():
        yield FOLDER / name, make()


def main() -> int:
    """Write the pages, or check them."""
    check = "--check" in sys.argv[1:]
    stale = []
    for path, text in written():
        if not path.exists() or path.read_text() != text:
            stale.append(path.name)
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
    if check and stale:
        print(f"docs: {', '.join(stale)} is not what the code says; run `make format`", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
