"""`kvferry doctor`: what works on this machine or to another node, why not, and how fast."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvferry.web.columns import columns

from .errors import FAILED, OK, CommandError, UsageError
from .output import add_json, print_json, say
from .path_table import PATHS, Path, path_of
from .version import versions

if TYPE_CHECKING:
    from .checks import Finding
    from .paths import Outcome, Shape

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
        "--seconds",
        type=positive,
        default=1.0,
        help="time in seconds for all measurements (default: %(default)s)",
    )
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
    if arguments.peer and "://" in arguments.peer:
        outcomes = [_connect(arguments.peer, find)]
        about: Mapping[str, object] = {"peer": arguments.peer}
    elif arguments.peer:
        outcomes, about = to_doctor(
            arguments.peer, arguments.path or tuple(PATHS), find, (_shape(),), _POOL_BYTES, arguments.seconds
        )
    else:
        return _this_machine(arguments, find)
    status = status_of(outcomes, arguments.path, is_peer=True)
    if arguments.json:
        print_json({**about, "paths": [outcome.to_json() for outcome in outcomes], "ok": status == OK})
    else:
        say(", ".join(f"{key} {value}" for key, value in about.items()), *path_lines(outcomes))
    return status


# == this machine ==================================================================================


def _this_machine(arguments: argparse.Namespace, find: Callable[[str], Path]) -> int:
    from .checks import machine

    def tell(*lines: str) -> None:
        if not arguments.json:
            say(*lines)

    found = versions()
    tell(", ".join(f"{name} {value}" for name, value in found.items() if value))
    findings = machine()
    for group in dict.fromkeys(finding.group for finding in findings):
        tell("", group, *finding_lines([f for f in findings if f.group == group]))
    outcomes = on_this_machine(
        arguments.path or tuple(PATHS), find, (_shape(),), _POOL_BYTES, arguments.seconds
    )
    tell("", f"paths between two processes, {_shape()}", *path_lines(outcomes))
    is_sound = not any(finding.grade == "failed" for finding in findings)
    status = status_of(outcomes, arguments.path, is_peer=False) if is_sound else FAILED
    if arguments.json:
        print_json(
            {
                "versions": found,
                "machine": [finding.to_json() for finding in findings],
                "paths": [outcome.to_json() for outcome in outcomes],
                "ok": status == OK,
            }
        )
    return status


def on_this_machine(
    names: Sequence[str],
    find: Callable[[str], Path],
    shapes: Sequence[Shape],
    pool_bytes: int,
    seconds: float,
) -> list[Outcome]:
    """Measure paths between two processes of this machine, for `seconds` in total."""
    from .paths import LocalPaths

    local = LocalPaths()
    try:
        return [local.measure(find(name), shapes, pool_bytes, seconds / len(names)) for name in names]
    finally:
        local.close()


def status_of(outcomes: list[Outcome], asked: list[str] | None, *, is_peer: bool) -> int:
    """Return the exit status; the help of the command states the rule.

    Args:
        asked: Names of paths that must work; None if the user named none.
    """
    works = [outcome.status == "ok" for outcome in outcomes]
    if asked:
        return OK if all(works) else FAILED
    if is_peer:
        return OK if any(works) else FAILED
    return FAILED if any(outcome.status == "failed" for outcome in outcomes) else OK


def _shape() -> Shape:
    """What the doctor reads: four blocks of a model like Llama-3.1-8B in the uniform layout."""
    from .paths import Shape

    return Shape(4, 2 << 20)


def finding_lines(findings: list[Finding]) -> list[str]:
    """Findings for people, each remedy on a line of its own."""
    lines = columns(((f.grade, f.name, f.found) for f in findings), indent="  ")
    remedies = [f"  {'':8}{f.remedy}" if f.remedy else "" for f in findings]
    return [line for pair in zip(lines, remedies, strict=True) for line in pair if line]


def path_lines(outcomes: list[Outcome]) -> list[str]:
    """Outcomes for people."""
    rows = []
    for outcome in outcomes:
        cells = [outcome.status, outcome.path]
        if outcome.status == "ok":
            by = outcome.mechanism or "connected"
            cells.append(by if outcome.transport == outcome.path else f"{outcome.transport}: {by}")
        if outcome.speeds:
            speed = outcome.speeds[0]
            cells.append(f"{speed.num_bytes / speed.seconds / 1e9:5.2f} GB/s")
            cells.append(f"{speed.memcpy_seconds / speed.seconds:.2f} of memcpy")
            cells.append(f"connected in {outcome.connect_s * 1e3:.1f} ms")
        elif outcome.status == "ok":
            cells.append(f"connected in {outcome.connect_s * 1e3:.1f} ms")
        rows.append((cells, outcome.reason))
    lines = columns(((*cells, "") for cells, _ in rows), indent="  ")
    reasons = [f"  {'':9}{reason}" if reason else "" for _, reason in rows]
    return [line for pair in zip(lines, reasons, strict=True) for line in pair if line]


# == to another node ===============================================================================


def _listen(arguments: argparse.Namespace, find: Callable[[str], Path]) -> int:
    from kvferry.transports.errors import ConfigurationError
    from kvferry.transports.network import parse_port_range

    from .remote import Listener, parse_host_port

    host, port = parse_host_port(arguments.listen, "--listen")
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
        return OK
    finally:
        listener.close()
    return OK


def to_doctor(
    address: str,
    names: Sequence[str],
    find: Callable[[str], Path],
    shapes: Sequence[Shape],
    pool_bytes: int,
    seconds: float,
) -> tuple[list[Outcome], Mapping[str, object]]:
    """Measure paths to a doctor that listens, for `seconds` in total.

    Raises:
        UsageError: the address is malformed.
        CommandError: no doctor answers there.
    """
    from .paths import Job, Outcome, Readers
    from .remote import RemoteDoctor, parse_host_port

    there = RemoteDoctor.find(*parse_host_port(address, "--peer"))
    readers = Readers()
    outcomes = []
    try:
        for name in names:
            path = find(name)
            if path.scheme == "shm" and not there.is_same_host:
                outcomes.append(Outcome(name, "skipped", reason="the peer is on another host"))
                continue
            if name not in there.paths:
                outcomes.append(
                    Outcome(name, "skipped", reason=f"kvferry {there.version} there has no such path")
                )
                continue
            with there.open(name, pool_bytes) as opened:
                if opened.address:
                    job = Job(path, opened.address, pool_bytes, tuple(shapes), seconds / len(names))
                    outcomes.append(readers.do(job))
                else:
                    is_missing = opened.status == "missing"
                    outcomes.append(
                        Outcome(name, "missing" if is_missing else "failed", reason=opened.reason)
                    )
    finally:
        readers.close()
    where = "this host" if there.is_same_host else "another host"
    return outcomes, {"peer": address, "kvferry": there.version, "on": where}


def _connect(address: str, find: Callable[[str], Path]) -> Outcome:
    """Connect to a running node, and read nothing: its pool belongs to its requests."""
    from kvferry.transports.errors import ConfigurationError

    from .paths import Job, Readers, towards

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
    readers = Readers()
    try:
        outcome = readers.do(Job(path, address, 1 << 20, (), 0.0))
    finally:
        readers.close()
    return outcome
