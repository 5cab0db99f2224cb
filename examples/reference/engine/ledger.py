"""What the engine did since it started, counted where it happens."""

from __future__ import annotations

from collections import Counter

from .request import Request
from .types import EngineTotals, FinishReason, TransferRecord


class Ledger:
    """Counters that only grow."""

    def __init__(self) -> None:
        self._finished: Counter[FinishReason] = Counter()
        self._counts: Counter[str] = Counter()
        self._transfer_seconds = 0.0
        self._exposed_seconds = 0.0

    def note_token(self) -> None:
        """A token was generated."""
        self._counts["output_tokens"] += 1

    def note_transfer(self, record: TransferRecord) -> None:
        """A load ended, well or not."""
        if record.error:
            self._counts["failed_transfers"] += 1
            return
        self._counts.update(transfers=1, bytes=record.num_bytes)
        self._transfer_seconds += record.seconds
        self._exposed_seconds += record.exposed_seconds

    def note_unreachable_peers(self, num: int) -> None:
        """So many loads were refused because their peers run another transport."""
        self._counts["unreachable_peers"] += num

    def note_finished(self, request: Request, reason: FinishReason) -> None:
        """A request is over."""
        self._finished[reason] += 1
        self._counts.update(
            preemptions=request.figures.num_preemptions,
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=request.figures.num_cached_tokens,
        )

    def totals(self) -> EngineTotals:
        """The counters now."""
        return EngineTotals(
            num_preemptions=self._counts["preemptions"],
            num_prompt_tokens=self._counts["prompt_tokens"],
            num_cached_tokens=self._counts["cached_tokens"],
            num_output_tokens=self._counts["output_tokens"],
            num_transfers=self._counts["transfers"],
            num_failed_transfers=self._counts["failed_transfers"],
            num_unreachable_peers=self._counts["unreachable_peers"],
            transferred_bytes=self._counts["bytes"],
            transfer_seconds=self._transfer_seconds,
            exposed_transfer_seconds=self._exposed_seconds,
            num_finished=dict(self._finished),
        )
