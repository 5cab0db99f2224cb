"""How often the prefix cache helps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class PrefixCacheStats:
    """Lookups of one interval.

    Attributes:
        requests: Requests that were looked up.
        queries: Their tokens.
        hits: Tokens of these that the cache held.
    """

    requests: int
    queries: int
    hits: int

    def __post_init__(self) -> None:
        if self.requests < 0 or not 0 <= self.hits <= self.queries:
            raise ValueError(f"not the figures of an interval: {self}")


class PrefixCachingMetrics:
    """The hit rate of the most recent requests.

    Args:
        max_recent_requests: The least number of requests that the rate is over, once as many were seen.
            Whole intervals are kept, so it may be over a few more.
    """

    def __init__(self, max_recent_requests: int = 1000) -> None:
        if max_recent_requests <= 0:
            raise ValueError(f"max_recent_requests={max_recent_requests}: it must be positive")
        self.max_recent_requests = max_recent_requests
        self._intervals: deque[PrefixCacheStats] = deque()
        self._requests = 0
        self._queries = 0
        self._hits = 0

    def observe(self, stats: PrefixCacheStats) -> None:
        """Take an interval in, and drop the oldest ones that are no longer needed."""
        if stats.requests == 0:
            return
        self._intervals.append(stats)
        self._count(stats, 1)
        while self._requests - self._intervals[0].requests >= self.max_recent_requests:
            self._count(self._intervals.popleft(), -1)

    def reset(self) -> None:
        """Forget everything, e.g. because the cache was emptied."""
        self._intervals.clear()
        self._requests = self._queries = self._hits = 0

    @property
    def hit_rate(self) -> float:
        """Share of the tokens looked up that the cache held, 0 to 1; 0 when none were."""
        return self._hits / self._queries if self._queries else 0.0

    def _count(self, stats: PrefixCacheStats, sign: int) -> None:
        self._requests += sign * stats.requests
        self._queries += sign * stats.queries
        self._hits += sign * stats.hits
