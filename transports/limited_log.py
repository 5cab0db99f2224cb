"""Log lines that a peer or a client can cause at will, at a bounded rate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass
class _Interval:
    """What happened to the lines of one key since the first of them was logged."""

    ends_at: float
    num_logged: int = 0
    num_suppressed: int = 0


class LimitedLog:
    """Logs the first lines of each interval and counts the others.

    Any process that reaches a port can have connections refused as fast as the network allows. With one line
    for each, the disk would fill up. The first line of the next interval says how many lines were suppressed.

    Lines with different keys are limited separately. Keys must not come from peers, because they are never
    forgotten. If several threads log at once, the counts may be slightly wrong.

    Args:
        max_lines: Lines per interval and key.
        interval_s: An interval starts with the first line after the previous one ended.
    """

    def __init__(self, logger: logging.Logger, *, max_lines: int = 10, interval_s: float = 10.0) -> None:
        self._logger = logger
        self._max_lines = max_lines
        self._interval_s = interval_s
        self._intervals: dict[Hashable, _Interval] = {}

    def warning(
        self, message: str, *args: object, key: Hashable = None, exc_info: BaseException | None = None
    ) -> None:
        """Log a warning, or count it."""
        if self._admits(key):
            self._logger.warning(message, *args, exc_info=exc_info)

    def error(self, message: Callable[[], str], *, key: Hashable = None) -> None:
        """Log an error, or count it; `message` is called only if it is logged."""
        if self._admits(key):
            self._logger.error("%s", message())

    def flush(self) -> None:
        """Log how many lines were suppressed in the current interval of each key, if any were."""
        for interval in self._intervals.values():
            self._report(interval)

    def _admits(self, key: Hashable) -> bool:
        interval, now = self._intervals.get(key), time.monotonic()
        if interval is None or now >= interval.ends_at:
            if interval is not None:
                self._report(interval)
            interval = self._intervals[key] = _Interval(now + self._interval_s)
        if interval.num_logged >= self._max_lines:
            interval.num_suppressed += 1
            return False
        interval.num_logged += 1
        return True

    def _report(self, interval: _Interval) -> None:
        if interval.num_suppressed:
            self._logger.warning(
                "suppressed %d more lines of this kind; at most %d are logged per %g s",
                interval.num_suppressed,
                self._max_lines,
                self._interval_s,
            )
            interval.num_suppressed = 0
