"""How `lab/bench/vllm_pair.py` summarizes what it measures. Running it needs vLLM and is not tested here."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.lab.bench.vllm_pair import (
    PERCENTILES,
    Sample,
    Shape,
    _load_rows,
    _load_table,
    _rows,
    _table,
)


@pytest.fixture
def rows():
    """Rows for two rounds. kvferry takes twice as long as one node, or four times.

    It hides three quarters of its loads.
    """
    shape = Shape.parse("128x2")
    num_bytes = 2 * shape.num_bytes
    samples = {
        "one node": [Sample(0.1, 0.01, 0, second_s=0.11), Sample(0.2, 0.02, 0, second_s=0.22)],
        "kvferry shm": [
            Sample(0.2, 0.01, num_bytes, second_s=0.22, load_s=0.08, exposed_s=0.02),
            Sample(0.8, 0.02, num_bytes, second_s=0.44, load_s=0.08, exposed_s=0.02),
        ],
    }
    return _rows(shape, samples)


def test_ratios_are_taken_round_by_round(rows):
    _, shm = rows
    assert shm["ttft_ratio"] == [3, 2.5, 3.5]
    assert shm["second_ratio"][0] == 2
    assert shm["itl_ratio"][0] == 1
    assert shm["bytes_ratio"] == 1
    assert (shm["load_ms"], shm["exposed"]) == (40, 0.25)


def test_the_table_is_markdown_with_the_spread_of_each_figure(rows):
    title, line, alone, shm = _table(rows).splitlines()
    assert title.startswith("| prompt tokens × at a time |  | TTFT ms | ratio |")
    assert {text.count("|") for text in (title, line, alone, shm)} == {12}
    assert alone.startswith("| 128 × 2 | one node | 150.0 (125.0–175.0) | 1.00 (1.00–1.00) |")
    assert shm.endswith("| 15.0 (12.5–17.5) | 1.00 (1.00–1.00) | 8.4 (1.00 ×) | 40.0 | 10.0 (25%) |")


def test_a_load_counts_every_failed_request():
    def result(seconds: float, failed: int) -> dict[str, Any]:
        figures = dict.fromkeys(PERCENTILES, seconds * 1e3)
        return {**figures, "request_throughput": 1 / seconds, "completed": 10 - failed, "failed": failed}

    rows = _load_rows(
        4,
        {
            "one node": [result(0.1, 0), result(0.2, 0)],
            "kvferry shm": [result(0.2, 1), result(0.2, 2)],
        },
    )
    *_, shm = _load_table(rows).splitlines()
    assert shm.startswith("| 4 | kvferry shm | 200.0 (200.0–200.0) 1.50 × |")
    assert shm.endswith("| 5.00 | 3 of 20 |")
