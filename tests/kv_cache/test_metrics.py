from __future__ import annotations

import pytest

from kvferry.runner_mixin.kv_cache import PrefixCacheStats, PrefixCachingMetrics


def test_only_the_most_recent_requests_count() -> None:
    metrics = PrefixCachingMetrics(max_recent_requests=2)
    for hits in (10, 5, 0):
        metrics.observe(PrefixCacheStats(requests=1, queries=10, hits=hits))
    assert metrics.hit_rate == 5 / 20


def test_an_interval_is_kept_while_the_later_ones_have_too_few_requests() -> None:
    metrics = PrefixCachingMetrics(max_recent_requests=3)
    metrics.observe(PrefixCacheStats(requests=2, queries=20, hits=20))
    metrics.observe(PrefixCacheStats(requests=2, queries=20, hits=0))
    assert metrics.hit_rate == 0.5
    metrics.observe(PrefixCacheStats(requests=1, queries=10, hits=0))
    assert metrics.hit_rate == 0.0


def test_reset_forgets_everything() -> None:
    metrics = PrefixCachingMetrics()
    metrics.observe(PrefixCacheStats(requests=1, queries=10, hits=10))
    metrics.reset()
    assert metrics.hit_rate == 0.0
    metrics.observe(PrefixCacheStats(requests=1, queries=10, hits=5))
    assert metrics.hit_rate == 0.5


@pytest.mark.parametrize("figures", [(-1, 0, 0), (1, 10, 11), (1, 10, -1)])
def test_impossible_figures_are_refused(figures: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="not those of an interval"):
        PrefixCacheStats(*figures)


def test_a_rate_over_no_request_is_refused() -> None:
    with pytest.raises(ValueError, match="max_recent_requests=0"):
        PrefixCachingMetrics(0)
