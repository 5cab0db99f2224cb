"""Joining the reports of several ranks into one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .output import KVConnectorOutput


class KVOutputAggregator:
    """Joins what the ranks of one node report, step after step.

    A request is finished as soon as `expected_count` different ranks have named it, in one step or in
    several. The reason why its load failed is held back until then, because other ranks may still write into
    its blocks, and the engine needs the reason together with the end. Failed blocks are passed on at once, so
    that no rank uses a block that another rank lacks. A hook that raised on one rank has raised for all of
    them: the step's tokens need every rank's part.

    Args:
        expected_count: Ranks that report each request, at least 1.

    Raises:
        ValueError: `expected_count` is not positive.
    """

    def __init__(self, expected_count: int) -> None:
        if expected_count < 1:
            raise ValueError(f"expected_count must be at least 1, got {expected_count}")
        self._expected_count = expected_count
        self._sending: dict[str, set[int]] = {}
        self._recving: dict[str, set[int]] = {}
        self._errors: dict[str, str] = {}  # of loads that have not ended on every rank

    def aggregate(self, outputs: Sequence[KVConnectorOutput | None]) -> KVConnectorOutput:
        """Join one step's reports.

        Args:
            outputs: `(num_ranks,)`: each rank's report at its index; None for a rank without a report.
        """
        joined = KVConnectorOutput()
        for rank, output in enumerate(outputs):
            if output is None:
                continue
            joined.finished_sending |= self._count(self._sending, rank, output.finished_sending)
            joined.finished_recving |= self._count(self._recving, rank, output.finished_recving)
            joined.invalid_block_ids |= output.invalid_block_ids
            self._merge_errors(joined, output)
            _merge_stats(joined, output)
            joined.failure = joined.failure or output.failure  # the lowest rank's, as with errors
            joined.warning = joined.warning or output.warning
            joined.hook_errors = {**output.hook_errors, **joined.hook_errors}
        for request_id in joined.finished_recving & self._errors.keys():
            joined.load_errors[request_id] = self._errors.pop(request_id)
        return joined

    def _merge_errors(self, joined: KVConnectorOutput, output: KVConnectorOutput) -> None:
        for request_id, reason in output.load_errors.items():
            # A synchronous load ends with its step, and no rank reports its end. So its reason is passed on
            # at once.
            ends_later = request_id in output.finished_recving
            # The first reason, and the lowest rank's within one step: ranks usually fail together, for one
            # cause.
            (self._errors if ends_later else joined.load_errors).setdefault(request_id, reason)

    def _count(self, named: dict[str, set[int]], rank: int, request_ids: Iterable[str]) -> set[str]:
        complete = set()
        for request_id in request_ids:
            ranks = named.setdefault(request_id, set())
            ranks.add(rank)
            if len(ranks) >= self._expected_count:
                complete.add(request_id)
                del named[request_id]
        return complete


def _merge_stats(joined: KVConnectorOutput, output: KVConnectorOutput) -> None:
    if output.kv_connector_stats is None:
        return
    if joined.kv_connector_stats is None:
        joined.kv_connector_stats = output.kv_connector_stats
    else:
        joined.kv_connector_stats = joined.kv_connector_stats.aggregate(output.kv_connector_stats)
