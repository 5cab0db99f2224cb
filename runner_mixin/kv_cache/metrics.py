"""The prefix cache's hit rate."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class PrefixCacheStats:
    """Lookups of one interval.

    Attributes:
        requests: Number of requests that were looked up.
        queries: Number of their tokens.
        hits: Number of those tokens that the cache held.
    """

    requests: int
    queries: int
    hits: int

    def __post_init__(self) -> None:
        if self.requests < 0 or not 0 <= self.hits <= self.queries:
            raise ValueError(
                f"figures are not those of an interval: {self}; hits must be between 0 and queries"
            )


class PrefixCachingMetrics:
    """The hit rate of the most recent requests.

    Args:
        max_recent_requests: Number of recent requests that the rate covers. Whole intervals are kept, so it
            may cover a few more.
    """

    def __init__(self, max_recent_requests: int = 1000) -> None:
        if max_recent_requests <= 0:
            raise ValueError(f"max_recent_requests={max_recent_requests} is not positive")
        self.max_recent_requests = max_recent_requests
        self._intervals: deque[PrefixCacheStats] = deque()
        self._requests = 0
        self._queries = 0
        self._hits = 0

    def observe(self, stats: PrefixCacheStats) -> None:
        """Add an interval, and drop the oldest ones that are no longer needed."""
        if stats.requests == 0:
            return
        self._intervals.append(stats)
        self._count(stats, 1)
        while self._requests - self._intervals[0].requests >= self.max_recent_requests:
            self._count(self._intervals.popleft(), -1)

    def reset(self) -> None:
        """Forget everything, for example because the cache was emptied."""
        self._intervals.clear()
        self._requests = self._queries = self._hits = 0

    @property
    def hit_rate(self) -> float:
        """Share of the looked-up tokens that the cache held, 0 to 1; 0 if none were looked up."""
        return self._hits / self._queries if self._queries else 0.0

    def _count(self, stats: PrefixCacheStats, sign: int) -> None:
        self._requests += sign * stats.requests
        self._queries += sign * stats.queries
        self._hits += sign * stats.hits
