"""Export the router's metrics for Prometheus, all named `kvferry_router_*`, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .handoffs import RESULTS, Handoffs
from .health import NodeState
from .nodes import UpstreamNode


class RouterMetrics:
    """Hold the metrics of one router."""

    def __init__(self, nodes: Sequence[UpstreamNode], handoffs: Handoffs) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_NodeCollector(nodes))
        self._registry.register(_HandoffCollector(handoffs))
        self.requests = Counter(
            "kvferry_router_requests_total",
            "Requests answered, by HTTP status",
            ["status"],
            registry=self._registry,
        )
        self.retries = Counter(
            "kvferry_router_retries_total",
            "Requests sent to another node, by the role of the node that failed",
            ["role"],
            registry=self._registry,
        )
        self.without_handoff = Counter(
            "kvferry_router_without_handoff_total",
            "Requests whose prompt the decode node computed again, because no KV cache was offered and it loaded none",
            registry=self._registry,
        )
        self.decoded_alone = Counter(
            "kvferry_router_decoded_alone_total",
            "Requests sent to a decode node alone, because no prefill node could take them",
            registry=self._registry,
        )
        self.lost_prefills = Counter(
            "kvferry_router_lost_prefills_total",
            "Prefills that failed after their decode had begun",
            registry=self._registry,
        )

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _NodeCollector(Collector):
    def __init__(self, nodes: Sequence[UpstreamNode]) -> None:
        self._nodes = nodes

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        healthy = GaugeMetricFamily(
            "kvferry_router_node_healthy", "1 while the node is ready", labels=["role", "url"]
        )
        in_flight = GaugeMetricFamily(
            "kvferry_router_node_in_flight",
            "Requests that the node is working on for this router",
            labels=["role", "url"],
        )
        states = GaugeMetricFamily(
            "kvferry_router_node_state",
            "1 for the state that the node is in, 0 for every other state",
            labels=["role", "url", "state"],
        )
        for node in self._nodes:
            healthy.add_metric([node.role, node.url], float(node.state is NodeState.READY))
            in_flight.add_metric([node.role, node.url], node.in_flight)
            for state in NodeState:
                states.add_metric([node.role, node.url, state.value], float(node.state is state))
        yield healthy
        yield in_flight
        yield states


class _HandoffCollector(Collector):
    def __init__(self, handoffs: Handoffs) -> None:
        self._handoffs = handoffs

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "kvferry_router_handoffs_total",
            "Offers given to a decode node, by result",
            labels=["prefill", "decode", "result"],
        )
        for (prefill, decode), pair in self._handoffs.pairs.items():
            for result in RESULTS:
                family.add_metric([prefill, decode, result], pair.counts[result])
        yield family
