"""The router's command line and life."""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import Sequence

from yarl import URL

from web.launcher_link import Link, open_link
from web.serving import (
    SHUTDOWN_GRACE_S,
    StartupError,
    add_serving_arguments,
    bind,
    exit_status_of,
    say,
    serving,
    set_up_logging,
    stop_event,
)

from .app import Router
from .nodes import NodePool

__all__ = ["main"]

DEFAULT_PORT = 8080


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the router until it is told to stop.

    Returns:
        The exit status: 0, or 2 when it could not start as asked.
    """
    return exit_status_of("router.py", lambda: _run(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="router.py",
        description="Send each request of an OpenAI-compatible API to a prefill node, then to a decode node.",
    )
    add_serving_arguments(parser, port=DEFAULT_PORT)
    group = parser.add_argument_group("nodes")
    for role in ("prefill", "decode"):
        group.add_argument(
            f"--{role}",
            action="append",
            required=True,
            metavar="URL",
            help=f"a {role} node, e.g. http://127.0.0.1:8100; may be repeated",
        )
    group.add_argument(
        "--silence-timeout-s",
        type=float,
        default=120.0,
        metavar="S",
        help="a node that sends nothing for so long is taken for gone (default: %(default)g)",
    )
    group.add_argument(
        "--check-interval-s",
        type=float,
        default=1.0,
        metavar="S",
        help="between two questions for a node's health (default: %(default)g)",
    )
    group.add_argument(
        "--overlap",
        action="store_true",
        help="begin to decode while the prompt is still computed: its KV cache crosses chunk by chunk; for nodes of serve.py",
    )
    return parser


def _run(options: argparse.Namespace) -> None:
    set_up_logging(options.log_level, "router")
    if options.silence_timeout_s <= 0 or options.check_interval_s <= 0:
        raise StartupError("--silence-timeout-s and --check-interval-s must be positive")
    router = Router(
        NodePool("prefill", [_url(text) for text in options.prefill]),
        NodePool("decode", [_url(text) for text in options.decode]),
        overlap=options.overlap,
        silence_timeout_s=options.silence_timeout_s,
        check_interval_s=options.check_interval_s,
    )
    link = open_link(options.launcher_fd)
    try:
        with bind(options.host, options.port) as listener:
            asyncio.run(_serve(router, listener, link))
    except StartupError as error:
        link.report(failed=str(error))
        raise
    finally:
        link.close()


async def _serve(router: Router, listener: socket.socket, link: Link) -> None:
    stop = stop_event(link)
    host, port = listener.getsockname()[:2]
    async with serving(router.application(), listener):
        link.report(listening=port)
        say(f"router listening on http://{host}:{port}")
        ready = asyncio.create_task(router.wait_until_ready())
        ready.add_done_callback(lambda task: None if task.cancelled() else link.report(ready=True))
        await stop.wait()
        ready.cancel()
        await router.stop(SHUTDOWN_GRACE_S)


def _url(text: str) -> str:
    try:
        parts = URL(text)
    except ValueError:
        parts = URL()
    if parts.scheme not in ("http", "https") or not parts.host:
        raise StartupError(f"{text!r} is not a URL of a node, e.g. http://127.0.0.1:8100")
    return text
