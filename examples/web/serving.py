"""Listen, serve, stop: the outer life of every process that speaks HTTP here."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from typing import NoReturn, TextIO

from aiohttp import web

from .launcher_link import Link

__all__ = [
    "EXIT_BAD_START",
    "EXIT_BROKEN",
    "BrokenError",
    "StartupError",
    "add_serving_arguments",
    "bind",
    "exit_status_of",
    "leave_now",
    "say",
    "serving",
    "set_up_logging",
    "stop_event",
]

#: Exit status of a process that cannot go on and should be started again.
EXIT_BROKEN = 1
#: Exit status of a process that could not start because of how it was asked to.
EXIT_BAD_START = 2
MAX_PORT = 65535
#: What is left to finish when the process is told to stop has this long.
SHUTDOWN_GRACE_S = 1.0
#: A process that has not come to its end by then is ended.
SHUTDOWN_DEADLINE_S = 10.0

logger = logging.getLogger(__name__)


class StartupError(Exception):
    """The process cannot start as asked. The message is one line for the user."""


class BrokenError(Exception):
    """The process ran and cannot go on. The message is one line for the user."""


def add_serving_arguments(parser: argparse.ArgumentParser, *, port: int) -> None:
    """Add the options that say where to listen and how loud to be."""
    group = parser.add_argument_group("serving")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument(
        "--port",
        type=int,
        default=port,
        help="port to listen on; 0 takes a free one and prints it (default: %(default)s)",
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
        listener.listen(128)
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise StartupError(f"cannot listen on {host}:{port}: {reason}") from None
    return listener


def stop_event(link: Link) -> asyncio.Event:
    """An event that is set by SIGTERM, SIGINT, or the launcher's end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    link.watch(stop.set)
    return stop


@contextlib.asynccontextmanager
async def serving(app: web.Application, listener: socket.socket) -> AsyncIterator[None]:
    """Serve `app` on `listener` inside the block. A client that hangs up cancels its handler."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_GRACE_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        yield
    finally:
        await runner.cleanup()


def exit_status_of(program: str, run: Callable[[], None]) -> int:
    """Run a process's whole life; say in one line why it could not start, or go on.

    Returns:
        The exit status.
    """
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
