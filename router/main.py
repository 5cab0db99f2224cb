"""The router's command line, start and stop."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import math
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import uvloop
from yarl import URL

from ..transports.errors import ConfigurationError
from .answer.performance import DecodeAlone
from .app import Router
from .choice.fleet import Mode
from .choice.kv_events import Follow
from .choice.placement import Limits
from .choice.ways import MAX_AT_ONCE, Options
from .http.access import OPEN_PATHS, Access, NodeAccess, add_node_access_arguments, node_access_of
from .http.admin import Admin, add_admin_arguments, admin_of, serving_admin
from .http.connections import ConnectionLimits
from .http.launcher_link import Link, open_link
from .http.logs import set_up_logging
from .http.serving import (
    EXIT_BAD_START,
    StartupError,
    StopRequest,
    add_drain_arguments,
    add_serving_arguments,
    bind,
    checked_access,
    exit_status_of,
    limits_of,
    place_of,
    say,
    serving,
    steer_to_newest,
    url_of,
)
from .http.tracing import set_up_tracing
from .nodes.membership import ROLES, DnsTarget, parse_target
from .nodes.pool import NodePool
from .nodes.sources import DnsName, LookUpError, NodesFile, NodeSource
from .nodes.states import FAILED_CHECKS_UNTIL_GONE, EjectionRule
from .processes import MAX_PROCESSES, run_workers
from .seen.page import EXPLAIN_PATH
from .seen.receipts import Receipts
from .workers import Siblings

DEFAULT_PORT = 8000
#: The client's connection, one to a prefill node and one to a decode node.
DESCRIPTORS_EACH = 3

#: Seconds between two look-ups of a DNS name.
DNS_INTERVAL_S = 5.0
#: Of `--ttft-limit-ms` and `--itl-limit-ms`.
MAX_LIMIT_MS = 1e7
#: Seconds in which a connection that is being made is complete, or the next request of a connection arrives.
HALF_OPEN_S = 0.5
#: How long a drain may take where another process waits for the port.
DRAIN_TIMEOUT_S = 30.0

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
            default=[],
            metavar="URL",
            help=f"a {role} node, e.g. http://127.0.0.1:8100, or dns://NAME:PORT (dns+https://NAME:PORT) for a node at each "
            "address of a DNS name; may be repeated",
        )
    group.add_argument(
        "--node",
        action="append",
        default=[],
        metavar="URL",
        help="a node that is a prefill node and a decode node (kv_role kv_both), written as for --prefill; --placement decides "
        "per request which of these nodes computes the prompt; may be repeated",
    )
    group.add_argument(
        "--nodes-file",
        type=Path,
        metavar="FILE",
        help="file with the lists prefill and decode of nodes' URLs, JSON if its name ends with .json, otherwise TOML; it is read "
        "again when it changes (default: none)",
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
    group.add_argument(
        "--eject-after",
        type=int,
        default=EjectionRule.num_failures,
        metavar="N",
        help=f"failed requests in a row after which a node whose health checks succeed is avoided for {EjectionRule.first_s:g} s "
        "while others work, and each further time for twice as long; 0: never (default: %(default)d)",
    )
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
        help="whether decode nodes compute prompts while no prefill node can: auto uses nodes that report the load "
        "failure policy recompute; always uses any node (default: %(default)s)",
    )
    add_drain_arguments(group)
    group.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="processes that share the port and what they know of the nodes; each takes its share of --max-concurrent-requests, "
        "--max-queued-requests, the connections, and requests that are sent to both nodes at once (default: %(default)d)",
    )
    group.add_argument(
        "--reuse-port",
        action="store_true",
        help="share the port with another router of this user that has this option (SO_REUSEPORT): start the new router, then "
        "stop the old one, and no request is lost (default: the port belongs to one process)",
    )
    group.add_argument(
        "--drain-timeout-s",
        type=float,
        metavar="S",
        help="seconds that requests in flight have to finish after SIGTERM or SIGINT; a second signal ends the router at "
        f"once (default: {DRAIN_TIMEOUT_S:g}; with --reuse-port until the last one has ended, because another router serves the port)",
    )
    group.add_argument(
        "--rendezvous",
        choices=("auto", "off"),
        default="auto",
        help="auto asks the prefill and the decode node at once, where both can do that: the cache crosses while the prompt is "
        "computed; off asks one after the other (default: %(default)s)",
    )
    group.add_argument(
        "--continue-answers",
        choices=("auto", "off"),
        default="auto",
        help="what becomes of a streamed answer whose decode node is lost: auto lets another one go on with it, where nodes and "
        "request make the answer provably that of a single node; off ends it with an error (default: %(default)s)",
    )

    group.add_argument(
        "--placement",
        choices=get_args(Mode),
        default="auto",
        help="where a prompt is computed, of nodes that are named for both: auto decides per request, by what the nodes have to do "
        "and have cached; never hands nothing over; always hands every prompt over (default: %(default)s)",
    )
    group.add_argument(
        "--kv-events",
        choices=get_args(Follow),
        default="auto",
        help="whose KV events --placement auto follows, to know what nodes have cached: auto those of nodes on loopback, on those of all "
        "nodes that publish, off none; they are neither encrypted nor authenticated (default: %(default)s)",
    )
    group.add_argument(
        "--receipts",
        choices=get_args(Receipts),
        default="keyed",
        help="which answers say how their cache came, in the field kv_receipts: keyed those to requests with the header X-KV-Receipt "
        "and a key of --api-key or --api-key-file, asked those to all requests with the header, always all; they name nodes "
        "(default: %(default)s)",
    )
    for name, what in (("ttft", "the first token"), ("itl", "a pause between two tokens")):
        group.add_argument(
            f"--{name}-limit-ms",
            type=float,
            default=0.0,
            metavar="MS",
            help=f"milliseconds for {what} that --placement auto keeps for as many requests as it can; 0: none "
            "(default: %(default)g)",
        )


def _run(options: argparse.Namespace) -> None:
    set_up_logging(options.log_level, "router", options.log_format)
    _check_times(options)
    num = options.processes
    if not 1 <= num <= MAX_PROCESSES:
        raise StartupError(f"--processes {num}: it must be 1 to {MAX_PROCESSES}")
    limits = limits_of(options, descriptors_each=DESCRIPTORS_EACH).share_of(num)
    access = checked_access(options)
    admin = admin_of(options, access.tls)
    pools, sources = _nodes(options)
    node_access = _node_access(options, pools)
    router = Router(
        *pools,
        options=Options(
            options.rendezvous == "auto", options.continue_answers == "auto", -(-MAX_AT_ONCE // num)
        ),
        answer_timeout_s=options.answer_timeout_s,
        check_interval_s=options.check_interval_s,
        check_timeout_s=options.check_timeout_s,
        decode_alone=options.decode_alone,
        node_access=node_access,
        # A key of the router's own clients is no key of the nodes.
        passes_keys_on=not access.keys,
        placement=options.placement,
        follow=options.kv_events,
        limits=Limits(options.ttft_limit_ms / 1e3, options.itl_limit_ms / 1e3),
        sources=sources,
        admin_keys=admin.access.keys if admin else None,
        # Without a key no request is answered, if there are keys.
        receipts="asked" if options.receipts == "keyed" and access.keys else options.receipts,
    )
    link = open_link()
    try:
        with bind(options.host, options.port, is_shared=options.reuse_port) as listener:

            def announce() -> None:
                link.report(**place_of(listener), **({} if admin is None else {"admin": admin.port}))
                if admin is not None:
                    say(f"router's admin endpoints on {admin.url}")
                say(f"router listening on {url_of(listener, access)}")

            if num > 1:
                gc.freeze()  # so that no collection writes to the memory that the processes share
                listeners = [listener, *([] if admin is None else [admin.listener])]
                seat = run_workers(num, listeners, link, announce)
                if seat is None:
                    return
                link = siblings = Siblings(seat)
                router.share(siblings)
                announce = partial(siblings.report, listening=True)
            set_up_tracing(options.otlp_traces_endpoint, "router")  # starts a thread, so after a fork
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(router, listener, link, announce, options, limits, access, admin))
    except StartupError as error:
        link.report(failed=str(error))
        if isinstance(link, Siblings):
            sys.exit(EXIT_BAD_START)  # the parent says why
        raise
    finally:
        link.close()


def _node_access(options: argparse.Namespace, pools: Sequence[NodePool]) -> NodeAccess:
    try:
        access = node_access_of(options)
    except ConfigurationError as error:
        raise StartupError(str(error)) from None
    # Nodes that the router learns of later are refused by their checks.
    for url in (node.url for pool in pools for node in pool.nodes):
        if refusal := access.refusal(URL(url)):
            raise StartupError(f"{url}: {refusal}")
    return access


def _check_times(options: argparse.Namespace) -> None:
    for name in (
        "check_interval_s",
        "check_timeout_s",
        "answer_timeout_s",
        "drain_timeout_s",
        "drain_delay_s",
    ):
        if (value := getattr(options, name)) is None:
            continue  # a default that depends on other options
        may_be_0 = not name.startswith("check")
        if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_0):
            option = "--" + name.replace("_", "-")
            raise StartupError(
                f"{option} {value:g}: it must be {'0 or more' if may_be_0 else 'positive'} seconds"
            )
    for name in ("ttft", "itl"):
        if not 0 <= (value := getattr(options, f"{name}_limit_ms")) <= MAX_LIMIT_MS:
            raise StartupError(f"--{name}-limit-ms {value:g}: it must be 0 to {MAX_LIMIT_MS:g} milliseconds")


async def _serve(
    router: Router,
    listener: socket.socket,
    link: Link,
    announce: Callable[[], None],
    options: argparse.Namespace,
    limits: ConnectionLimits,
    access: Access,
    admin: Admin | None,
) -> None:
    stop = StopRequest(link)
    begin_drain = stop.begin_drain
    if isinstance(link, Siblings):
        link.on_drain, begin_drain = begin_drain, link.begin_drain
        await link.connect()
    # The page asks for the admin key itself. Without one it needs the key of clients.
    open_paths = OPEN_PATHS | ({EXPLAIN_PATH} if admin is not None and admin.access.keys else set())
    async with (
        serving_admin(router.admin_application(begin_drain, admin.port if admin else None), admin),
        serving(router.application(), listener, limits, access, open_paths) as server,
    ):
        gc.freeze()  # what is here now stays, so no collection needs to look at it
        announce()
        ready = asyncio.create_task(router.wait_until_ready())
        ready.add_done_callback(lambda task: None if task.cancelled() else link.report(ready=True))
        await stop.drain.wait()
        ready.cancel()
        if not stop.now.is_set():
            draining = asyncio.create_task(_drain(router, server, listener, options))
            stopped = asyncio.create_task(stop.now.wait())
            await asyncio.wait({draining, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if isinstance(link, Siblings):
                # Until the last worker has nothing to do, new requests are refused by an answer. One that
                # ended now would reset connections that it has just accepted.
                link.report(drained=True)
                await stopped
            draining.cancel()
            stopped.cancel()
        router.stop()


def drain_timeout_s(options: argparse.Namespace) -> float:
    """How long requests in flight have to finish; infinity if nothing waits for this process to make way for
    another one.
    """
    if options.drain_timeout_s is None:
        return math.inf if options.reuse_port else DRAIN_TIMEOUT_S
    timeout_s: float = options.drain_timeout_s
    return timeout_s


async def _drain(
    router: Router, server: asyncio.Server, listener: socket.socket, options: argparse.Namespace
) -> None:
    """Accept no more requests, and wait for those in flight."""
    timeout_s = drain_timeout_s(options)
    until = f"for up to {timeout_s:g} s" if math.isfinite(timeout_s) else "until the last request has ended"
    logger.info("draining %s; a second signal ends the router at once", until)
    router.announce_drain()
    await asyncio.sleep(options.drain_delay_s)
    if options.reuse_port:
        # The other router serves new connections. This one serves what it has accepted, and closes the
        # connections after it.
        steer_to_newest(listener)
        await asyncio.sleep(HALF_OPEN_S)  # accept the connections that were being made
        server.close()
    else:
        router.refuse_requests()
    await router.finish(timeout_s, quiet_s=HALF_OPEN_S if options.reuse_port else 0.0)


def _nodes(options: argparse.Namespace) -> tuple[tuple[NodePool, NodePool], list[NodeSource]]:
    """Return the pools of prefill and decode nodes, and the sources that will change them.

    Raises:
        StartupError: An option is wrong, or the file of nodes cannot be read.
    """
    sources: list[NodeSource] = []
    urls: dict[str, list[str]] = {}
    try:
        ejection = EjectionRule(options.eject_after)
        for role in ROLES:
            targets = [parse_target(text) for text in (*getattr(options, role), *options.node)]
            urls[role] = [target for target in targets if isinstance(target, str)]
            names = dict.fromkeys(target for target in targets if isinstance(target, DnsTarget))
            sources += [DnsName(role, name, DNS_INTERVAL_S) for name in names]
        if options.nodes_file is not None:
            file = NodesFile(options.nodes_file)
            # Later mistakes only delay a change, but now the user can correct the file at once.
            file.read()
            sources.append(file)
    except (ValueError, LookUpError) as error:
        raise StartupError(str(error)) from None
    missing = [role for role in ROLES if not getattr(options, role) and not options.node]
    if missing and options.nodes_file is None:
        what = f"the router knows no {' and no '.join(missing)} node"
        if options.admin_port is None:
            logger.warning("%s: give --%s, --nodes-file, or --admin-port to add one later", what, missing[0])
        else:
            logger.info("%s until one is added at /admin/nodes", what)
    prefill = NodePool("prefill", urls["prefill"], ejection=ejection)
    return (prefill, NodePool("decode", urls["decode"], ejection=ejection)), sources
