"""`kvferry top`: transfers, bandwidth, leases and failures of nodes, from their `/metrics`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from .access import add_access, fetch, getter
from .doctor import positive
from .errors import FAILED, OK, CommandError, UsageError
from .metrics_page import MetricsPage
from .output import add_json, columns, print_json, say

_DESCRIPTION: Final = """\
Show what nodes transfer, refreshed in the terminal. A node is a reference node or vLLM with kvferry; give the URL of its
HTTP server. The URL of a router stands for all of its nodes.
"""

_FETCH_TIMEOUT_S: Final = 3.0
_MAX_NODES: Final = 32

#: Moves the cursor home, and clears from there to the end, so that the screen does not flicker.
_HOME: Final = "\033[H\033[J"


def add(commands: Any) -> argparse.ArgumentParser:
    """Declare the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "top",
        help="show transfers, bandwidth, leases and failures of nodes",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument("urls", nargs="+", metavar="URL", help="of a node or a router: http://HOST:PORT")
    parser.add_argument(
        "--once", action="store_true", help="print one interval and exit; 1 if a node does not answer"
    )
    parser.add_argument(
        "--interval",
        type=positive,
        default=2.0,
        help="time in seconds between refreshes (default: %(default)s)",
    )
    add_access(parser)
    add_json(parser)
    return parser


@dataclass(frozen=True)
class NodeView:
    """What one node did in the interval. A figure that it does not export is None.

    Attributes:
        error: Why nothing is known; empty if something is.
        live_transfers: Requests whose KV cache is being loaded now.
        live_leases: Finished requests whose blocks are kept for another node now.
        loads_per_s, gb_per_s: Loads that succeeded, and what they read, per second of the interval.
        load_ms, exposed_ms: Means over the loads that ended in the interval; None without any.
        failed_loads, expired_leases, aborted_offers: Since the node started.
        new_failures: All three, in the interval.
        by_transport: `transport:mechanism` → GB/s.
    """

    url: str
    error: str = ""
    running: float | None = None
    waiting: float | None = None
    live_transfers: float | None = None
    live_leases: float | None = None
    loads_per_s: float | None = None
    gb_per_s: float | None = None
    load_ms: float | None = None
    exposed_ms: float | None = None
    failed_loads: float | None = None
    expired_leases: float | None = None
    aborted_offers: float | None = None
    new_failures: float | None = None
    by_transport: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scrape:
    """A page of one node and when it came, in `time.monotonic` seconds; or why it did not."""

    at: float
    page: MetricsPage | None
    error: str = ""


_FAILURES: Final = (
    "kvferry_load_failures_total",
    "kvferry_offers_expired_total",
    "kvferry_offers_aborted_total",
)


def view_of(url: str, before: Scrape | None, now: Scrape) -> NodeView:
    """Compare two scrapes of a node. Counters that went backwards belong to a node that was restarted."""
    page = now.page
    if page is None:
        return NodeView(url, error=now.error)
    earlier = before.page if before is not None else None
    seconds = now.at - before.at if before is not None else 0.0

    def growth(name: str) -> float | None:
        new = page.total(name)
        if new is None or earlier is None:
            return None
        old = earlier.total(name) or 0.0
        return new - old if new >= old else new

    def rate(name: str) -> float | None:
        grown = growth(name)
        return None if grown is None or seconds <= 0 else grown / seconds

    def mean_ms(name: str) -> float | None:
        total, count = growth(f"{name}_sum"), growth(f"{name}_count")
        return total / count * 1e3 if total is not None and count else None

    # A node without a single load has no series of loads yet, and that is no load per second.
    is_host = page.total("kvferry_load_failures_total") is not None
    none_yet = 0.0 if is_host and earlier is not None else None
    bytes_per_s = rate("kvferry_load_bytes_sum")
    grown = [growth(name) for name in _FAILURES]
    return NodeView(
        url,
        error="" if is_host else "its /metrics has nothing of kvferry; is the connector configured?",
        running=_first(page, "kvferry_engine_running_requests", "vllm:num_requests_running"),
        waiting=_first(page, "kvferry_engine_waiting_requests", "vllm:num_requests_waiting"),
        live_transfers=_first(page, "kvferry_engine_loading_requests", "kvferry_live_loads"),
        live_leases=_first(page, "kvferry_engine_offered_requests", "kvferry_live_leases"),
        loads_per_s=_or(rate("kvferry_load_seconds_count"), none_yet),
        gb_per_s=bytes_per_s / 1e9 if bytes_per_s is not None else none_yet,
        load_ms=mean_ms("kvferry_load_seconds"),
        exposed_ms=mean_ms("kvferry_load_exposed_seconds"),
        failed_loads=page.total(_FAILURES[0]),
        expired_leases=page.total(_FAILURES[1]),
        aborted_offers=page.total(_FAILURES[2]),
        new_failures=sum(grow for grow in grown if grow is not None) if earlier is not None else None,
        by_transport=_by_transport(page, earlier, seconds),
    )


def _first(page: MetricsPage, *names: str) -> float | None:
    return next((total for total in map(page.total, names) if total is not None), None)


def _or(value: float | None, default: float | None) -> float | None:
    return default if value is None else value


def _by_transport(page: MetricsPage, earlier: MetricsPage | None, seconds: float) -> dict[str, float]:
    if earlier is None or seconds <= 0:
        return {}

    def sums(of: MetricsPage) -> dict[str, float]:
        found: dict[str, float] = {}
        for sample in of.samples("kvferry_load_bytes_sum"):
            key = ":".join(sample.labels.get(label, "") for label in ("transport", "mechanism"))
            found[key] = found.get(key, 0.0) + sample.value
        return found

    old = sums(earlier)
    rates = {key: (new - old.get(key, 0.0)) / seconds / 1e9 for key, new in sums(page).items()}
    return {key: rate for key, rate in rates.items() if rate > 0}


class Watch:
    """Scrapes nodes again and again.

    Args:
        urls: Of nodes and routers.
    """

    def __init__(self, urls: Sequence[str], get: Callable[[str, float], str] = fetch) -> None:
        self._urls = urls
        self._get = get
        self._last: dict[str, Scrape] = {}

    def look(self) -> list[NodeView]:
        """Scrape every node once, at the same time; return what changed since the last look."""
        with ThreadPoolExecutor(_MAX_NODES) as pool:
            given = dict(zip(self._urls, pool.map(self._scrape, self._urls), strict=True))
            nodes: dict[str, Scrape | None] = {}
            for url, scrape in given.items():
                behind = nodes_of_router(scrape.page) if scrape.page is not None else []
                nodes |= dict.fromkeys(behind, None) if behind else {url: scrape}
            unknown = [url for url, scrape in nodes.items() if scrape is None]
            nodes |= zip(unknown, pool.map(self._scrape, unknown), strict=True)
        scrapes = {url: scrape for url, scrape in nodes.items() if scrape is not None}
        views = [view_of(url, self._last.get(url), scrape) for url, scrape in scrapes.items()]
        self._last = scrapes
        return views

    def _scrape(self, url: str) -> Scrape:
        try:
            text = self._get(f"{url}/metrics", _FETCH_TIMEOUT_S)
        except CommandError as error:
            return Scrape(time.monotonic(), None, str(error))
        return Scrape(time.monotonic(), MetricsPage(text))


def nodes_of_router(page: MetricsPage) -> list[str]:
    """Return the URLs of a router's nodes; empty if the page is not a router's."""
    samples = page.samples("kvferry_router_node_healthy")
    return [sample.labels["url"].rstrip("/") for sample in samples if "url" in sample.labels]


_HEADER: Final = (
    "node",
    "run",
    "wait",
    "loading",
    "leases",
    "loads/s",
    "GB/s",
    "load ms",
    "exposed",
    "failed",
)


def table(views: Sequence[NodeView]) -> list[str]:
    """The views for people."""
    rows: list[tuple[str, ...]] = [(*_HEADER, "")]
    for view in views:
        name = view.url.partition("://")[2] or view.url
        if view.error:
            rows.append((name, *[""] * (len(_HEADER) - 1), view.error))
            continue
        failures = [view.failed_loads, view.expired_leases, view.aborted_offers]
        failed = "/".join(_number(value) for value in failures)
        by = ", ".join(f"{key} {rate:.2f} GB/s" for key, rate in view.by_transport.items())
        rows.append(
            (
                name,
                *map(_number, (view.running, view.waiting, view.live_transfers, view.live_leases)),
                *(
                    _number(value, 2)
                    for value in (view.loads_per_s, view.gb_per_s, view.load_ms, view.exposed_ms)
                ),
                failed + (f" +{_number(view.new_failures)}" if view.new_failures else ""),
                by,
            )
        )
    lines = columns(rows)
    return [
        *lines,
        "failed: loads that failed / leases that expired / offers that ended early, since the node started",
    ]


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def require_urls(urls: Sequence[str]) -> None:
    """Refuse what is no URL of HTTP. Raises UsageError: one of them is none."""
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise UsageError(
                f"URL must begin with http:// or https://, got {url!r}; did you mean 'http://{url}'?"
            )


def run(arguments: argparse.Namespace) -> int:
    """Refresh until interrupted, or print one interval."""
    require_urls(arguments.urls)
    watch = Watch([url.rstrip("/") for url in arguments.urls], getter(arguments))
    views = watch.look()
    is_screen = sys.stdout.isatty() and not arguments.json and not arguments.once
    while True:
        time.sleep(arguments.interval)
        views = watch.look()
        if arguments.json and arguments.once:
            print_json([asdict(view) for view in views])
        elif arguments.json:
            print_json([asdict(view) for view in views], indent=None)
        else:
            say(*table(views), start=_HOME if is_screen else "")
        if arguments.once:
            return FAILED if any(view.error for view in views) else OK
