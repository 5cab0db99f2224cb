"""What the demo says about answers that stream while long prompts arrive."""

from __future__ import annotations

import pytest

from kvferry.lab.demo.load import (
    Figures,
    format_load_table,
    verdict_of,
)


def figures(longest: float, num_handed_over: int = 1) -> Figures:
    return Figures([0.1, 0.3], [0.05, 0.05, longest], 200, 10.0, num_handed_over)


def test_the_table_has_both_ways_and_their_ratios() -> None:
    lines = format_load_table(figures(2.0), figures(0.5)).splitlines()
    assert lines[0].split("  ")[0] == "ms"
    assert lines[1].split()[-6:] == ["50", "1,961", "2,000", "200", "298", "20"]
    assert lines[3].split() == ["ratio", "1.00", "0.25", "0.25", "1.00", "1.00", "1.00"]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("together", "num_cores", "why"),
    [
        pytest.param(figures(0.5), 2, "", id="better"),
        pytest.param(figures(1.9), 2, "other work takes its core", id="no better"),
        pytest.param(
            figures(1.9, num_handed_over=0), 2, "no cache was handed over", id="nothing handed over"
        ),
        pytest.param(figures(1.9), 1, "share one core", id="one core"),
    ],
)
def test_the_last_line_says_what_was_gained_or_why_nothing(
    together: Figures, num_cores: int, why: str
) -> None:
    first, *rest = verdict_of(figures(2.0), together, num_cores).splitlines()
    assert first == f"longest pause in a running answer: {max(together.gaps):.2f} s instead of 2.00 s"
    assert bool(rest) == bool(why)
    assert why in "".join(rest)
