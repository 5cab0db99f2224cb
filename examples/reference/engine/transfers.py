"""What became of a load, from what each rank recorded of it."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.connector.output import KVConnectorOutput
from kvferry.connector.stats import KVConnectorStats
from kvferry.connector.stats import TransferRecord as RankRecord

from .types import TransferRecord

#: Loads whose end is still to come; more are a connector's that records what it never ends.
MAX_OPEN_LOADS = 1024


class RankRecords:
    """Keeps the records of a load until all ranks are through with it.

    Args:
        connector_name: Class of the connector, for the joined records.
    """

    def __init__(self, connector_name: str) -> None:
        self._connector_name = connector_name
        self._open: dict[str, list[RankRecord]] = {}

    def take_ended(self, report: KVConnectorOutput) -> dict[str, TransferRecord]:
        """Take in one step's report of all ranks; returns one record for each load that ended in it, by request."""
        stats = report.kv_connector_stats
        # Else it is a connector of someone else's, with figures of its own.
        for record in stats.transfers if isinstance(stats, KVConnectorStats) else ():
            self._open.setdefault(record.request_id, []).append(record)
        ended = report.finished_recving & self._open.keys()
        joined = {request_id: self._joined(self._open.pop(request_id)) for request_id in ended}
        while len(self._open) > MAX_OPEN_LOADS:
            del self._open[next(iter(self._open))]
        return joined

    def _joined(self, records: Sequence[RankRecord]) -> TransferRecord:
        """Ranks load side by side, each its part of the same blocks."""
        first = records[0]
        return TransferRecord(
            connector=self._connector_name,
            transport=first.transport,
            mechanism=first.mechanism,
            layout=first.layout,
            num_blocks=max(record.num_blocks for record in records),
            num_regions=sum(record.num_regions for record in records),
            num_regions_per_layer=sum(record.num_regions_per_layer for record in records),
            num_bytes=sum(record.num_bytes for record in records),
            seconds=max(record.seconds for record in records),
            exposed_seconds=max(record.exposed_seconds for record in records),
            error=next((record.error for record in records if record.error), ""),
            reason=first.reason,
        )
