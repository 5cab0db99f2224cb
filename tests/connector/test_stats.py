"""Statistics of ranks and intervals add up, and are sent as plain values."""

from __future__ import annotations

import json
from functools import partial

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvferry.connector import KVConnectorStats, StatsCollector, TransferRecord
from kvferry.connector.stats import METRICS, HandoffMetrics


def record(
    request_id: str, *, num_bytes: int = 1000, seconds: float = 0.5, error: str = ""
) -> TransferRecord:
    return TransferRecord(
        request_id=request_id,
        transport="shm",
        mechanism="mapped",
        layout="uniform",
        num_blocks=4,
        num_regions=1,
        num_regions_per_layer=30,
        num_bytes=num_bytes,
        seconds=seconds,
        error=error,
    )


def test_an_interval_without_events_is_empty() -> None:
    assert KVConnectorStats().is_empty()
    assert KVConnectorStats(counters={"load_failures_total": 0}).is_empty()
    assert not KVConnectorStats(counters={"load_failures_total": 1}).is_empty()
    assert not KVConnectorStats((record("a"),)).is_empty()


def test_adding_two_intervals_changes_neither() -> None:
    first = KVConnectorStats((record("a"),), {"load_failures_total": 1})
    second = KVConnectorStats((record("b"),), {"load_failures_total": 2, "offers_expired_total": 1})
    both = first.aggregate(second)
    assert [r.request_id for r in both.transfers] == ["a", "b"]
    assert both.counters == {"load_failures_total": 3, "offers_expired_total": 1}
    assert first.counters == {"load_failures_total": 1}


def test_the_summary_counts_failures_separately() -> None:
    stats = KVConnectorStats((record("a"), record("b", seconds=1.5), record("c", error="peer lost")))
    summary = stats.reduce()
    assert summary["num_transfers"] == 2
    assert summary["num_failed_transfers"] == 1
    assert summary["num_bytes"] == 2000
    assert summary["mean_transfer_s"] == 1.0
    assert summary["gb_per_s"] == pytest.approx(2000 / 2.0 / 1e9)


def test_a_summary_without_transfers_does_not_divide_by_zero() -> None:
    assert set(KVConnectorStats().reduce().values()) == {0}


def test_stats_travel_as_json() -> None:
    stats = KVConnectorStats((record("a"), record("b", error="x")), {"load_failures_total": 1})
    assert KVConnectorStats.from_dict(json.loads(json.dumps(stats.to_dict()))) == stats


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"transfers": []},
        {"transfers": [], "counters": {}, "more": 1},
        {"transfers": [{"request_id": "a"}], "counters": {}},
    ],
)
def test_malformed_stats_are_refused(data: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="got"):
        KVConnectorStats.from_dict(data)


def test_every_metric_is_explained() -> None:
    assert all(metric.text and metric.name.startswith("kvferry_") for metric in METRICS)
    assert all(metric.name.endswith("_total") == (metric.kind == "counter") for metric in METRICS)
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_ranks_of_one_load_are_joined() -> None:
    """All ranks load their parts of the same blocks at the same time."""
    ranks = record("a", num_bytes=1000, seconds=0.5), record("a", num_bytes=3000, seconds=0.2, error="gone")
    joined = TransferRecord.joined(ranks)
    assert (joined.num_blocks, joined.num_regions, joined.num_bytes) == (4, 2, 4000)
    assert (joined.seconds, joined.error) == (0.5, "gone")
    assert TransferRecord.joined(ranks[:1]) == ranks[0]


class TestCollector:
    """How a worker half keeps its figures."""

    def test_figures_are_taken_once(self) -> None:
        collector = StatsCollector()
        assert collector.take() is None
        collector.add(record("a"))
        collector.add(record("b", error="gone"))
        collector.count("offers_expired_total")
        counters = {"load_failures_total": 1, "offers_expired_total": 1}
        assert collector.take() == KVConnectorStats((record("a"), record("b", error="gone")), counters)
        assert collector.take() is None

    def test_a_store_needs_to_name_only_what_it_knows(self) -> None:
        collector = StatsCollector()
        collector.add(TransferRecord("a", "file", num_blocks=2, num_bytes=4096, seconds=0.5))
        stats = collector.take()
        assert stats is not None
        assert KVConnectorStats.from_dict(json.loads(json.dumps(stats.to_dict()))) == stats

    def test_an_engine_that_never_takes_them_loses_no_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvferry.connector.stats._MAX_RECORDS", 2)
        collector = StatsCollector()
        for name in "abc":
            collector.add(record(name, error="gone"))
        stats = collector.take()
        assert stats is not None
        assert (len(stats.transfers), stats.counters["load_failures_total"]) == (2, 3)


class TestExport:
    """The metrics that `HandoffMetrics` exports."""

    @pytest.fixture
    def registry(self) -> CollectorRegistry:
        return CollectorRegistry()

    @pytest.fixture
    def metrics(self, registry: CollectorRegistry) -> HandoffMetrics:
        return HandoffMetrics(*(partial(kind, registry=registry) for kind in (Counter, Histogram, Gauge)))

    def test_counters_start_at_zero(self, metrics: HandoffMetrics, registry: CollectorRegistry) -> None:
        assert registry.get_sample_value("kvferry_offers_delivered_total") == 0

    def test_intervals_add_up(self, metrics: HandoffMetrics, registry: CollectorRegistry) -> None:
        metrics.observe(KVConnectorStats((record("a"),), {"offers_delivered_total": 2}))
        metrics.observe(KVConnectorStats((record("b", num_bytes=500),), {"offers_delivered_total": 1}))
        labels = {"transport": "shm", "mechanism": "mapped"}
        assert registry.get_sample_value("kvferry_offers_delivered_total") == 3
        assert registry.get_sample_value("kvferry_load_seconds_count", labels) == 2
        assert registry.get_sample_value("kvferry_load_bytes_sum", labels) == 1500
        assert registry.get_sample_value("kvferry_load_blocks_sum", labels) == 8

    def test_a_failed_load_has_no_size(self, metrics: HandoffMetrics, registry: CollectorRegistry) -> None:
        metrics.observe(KVConnectorStats((record("a", error="gone"),), {"load_failures_total": 1}))
        assert registry.get_sample_value("kvferry_load_failures_total") == 1
        assert "_count" not in generate_latest(registry).decode()

    def test_a_gauge_rises_and_falls_with_what_ranks_and_intervals_report(
        self, metrics: HandoffMetrics, registry: CollectorRegistry
    ) -> None:
        for growth in (2, -1, 1):
            metrics.observe(KVConnectorStats((), {"live_leases": growth}))
        assert registry.get_sample_value("kvferry_live_leases") == 2
