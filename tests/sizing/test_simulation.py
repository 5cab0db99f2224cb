"""What a simulated node takes, against arithmetic that a reader can do, and what happens when its pool is
full.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.lab.plan.costs import Costs, read_costs, write_costs
from kvferry.lab.plan.loads import Turn, arrivals_of, read_trace, read_trace_file
from kvferry.lab.plan.search import Result, least_possible, search, simulate
from kvferry.lab.plan.simulation import FleetSimulation, Outcome, fixed_roles, least_load
from kvferry.router.choice.placement import Limits
from kvferry.router.choice.prefixes import PIECE_TOKENS
from kvferry.transports.errors import ConfigurationError

COSTS = Costs(0.01, 1e-4, 2e-3, 512, 0.02, 1e-5, request_s=0.005, context_s=1e-7, answer_context_s=1e-6)


def alone(*requests: tuple[str, int, int]) -> list[tuple[Turn, ...]]:
    """Return requests that all arrive at once: the key of the prompt, its tokens, and those of the answer."""
    return [(Turn(0.0, ((key, number),), answer),) for key, number, answer in requests]


def on_one_node(costs: Costs, *requests: tuple[str, int, int]) -> list[Outcome]:
    return FleetSimulation(arrivals_of(alone(*requests)), [costs], least_load(1)).run()


def test_a_request_at_an_idle_node_takes_the_sum_of_its_costs() -> None:
    (outcome,) = on_one_node(COSTS, ("a", 1000, 3))
    # Two chunks; each of the 1,000 tokens after the first has those before it as its context.
    assert outcome.ttft_s == pytest.approx(0.005 + 2 * 0.01 + 1000 * 1e-4 + 1000 * 1000 / 2 * 1e-7)
    assert outcome.ttft_s == pytest.approx(COSTS.unloaded_ttft_s(1000))
    first, second, third = outcome.token_times
    assert second - first == pytest.approx(0.01 + 0.002 + 1001 * 1e-6)
    assert third - second == pytest.approx(0.01 + 0.002 + 1002 * 1e-6)


def test_answers_wait_for_the_chunk_of_a_prompt_in_their_step() -> None:
    costs = replace(COSTS, request_s=0.0, context_s=0.0, answer_context_s=0.0, mixed_s=0.003)
    plan = [(Turn(0.0, (("a", 16),), 20),), (Turn(0.05, (("b", 400),), 1),)]
    short, _ = FleetSimulation(arrivals_of(plan), [costs], least_load(1)).run()
    gaps = [later - earlier for earlier, later in zip(short.token_times, short.token_times[1:], strict=False)]
    assert max(gaps) == pytest.approx(0.01 + 0.002 + 400 * 1e-4 + 0.003)
    assert sorted(gaps)[-2] == pytest.approx(0.01 + 0.002)


def test_a_pool_without_room_lets_requests_wait_in_order() -> None:
    small = replace(COSTS, pool_tokens=1200)
    first, second, third = on_one_node(small, ("a", 1000, 50), ("b", 1000, 5), ("c", 16, 5))
    assert second.token_times[0] > first.token_times[-1]
    assert third.token_times[0] > first.token_times[-1], "it must not overtake the one before it"
    roomy = on_one_node(COSTS, ("a", 1000, 50), ("b", 1000, 5), ("c", 16, 5))
    assert roomy[1].token_times[0] < roomy[0].token_times[-1]


def test_a_node_takes_no_more_requests_than_its_steps() -> None:
    narrow = replace(COSTS, max_requests=1)
    first, second = on_one_node(narrow, ("a", 64, 10), ("b", 64, 10))
    assert second.token_times[0] > first.token_times[-1]


def test_a_cached_prompt_costs_its_last_tokens_until_others_need_the_room() -> None:
    def ttft_again(costs: Costs, *between: tuple[str, int, int]) -> float:
        requests = alone(("a", 1024, 1), *between, ("a", 1024, 1))
        spread = [(replace(turns[0], after=10.0 * number),) for number, turns in enumerate(requests)]
        return FleetSimulation(arrivals_of(spread), [costs], least_load(1)).run()[-1].ttft_s

    others = [(f"b{number}", 1024, 1) for number in range(4)]
    assert ttft_again(COSTS) == pytest.approx(ttft_again(COSTS, *others))
    assert ttft_again(COSTS) < 0.05
    assert ttft_again(replace(COSTS, pool_tokens=3000), *others) == pytest.approx(COSTS.unloaded_ttft_s(1024))


def test_a_link_sends_one_prompt_after_the_other() -> None:
    slow = replace(COSTS, handed_token_s=1e-3)
    plan = arrivals_of(alone(("a", 512, 2), ("b", 512, 2)))
    first, second = FleetSimulation(plan, [slow] * 2, fixed_roles(1, 1)).run()
    quick, _ = FleetSimulation(plan, [replace(slow, handed_token_s=0.0)] * 2, fixed_roles(1, 1)).run()
    assert first.ttft_s - quick.ttft_s >= 0.9 * 0.512
    assert second.token_times[0] - first.token_times[0] >= 0.9 * 0.512


def test_a_whole_conversation_is_the_prompt_of_its_next_turn() -> None:
    turns = (Turn(0.0, (("a", 100),), 30), Turn(1.0, (("b", 40),), 5))
    first, second = arrivals_of([turns])
    assert (first.num_tokens, second.num_tokens, second.after) == (100, 170, 0)
    assert len(first.keys) == 100 // PIECE_TOKENS
    assert list(second.keys[: len(first.keys)]) == list(first.keys)


def test_prompts_share_keys_as_far_as_their_blocks_are_equal() -> None:
    rows = [
        '{"timestamp": 0, "input_length": 1600, "output_length": 1, "hash_ids": [1, 2, 3, 4]}',
        '{"timestamp": 5, "input_length": 1600, "output_length": 1, "hash_ids": [1, 2, 9, 4]}',
    ]
    first, second = arrivals_of(read_trace(rows, 1.0, 10))
    equal = [one == other for one, other in zip(first.keys, second.keys, strict=True)]
    assert equal == [True] * 64 + [False] * 36


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("x", "is no JSON"),
        ("[1]", "must be a mapping, got [1]"),
        ("[" * 100_000, "has more than 16 levels"),
        ("\xff", "is no JSON"),
        ('{"timestamp": 9, "input_length": 5}', "output_length is missing"),
        (
            '{"timestamp": -1, "input_length": 5, "output_length": 5}',
            "timestamp must be a number of milliseconds",
        ),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 5}', "of at least 0, got nan"),
        ('{"timestamp": true, "input_length": 5, "output_length": 5}', "of at least 0, got True"),
        (
            f'{{"timestamp": {"9" * 400}, "input_length": 5, "output_length": 5}}',
            "timestamp must be a number",
        ),
        (
            f'{{"timestamp": {"9" * 5000}, "input_length": 5, "output_length": 5}}',
            "a number of more than 4096 bits",
        ),
        ('{"timestamp": 7, "input_length": 5, "output_length": 5}', "timestamp must not be before 8, "),
        (
            '{"timestamp": 9, "input_length": 3.5, "output_length": 5}',
            "input_length must be an integer from 1 ",
        ),
        ('{"timestamp": 9, "input_length": true, "output_length": 5}', "to 10000000, got True"),
        ('{"timestamp": 9, "input_length": 1e99, "output_length": 5}', "to 10000000, got 1e+99"),
        (
            '{"timestamp": 9, "input_length": 5, "output_length": 0}',
            "output_length must be an integer from 1 ",
        ),
        ('{"timestamp": 9, "input_length": 5, "output_length": 5, "hash_ids": ["7"]}', "hash_ids[0] must be"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 8, "input_length": 5, "output_length": 5}\n' + line + "\n", encoding="latin-1"
    )
    with pytest.raises(ConfigurationError, match=re.escape(why)) as caught:
        read_trace_file(path, 1.0, 10)
    assert "line 2" in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_trace_without_a_line_end_is_not_read_for_ever() -> None:
    with pytest.raises(ConfigurationError, match="line 1 has more than 1048576 bytes"):
        read_trace_file(Path("/dev/zero"), 1.0, 10)


def test_costs_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_costs(COSTS, tmp_path / "costs.json")
    assert read_costs(tmp_path / "costs.json") == COSTS


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "must be a JSON object"),
        ("{", "no JSON"),
        ('{"steps_s": 1}', "unknown key 'steps_s'"),
        ('{"step_s": -1}', "step_s must be"),
        ('{"step_s": NaN}', "step_s must be"),
        ('{"step_s": "1"}', "step_s must be"),
        ('{"chunk_tokens": 0}', "chunk_tokens must be"),
        ('{"chunk_tokens": 1.5}', "chunk_tokens must be"),
        ('{"step_s": ' + "9" * 400 + "}", "step_s must be"),
        ('{"step_s": ' + "9" * 5000 + "}", "a number of more than 4096 bits"),
        ("[" * 10_000, "it has more than 16 levels"),
        ('"\x00"' * 30_000, "more than 65536 bytes"),
    ],
)
def test_costs_that_make_no_sense_are_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=why):
        read_costs(path)


@pytest.mark.parametrize("enough", [1, 2, 3, 5, 11, 64])
def test_the_search_finds_the_least_number_of_nodes_in_few_tries(enough: int) -> None:
    def run(way: str, number: int, *others: object) -> Result:
        return Result(way, number, 1.0 if number >= enough else 0.5, 1.0, [], [])

    arrivals = arrivals_of(alone(("a", 10, 2)))
    tried = list(search("auto", arrivals, COSTS, Limits(1, 1), 0.9, 64, run))
    assert min(each.num_nodes for each in tried if each.share >= 0.9) == enough
    assert len(tried) <= 13
    assert len({each.num_nodes for each in tried}) == len(tried)
    nothing = list(search("auto", arrivals, COSTS, Limits(1, 1), 0.9, enough - 1, run)) if enough > 1 else []
    assert all(each.share < 0.9 for each in nothing)


def test_more_nodes_keep_more_limits_and_the_search_starts_below_them() -> None:
    plan = [(Turn(0.02 * number, ((f"{number}", 512),), 40),) for number in range(200)]
    arrivals, limits = arrivals_of(plan), Limits(1.0, 0.03)
    shares = [simulate("auto", number, arrivals, COSTS, limits).share for number in (2, 8, 32)]
    assert shares[0] < shares[1] < shares[2] == 1.0
    tried = list(search("plain", arrivals, COSTS, limits, 1.0, 64))
    least = min(each.num_nodes for each in tried if each.share == 1.0)
    assert least_possible(arrivals, COSTS) <= least
    assert simulate("plain", least - 1, arrivals, COSTS, limits).share < 1.0
