"""How many nodes are kept for prompts: the slow decision, on made-up loads."""

from __future__ import annotations

import math
import random

import pytest

from kvferry.router.choice.estimates import ALIKE, SURELY_KEPT, Line
from kvferry.router.choice.placement import NodeLoad, Work, keep_for_prompts
from kvferry.router.choice.roles import DECIDE_S, NUM_TRIED, Recent, Roles, Times, beyond

#: A node like one core: 24 ms and 0.9 ms per token for a prompt, 24 ms and 5 ms per answer for a step.
PROMPT, STEP = (Line(((0, 0.024), (1000, 0.924)), 1e6), Line(((0, 0.024), (10, 0.074)), 1e6))
TIMES = Times(PROMPT, STEP, itl_limit_s=0.087, ttft_limit_s=0.0, ttft_limit_times=3.0, handover_s=0.03)


def roles_of(
    rate: float, num_tokens: int, num_steps: int, num: int = 256, seed: int = 0
) -> tuple[Roles, float]:
    """Return roles that have noted requests of one kind, which came independently, and the time."""
    roles, draw, now = Roles(), random.Random(seed), 0.0
    for _ in range(num):
        now += draw.expovariate(rate)
        roles.note(Recent(now, num_tokens, num_tokens, num_steps))
    return roles, now


@pytest.mark.parametrize(
    ("rate", "num_tokens", "num_steps", "least", "most"),
    [
        (9.0, 20, 200, 0, 0),  # prompts of 42 ms: a node that is kept for them would have nothing to do
        (20.0, 500, 16, 10, 13),  # prompts of 0.47 s keep nine and a half busy
        (0.5, 500, 16, 0, 15),  # every number will do
    ],
    ids=["long answers", "long prompts", "little to do"],
)
def test_as_many_nodes_are_kept_as_the_load_needs(
    rate: float, num_tokens: int, num_steps: int, least: int, most: int
) -> None:
    roles, now = roles_of(rate, num_tokens, num_steps)
    assert least <= roles.decide(now, 16, TIMES) <= most


def test_a_load_that_changes_its_kind_changes_the_roles_and_chance_does_not() -> None:
    roles, now = roles_of(20.0, 500, 16)
    kept = {roles.decide(now, 16, TIMES)}
    draw = random.Random(1)
    for kind, (rate, num_tokens, num_steps) in enumerate([(20.0, 500, 16), (9.0, 20, 200)]):
        for _ in range(300):
            now += draw.expovariate(rate)
            roles.note(Recent(now, num_tokens, num_tokens, num_steps))
            kept.add(roles.decide(now, 16, TIMES))
        if kind == 0:
            assert max(kept) - min(kept) <= 2
    assert roles.num == 0


def test_a_load_that_changes_its_kind_is_noticed_though_few_requests_come() -> None:
    roles, now = roles_of(2.5, 2000, 16)
    assert roles.decide(now, 16, TIMES) > 10
    for _ in range(40):  # a fiftieth of what is remembered at most
        now += 1.0
        roles.note(Recent(now, 20, 20, 200))
    assert roles.decide(now, 16, TIMES) < 5


def test_other_routers_requests_count() -> None:
    roles, now = roles_of(3.0, 500, 16)
    alone = roles.decide(now, 16, TIMES)
    assert roles.decide(now, 16, TIMES, share=0.25) >= alone + 4


def test_nodes_are_kept_before_the_load_needs_them() -> None:
    roles, now = roles_of(5.0, 500, 16)
    assert (costs := roles.costs(now, 16, TIMES, 1.0))[0] < min(costs.values()) + ALIKE
    assert roles.decide(now, 16, TIMES) > 0


def test_a_full_fleet_makes_late_what_is_too_much_and_not_all() -> None:
    assert (beyond(0.0), beyond(SURELY_KEPT), beyond(4.0)) == (0.0, 0.0, 0.75)
    assert 0 < beyond(0.9) < beyond(1.0) < beyond(1.29) < 1 - 1 / 1.31 < beyond(1.32)
    roles, now = roles_of(40.0, 500, 16)  # the prompts alone keep 19 busy
    assert 0.1 < min(roles.costs(now, 16, TIMES, 1.0).values()) < 0.8


def test_a_decision_is_made_now_and_then_and_tries_few_numbers() -> None:
    roles, now = roles_of(50.0, 500, 16)
    roles.decide(now, 200, TIMES)
    assert len(roles.costs(now, 200, TIMES, 1.0)) <= NUM_TRIED + 4
    assert not roles.are_due(now + DECIDE_S / 2)
    assert roles.are_due(now + DECIDE_S)


@pytest.mark.parametrize("at", [0.0, 1e-9, 1e300])
@pytest.mark.parametrize("num_tokens", [1, 10**9])
def test_no_load_makes_an_estimate_absurd(at: float, num_tokens: int) -> None:
    roles = Roles()
    for number in range(20):
        roles.note(Recent(at * number, num_tokens, num_tokens, 1e6))
    assert all(map(math.isfinite, roles.costs(at * 20, 8, TIMES, 1.0).values()))
    assert 0 <= roles.decide(at * 20, 8, TIMES) < 8


def test_nodes_that_are_kept_stay_so_while_their_number_does() -> None:
    """A node that changed its role whenever another one had fewer answers would always have both kinds of
    work.
    """
    loads = [NodeLoad(f"http://node-{number}") for number in range(8)]
    first = keep_for_prompts(loads, 3)
    for load in first:
        load.answers = {Work(0, 0.0): None for _ in range(5)}
    assert keep_for_prompts(loads, 3) == first
    assert keep_for_prompts(loads, 4) > first
    gone = next(iter(first))
    assert keep_for_prompts([load for load in loads if load is not gone], 3) >= first - {gone}
    assert not keep_for_prompts(loads, 0)
    assert not any(load.is_kept for load in loads)
