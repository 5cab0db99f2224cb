"""The router's command line, start and stop."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import socket
from collections.abc import Sequence
from typing import get_args

from yarl import URL

from kvferry.transports.errors import ConfigurationError

from ..web.access import Access, NodeAccess, add_node_access_arguments, node_access_of
from ..web.admin import Admin, add_admin_arguments, admin_of, serving_admin
from ..web.connections import ConnectionLimits
from ..web.launcher_link import Link, open_link
from ..web.logs import set_up_logging
from ..web.serving import (
    StartupError,
    StopRequest,
    add_drain_arguments,
    add_serving_arguments,
    bind,
    checked_access,
    exit_status_of,
    limits_of,
    say,
    serving,
    steer_to_newest,
)
from ..web.tracing import set_up_tracing
from .app import DecodeAlone, Router
from .nodes import FAILED_CHECKS_UNTIL_GONE, NodePool

DEFAULT_PORT = 8000
#: The client's connection, one to a prefill node and one to a decode node.
DESCRIPTORS_EACH = 3

#: Seconds in which a connection that is being made is complete, or the next request of a connection arrives.
HALF_OPEN_S = 0.5

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None, program: str = "kvferry router") -> int:
    """Run the router until a signal, or the end of its launcher, stops it.

    Args:
        program: The program's name in messages.

    Returns:
        The exit status: 0, or 2 if the router could not start.
    """
    parser = argparse.ArgumentParser(prog=program, allow_abbrev=False)
    configure(parser)
    return exit_status_of(program, lambda: _run(parser.parse_args(arguments)))


def run(arguments: argparse.Namespace, program: str) -> int:
    """Run the router with the options that a parser has read; see `main`."""
    return exit_status_of(program, lambda: _run(arguments))


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the router."""
    parser.description = (
        "Send each request of an OpenAI-compatible API to a prefill node, then to a decode node."
    )
    parser.epilog = "docs/router.md explains the states of a node, handoff counts, and how the router stops."
    add_serving_arguments(parser, port=DEFAULT_PORT)
    add_admin_arguments(parser)
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
        "--check-interval-s",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds between two health checks of a node (default: %(default)g)",
    )
    group.add_argument(
        "--check-timeout-s",
        type=float,
        default=5.0,
        metavar="S",
        help=f"seconds after which a health check has failed; after {FAILED_CHECKS_UNTIL_GONE} failures in a row the node counts "
        "as gone, and its requests end (default: %(default)g)",
    )
    add_node_access_arguments(group)
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--answer-timeout-s",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds from a request to the last byte of its answer; a later answer ends with error 504, which affects no other "
        "request and no node's state; 0 sets no limit (default: %(default)g)",
    )
    group.add_argument(
        "--decode-alone",
        choices=get_args(DecodeAlone),
        default="auto",
        help="whether decode nodes compute prompts while no prefill node can: auto uses nodes whose /health reports the "
        "load failure policy recompute; always uses any node, which vLLM's nodes need because they do not report it "
        "(default: %(default)s)",
    )
    add_drain_arguments(group)
    group.add_argument(
        "--reuse-port",
        action="store_true",
        help="share the port with another router of this user that has this option (SO_REUSEPORT): start the new router, then "
        "stop the old one, and no request is lost (default: the port belongs to one process)",
    )
    group.add_argument(
        "--drain-timeout-s",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that requests in flight have to finish after SIGTERM or SIGINT; a second signal ends the router at "
        "once (default: %(default)g)",
    )
    group.add_argument(
        "--overlap",
        action="store_true",
        help="start the decode while the prompt is still being computed, and transfer its KV cache chunk by chunk; "
        "needs reference nodes (default: off)",
    )


def _run(options: argparse.Namespace) -> None:
    set_up_logging(options.log_level, "router", options.log_format)
    set_up_tracing(options.otlp_traces_endpoint, "router")
    _check_times(options)
    limits = limits_of(options, descriptors_each=DESCRIPTORS_EACH)
    access = checked_access(options)
    admin = admin_of(options, access.tls)
    node_access = _node_access(options)
    router = Router(
        NodePool("prefill", [_url(text) for text in options.prefill]),
        NodePool("decode", [_url(text) for text in options.decode]),
        overlap=options.overlap,
        answer_timeout_s=options.answer_timeout_s,
        check_interval_s=options.check_interval_s,
        check_timeout_s=options.check_timeout_s,
        decode_alone=options.decode_alone,
        node_access=node_access,
        # A key of the router's own clients is no key of the nodes.
        passes_keys_on=not access.keys,
    )
    link = open_link(options.launcher_fd)
    try:
        with bind(options.host, options.port, is_shared=options.reuse_port) as listener:
            asyncio.run(_serve(router, listener, link, options, limits, access, admin))
    except StartupError as error:
        link.report(failed=str(error))
        raise
    finally:
        link.close()


def _node_access(options: argparse.Namespace) -> NodeAccess:
    try:
        access = node_access_of(options)
    except ConfigurationError as error:
        raise StartupError(str(error)) from None
    for text in (*options.prefill, *options.decode):
        if refusal := access.refusal(URL(_url(text))):
            raise StartupError(f"{text}: {refusal}")
    return access


def _check_times(options: argparse.Namespace) -> None:
    for name in (
        "check_interval_s",
        "check_timeout_s",
        "answer_timeout_s",
        "drain_timeout_s",
        "drain_delay_s",
    ):
        value = getattr(options, name)
        may_be_0 = not name.startswith("check")
        if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_0):
            option = "--" + name.replace("_", "-")
            raise StartupError(
                f"{option} {value:g}: it must be {'0 or more' if may_be_0 else 'positive'} seconds"
            )


async def _serve(
    router: Router,
    listener: socket.socket,
    link: Link,
    options: argparse.Namespace,
    limits: ConnectionLimits,
    access: Access,
    admin: Admin | None,
) -> None:
    stop = StopRequest(link)
    host, port = listener.getsockname()[:2]
    async with (
        serving_admin(router.admin_application(stop.begin_drain), admin),
        serving(router.application(), listener, limits, access) as server,
    ):
        link.report(listening=port, **({} if admin is None else {"admin": admin.port}))
        if admin is not None:
            say(f"router's admin endpoints on {admin.url}")
        say(f"router listening on {access.scheme}://{host}:{port}")
        ready = asyncio.create_task(router.wait_until_ready())
        ready.add_done_callback(lambda task: None if task.cancelled() else link.report(ready=True))
        await stop.drain.wait()
        ready.cancel()
        if not stop.now.is_set():
            draining = asyncio.create_task(_drain(router, server, listener, options))
            stopped = asyncio.create_task(stop.now.wait())
            await asyncio.wait({draining, stopped}, return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
            stopped.cancel()
        router.stop()


async def _drain(
    router: Router, server: asyncio.Server, listener: socket.socket, options: argparse.Namespace
) -> None:
    """Accept no more requests, and wait for those in flight."""
    timeout_s = options.drain_timeout_s
    logger.info("draining for up to %g s; a second signal ends the router at once", timeout_s)
    router.announce_drain()
    await asyncio.sleep(options.drain_delay_s)
    if options.reuse_port:
        # The other router serves new connections. This one serves what it has accepted, and closes the connections after it.
        steer_to_newest(listener)
        await asyncio.sleep(HALF_OPEN_S)  # accept the connections that were being made
        server.close()
    else:
        router.refuse_requests()
    await router.finish(timeout_s, quiet_s=HALF_OPEN_S if options.reuse_port else 0.0)


def _url(text: str) -> str:
    try:
        parts = URL(text)
    except ValueError:
        parts = URL()
    if parts.scheme not in ("http", "https") or not parts.host:
        raise StartupError(f"{text!r} is not the URL of a node: give one such as http://127.0.0.1:8100")
    return text
