"""Export the node's metrics for Prometheus, in a registry of its own.

Metrics of handoffs come from `kvferry.connector.stats`, and are the same in every host of a connector. The
fields of `EngineStats` and `EngineTotals` declare the metrics of the engine, which are named
`kvferry_engine_*`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from ...connector.stats import HandoffMetrics, KVConnectorStats, Metric
from ..engine.types import EngineStats, RequestOutput

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
DURATION_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class NodeMetrics:
    """Hold the metrics of one node.

    Args:
        read_stats: Called at each scrape.
    """

    def __init__(self, read_stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(read_stats))
        self.ttft = Histogram(
            "kvferry_engine_time_to_first_token_seconds",
            "Time from a request's arrival to its first token",
            registry=self._registry,
            buckets=TTFT_BUCKETS,
        )
        self.request_duration = Histogram(
            "kvferry_engine_request_duration_seconds",
            "Time from a request's arrival to the last piece of its answer",
            ["reason"],
            registry=self._registry,
            buckets=DURATION_BUCKETS,
        )
        self.inter_token = Histogram(
            "kvferry_engine_inter_token_latency_seconds",
            "Time between two pieces of an answer, which have a token each",
            registry=self._registry,
            buckets=TOKEN_BUCKETS,
        )
        ProcessCollector(registry=self._registry)
        self._handoffs = HandoffMetrics(
            partial(Counter, registry=self._registry),
            partial(Histogram, registry=self._registry),
            partial(Gauge, registry=self._registry),
        )

    def observe_handoffs(self, stats: KVConnectorStats) -> None:
        """Count handoffs that have ended. May be called from any thread."""
        self._handoffs.observe(stats)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class MeasuredRequest:
    """Measures one request, which arrived now, to its end."""

    def __init__(self, metrics: NodeMetrics) -> None:
        self._metrics = metrics
        self._arrival = time.monotonic()
        self._latest: float | None = None  # when the latest token came

    def observe(self, output: RequestOutput) -> None:
        """Note a piece of the answer that came now."""
        now = time.monotonic()
        if output.new_token_ids and not output.is_known:
            if self._latest is not None:
                self._metrics.inter_token.observe(now - self._latest)
            self._latest = now
        if output.finish_reason:
            self._metrics.request_duration.labels(output.finish_reason).observe(now - self._arrival)
            if output.metrics.ttft_s > 0:
                self._metrics.ttft.observe(output.metrics.ttft_s)


class _EngineCollector(Collector):
    def __init__(self, read_stats: Callable[[], EngineStats]) -> None:
        self._read_stats = read_stats

    def describe(self) -> list[Family]:
        return []  # without this the registry would collect at registration, before the engine runs

    def collect(self) -> Iterator[Family]:
        stats = self._read_stats()
        is_healthy = stats.healthy and not stats.transfer_error
        yield GaugeMetricFamily(
            "kvferry_engine_healthy",
            "1 while the engine's step loop runs and the node can hand over",
            value=float(is_healthy),
        )
        for record in (stats, stats.totals):
            for field in fields(record):
                metric = field.metadata.get("metric")
                if metric is not None:
                    yield _family(metric, getattr(record, field.name))


def _family(metric: Metric, value: float | dict[str, float]) -> Family:
    family: CounterMetricFamily | GaugeMetricFamily
    if metric.kind == "counter":
        family = CounterMetricFamily(metric.name, metric.text, labels=metric.labels)
    else:
        family = GaugeMetricFamily(metric.name, metric.text, labels=metric.labels)
    for label, number in value.items() if isinstance(value, dict) else [("", value)]:
        family.add_metric([label] if metric.labels else [], number)
    return family
