"""Listen, serve, stop: the outer life of every process that speaks HTTP here."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from typing import NoReturn, TextIO

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from .connections import MOST_CONNECTIONS, ConnectionLimits, GuardedRunner
from .json_body import BODY_TIMEOUT
from .launcher_link import Link

#: Exit status of a process that cannot go on and should be started again.
EXIT_BROKEN = 1
#: Exit status of a process that could not start because of how it was asked to.
EXIT_BAD_START = 2
MAX_PORT = 65535
#: Enough for thousands of clients and hundreds of peers; much more costs memory in some libraries.
MOST_OPEN_FILES = 65536
#: Connections that the system keeps for us until we accept them.
BACKLOG = 128
#: What is left to finish when the process is told to stop has this long.
SHUTDOWN_GRACE_S = 1.0
#: Between two requests of one connection.
KEEP_ALIVE_S = 75.0
#: A refused body is read on for so long, so that the client is done with sending when its connection is closed.
LINGER_S = 2.0
#: The request line, and each line of a header; aiohttp takes at most 128 lines.
MAX_HEADER_LINE_BYTES = 8190

#: A process that has not come to its end by then is ended.
SHUTDOWN_DEADLINE_S = 10.0

logger = logging.getLogger(__name__)


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a record is about more than bytes that are not HTTP, which any client can send again and again."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


_http_logger = logging.getLogger(f"{__name__}.http")
_http_logger.addFilter(_is_ours)


class StartupError(Exception):
    """The process cannot start as asked. The message is one line for the user."""


class BrokenError(Exception):
    """The process ran and cannot go on. The message is one line for the user."""


def add_serving_arguments(
    parser: argparse.ArgumentParser, *, port: int | None, port_default: str = "%(default)s"
) -> None:
    """Add the options that say where to listen, what clients may take, and how loud to be.

    Args:
        port: The default port; None: the caller decides.
        port_default: What the help says of it.
    """
    group = parser.add_argument_group("serving")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument(
        "--port",
        type=int,
        default=port,
        help=f"port to listen on; 0 takes a free one and prints it (default: {port_default})",
    )
    group.add_argument(
        "--header-timeout-s",
        type=float,
        default=ConnectionLimits.header_timeout_s,
        metavar="S",
        help="time for the header of a request, from the connection or the first byte; a slower client's connection is "
        "closed (default: %(default)g)",
    )
    group.add_argument(
        "--body-timeout-s",
        type=float,
        default=ConnectionLimits.body_timeout_s,
        metavar="S",
        help="time for the body of a request, from the end of its header; a slower one is answered 408 (default: %(default)g)",
    )
    group.add_argument(
        "--max-connections",
        type=int,
        metavar="N",
        help="connections served at a time; one more closes the longest idle one, or is answered 503 if none is idle "
        f"(default: as many as half of the limit of open files allows, at most {MOST_CONNECTIONS})",
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="how much to write to stderr (default: %(default)s)",
    )
    group.add_argument(
        "--launcher-fd",
        type=int,
        default=-1,
        metavar="FD",
        help="inherited socket on which a launcher learns port and readiness; this process ends when it closes",
    )


def limits_of(options: argparse.Namespace, *, descriptors_each: int) -> ConnectionLimits:
    """What `options` allow clients.

    Args:
        descriptors_each: Open files that a connection may cost, its own included.

    Raises:
        StartupError: a limit cannot work.
    """
    try:
        return ConnectionLimits.of_options(options, descriptors_each)
    except ValueError as error:
        raise StartupError(str(error)) from None


def set_up_logging(level: str, name: str) -> None:
    """Log to stderr, each line beginning with who speaks."""
    logging.basicConfig(
        level=level.upper(), format=f"%(asctime)s {name} %(levelname)s %(message)s", datefmt="%H:%M:%S"
    )


def bind(host: str, port: int) -> socket.socket:
    """Listen on `host:port`.

    Raises:
        StartupError: the port is taken, or the address is not ours.
    """
    if not 0 <= port <= MAX_PORT:
        raise StartupError(f"port {port} is not between 0 and {MAX_PORT}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise StartupError(f"cannot listen on {host}:{port}: {reason}") from None
    return listener


class StopRequest:
    """What a process was told about its end.

    A first SIGTERM or SIGINT sets `drain`. A second one, or the launcher's end, sets `drain` and `now`. A third signal
    ends the process on the spot.
    """

    def __init__(self, link: Link) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        link.watch(self.at_once)

    def at_once(self) -> None:
        self.drain.set()
        self.now.set()

    def _on_signal(self, number: int) -> None:
        if self.now.is_set():
            leave_now(128 + number)
        if self.drain.is_set():
            self.now.set()
        self.drain.set()


@contextlib.asynccontextmanager
async def serving(
    app: web.Application, listener: socket.socket, limits: ConnectionLimits
) -> AsyncIterator[None]:
    """Serve `app` on `listener` inside the block, within `limits`. A client that hangs up cancels its handler."""
    app[BODY_TIMEOUT] = limits.body_timeout_s
    runner = GuardedRunner(
        app,
        limits,
        handler_cancellation=True,
        access_log=None,
        logger=_http_logger,
        shutdown_timeout=SHUTDOWN_GRACE_S,
        keepalive_timeout=KEEP_ALIVE_S,
        lingering_time=LINGER_S,
        auto_decompress=False,
        max_line_size=MAX_HEADER_LINE_BYTES,
        max_field_size=MAX_HEADER_LINE_BYTES,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=runner.accepted_at_once).start()
        listener.listen(BACKLOG)  # asyncio means two things by `backlog`; the system's queue is to be long
        yield
    finally:
        await runner.cleanup()


def exit_status_of(program: str, run: Callable[[], None]) -> int:
    """Run a process's whole life; say in one line why it could not start, or go on.

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
    """Let this process open as many files as it may, up to `MOST_OPEN_FILES`.

    The usual soft limit of 1,024 is there for programs that call `select()`. Ours do not, and each client and peer costs them
    descriptors. The transports leave the limit alone, because they cannot know what else their process does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(
            OSError, ValueError
        ):  # a sandbox may not allow it; the limit then stays as it was
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def say(line: str, stream: TextIO | None = None) -> None:
    """Write a line, to stdout by default, at once. One that cannot be written is dropped: a full disk ends nothing."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stdout if stream is None else stream, flush=True)


def _give_up_unwritten() -> None:
    """Drop what stdout and stderr still cannot write.

    Otherwise the interpreter tries once more when it ends, and changes the exit status to 120.
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
    """End the process without unwinding: for a step that cannot be interrupted, such as a model that loads."""
    _give_up_unwritten()
    os._exit(status)
