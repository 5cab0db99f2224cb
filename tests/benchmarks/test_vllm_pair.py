"""How `lab/bench/vllm_pair.py` summarizes what it measures. Running it needs vLLM and is not tested here."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
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
    marks,
    router_options,
    system_name,
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


@dataclass(frozen=True)
class Span:
    name: str
    start_s: float
    end_s: float
    span_id: str = ""
    parent_id: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)


def test_a_breakdown_says_which_node_did_what_when():
    def llm_request(start_s: float, parent_id: str) -> Span:
        figures = {"gen_ai.latency.time_to_first_token": 0.5, "gen_ai.latency.time_in_model_prefill": 0.3}
        return Span("llm_request", start_s, start_s + 0.6, parent_id=parent_id, attributes=figures)

    found = marks(
        100.0,
        [2.5, 2.6],
        [
            Span("kvferry.prefill_call", 100.25, 101, "p"),
            Span("kvferry.decode_call", 101.25, 103, "d"),
            llm_request(100.5, "p"),
            llm_request(101.5, "d"),
            Span("kvferry.read", 101.75, 101.875),
            Span("kvferry.read", 102, 102.25),
        ],
    )
    assert found["router", "asks the prefill node"] == 0.25
    assert found["prefill node", "has the first token it computes"] == 1.0
    assert found["decode node", "schedules it"] == pytest.approx(1.7)
    assert (found["decode node", "begins to read"], found["decode node", "has read everything"]) == (
        1.75,
        2.25,
    )
    assert found["client", "has the second token"] == 2.6


@pytest.mark.parametrize("name", ["", "+rendezvous", "shm+push", "nixl+rendezvous"])
def test_a_system_that_does_not_exist_is_refused(name):
    with pytest.raises(argparse.ArgumentTypeError):
        system_name(name)


def test_a_mode_is_switched_on_or_off_if_the_router_knows_it():
    options, help_text = router_options, "--rendezvous {auto,off}"
    assert options(["rendezvous"], help_text) == ["--rendezvous", "auto"]
    assert options([], help_text) == ["--rendezvous", "off"]
    assert options([], "") == []
