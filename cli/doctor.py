"""`kvferry doctor`: what works on this machine or to another node, why not, and how fast."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvferry.lab.moving.paths import PATHS, Path, path_of, towards
from kvferry.lab.versions import versions
from kvferry.router.seen.columns import columns

from .errors import FAILED, OK, CommandError, UsageError
from .output import add_json, print_json, say

if TYPE_CHECKING:
    from kvferry.lab.machine import Finding
    from kvferry.lab.moving.outcomes import Measuring, Outcome

_DESCRIPTION: Final = """\
Report what works on this machine, and why the rest does not: the kernel's features and limits, devices, GPUs, libraries,
and the paths that bytes can take between two processes, each measured beside memcpy.

With --peer, test the paths to another node instead. Run `kvferry doctor --listen HOST:PORT` there first. ADDRESS may also
be the address of a running node, such as tcp://10.0.0.7:7001; then only the handshake is tested, and nothing is read.

The paths carry a pattern of numbers, and are not encrypted unless --options turns that on.
"""

_EPILOG: Final = """\
exit status: 0 if everything works that was asked for, 1 if something does not, 2 if the command line is wrong. Without
--path, every path whose libraries are installed counts. With --path, the named ones must work. With --peer and without
--path, at least one must.
"""

_POOL_BYTES: Final = 32 << 20
#: Time for all measurements.
SECONDS = 1.0

#: What a read moves: four blocks of a model like Llama-3.1-8B in the uniform layout.
_BLOCKS, _BLOCK_BYTES = 4, 2 << 20


def add(commands: Any) -> argparse.ArgumentParser:
    """Declare the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="report what works on this machine or to another node, why not, and how fast",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--peer", metavar="ADDRESS", help="test the paths to a doctor at HOST:PORT, or to a node's address"
    )
    mode.add_argument(
        "--listen", metavar="HOST:PORT", help="serve the paths to doctors on other hosts, until interrupted"
    )
    add_path_options(parser)
    parser.add_argument(
        "--port-range",
        default="",
        metavar="LOW-HIGH",
        help="with --listen: ports for the paths themselves (default: the system chooses)",
    )
    add_json(parser)
    return parser


def add_path_options(parser: argparse.ArgumentParser) -> None:
    """Declare `--path` and `--options`."""
    parser.add_argument(
        "--path",
        nargs="+",
        choices=tuple(PATHS),
        metavar="NAME",
        help=f"only these paths: {', '.join(PATHS)}",
    )
    parser.add_argument(
        "--options",
        default="{}",
        metavar="JSON",
        help='options of paths, by name, instead of the defaults: \'{"tcp": {"tls_cert": …}}\'; '
        "give the same to both sides",
    )


def positive(text: str) -> float:
    """A positive number, for `type=` of an option."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def path_finder(text: str) -> Callable[[str], Path]:
    """Return a function that finds a path by its name, with the options that `--options` gives to it.

    Raises:
        UsageError: the options are no JSON object of objects, or name an unknown path.
    """
    # Not above, because it brings NumPy, which most commands do not need.
    from kvferry.transports.checked import Refused, json_of, shown

    try:
        options = json_of(text)
    except Refused as refused:
        raise UsageError(f"--options={shown(text)} {refused.why}; give a JSON object") from refused
    if not isinstance(options, dict) or not all(isinstance(value, dict) for value in options.values()):
        raise UsageError(f"--options must map names of paths to options, got {shown(text)}")
    unknown = sorted(options.keys() - set(PATHS))
    if unknown:
        raise UsageError(f"--options names the unknown path {unknown[0]!r}; known: {', '.join(PATHS)}")
    return lambda name: path_of(name, options.get(name))


def run(arguments: argparse.Namespace) -> int:
    """Examine this machine, or the way to a peer, or serve other doctors."""
    find = path_finder(arguments.options)
    if arguments.listen:
        return _listen(arguments, find)
    if arguments.port_range:
        raise UsageError("--port-range needs --listen; the side that connects needs no ports")
    if not arguments.peer:
        return _this_machine(arguments, find)
    if "://" in arguments.peer:
        outcomes = [_connect(arguments.peer, find)]
        about: Mapping[str, object] = {"peer": arguments.peer}
    else:
        outcomes, about = to_doctor(arguments.peer, _measuring(arguments, find))
    head = ", ".join(f"{key} {value}" for key, value in about.items())
    return report(arguments, about, outcomes, [head, *path_lines(outcomes)])


def _this_machine(arguments: argparse.Namespace, find: Callable[[str], Path]) -> int:
    from kvferry.lab.machine import findings

    found, machine = versions(), findings()
    if not arguments.json:
        say(version_line(found))
        for group in dict.fromkeys(finding.group for finding in machine):
            say("", group, *finding_lines([f for f in machine if f.group == group]))
    outcomes = _measuring(arguments, find).here()
    about = {"versions": found, "machine": [finding.to_json() for finding in machine]}
    head = ["", f"paths between two processes, {_BLOCKS} x {_BLOCK_BYTES >> 20} MiB"]
    is_sound = not any(finding.grade == "failed" for finding in machine)
    return report(arguments, about, outcomes, [*head, *path_lines(outcomes)], is_sound)


def version_line(found: Mapping[str, str | None]) -> str:
    """What is installed, for people."""
    return ", ".join(f"{name} {value}" for name, value in found.items() if value)


def report(
    arguments: argparse.Namespace,
    about: Mapping[str, object],
    outcomes: list[Outcome],
    lines: list[str],
    is_sound: bool = True,
) -> int:
    """Print outcomes and what is known beside them, as lines or as JSON; return the exit status.

    The help of the command states the rule of the status.

    Args:
        is_sound: Nothing but the outcomes can make the status bad.
    """
    statuses = {outcome.status for outcome in outcomes}
    if arguments.path:
        works = statuses == {"ok"}
    elif arguments.peer:
        works = "ok" in statuses
    else:
        works = "failed" not in statuses
    if arguments.json:
        paths = [outcome.to_json() for outcome in outcomes]
        print_json({**about, "paths": paths, "ok": works and is_sound})
    else:
        say(*lines)
    return OK if works and is_sound else FAILED


def _measuring(arguments: argparse.Namespace, find: Callable[[str], Path]) -> Measuring:
    from kvferry.lab.moving.outcomes import Measuring
    from kvferry.lab.moving.shapes import Shape

    warn_if_busy()
    paths = [find(name) for name in arguments.path or PATHS]
    return Measuring(paths, [Shape(_BLOCKS, _BLOCK_BYTES)], _POOL_BYTES, SECONDS)


def warn_if_busy() -> None:
    """Say on stderr when the machine is too busy for figures to mean anything."""
    from kvferry.lab.machine import too_busy

    if why := too_busy():
        say(f"warning: {why}", file=sys.stderr)


def finding_lines(findings: list[Finding]) -> list[str]:
    """Findings for people, each remedy on a line of its own."""
    return _annotated([((f.grade, f.name, f.found), f.remedy and f"{'':8}{f.remedy}") for f in findings])


def path_lines(outcomes: list[Outcome]) -> list[str]:
    """Outcomes for people."""
    rows = []
    for outcome in outcomes:
        cells = [outcome.status, outcome.path]
        if outcome.status == "ok":
            by = outcome.mechanism or "connected"
            cells.append(by if outcome.transport == outcome.path else f"{outcome.transport}: {by}")
            for speed in outcome.speeds:
                cells += [f"{speed.gb_per_s:5.2f} GB/s", f"{speed.to_memcpy:.2f} of memcpy"]
            cells.append(f"connected in {outcome.connect_s * 1e3:.1f} ms")
        rows.append(((*cells, ""), outcome.reason and f"{'':9}{outcome.reason}"))
    return _annotated(rows)


def _annotated(rows: Sequence[tuple[Sequence[str], str]]) -> list[str]:
    """Align the cells of rows; each note that is not empty gets a line of its own below its row."""
    lines = columns((cells for cells, _ in rows), indent="  ")
    return [
        text
        for line, (_, note) in zip(lines, rows, strict=True)
        for text in (line, f"  {note}")
        if text.strip()
    ]


# == to another node ===============================================================================


def _listen(arguments: argparse.Namespace, find: Callable[[str], Path]) -> int:
    from kvferry.lab.moving.remote import Listener
    from kvferry.transports.errors import ConfigurationError
    from kvferry.transports.network import parse_port_range

    host, port = _parse_host_port(arguments.listen, "--listen")
    if arguments.json:
        raise UsageError("--json has no meaning with --listen: it prints a log; remove one of them")
    if arguments.port_range and not parse_port_range(arguments.port_range):
        raise UsageError(
            f"--port-range must be LOW-HIGH within 1-65535, got {arguments.port_range!r}; give the lower port first"
        )
    try:
        listener = Listener(host, port, find, say, arguments.port_range)
    except ConfigurationError as error:
        raise CommandError(f"--listen={arguments.listen!r}: {error}") from error
    say("listening at {}:{}, for `kvferry doctor --peer`".format(*listener.address))
    try:
        listener.serve()
    except KeyboardInterrupt:
        pass
    return OK


def _parse_host_port(text: str, option: str) -> tuple[str, int]:
    """Read `HOST:PORT`, with brackets around an IPv6 address.

    Raises:
        UsageError: it is malformed.
    """
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or not port.isdecimal() or int(port) > 65535 or (":" in bare and bare == host):
        raise UsageError(f"{option} must be HOST:PORT, with brackets around an IPv6 address; got {text!r}")
    return bare, int(port)


def to_doctor(address: str, measuring: Measuring) -> tuple[list[Outcome], Mapping[str, object]]:
    """Measure to a doctor that listens; return what it says of itself as well.

    Raises:
        UsageError: the address is malformed.
        CommandError: no doctor answers there.
    """
    from kvferry.lab.moving.remote import NoDoctorError, RemoteDoctor

    host, port = _parse_host_port(address, "--peer")
    try:
        there = RemoteDoctor.find(host, port)
        outcomes = measuring.to(there)
    except NoDoctorError as error:
        raise CommandError(str(error)) from error
    where = "this host" if there.is_same_host else "another host"
    return outcomes, {"peer": address, "kvferry": there.version, "on": where}


def _connect(address: str, find: Callable[[str], Path]) -> Outcome:
    """Connect to a running node, and read nothing: its pool belongs to its requests."""
    from kvferry.lab.moving.outcomes import connect
    from kvferry.transports.errors import ConfigurationError

    scheme = address.partition("://")[0]
    if scheme not in PATHS:
        raise UsageError(
            f"--peer={address!r} is of an unknown transport {scheme!r}; "
            f"known: {', '.join(sorted({path.scheme for path in PATHS.values()}))}"
        )
    path, default = find(scheme), PATHS[scheme]
    try:
        path = towards(path, address) if path == default else path
    except ConfigurationError as error:
        raise UsageError(f"--peer={address!r}: {error}") from error
    return connect(path, address)
