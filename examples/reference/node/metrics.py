"""The node's figures as Prometheus reads them, all named `kvferry_*`, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..engine.types import EngineStats, RequestMetrics

#: Metric → field (of `EngineStats`, for counters of its `totals`) and help text.
GAUGES = {
    "kvferry_waiting_requests": ("num_waiting", "Requests that have no blocks yet"),
    "kvferry_loading_requests": ("num_loading", "Requests that wait for another node's KV cache"),
    "kvferry_running_requests": ("num_running", "Requests that are being computed"),
    "kvferry_offered_requests": ("num_offered", "Finished requests whose blocks are kept for another node"),
    "kvferry_blocks": ("num_blocks", "Blocks that requests can have"),
    "kvferry_free_blocks": ("num_free_blocks", "Blocks that nobody holds"),
    "kvferry_prefix_cache_hit_rate": (
        "prefix_cache_hit_rate",
        "Share of the tokens of recent requests that the node's own prefix cache held",
    ),
}
COUNTERS = {
    "kvferry_preemptions": ("num_preemptions", "Times a request lost its blocks and was recomputed"),
    "kvferry_prompt_tokens": ("num_prompt_tokens", "Prompt tokens of finished requests"),
    "kvferry_cached_tokens": ("num_cached_tokens", "Of these, tokens found in the node's own prefix cache"),
    "kvferry_output_tokens": ("num_output_tokens", "Tokens generated"),
    "kvferry_transfers": ("num_transfers", "KV cache loads that ended well"),
    "kvferry_failed_transfers": ("num_failed_transfers", "KV cache loads that did not"),
    "kvferry_unreachable_peers": (
        "num_unreachable_peers",
        "Loads refused because the other node runs another transport than this one",
    ),
    "kvferry_transferred_bytes": ("transferred_bytes", "Bytes of KV cache that came from other nodes"),
    "kvferry_transfer_seconds": ("transfer_seconds", "Seconds those bytes took"),
    "kvferry_exposed_transfer_seconds": (
        "exposed_transfer_seconds",
        "Of these, seconds that no computing hid",
    ),
}
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TRANSFER_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)


class NodeMetrics:
    """Figures of one node.

    Args:
        read_stats: Asked at each scrape.
    """

    def __init__(self, read_stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(read_stats))
        self._ttft = Histogram(
            "kvferry_time_to_first_token_seconds",
            "From arrival to the first token",
            registry=self._registry,
            buckets=TTFT_BUCKETS,
        )
        self._transfer = Histogram(
            "kvferry_request_transfer_seconds",
            "One request's KV cache, from the start of the read to the last byte",
            ["connector", "transport", "mechanism", "layout"],
            registry=self._registry,
            buckets=TRANSFER_BUCKETS,
        )

    def observe(self, metrics: RequestMetrics) -> None:
        """Count a request that ended."""
        if metrics.ttft_s > 0:
            self._ttft.observe(metrics.ttft_s)
        transfer = metrics.transfer
        if transfer is not None and not transfer.error:
            labels = (transfer.connector, transfer.transport, transfer.mechanism, transfer.layout)
            self._transfer.labels(*labels).observe(transfer.seconds)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, read_stats: Callable[[], EngineStats]) -> None:
        self._read_stats = read_stats

    def describe(self) -> list[Metric]:
        return []  # registering must not ask an engine that does not run yet

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        is_healthy = stats.healthy and not stats.transfer_error
        yield GaugeMetricFamily(
            "kvferry_healthy",
            "1 while the engine's step loop runs and can hand over",
            value=float(is_healthy),
        )
        for name, (field, text) in GAUGES.items():
            yield GaugeMetricFamily(name, text, value=getattr(stats, field))
        for name, (field, text) in COUNTERS.items():
            yield CounterMetricFamily(name, text, value=getattr(stats.totals, field))
        finished = CounterMetricFamily(
            "kvferry_finished_requests", "Requests that are over", labels=["reason"]
        )
        for reason, count in stats.totals.num_finished.items():
            finished.add_metric([reason], count)
        yield finished
