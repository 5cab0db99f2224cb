"""Export the router's metrics for Prometheus, all named `kvferry_router_*`, in a registry of its own."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...connector.stats import export_build_info
from ..answer.exchange import Fact, Source
from ..answer.handoffs import RESULTS, Handoffs
from ..nodes.pool import UpstreamNode
from ..nodes.states import NodeState

DURATION_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
FIRST_PIECE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PIECE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class RouterMetrics:
    """Hold the metrics of one router.

    Args:
        nodes: Returns the nodes that there are now.
    """

    def __init__(self, nodes: Callable[[], Iterable[UpstreamNode]], handoffs: Handoffs) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_NodeCollector(nodes))
        self._registry.register(_HandoffCollector(handoffs))
        self.requests = Counter(
            "kvferry_router_requests_total",
            "Requests answered, by HTTP status; 499: the client left before its answer was complete",
            ["status"],
            registry=self._registry,
        )
        self.request_duration = Histogram(
            "kvferry_router_request_duration_seconds",
            "Time from a request's arrival to the last byte of its answer",
            registry=self._registry,
            buckets=DURATION_BUCKETS,
        )
        self._inter_piece = Histogram(
            "kvferry_router_inter_token_latency_seconds",
            "Time between two pieces of a streamed answer, which have a token each unless the network joins them",
            registry=self._registry,
            buckets=PIECE_BUCKETS,
        )
        self._first_piece = Histogram(
            "kvferry_router_time_to_first_token_seconds",
            "Time from a streamed request's arrival to the first piece of its answer, by the way of the prompt's cache. With "
            "rendezvous both nodes were asked at once, with in_turn the decode node after the prefill node. With without_offer the "
            "prefill node offered none, and with alone there was none",
            ["way"],
            registry=self._registry,
            buckets=FIRST_PIECE_BUCKETS,
        )
        for way in get_args(Source):
            self._first_piece.labels(way)
        self._latencies = {"first": Latencies(), "next": Latencies()}
        export_build_info(partial(Gauge, registry=self._registry))
        ProcessCollector(registry=self._registry)
        self.asked_both = Counter(
            "kvferry_router_rendezvous_total",
            "Requests sent to a prefill and a decode node at once",
            registry=self._registry,
        )
        self.placements = Counter(
            "kvferry_router_placements_total",
            "Choices of where a prompt is computed: local, at the node that answers; handover, elsewhere",
            ["way"],
            registry=self._registry,
        )
        for way in ("local", "handover"):
            self.placements.labels(way)
        self.nonsense = Counter(
            "kvferry_router_nonsense_usage_total",
            "Counts in the usage of nodes' answers that cannot be true, such as negative ones; answers leave them out",
            registry=self._registry,
        )
        self.followed_nodes = Gauge(
            "kvferry_router_nodes_with_kv_events",
            "Nodes whose KV events the router follows; what the others have cached is a guess from what was sent there",
            registry=self._registry,
        )
        count = partial(Counter, registry=self._registry)
        retries = count(
            "kvferry_router_retries_total",
            "Requests sent to another node, by the role of the node that failed",
            ["role"],
        )
        #: What counts each fact of an exchange. The labels are made here: an alert cannot use a counter that
        #: appears with its first event.
        self.facts: Mapping[Fact, Counter] = {
            "prefill lost": retries.labels("prefill"),
            "decode lost": retries.labels("decode"),
            "prefill lost late": count(
                "kvferry_router_lost_prefills_total", "Prefills that failed after their decode had begun"
            ),
            "alone": count(
                "kvferry_router_decoded_alone_total",
                "Requests sent to a decode node alone, because no prefill node could take them",
            ),
            "without offer": count(
                "kvferry_router_without_handoff_total",
                "Requests whose prompt the decode node computed again, because no KV cache was offered and it loaded none",
            ),
            "answer moved": count(
                "kvferry_router_moved_answers_total",
                "Streamed answers that another decode node went on with, after their own was lost",
            ),
            "answer stopped": count(
                "kvferry_router_stopped_answers_total",
                "Streamed answers that their draining node has stopped, so that another one goes on with them",
            ),
        }

    def note_piece(self, way: Source, at_s: float, last_s: float | None) -> None:
        """Note a piece of a streamed answer.

        Args:
            way: Of the prompt's cache.
            at_s: In seconds from the request's arrival.
            last_s: Of the piece before; None: it is the first one.
        """
        if last_s is None:
            self._first_piece.labels(way).observe(at_s)
            self._latencies["first"].note(at_s)
        else:
            self._inter_piece.observe(at_s - last_s)
            self._latencies["next"].note(at_s - last_s)

    def latencies(self, others: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Return percentiles of the last minutes as JSON: of the times to first token, and of those between
        tokens.

        Args:
            others: The `counted` of other processes.
        """
        told = list(others)
        reports = {name: each.report([one[name] for one in told]) for name, each in self._latencies.items()}
        return {"slot_s": SLOT_S, **reports}

    def counted(self) -> dict[str, Any]:
        """Return what `latencies` needs of another process."""
        return {name: latencies.counted() for name, latencies in self._latencies.items()}

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _NodeCollector(Collector):
    def __init__(self, nodes: Callable[[], Iterable[UpstreamNode]]) -> None:
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
        failures = CounterMetricFamily(
            "kvferry_router_connection_failures_total",
            "Connections to the node that could not be made, or broke",
            labels=["role", "url"],
        )
        ejections = CounterMetricFamily(
            "kvferry_router_node_ejections_total",
            "How many times the node was avoided from then on, because several requests in a row failed",
            labels=["role", "url"],
        )
        for node in self._nodes():
            failures.add_metric([node.role, node.url], node.num_connection_failures)
            ejections.add_metric([node.role, node.url], node.num_ejections)
            healthy.add_metric([node.role, node.url], float(node.state is NodeState.READY))
            in_flight.add_metric([node.role, node.url], node.in_flight)
            for state in NodeState:
                states.add_metric([node.role, node.url, state.value], float(node.state is state))
        yield healthy
        yield in_flight
        yield states
        yield failures
        yield ejections


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


# -- percentiles of the last minutes --------------------------------------------------------------


#: The percentiles of each slot of time, and how many slots are kept: five minutes.
SLOT_S: Final = 10
NUM_SLOTS: Final = 30
SHARES: Final = (0.5, 0.9, 0.99)

#: A time is counted in a bucket whose end is this many times its beginning, so a percentile is wrong by 5 %
#: at most.
_RATIO: Final = 1.1
_SHORTEST_S: Final = 1e-4
_LONGEST_S: Final = 3600.0


class Latencies:
    """Counts times in buckets, per slot of `SLOT_S` seconds."""

    def __init__(self) -> None:
        self._slots: collections.deque[tuple[int, collections.Counter[int]]] = collections.deque(
            maxlen=NUM_SLOTS
        )

    def note(self, seconds: float) -> None:
        """Count a time that has just ended.

        Shorter and longer ones than the buckets count in the first and the last one.
        """
        slot = int(time.monotonic() / SLOT_S)
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, collections.Counter()))
        bounded = min(max(seconds, _SHORTEST_S), _LONGEST_S)
        self._slots[-1][1][int(math.log(bounded / _SHORTEST_S, _RATIO))] += 1

    def counted(self) -> list[Any]:
        """Return as JSON the counts of each slot, for `report` of another process."""
        return [(slot, list(counts.items())) for slot, counts in self._slots]

    def report(self, others: Iterable[Iterable[Any]] = ()) -> dict[str, Any]:
        """Return as JSON the percentiles in milliseconds, of all and per slot: oldest first, None where
        nothing was counted.

        The last slot is not over.

        Args:
            others: What other processes have counted, by the same clock.
        """
        end = int(time.monotonic() / SLOT_S)
        slots: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
        for counted in (self.counted(), *others):
            for slot, counts in counted:
                if slot > end - NUM_SLOTS:
                    slots[slot].update(dict(counts))
        kept = [slots.get(slot) for slot in range(end - NUM_SLOTS + 1, end + 1)]
        return {
            "all": _percentiles(sum(slots.values(), collections.Counter())),
            "slots": [_percentiles(counts) for counts in kept],
        }


def _percentiles(counts: collections.Counter[int] | None) -> list[float] | None:
    if not counts:
        return None
    ranks = [math.ceil(share * counts.total()) for share in SHARES]
    found: list[float] = []
    num = 0
    for bucket in sorted(counts):
        num += counts[bucket]
        while len(found) < len(ranks) and num >= ranks[len(found)]:
            found.append(round(_SHORTEST_S * _RATIO ** (bucket + 0.5) * 1e3, 3))
    return found
