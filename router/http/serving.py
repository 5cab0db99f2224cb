"""Start, listen, serve and stop: shared by all processes here that speak HTTP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import ipaddress
import logging
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn, TextIO

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ...transports.checked import printable
from ...transports.errors import ConfigurationError
from ...transports.network import HostPort, is_loopback
from .access import (
    ACCESS,
    MAX_PORT,
    OPEN_PATHS,
    Access,
    access_of,
    add_access_arguments,
    answer_preflights,
    name_allowed_origin,
    require_key,
    require_own_name,
)
from .connections import GATE, SHUTDOWN_GRACE_S, ConnectionLimits, LimitedRunner, RequestGate
from .json_body import BODY_TIMEOUT, MAX_BODY
from .launcher_link import Link

#: Exit status of a process that cannot continue and should be restarted.
EXIT_BROKEN = 1
#: Exit status of a process that could not start because of its options or environment.
EXIT_BAD_START = 2
#: Enough for thousands of clients and hundreds of peers. A much higher limit costs memory in some libraries.
MOST_OPEN_FILES = 65536
#: Connections that the system queues until we accept them.
BACKLOG = 128
#: Seconds that a connection may be idle between two requests.
KEEP_ALIVE_S = 75.0
#: Read a refused body for this long, so that the client has finished sending when its connection is closed.
LINGER_S = 2.0
#: A process that has not ended by then is killed.
SHUTDOWN_DEADLINE_S = 10.0

logger = logging.getLogger(__name__)


def _is_ours(record: logging.LogRecord) -> bool:
    """Drop records about bytes that are not HTTP. Any client can send those, as often as it likes."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


_http_logger = logging.getLogger(f"{__name__}.http")
_http_logger.addFilter(_is_ours)


class StartupError(Exception):
    """The process cannot start. The message is one line for the user."""


class BrokenError(Exception):
    """The process ran and cannot continue. The message is one line for the user."""


def add_serving_arguments(
    parser: argparse.ArgumentParser, *, port: int | None, port_default: str = "%(default)s"
) -> None:
    """Add the options for the address, the limits on clients, keys and TLS, and the log.

    Args:
        port: The default port. None if the caller decides later.
        port_default: The default port in the help text.
    """
    group = parser.add_argument_group("serving")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument(
        "--port",
        type=int,
        default=port,
        help=f"port to listen on; 0 takes a free one and prints it (default: {port_default})",
    )
    for name, default, what in (
        ("max-body-bytes", ConnectionLimits.max_body_bytes, "largest body; a larger one is answered 413"),
        (
            "max-concurrent-requests",
            ConnectionLimits.max_concurrent_requests,
            "completions answered at a time; more wait",
        ),
        (
            "max-queued-requests",
            ConnectionLimits.max_queued_requests,
            "completions that wait for that; one more is answered 429 with Retry-After, and /ready says overloaded",
        ),
    ):
        group.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: %(default)s)"
        )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="lowest level of log messages on stderr (default: %(default)s)",
    )
    group.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="json writes one object per line, with the request's id and trace (default: %(default)s)",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        default="",
        metavar="URL",
        help="where to send OpenTelemetry spans by OTLP over HTTP, e.g. http://127.0.0.1:4318/v1/traces; needs kvferry[otel] "
        "(default: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT; without either, requests are not traced)",
    )
    add_access_arguments(parser)


def limits_of(options: argparse.Namespace, *, descriptors_each: int) -> ConnectionLimits:
    """Return the limits on clients that `options` set.

    Args:
        descriptors_each: Open files per connection, its own included.

    Raises:
        StartupError: A limit is out of range.
    """
    try:
        return ConnectionLimits.of_options(options, descriptors_each)
    except ValueError as error:
        raise StartupError(str(error)) from None


def checked_access(options: argparse.Namespace) -> Access:
    """Return what `options` ask of clients.

    Raises:
        StartupError: A file or a key cannot be used, or beyond loopback there is no TLS or no key.
    """
    try:
        return access_of(options)
    except ConfigurationError as error:
        raise StartupError(str(error)) from None


def bind(host: str, port: int, option: str = "--port", *, is_shared: bool = False) -> socket.socket:
    """Listen on `host:port`.

    Args:
        option: The option that named the port, for errors.
        is_shared: Other processes of this user may listen on the same port, if they ask for it as well
            (SO_REUSEPORT).

    Raises:
        StartupError: The port is in use, or the address is not one of this host.
    """
    if not 0 <= port <= MAX_PORT:
        raise StartupError(f"{option} {port}: it must be 0 to {MAX_PORT}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise StartupError(f"cannot listen on {host}:{port}: {reason}") from None
    return listener


def url_of(listener: socket.socket, access: Access) -> str:
    """Return the base URL of a server that listens there."""
    return f"{access.scheme}://{HostPort(*listener.getsockname()[:2])}"


def place_of(listener: socket.socket) -> dict[str, Any]:
    """Return a server's host and port for the report to its launcher."""
    host, port = listener.getsockname()[:2]
    return (
        {"listening": port}
        if ipaddress.ip_address(host).is_unspecified
        else {"host": host, "listening": port}
    )


def steer_to_newest(listener: socket.socket) -> None:
    """Let the system give new connections to the second listener of a shared port, if there are two.

    Otherwise it chooses by a hash, so the one that is about to close would lose those that arrive at that
    moment. If there is one listener only, or the system cannot do this, nothing changes.
    """
    program = ctypes.create_string_buffer(_RETURN_1)
    with contextlib.suppress(OSError):
        listener.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, struct.pack("@HP", 1, ctypes.addressof(program))
        )


#: Linux's name of an option that Python does not know: which listener gets a connection, as a program of
#: BPF's classic form.
SO_ATTACH_REUSEPORT_CBPF = 51
#: `return 1`: listeners are numbered from 0 in the order in which they were opened.
_RETURN_1 = struct.pack("=HBBI", 0x06, 0, 0, 1)


def close_connections_while(app: web.Application, is_draining: Callable[[], bool]) -> None:
    """Close each connection after its answer while `is_draining`, so that clients find another server for
    their next request.
    """

    async def close(request: web.Request, response: web.StreamResponse) -> None:
        if is_draining():
            response.headers["Connection"] = "close"
            response.force_close()

    app.on_response_prepare.append(close)


def add_drain_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the option for the beginning of a drain."""
    group.add_argument(
        "--drain-delay-s",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds for which a drain still accepts requests after /ready has begun to answer 503, so that load balancers "
        "notice first (default: %(default)g)",
    )


class StopRequest:
    """Requests to stop this process.

    The first SIGTERM or SIGINT, or `begin_drain`, sets `drain`. A second signal, or the end of the launcher,
    sets `drain` and `now`. A third signal ends the process immediately.
    """

    def __init__(self, link: Link) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()
        self._was_signalled = False
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        link.watch(self.at_once)

    def begin_drain(self) -> None:
        """Drain, as after a first signal.

        The signal that a service manager sends after its drain hook is still the first one.
        """
        self.drain.set()

    def at_once(self) -> None:
        self.drain.set()
        self.now.set()

    def _on_signal(self, number: int) -> None:
        if self.now.is_set():
            leave_now(128 + number)
        if self._was_signalled:
            self.now.set()
        self._was_signalled = True
        self.drain.set()


@contextlib.asynccontextmanager
async def serving(
    app: web.Application,
    listener: socket.socket,
    limits: ConnectionLimits,
    access: Access | None = None,
    open_paths: frozenset[str] = OPEN_PATHS,
) -> AsyncIterator[asyncio.Server]:
    """Serve `app` on `listener` inside the block, within `limits`.

    If a client disconnects, its handler is cancelled.

    Args:
        access: What clients must present. None: nothing, over plain HTTP.
        open_paths: Routes that need no key.

    Yields:
        What accepts connections, for a program that stops accepting before it stops serving.
    """
    access = access or Access()
    app[BODY_TIMEOUT] = limits.body_timeout_s
    app[MAX_BODY] = limits.max_body_bytes
    app[GATE] = RequestGate(limits)
    # The last ones are the innermost ones, so the application's own middleware answers their errors.
    app[ACCESS] = access
    app.on_response_prepare.append(name_allowed_origin)
    app.middlewares.append(answer_preflights)
    app.middlewares.append(require_own_name(access, is_loopback_only=is_loopback(listener.getsockname()[0])))
    app.middlewares.append(require_key(access.keys, open_paths))
    runner = LimitedRunner(
        app,
        limits,
        handler_cancellation=True,
        access_log=None,
        logger=_http_logger,
        shutdown_timeout=SHUTDOWN_GRACE_S,
        keepalive_timeout=KEEP_ALIVE_S,
        lingering_time=LINGER_S,
        auto_decompress=False,
        # `LimitedRunner` limits the whole header to this, so no line needs another limit.
        max_line_size=limits.max_header_bytes,
        max_field_size=limits.max_header_bytes,
    )
    await runner.setup()
    try:
        make_protocol = runner.server
        assert make_protocol is not None, "`setup` made it"
        tls = access.ssl_context
        server = await asyncio.get_running_loop().create_server(
            make_protocol,
            sock=listener,
            backlog=runner.accepted_at_once,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else limits.header_timeout_s,
        )
        listener.listen(BACKLOG)  # `backlog` above also set the system's queue, which must be longer
        try:
            yield server
        finally:
            server.close()
    finally:
        await runner.cleanup()


def exit_status_of(program: str, run: Callable[[], None]) -> int:
    """Run a program. Print one line if it cannot start or continue.

    Returns:
        The exit status.
    """
    _raise_open_file_limit()
    try:
        run()
    except StartupError as error:
        say(f"{program}: error: {error}", sys.stderr)
        return EXIT_BAD_START
    except BrokenError as error:
        say(f"{program}: error: {error}", sys.stderr)
        return EXIT_BROKEN
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        _give_up_unwritten()
    return 0


def _raise_open_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, at most to `MOST_OPEN_FILES`.

    The usual soft limit of 1,024 exists for programs that call `select()`. Ours do not, and need descriptors
    for each client and peer. The transports leave the limit alone, because they cannot know what else their
    process does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


#: Form of the lines of `say`, which are text, and whether they report an error. `logs` changes it for JSON.
form_of_lines: Callable[[str, bool], str] = lambda line, is_error: printable(line, keep="\n")


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line and flush it. Drop it if that fails, so that a full disk does not end the process."""
    with contextlib.suppress(OSError, ValueError):
        line = form_of_lines(line, stream is sys.stderr)
        print(line, file=sys.stdout if stream is None else stream, flush=True)


def _give_up_unwritten() -> None:
    """Drop unwritten output of stdout and stderr.

    Otherwise the interpreter flushes again when it ends, and an error changes the exit status to 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def leave_now(status: int) -> NoReturn:
    """End the process without unwinding, because some steps, such as loading a model, cannot be
    interrupted.
    """
    _give_up_unwritten()
    os._exit(status)
