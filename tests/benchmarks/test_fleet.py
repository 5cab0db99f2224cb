"""The arithmetic of `lab/bench/fleet.py`. Running it takes minutes and is not tested here."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from kvferry.lab.bench import fleet_figures
from kvferry.lab.bench.fleet_figures import (
    LOADS,
    Unloaded,
    arrivals,
    paced,
    prompt_tokens,
    row_of,
    standing,
    table,
)
from kvferry.lab.client import Answer
from kvferry.lab.load import percentile
from kvferry.lab.plan.loads import Turn, read_trace, sizes

IDLE = Unloaded({16: 0.1, 32: 0.2, 1000: 2.0}, itl_s=0.05)


def answered(prompt_tokens, ttft_s, gaps, num_tokens):
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": num_tokens}
    return Answer(times=list(itertools.accumulate(gaps, initial=ttft_s)), usage=usage)


def figures_of(answers, *, computed_tokens=0, seconds=10.0, factor=3.0):
    times = {"ran_s": 8, "waited_s": 2}
    added = {"computed_tokens": computed_tokens, "moved_bytes": 3e6, "failed_loads": 0, **times}
    return fleet_figures.figures_of(answers, seconds, added, IDLE, 2, factor)


def test_a_percentile_lies_between_two_figures_on_the_straight_line():
    assert percentile([3, 1, 2, 4], 0.5) == 2.5
    assert percentile([1, 2, 3, 4, 5], 0.99) == pytest.approx(4.96)
    assert percentile([7], 0.99) == 7
    assert percentile([], 0.5) == 0


def test_an_idle_nodes_ttft_is_interpolated_by_the_length_of_the_prompt():
    assert IDLE.ttft_s(24) == pytest.approx(0.15)
    assert (IDLE.ttft_s(32), IDLE.ttft_s(1), IDLE.ttft_s(5000)) == (0.2, 0.1, 2.0)


def test_goodput_counts_requests_that_keep_both_limits():
    answers = [
        answered(16, 0.19, (0.09, 0.09), 3),  # keeps twice the idle node's figures
        answered(16, 0.21, (0.09, 0.09), 3),  # three times, because of its TTFT
        answered(1000, 3.9, (0.09, 0.09), 3),  # twice: its prompt is longer
        answered(16, 0.19, (0.19, 0.19), 3),  # ten times, because of its gaps
        answered(16, 0.19, (), 1),  # twice: it has no gaps
        answered(16, 1.01, (), 1),  # none
    ]
    for factor, good in ((2.0, 3), (3.0, 4), (10.0, 5)):
        figures = figures_of(answers, factor=factor)
        assert figures["goodput"] == good / 10 / 2
    assert figures["requests_per_s_and_core"] == 6 / 10 / 2


def test_the_other_figures_are_taken_over_all_gaps_and_all_nodes():
    answers = [answered(60, 0.1, (0.1, 0.3), 3), answered(40, 0.3, (0.2,), 2)]
    figures = figures_of(answers, computed_tokens=75)
    assert figures["ttft_p50_ms"] == pytest.approx(200)
    assert figures["itl_p50_ms"] == pytest.approx(200)
    assert figures["pause_p50_ms"] == pytest.approx(250)
    assert figures["output_tokens_per_s"] == 0.5
    assert (figures["cached_share"], figures["moved_mb"], figures["waited_share"]) == (0.25, 3, 0.25)


def test_a_trace_keeps_its_arrivals_and_its_shared_prefixes():
    rows = [
        {"timestamp": 0, "input_length": 1200, "output_length": 100, "hash_ids": [0, 1, 2]},
        {"timestamp": 2500, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 3]},
        {"timestamp": 2600, "input_length": 64, "output_length": 64},
    ]
    plan = read_trace([json.dumps(row) for row in rows], 16, 99)
    assert [turns[0].after for turns in plan] == [0, 2.5, 2.6]
    assert list(sizes(plan)) == [(75, 6), (69, 1), (4, 4)]
    first, second, third = (prompt_tokens("salt", turns[0], 500) for turns in plan)
    assert (len(first), len(second), len(third)) == (75, 69, 4)
    assert first[:64] == second[:64]
    assert first[64:69] != second[64:69]
    assert prompt_tokens("another salt", plan[0][0], 500)[:64] != first[:64]


def test_a_trace_whose_scale_does_not_divide_its_blocks_has_prompts_of_the_right_length():
    row = {"timestamp": 0, "input_length": 2000, "output_length": 9, "hash_ids": [4, 5, 6, 7]}
    ((turn,),) = read_trace([json.dumps(row)], 100, 1)
    assert turn.pieces == (("block 4", 5), ("block 5", 5), ("block 6", 5), ("block 7", 5))
    ((turn,),) = read_trace([json.dumps({**row, "hash_ids": [4]})], 100, 1)
    assert turn.pieces == (("block 4", 5), ("prompt 0", 15))


@pytest.mark.parametrize("name", LOADS)
def test_a_seed_gives_the_same_load_again(name):
    def plan(seed):
        return LOADS[name](random.Random(seed), 16, 1.0)

    assert plan(7) == plan(7)
    assert plan(7) != plan(8)
    assert len(list(sizes(plan(7)))) == 16
    begins = [turns[0].after for turns in plan(7)]
    assert len(set(begins)) == len(begins)


def test_arrivals_are_a_poisson_process():
    times = arrivals(random.Random(1), 4000)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert sum(gaps) / len(gaps) == pytest.approx(1, rel=0.05)
    assert sum(gap > 1 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)


def test_the_last_turn_is_due_after_the_time_that_the_nodes_need_for_all_of_them():
    plan = [(Turn(1.0, (("a", 16),), 3),), (Turn(4.0, (("b", 32),), 1), Turn(2.0, (("c", 967),), 1))]
    planned, unit_s = paced(plan, IDLE, 2, 0.5)
    # 0.1 + 2 * 0.05 s, 0.2 s, and 2 s for a prompt of 32 + 1 + 967 tokens.
    assert unit_s == pytest.approx(2.4 / 2 / 0.5 / 6)
    assert [turn.after for turns in planned for turn in turns] == pytest.approx([0.4, 1.6, 0.8])


@pytest.fixture
def rows():
    """Rows of two ways, one of which keeps the limits half the time in the second round."""
    good = figures_of([answered(16, 0.1, (0.05,), 2)] * 2)
    bad = figures_of([answered(16, 9.0, (0.05,), 2)] * 2)
    rounds = {"least-load": [good, good], "auto": [good, bad]}
    return [row_of("<load>", name, own) for name, own in rounds.items()]


def test_the_table_is_markdown_with_the_least_and_the_greatest_figure(rows):
    text = table(rows, 3.0)
    assert len({line.count("|") for line in text.splitlines()}) == 1
    title, _, steady, varying = text.splitlines()
    assert title.startswith("|  | goodput 3 × | all requests | TTFT p50 ms | p99 |")
    assert steady.startswith("| least-load | 0.100 | 0.100 | 100 | 100 |")
    assert varying.startswith("| auto | 0.050 (0.000–0.100) | 0.100 | 4,550 (100–9,000) |")


def test_auto_is_compared_with_the_best_fixed_way(rows):
    told = "serves 2 within the limits, `least-load` 4: 0.50 times as many (by round: 1.00, 0.00)"
    assert told in standing(rows)
    assert standing(rows[:1]) == standing(rows[1:]) == ""
