"""The judge of the router's choice of nodes: what it calls the best fixed way, and how it compares."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from kvferry.lab.bench import placement
from kvferry.router.choice import estimates
from kvferry.router.choice import placement as choosing


def test_the_best_fixed_way_just_carries_factor_one() -> None:
    (verdict, overload), fixed = placement.judge(placement.Cell("short-answers", "cpu", 2), [1.0, 4.0])
    best = max(verdict.plain, *verdict.splits.values())
    assert placement.CARRIED - 0.05 <= best <= 1
    assert max(overload.plain, *overload.splits.values()) < best
    assert verdict.ratio == verdict.auto / best
    assert 0 < verdict.chosen_s < 1
    # What is known of the fixed ways is not simulated again.
    fixed.shares["1"] = 0.25, {"1": 0.5}
    (again,), _ = placement.judge(placement.Cell("short-answers", "cpu", 2), [1.0], fixed)
    assert (again.plain, again.splits, again.auto) == (0.25, {"1": 0.5}, verdict.auto)


def test_the_best_split_is_found_from_any_other() -> None:
    shares = [0.0, 0.1, 0.4, 0.7, 0.9, 0.6, 0.2, 0.1]
    assert {placement.climb(shares.__getitem__, start, 8) for start in range(1, 8)} == {(4, 0.9)}


def test_a_higher_rate_has_the_same_requests_in_less_time() -> None:
    cell = placement.Cell("conversations", "gpu", 2)
    slow, fast = (placement.arrivals_at(placement.plan_of(cell), cell, intensity) for intensity in (0.5, 1.0))
    assert len(slow) == len(fast) >= 2 * placement.KINDS["gpu"].num_each
    assert [each.num_tokens for each in slow] == [each.num_tokens for each in fast]
    assert max(each.at for each in slow) > 1.9 * max(each.at for each in fast)


def test_the_summary_counts_the_cells_that_are_worse_than_wanted() -> None:
    cell = placement.Cell("short-answers", "cpu", 2)
    ratios = [placement.Verdict(cell, 1.0, 0.5, {"1": 0.8}, auto, 0.0).ratio for auto in (0.8, 0.6)]
    assert placement.summary(ratios) == "2 cells: mean 0.875, least 0.750, 1 below 0.97"


def test_a_changing_load_has_each_kind_for_two_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.lab.bench.placement.carried", lambda cell: placement.Fixed(1.0, 1))
    turns = [turn for (turn,) in placement.changing(placement.Cell("changing", "cpu", 2))]
    for place, load in enumerate(placement.IN_TURN):
        times = [turn.after for turn in turns if turn.pieces[0][0].startswith(load)]
        assert placement.EACH_S * place <= min(times) < placement.EACH_S * (place + 0.1)
        assert max(times) == pytest.approx(placement.EACH_S * (place + 1), abs=placement.EACH_S / 4)


def constants() -> tuple[float, ...]:
    line = estimates.Line([(1.0, 1.0)], 1.0)
    return line.fading, estimates.FADING, estimates.SURELY_KEPT, choosing.SURELY_KEPT


def test_constants_are_changed_wherever_they_were_imported() -> None:
    with ProcessPoolExecutor(1) as pool:
        for name in placement.VARIED:
            pool.submit(placement.vary, name, 2.0).result()
        assert pool.submit(constants).result() == pytest.approx([1 - 2 * (1 - each) for each in constants()])


def test_a_varied_constant_gets_a_line_per_factor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known, plot = tmp_path / "fixed.json", tmp_path / "plot.svg"
    cell, fixed = placement.Cell("long-prompts", "cpu", 2), placement.Fixed(1.0, 1, {"1": (0.9, {"1": 0.5})})
    known.write_text(json.dumps({json.dumps(asdict(cell)): asdict(fixed)}))
    name = "1-estimates.SURELY_KEPT"
    options = (
        f"placement --loads long-prompts --nodes 2 --kinds cpu --factors 1 --vary {name} --known {known}"
    )
    monkeypatch.setattr("sys.argv", [*options.split(), "--plot", str(plot)])
    placement.main()
    told = capsys.readouterr().out
    assert all(f"{name} x {factor:g}: 1 cells: mean" in told for factor in placement.VARIED_BY)
    assert plot.read_text().count("<circle") == len(placement.VARIED_BY) + 1
