"""What the processes of one router say, as one. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from ..answer.handoffs import RESULTS
from .records import MAX_LISTED

#: Gauges of one process, whose sum is that of the router. The other gauges are the same in all processes.
SUMMED_GAUGES: Final = frozenset(
    {
        "kvferry_router_node_in_flight",
        "process_resident_memory_bytes",
        "process_virtual_memory_bytes",
        "process_open_fds",
    }
)
_COUNTS: Final = ("counter", "histogram")


class _Merged(Collector):
    def __init__(self, families: Mapping[str, Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families.values()


def merged_metrics(texts: Iterable[bytes], *, only_counts: bool = False) -> bytes:
    """Return metrics in Prometheus' text format: counts and some gauges summed, other gauges of the first
    text that has them.

    Args:
        only_counts: Leave gauges out.
    """
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text.decode()):
            is_summed = family.type in _COUNTS or family.name in SUMMED_GAUGES
            if only_counts and family.type not in _COUNTS:
                continue
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known = values.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                if is_summed:
                    known[key] = known.get(key, 0.0) + sample.value
                else:
                    known.setdefault(key, sample.value)
    for name, family in families.items():
        for (sample_name, labels), value in values[name].items():
            family.add_sample(sample_name, dict(labels), value)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(families))
    return generate_latest(registry)


def merged_nodes(
    own: Sequence[Mapping[str, Any]], others: Iterable[Sequence[Mapping[str, Any]]]
) -> list[Any]:
    """Return the nodes as this process sees them, with the requests of all processes."""
    summed: dict[tuple[str, str], Counter[str]] = {}
    for nodes in (own, *others):
        for node in nodes:
            counts = summed.setdefault((node["role"], node["url"]), Counter())
            counts.update({name: node[name] for name in ("in_flight", "offers", "ejections")})
    return [{**node, **summed[node["role"], node["url"]]} for node in own]


def merged_health(own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return this process's health, with the handoffs of all processes and the first problem of any."""
    pairs: dict[tuple[str, str], dict[str, Any]] = {}
    for health in (own, *others):
        for pair in health["handoffs"]:
            known = pairs.setdefault((pair["prefill"], pair["decode"]), dict.fromkeys(RESULTS, 0))
            for result in RESULTS:
                known[result] += pair[result]
            known["last_error"] = known.get("last_error") or pair["last_error"]
    handoffs = [{"prefill": prefill, "decode": decode, **pair} for (prefill, decode), pair in pairs.items()]
    return {**own, "status": merged_status([own, *others]), "handoffs": handoffs}


def merged_status(reports: Iterable[Mapping[str, Any]]) -> str:
    """Return the first status that names a problem."""
    return next((str(each["status"]) for each in reports if each["status"] != "ok"), "ok")


def merged_recent(own: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the requests of all processes; see `RecentRequests.report`."""
    reports = [own, *others]
    finished = [record for each in reports for record in each["finished"]]
    finished.sort(key=lambda record: record["arrived_at"] + record["total_ms"] / 1e3)
    live = sorted(
        (record for each in reports for record in each["in_flight"]), key=lambda record: record["arrived_at"]
    )
    return {
        **own,
        "finished": finished[-own["keeps"] :],
        "num_in_flight": sum(each["num_in_flight"] for each in reports),
        "in_flight": live[:MAX_LISTED],
        "history": {
            name: [sum(second) for second in zip(*(each["history"][name] for each in reports), strict=True)]
            for name in own["history"]
        },
    }
