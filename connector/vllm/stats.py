"""kvferry's figures through vLLM's channels: its log line, and `kvferry_…` on its `/metrics`."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorStats as VllmStats,
)

from ..stats import COUNTERS, KVConnectorStats, TransferRecord

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_BYTES = tuple(float(4**exponent) for exponent in range(7, 19))  # 16 KiB to 64 GiB
_REGIONS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0, 30000.0)


class KvferryStats(VllmStats):  # type: ignore[misc]
    """`KVConnectorStats` in vLLM's envelope; `data` is its `to_dict`."""

    data: dict[str, Any]

    @property
    def figures(self) -> KVConnectorStats:
        """What the envelope holds."""
        return KVConnectorStats.from_dict(self.data) if self.data else KVConnectorStats()

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: VllmStats) -> KvferryStats:
        return KvferryStats(data=self.figures.aggregate(KvferryStats(data=other.data).figures).to_dict())

    def reduce(self) -> dict[str, int | float]:
        """Of what was received, the transfers' figures; of what was offered, how the offers ended."""
        figures = self.figures
        offers = {name: value for name, value in figures.counters.items() if name.startswith("offers_")}
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in {**figures.reduce(), **offers}.items()
        }

    def is_empty(self) -> bool:
        return self.figures.is_empty()


class KvferryPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The metrics: each counter of `COUNTERS`, and per transfer its time, bytes, regions and mechanism."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        self._counters = {
            name: counter(name=f"kvferry_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._transfers = counter(
            name="kvferry_transfers_total",
            documentation="Transfers into this node by what moved the bytes; none moved any if it is empty",
            labelnames=[*labelnames, "transport", "mechanism"],
        )
        self._histograms = {
            field: histogram(name=name, documentation=text, buckets=buckets, labelnames=labelnames)
            for field, name, text, buckets in (
                (
                    "seconds",
                    "kvferry_transfer_seconds",
                    "Time from the start of a read to its last byte",
                    _SECONDS,
                ),
                ("num_bytes", "kvferry_transfer_bytes", "Bytes of a transfer", _BYTES),
                ("num_regions", "kvferry_transfer_regions", "Runs of bytes of a transfer", _REGIONS),
            )
        }
        for metric in self._counters.values():
            for labels in per_engine_labelvalues.values():
                metric.labels(*labels)  # a counter that never counted is there, and zero

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        figures = KvferryStats(data=transfer_stats_data).figures
        labels = self.per_engine_labelvalues[engine_idx]
        for name, growth in figures.counters.items():
            self._counters[name].labels(*labels).inc(growth)
        for record in figures.transfers:
            self._observe_transfer(record, labels)

    def _observe_transfer(self, record: TransferRecord, labels: list[object]) -> None:
        self._transfers.labels(*labels, record.transport, record.mechanism).inc()
        if not record.error:
            for field, histogram in self._histograms.items():
                histogram.labels(*labels).observe(getattr(record, field))
