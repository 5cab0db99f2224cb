"""Join the ranks' records of a load."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from ...connector.output import KVConnectorOutput
from ...connector.stats import KVConnectorStats, TransferRecord

#: Most loads in flight whose records are kept. Only a connector that never ends the loads it records can exceed this.
MAX_OPEN_LOADS = 1024


class RankRecords:
    """Keep the records of a load until all ranks have ended it."""

    def __init__(self) -> None:
        self._open: dict[str, list[TransferRecord]] = {}

    def take_ended(self, report: KVConnectorOutput, loading: AbstractSet[str]) -> dict[str, TransferRecord]:
        """Take in one step's report of all ranks; return one record per load that ended in it, by request.

        Args:
            loading: Requests whose asynchronous load had not ended before this step. A load of any other request was
                synchronous: every rank ended it in this step.
        """
        stats = report.kv_connector_stats
        # A connector from outside the project may have stats of another class, which hold no records of ours.
        for record in stats.transfers if isinstance(stats, KVConnectorStats) else ():
            self._open.setdefault(record.request_id, []).append(record)
        # Ranks need not end a load in the same step. `finished_recving` names it only after the last of them has.
        unfinished = loading - report.finished_recving
        joined = {
            request_id: TransferRecord.joined(self._open.pop(request_id))
            for request_id in list(self._open)
            if request_id not in unfinished
        }
        while len(self._open) > MAX_OPEN_LOADS:
            del self._open[next(iter(self._open))]
        return joined
