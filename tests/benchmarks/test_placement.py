"""The judge of the router's choice of nodes: what it calls the best fixed way, and how it compares."""

from __future__ import annotations

from kvferry.lab.bench.placement import (
    CARRIED,
    KINDS,
    Cell,
    Verdict,
    arrivals_at,
    climb,
    judge,
    plan_of,
    summary,
)


def test_the_best_fixed_way_just_carries_factor_one() -> None:
    (verdict, overload), fixed = judge(Cell("short-answers", "cpu", 2), [1.0, 4.0])
    best = max(verdict.plain, *verdict.splits.values())
    assert CARRIED - 0.05 <= best <= 1
    assert max(overload.plain, *overload.splits.values()) < best
    assert verdict.ratio == verdict.auto / best
    assert 0 < verdict.chosen_s < 1
    # What is known of the fixed ways is not simulated again.
    fixed.shares["1"] = 0.25, {"1": 0.5}
    (again,), _ = judge(Cell("short-answers", "cpu", 2), [1.0], fixed)
    assert (again.plain, again.splits, again.auto) == (0.25, {"1": 0.5}, verdict.auto)


def test_the_best_split_is_found_from_any_other() -> None:
    shares = [0.0, 0.1, 0.4, 0.7, 0.9, 0.6, 0.2, 0.1]
    assert {climb(shares.__getitem__, start, 8) for start in range(1, 8)} == {(4, 0.9)}


def test_a_higher_rate_has_the_same_requests_in_less_time() -> None:
    cell = Cell("conversations", "gpu", 2)
    slow, fast = (arrivals_at(plan_of(cell), cell, intensity) for intensity in (0.5, 1.0))
    assert len(slow) == len(fast) >= 2 * KINDS["gpu"].num_each
    assert [each.num_tokens for each in slow] == [each.num_tokens for each in fast]
    assert max(each.at for each in slow) > 1.9 * max(each.at for each in fast)


def test_the_summary_counts_the_cells_that_are_worse_than_wanted() -> None:
    cell = Cell("short-answers", "cpu", 2)
    ratios = [Verdict(cell, 1.0, 0.5, {"1": 0.8}, auto, 0.0).ratio for auto in (0.8, 0.6)]
    assert summary(ratios) == "2 cells: mean 0.875, least 0.750, 1 below 0.97"
