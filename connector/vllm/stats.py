"""kvferry's figures in vLLM: its log line, and the metrics of `connector.stats` on its `/metrics`."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorStats as VllmStats,
)

from ..stats import HandoffMetrics, KVConnectorStats


class KvferryStats(VllmStats):  # type: ignore[misc]
    """Wrap `KVConnectorStats` for vLLM; `data` is its `to_dict`."""

    data: dict[str, Any]

    @property
    def figures(self) -> KVConnectorStats:
        """Return the figures that `data` holds."""
        return KVConnectorStats.from_dict(self.data) if self.data else KVConnectorStats()

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: VllmStats) -> KvferryStats:
        return KvferryStats(data=self.figures.aggregate(KvferryStats(data=other.data).figures).to_dict())

    def reduce(self) -> dict[str, int | float]:
        """Return a summary of the loads, and how the offers ended."""
        figures = self.figures
        offers = {name: value for name, value in figures.counters.items() if name.startswith("offers_")}
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in {**figures.reduce(), **offers}.items()
        }

    def is_empty(self) -> bool:
        return self.figures.is_empty()


class KvferryPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Export the metrics of `connector.stats` with vLLM's labels, which name the model and the engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        # vLLM chooses the classes: with Ray they are not those of prometheus_client.
        counter, histogram, gauge = (metric_types[kind] for kind in (Counter, Histogram, Gauge))
        hosts = per_engine_labelvalues.values()
        self._metrics = HandoffMetrics(counter, histogram, gauge, labelnames, hosts)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        figures = KvferryStats(data=transfer_stats_data).figures
        self._metrics.observe(figures, self.per_engine_labelvalues[engine_idx])
