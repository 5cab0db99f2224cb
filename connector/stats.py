"""Figures of handoffs: one record per load, counters, and the table of metrics that every host exports.

A worker half keeps a `StatsCollector`, adds one `TransferRecord` to it per load, and returns what `take`
gives it from `get_kv_connector_stats`. The host adds the figures up over ranks with
`KVConnectorStats.aggregate` and gives them to `HandoffMetrics`, which exports them.

To add a metric, add a row to `METRICS` here and measure it where it happens: count it under its key in
`COUNTERS`, or fill a field of `TransferRecord`. Hosts and `docs/observing.md` take names, types, labels and
meanings from the table.
"""

from __future__ import annotations

import platform
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, Self

from kvferry import __version__

from ..transports import checked
from .spans import SpanRecord

#: Prefix of every metric of kvferry.
PREFIX = "kvferry_"

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_BYTES = tuple(float(4**exponent) for exponent in range(7, 19))  # 16 KiB to 64 GiB
_NUMBERS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0, 30000.0)
#: Fields of `TransferRecord` that are labels of the metrics of loads. They say what moved the bytes.
_LOAD_LABELS = ("transport", "mechanism")
#: Records that a collector keeps at most, in case the engine never takes them. The counters go on counting.
_MAX_RECORDS = 1024


@dataclass(frozen=True)
class Metric:
    """Declare a metric as it appears on `/metrics`.

    Attributes:
        name: With its unit, and for a counter with `_total`.
        text: Its meaning, the help text on `/metrics`.
        labels: Its own labels; a host may put labels of its own before them.
        values: All values of the label of a counter that has one.
        measures: Field of `TransferRecord` that a histogram observes; empty for every other metric.
        buckets: Upper bounds of a histogram's buckets.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    measures: str = ""
    buckets: tuple[float, ...] = ()


def _counter(key: str, text: str) -> Metric:
    return Metric(f"{PREFIX}{key}", "counter", text)


def _gauge(key: str, text: str) -> Metric:
    return Metric(f"{PREFIX}{key}", "gauge", text)


def _of_loads(key: str, measures: str, buckets: tuple[float, ...], text: str) -> Metric:
    return Metric(f"{PREFIX}{key}", "histogram", text, _LOAD_LABELS, (), measures, buckets)


#: Every metric of handoffs. Loads and offers are counted once per rank. Histograms are of the loads that
#: succeeded.
METRICS = (
    _of_loads(
        "load_seconds",
        "seconds",
        _SECONDS,
        "Time from the start of a load's first read to the end of its last",
    ),
    _of_loads(
        "load_exposed_seconds",
        "exposed_seconds",
        _SECONDS,
        "Part of a load's time that computing the prompt did not hide",
    ),
    _of_loads("load_bytes", "num_bytes", _BYTES, "Bytes of KV cache that a load read"),
    _of_loads("load_blocks", "num_blocks", _NUMBERS, "Blocks of KV cache that a load filled"),
    _of_loads("load_regions", "num_regions", _NUMBERS, "Contiguous runs of bytes that a load read"),
    Metric(
        f"{PREFIX}offered_requests_total",
        "counter",
        "Requests that came with an offer of another node, by what became of it: it was loaded, or the prompt was cached here "
        "already. Otherwise this node computed the prompt: the load failed, the engine's side refused the params, this "
        "node's role does not load, or the offered state includes the prompt's last token",
        ("outcome",),
        ("loaded", "cached", "failed", "refused", "role", "state"),
    ),
    _counter("load_failures_total", "Loads that failed"),
    _counter("unreachable_peers_total", "Loads refused because the other node uses another transport"),
    _counter("offers_delivered_total", "Offers that a consumer has read"),
    _counter("offers_aborted_total", "Offers that ended early because a request or a peer went away"),
    _counter("offers_expired_total", "Offers whose lease ran out"),
    _counter(
        "rendezvous_failures_total", "Loads that failed because no request of that rendezvous's name came"
    ),
    _counter(
        "unmet_claims_total", "Claims of a rendezvous that were denied, because no request of its name came"
    ),
    _gauge("live_leases", "Offers whose blocks are held, or that are being computed, for another node"),
    _gauge("live_loads", "Loads that were ordered and have not ended"),
    _counter(
        "connection_failures_total",
        "Connections with other nodes that could not be made, were refused, or were lost",
    ),
    _counter(
        "handoff_thread_deaths_total",
        "Handoff threads that died; after that a node hands nothing over until it is restarted",
    ),
)

#: What is counted, by its key in `KVConnectorStats.counters`, which is the name without `PREFIX`, and for
#: each value of a label the name, a slash and the value. A gauge is counted up and down, so that its growth
#: adds up over ranks and intervals as that of a counter does.
COUNTERS: Mapping[str, Metric] = {
    metric.name.removeprefix(PREFIX) + (value and f"/{value}"): metric
    for metric in METRICS
    if metric.kind != "histogram"
    for value in metric.values or ("",)
}
#: The program that exports a page of metrics: a host of a connector, or the router. Always 1.
BUILD_INFO = Metric(
    f"{PREFIX}build_info",
    "gauge",
    "1, with the version of kvferry, of its handoff protocol and of Python",
    ("version", "protocol", "python"),
)
_HISTOGRAMS = tuple(metric for metric in METRICS if metric.kind == "histogram")


@dataclass(frozen=True)
class TransferRecord:
    """Describe one request's load, as one rank saw it or, after `joined`, as the whole node did.

    A connector adds it no later than the step in which the load ends: for an asynchronous load, the one whose
    `get_finished` names the request.

    Attributes:
        transport: What the bytes came through: scheme of the transport, e.g. `"shm"`, or a store's own word,
            e.g. `"file"`.
        mechanism: What moved the bytes, e.g. `"mapped"`; empty if nothing was read.
        layout: Layout of this node's pool, `"uniform"` or `"per-layer"`; empty if the connector does not say.
        num_blocks: Blocks that the load was to fill, over all groups. Blocks that were cached here are not
            included.
        num_regions: Contiguous runs of bytes that were copied; 0 if the connector does not count them.
        num_regions_per_layer: Runs that the per-layer layout would have needed. Between nodes that differ in
            layout or sharding, this counts only the runs that do not span two layers.
        num_bytes: Bytes copied.
        seconds: From the start of the first read to the end of the last one. There is one read per rank that
            is read from.
        error: Why the load failed; empty if it succeeded. After a failure the other figures describe the
            attempt.
        reason: Why this transport was used; empty if there was no choice.
        exposed_seconds: From the moment when the whole offer was readable, or when the load was ordered if
            that was later, until the load ended. This is the part that computing the prompt did not hide.
        sums: What verified the bytes in transit, `"xxh3"` or `"tls"`; empty if nothing did. The owner's guard
            is looked at after each read, whatever moved the bytes.
    """

    request_id: str
    transport: str
    mechanism: str = ""
    layout: str = ""
    num_blocks: int = 0
    num_regions: int = 0
    num_regions_per_layer: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""
    reason: str = ""
    exposed_seconds: float = 0.0
    sums: str = ""

    @staticmethod
    def joined(records: Sequence[TransferRecord]) -> TransferRecord:
        """Join the records of one request's load, one per rank.

        Ranks load at the same time, and each loads its part of the same blocks. So bytes and regions add up,
        while blocks and times do not.
        """
        return replace(
            records[0],
            num_blocks=max(record.num_blocks for record in records),
            num_regions=sum(record.num_regions for record in records),
            num_regions_per_layer=sum(record.num_regions_per_layer for record in records),
            num_bytes=sum(record.num_bytes for record in records),
            seconds=max(record.seconds for record in records),
            exposed_seconds=max(record.exposed_seconds for record in records),
            error=next((record.error for record in records if record.error), ""),
            sums=records[0].sums if all(record.sums for record in records) else "",
        )


@dataclass(frozen=True)
class KVConnectorStats:
    """Hold the figures of one interval, of one rank or of several.

    Attributes:
        transfers: One record per load that ended in the interval, oldest first.
        counters: Key in `COUNTERS` → growth in the interval, negative if a gauge fell. An absent key means
            zero.
        spans: The spans of handoffs that ended in the interval, if the connector has the option `trace`.
    """

    transfers: tuple[TransferRecord, ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)
    spans: tuple[SpanRecord, ...] = ()

    def is_empty(self) -> bool:
        """Say whether nothing happened in the interval."""
        return not self.transfers and not self.spans and not any(self.counters.values())

    def aggregate(self, other: Self) -> Self:
        """Add the figures of both. Neither changes."""
        names = [*self.counters, *(name for name in other.counters if name not in self.counters)]
        sums = {name: self.counters.get(name, 0) + other.counters.get(name, 0) for name in names}
        counters = {name: growth for name, growth in sums.items() if growth}
        return type(self)(self.transfers + other.transfers, counters, self.spans + other.spans)

    def reduce(self) -> dict[str, int | float]:
        """Return a few figures for a log line.

        Means are over the loads that succeeded, and 0 if there are none.
        """
        done = [record for record in self.transfers if not record.error]
        num_bytes = sum(record.num_bytes for record in done)
        seconds = sum(record.seconds for record in done)
        return {
            "num_transfers": len(done),
            "num_failed_transfers": len(self.transfers) - len(done),
            "num_blocks": sum(record.num_blocks for record in done),
            "num_regions": sum(record.num_regions for record in done),
            "num_regions_per_layer": sum(record.num_regions_per_layer for record in done),
            "num_bytes": num_bytes,
            "mean_transfer_s": seconds / len(done) if done else 0.0,
            "gb_per_s": num_bytes / seconds / 1e9 if seconds > 0 else 0.0,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain lists, dicts, strings and numbers."""
        plain = {"transfers": [asdict(record) for record in self.transfers], "counters": dict(self.counters)}
        return plain | ({"spans": [asdict(span) for span in self.spans]} if self.spans else {})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Do the inverse of `to_dict`.

        Raises:
            ValueError: a key is missing or unknown. Nothing was built.
        """
        if set(data) - {"spans"} != {"transfers", "counters"}:
            raise ValueError(
                f"malformed stats: the keys must be 'counters' and 'transfers', and may be 'spans', got {sorted(data)}"
            )
        known = {f.name for f in fields(TransferRecord)}
        for record in data["transfers"]:
            if set(record) != known:
                raise ValueError(
                    f"malformed transfer record: the keys must be {sorted(known)}, got {sorted(record)}"
                )
        transfers = tuple(TransferRecord(**record) for record in data["transfers"])
        try:
            spans = tuple(map(checked.record(SpanRecord).read, data.get("spans", ())))
        except checked.Refused as error:
            raise ValueError(f"malformed span: {error}") from error
        return cls(transfers, dict(data["counters"]), spans)


class StatsCollector:
    """Collect figures between two calls of `get_kv_connector_stats`. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: list[TransferRecord] = []
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._spans: list[SpanRecord] = []

    def add(self, record: TransferRecord) -> None:
        """Note a load that has ended. One with an `error` is counted as a failure as well."""
        with self._lock:
            if len(self._records) < _MAX_RECORDS:
                self._records.append(record)
            if record.error:
                self._counters["load_failures_total"] += 1

    def count(self, key: str, by: int = 1) -> None:
        """Count something else that happened; `key` is one of `COUNTERS`."""
        with self._lock:
            self._counters[key] += by

    def keep_span(self, span: SpanRecord) -> None:
        """Keep a span. Spans beyond a bound are dropped until the next `take`."""
        with self._lock:
            if len(self._spans) < _MAX_RECORDS:
                self._spans.append(span)

    def take(self) -> KVConnectorStats | None:
        """Take the figures since the last call, or None without any."""
        with self._lock:
            records, self._records = self._records, []
            counters, self._counters = self._counters, defaultdict(float)
            spans, self._spans = self._spans, []
        growths = {key: growth for key, growth in counters.items() if growth}
        stats = KVConnectorStats(tuple(records), growths, tuple(spans))
        return None if stats.is_empty() else stats


class HandoffMetrics:
    """Export `METRICS`.

    Every host uses this class, so a dashboard works with all of them. Safe to call from any thread.

    Args:
        counter: `prometheus_client.Counter`, or what the host uses in its place.
        histogram: `prometheus_client.Histogram`, likewise.
        gauge: `prometheus_client.Gauge`, likewise.
        host_labels: Names of the labels that the host puts on all its metrics.
        hosts: Values of `host_labels`, one tuple per engine whose stats will be observed. Each gets its
            counters now, at zero, because an alert cannot use a counter that appears only when it has counted
            something.
    """

    def __init__(
        self,
        counter: Callable[..., Any],
        histogram: Callable[..., Any],
        gauge: Callable[..., Any],
        host_labels: Sequence[str] = (),
        hosts: Iterable[Sequence[object]] = ((),),
    ) -> None:
        self._exported: dict[str, Any] = {}
        self._levels: defaultdict[tuple[str, tuple[object, ...]], float] = defaultdict(float)
        for metric in METRICS:
            labels = [*host_labels, *metric.labels]
            named = {"name": metric.name, "documentation": metric.text, "labelnames": labels}
            match metric.kind:
                case "histogram":
                    self._exported[metric.name] = histogram(**named, buckets=metric.buckets)
                case "counter":
                    self._exported[metric.name] = counter(**named)
                case "gauge":
                    # Several front ends of vLLM each see a part of the ups and downs.
                    self._exported[metric.name] = gauge(**named, multiprocess_mode="sum")
        export_build_info(gauge, host_labels, hosts := list(hosts))
        for host in hosts:
            for key in COUNTERS:
                self._count(key, 0, host)

    def observe(self, stats: KVConnectorStats, host: Sequence[object] = ()) -> None:
        """Add the figures of one interval to the series of `host`."""
        for key, growth in stats.counters.items():
            self._count(key, growth, host)
        for record in stats.transfers:
            if not record.error:
                for metric in _HISTOGRAMS:
                    labels = [*host, *(getattr(record, label) for label in metric.labels)]
                    self._series(metric, labels).observe(getattr(record, metric.measures))

    def _count(self, key: str, growth: float, host: Sequence[object]) -> None:
        metric = COUNTERS[key]
        value = key.partition("/")[2]
        series = self._series(metric, [*host, value] if value else host)
        if metric.kind == "counter":
            if growth:
                series.inc(growth)
            return
        # Not `inc`, which the gauges of Ray do not have.
        level = self._levels[metric.name, tuple(host)] = self._levels[metric.name, tuple(host)] + growth
        series.set(level)

    def _series(self, metric: Metric, labels: Sequence[object]) -> Any:
        exported = self._exported[metric.name]
        return exported.labels(*labels) if labels else exported


def export_build_info(
    gauge: Callable[..., Any], host_labels: Sequence[str] = (), hosts: Iterable[Sequence[object]] = ((),)
) -> None:
    """Export `BUILD_INFO`.

    The arguments are those of `HandoffMetrics`, which calls this; a program without handoffs calls it itself.
    """
    from .handoff.messages import (
        PROTOCOL_VERSION,  # here, so that importing the package does not import MessagePack
    )

    labels = [*host_labels, *BUILD_INFO.labels]
    exported = gauge(
        name=BUILD_INFO.name,
        documentation=BUILD_INFO.text,
        labelnames=labels,
        multiprocess_mode="mostrecent",
    )
    for host in hosts:
        exported.labels(*host, __version__, PROTOCOL_VERSION, platform.python_version()).set(1)
