"""How `benchmarks/vllm_pair.py` summarizes its samples. Running it with engines needs vLLM and is not tested here."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

PROGRAM = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "vllm_pair.py"))
Sample, Shape = PROGRAM["Sample"], PROGRAM["Shape"]


@pytest.fixture
def rows():
    """Rows for two rounds. kvferry takes twice as long as one node; NixlConnector four times, then three times."""
    shape = Shape.parse("128x2")
    num_bytes = 2 * shape.num_bytes
    samples = {
        "one node": [Sample(0.1, 0.01, 0), Sample(0.2, 0.02, 0)],
        "kvferry shm": [Sample(0.2, 0.01, num_bytes), Sample(0.4, 0.02, num_bytes)],
        "nixl": [Sample(0.4, 0.02, num_bytes), Sample(0.6, 0.06, num_bytes)],
    }
    return {row["system"]: row for row in PROGRAM["_rows"](shape, samples)}


def test_ratios_are_taken_round_by_round(rows):
    shm = rows["kvferry shm"]
    assert (shm["ttft_ratio"], shm["itl_ratio"]) == (2, 1)
    assert shm["ttft_to_nixl"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert shm["itl_to_nixl"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert shm["bytes_ratio"] == 1
    assert rows["nixl"]["ttft_ratio"] == pytest.approx(3.5)


def test_the_table_shows_them(rows, capsys):
    PROGRAM["_show"](list(rows.values()))
    title, *lines = capsys.readouterr().out.strip().splitlines()
    assert title == "128 prompt tokens, 2 concurrent requests"
    shm = next(line for line in lines if "kvferry shm" in line)
    assert shm.split()[2:] == [
        "300.0",
        "200.0",
        "2.00",
        "0.58",
        "150.0",
        "15.0",
        "1.00",
        "0.42",
        "8.4",
        "1.00",
    ]
