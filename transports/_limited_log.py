"""Log lines that a stranger can cause at will, at a bounded rate."""

from __future__ import annotations

import logging
import time


class LimitedLog:
    """Passes the first lines of each interval on; of the others it tells only how many there were.

    Any process that reaches a port can have connections refused as fast as the network allows: with a line for each, a disk
    fills up. One owner; not for several threads.

    Args:
        max_lines: Lines per interval.
    """

    def __init__(self, logger: logging.Logger, *, max_lines: int = 10, interval_s: float = 10.0) -> None:
        self._logger = logger
        self._max_lines = max_lines
        self._interval_s = interval_s
        self._ends_at = 0.0
        self._num_passed = 0
        self._num_suppressed = 0

    def warning(self, message: str, *args: object, exc_info: BaseException | None = None) -> None:
        """Log a warning, or count it."""
        now = time.monotonic()
        if now >= self._ends_at:
            self.flush()
            self._ends_at = now + self._interval_s
            self._num_passed = 0
        if self._num_passed < self._max_lines:
            self._num_passed += 1
            self._logger.warning(message, *args, exc_info=exc_info)
        else:
            self._num_suppressed += 1

    def flush(self) -> None:
        """Tell how many lines were suppressed, if any were."""
        if self._num_suppressed:
            self._logger.warning(
                "suppressed %d more lines about refused or lost connections, after the first %d of %g s",
                self._num_suppressed,
                self._max_lines,
                self._interval_s,
            )
            self._num_suppressed = 0
