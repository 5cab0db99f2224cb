"""Figures of what was handed over: one record a transfer, and counters that only grow.

A worker half collects them between two calls of `get_kv_connector_stats`; the engine adds them up over
ranks and steps with `aggregate`, and turns `counters` into whatever its metrics endpoint speaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

#: Every counter, with the help text of its metric.
COUNTERS: Mapping[str, str] = {
    "loads_total": "Handoffs loaded from another node",
    "load_failures_total": "Loads that ended without their bytes",
    "loaded_bytes_total": "Bytes of KV cache loaded from other nodes",
    "loaded_blocks_total": "Blocks of KV cache loaded from other nodes",
    "load_seconds_total": "Seconds spent in reads, summed over transfers",
    "regions_total": "Regions of bytes read",
    "offers_delivered_total": "Offers that a consumer has read",
    "offers_aborted_total": "Offers that ended because a request or a peer went away",
    "offers_expired_total": "Offers whose lease ran out",
    "unreachable_peers_total": "Loads refused because the other node runs another transport than this one",
    "handoff_thread_deaths_total": "1 after the handoff thread died: this node hands nothing over until it is restarted",
}


@dataclass(frozen=True)
class TransferRecord:
    """One request's transfer into this node.

    Attributes:
        transport: Scheme of the transport that was used, e.g. `"shm"`.
        mechanism: What really moved the bytes, e.g. `"mapped"`; empty if nothing was read.
        layout: `"uniform"` or `"per-layer"`, of this node's pool.
        num_blocks: Blocks asked for, over all groups.
        num_regions: Runs of bytes that were copied.
        num_regions_per_layer: Runs that the per-layer layout would have needed; between nodes that are not alike, the runs
            without those that span two layers.
        num_bytes: Bytes copied.
        seconds: From the start of the first read to the end of the last; there is one for each rank that is read from.
        error: Why it failed; empty if it did not.
        reason: Why this transport; empty where there was no choice.
        exposed_seconds: From the moment when the whole offer was readable, or the load was ordered if that was later, until
            the load ended: what computing the prompt did not hide.
    """

    request_id: str
    transport: str
    mechanism: str
    layout: str
    num_blocks: int
    num_regions: int
    num_regions_per_layer: int
    num_bytes: int
    seconds: float
    error: str = ""
    reason: str = ""
    exposed_seconds: float = 0.0


@dataclass(frozen=True)
class KVConnectorStats:
    """Figures of one interval, of one rank or of several.

    Attributes:
        transfers: One record for each transfer that ended in the interval, oldest first.
        counters: Name (see `COUNTERS`) → growth in the interval. Absent means zero.
    """

    transfers: tuple[TransferRecord, ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)

    def is_empty(self) -> bool:
        """Whether nothing happened in the interval."""
        return not self.transfers and not any(self.counters.values())

    def aggregate(self, other: Self) -> Self:
        """Both together; neither changes."""
        names = [*self.counters, *(name for name in other.counters if name not in self.counters)]
        counters = {name: self.counters.get(name, 0) + other.counters.get(name, 0) for name in names}
        return type(self)(transfers=self.transfers + other.transfers, counters=counters)

    def reduce(self) -> dict[str, int | float]:
        """A few figures for a log line. Means are over the transfers that succeeded; 0 without any."""
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
        """Plain lists, dicts, strings and numbers."""
        return {"transfers": [asdict(record) for record in self.transfers], "counters": dict(self.counters)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            ValueError: a key is missing or unknown. Nothing was built.
        """
        if set(data) != {"transfers", "counters"}:
            raise ValueError(f"stats have 'transfers' and 'counters', got {sorted(data)}")
        known = {f.name for f in fields(TransferRecord)}
        for record in data["transfers"]:
            if set(record) != known:
                raise ValueError(f"a transfer record has {sorted(known)}, got {sorted(record)}")
        transfers = tuple(TransferRecord(**record) for record in data["transfers"])
        return cls(transfers=transfers, counters=dict(data["counters"]))
