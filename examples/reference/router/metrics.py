"""The router's figures as Prometheus reads them, all named `kvferry_router_*`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .handoffs import RESULTS, Handoffs
from .health import NodeState
from .nodes import Node


class RouterMetrics:
    """Figures of one router, in a registry of its own."""

    def __init__(self, nodes: Sequence[Node], handoffs: Handoffs) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_NodeCollector(nodes))
        self._registry.register(_HandoffCollector(handoffs))
        self.requests = Counter(
            "kvferry_router_requests",
            "Requests answered, by HTTP status",
            ["status"],
            registry=self._registry,
        )
        self.retries = Counter(
            "kvferry_router_retries",
            "Requests sent to another node, by what failed",
            ["role"],
            registry=self._registry,
        )
        self.without_handoff = Counter(
            "kvferry_router_without_handoff",
            "Requests whose prefill node offered no KV cache, so that the decode node computed it again",
            registry=self._registry,
        )
        self.decoded_alone = Counter(
            "kvferry_router_decoded_alone",
            "Requests sent to a decode node alone, because no prefill node could take them",
            registry=self._registry,
        )
        self.lost_prefills = Counter(
            "kvferry_router_lost_prefills",
            "Prefills that failed after their decode had begun",
            registry=self._registry,
        )

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)


class _NodeCollector(Collector):
    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        healthy = GaugeMetricFamily(
            "kvferry_router_node_healthy", "1 while the node is ready", labels=["role", "url"]
        )
        in_flight = GaugeMetricFamily(
            "kvferry_router_node_in_flight", "Requests the node works on", labels=["role", "url"]
        )
        states = GaugeMetricFamily(
            "kvferry_router_node_state",
            "1 for the state that the node is in",
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
            "kvferry_router_handoffs",
            "Offers given to a decode node, by how that ended",
            labels=["prefill", "decode", "result"],
        )
        for (prefill, decode), pair in self._handoffs.pairs.items():
            for result in RESULTS:
                family.add_metric([prefill, decode, result], pair.counts[result])
        yield family
