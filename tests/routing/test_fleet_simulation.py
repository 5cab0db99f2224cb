"""The router's placement in virtual time, against fixed ways and against one that knows the future.

The loads are those of `lab/bench/fleet.py`. Everything follows from the seeds, so a failure repeats.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from functools import cache

import pytest

from kvferry.lab.bench.fleet_figures import LOADS, Unloaded, paced
from kvferry.lab.plan.costs import Costs
from kvferry.lab.plan.loads import Arrival, arrivals_of
from kvferry.lab.plan.simulation import Chosen, FleetSimulation, Outcome, fixed_roles, least_load
from kvferry.router.choice.placement import Limits
from tests.support.fleet_simulator import SharedFleet, best_known, fixed_ways, goodput, routed

CPU = Costs()
#: Something like a GPU: prompts are cheap, steps are short, and a handover is a large part of a short prompt.
GPU = Costs(0.008, 4e-5, 3e-4, 2048, 0.004, 2e-6)
INTENSITIES = (0.7, 1.0, 1.4)


def arrivals(
    load: str, seed: int, intensity: float, costs: Costs, num_nodes: int, num: int = 32
) -> list[Arrival]:
    """Return requests of a load, which bring so much work per unit of time, 1 for what the nodes do one by
    one.
    """
    plan = LOADS[load](random.Random(f"{seed} {load}"), num, 1.0)
    idle = Unloaded(
        {number: costs.unloaded_ttft_s(number) for number in (16, 256, 512, 1024, 2048)}, costs.unloaded_itl_s
    )
    return arrivals_of(paced(plan, idle, num_nodes, intensity)[0])


@cache
def rounds(
    load: str, intensity: float, costs: Costs = CPU, num_nodes: int = 2, num: int = 6
) -> tuple[dict[str, float], list[Chosen]]:
    """Return the mean goodput of each way over some rounds, and what the router chose."""
    rates: dict[str, list[float]] = {}
    chosen = []
    for seed in range(num):
        requests = arrivals(load, seed, intensity, costs, num_nodes)
        for name, way in fixed_ways(num_nodes).items():
            outcomes = FleetSimulation(requests, [costs] * num_nodes, way).run()
            rates.setdefault(name, []).append(goodput(outcomes, costs))
        simulation = FleetSimulation(requests, [costs] * num_nodes, fleet=routed())
        rates.setdefault("auto", []).append(goodput(simulation.run(), costs))
        chosen.append(simulation.chosen)
    return {name: statistics.fmean(each) for name, each in rates.items()}, chosen


@pytest.mark.parametrize("intensity", INTENSITIES)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    ("costs", "num_nodes", "share"),
    # The rounds of the fleet like GPUs take 2 to 5 s, in which the router has to learn what everything takes.
    [(CPU, 2, 0.98), (GPU, 2, 0.94), (CPU, 3, 0.95)],
    ids=["cpu", "gpu", "three"],
)
def test_no_fixed_way_keeps_the_limits_for_more_requests(
    load: str, intensity: float, costs: Costs, num_nodes: int, share: float
) -> None:
    rates, _ = rounds(load, intensity, costs, num_nodes)
    best = max(rate for name, rate in rates.items() if name != "auto")
    assert rates["auto"] >= share * best, rates


@pytest.mark.parametrize("load", [name for name in LOADS if name != "long-answers"])
@pytest.mark.parametrize(
    ("costs", "intensity", "share"),
    [(CPU, 1.0, 0.95), (CPU, 1.5, 0.95), (GPU, 1.0, 0.98), (GPU, 1.5, 0.97)],
    ids=["cpu", "full cpu", "gpu", "full gpu"],
)
def test_eight_nodes_are_used_as_well_as_by_the_best_split(
    load: str, costs: Costs, intensity: float, share: float
) -> None:
    """Which split is best is known only afterwards, and differs from load to load."""
    requests = arrivals(load, 0, intensity, costs, 8, 1200)
    ways = [least_load(8), *(fixed_roles(first, 8 - first) for first in range(1, 8))]
    best = max(goodput(FleetSimulation(requests, [costs] * 8, way).run(), costs) for way in ways)
    ours = goodput(FleetSimulation(requests, [costs] * 8, fleet=routed()).run(), costs)
    assert ours >= share * best


@pytest.mark.parametrize(
    ("load", "intensity", "costs", "gain", "share"),
    [
        ("long-prompts", 1.0, CPU, 1.1, 0.5),
        ("interference", 1.0, CPU, 1.1, 0.65),
        ("short-answers", 0.7, CPU, 0.95, 0.75),
        # A second between two checks is long for such nodes.
        ("long-prompts", 1.5, GPU, 0.95, 0.85),
        ("short-answers", 1.5, GPU, 0.95, 0.9),
    ],
)
def test_routers_that_share_nodes_count_each_others_requests(
    load: str, intensity: float, costs: Costs, gain: float, share: float
) -> None:
    def rate(num_routers: int, *, is_told: bool) -> float:
        return statistics.fmean(
            goodput(SharedFleet(requests, [costs] * 8, num_routers, is_told=is_told).run(), costs)
            for requests in (arrivals(load, seed, intensity, costs, 8, 400) for seed in range(2))
        )

    one, four, blind = rate(1, is_told=True), rate(4, is_told=True), rate(4, is_told=False)
    assert one >= 0.98 * rate(1, is_told=False)
    assert four >= gain * blind
    assert four >= share * one


def test_all_nodes_are_used_if_they_are_faster_than_the_first_guess() -> None:
    """A node that has shown nothing is taken to be like the others, and not like the guess."""
    requests = arrivals("short-answers", 0, 1.0, GPU, 16, 320)
    simulation = FleetSimulation(requests, [GPU] * 16, fleet=routed(Limits(1.0, 0.02)))
    simulation.run()
    assert len({decode for _, decode in simulation.chosen.values()}) == 16


@pytest.mark.parametrize(("load", "gain"), [("interference", 1.2), ("long-prompts", 1.5)])
def test_it_keeps_more_limits_where_nodes_are_full(load: str, gain: float) -> None:
    rates, _ = rounds(load, 1.4, num=12)
    assert rates["auto"] >= gain * max(rate for name, rate in rates.items() if name != "auto"), rates


@pytest.mark.parametrize("load", ["interference", "long-answers", "conversations"])
def test_it_comes_near_to_a_choice_that_knows_the_future(load: str) -> None:
    rates, chosen = rounds(load, 1.0)
    known = []
    for seed in range(2):
        requests = arrivals(load, seed, 1.0, CPU, 2)
        known.append(best_known(requests, [CPU, CPU], [chosen[seed]], seed, 150))
    assert rates["auto"] >= 0.75 * statistics.fmean(known)


@pytest.mark.parametrize("load", ["short-answers", "conversations"])
def test_a_slow_node_gets_less_to_do(load: str) -> None:
    slow = replace(CPU, step_s=5 * CPU.step_s, prompt_token_s=5 * CPU.prompt_token_s)
    rates: dict[str, list[float]] = {"auto": [], "balancer": []}
    shares = []
    for seed in range(1, 7):
        requests = arrivals(load, seed, 0.4, CPU, 2)
        simulation = FleetSimulation(requests, [slow, CPU], fleet=routed())
        rates["auto"].append(goodput(simulation.run(), CPU))
        shares.append(statistics.fmean(decode == 0 for _, decode in simulation.chosen.values()))
        by_load = FleetSimulation(requests, [slow, CPU], fixed_ways(2)["least-load"]).run()
        rates["balancer"].append(goodput(by_load, CPU))
    assert statistics.fmean(shares) < 1 / 4
    assert sum(rates["auto"]) >= 1.15 * sum(rates["balancer"]), rates


@pytest.mark.parametrize("limits", [Limits(1e-9, 1e-9), Limits(1e9, 1e9), Limits(1e-9, 1e9)], ids=str)
def test_absurd_limits_leave_a_sensible_choice(limits: Limits) -> None:
    """A limit that is always missed must not send every request to one node."""
    requests = arrivals("long-prompts", 2, 1.0, CPU, 2)

    def mean_ttft(outcomes: list[Outcome]) -> float:
        return statistics.fmean(each.ttft_s for each in outcomes)

    by_turns = FleetSimulation(requests, [CPU, CPU], fixed_ways(2)["round-robin"]).run()
    assert mean_ttft(FleetSimulation(requests, [CPU, CPU], fleet=routed(limits)).run()) < 2 * mean_ttft(
        by_turns
    )


def test_a_simulation_repeats() -> None:
    requests = arrivals("interference", 3, 1.0, CPU, 2)
    first, second = (FleetSimulation(requests, [CPU, CPU], fleet=routed()).run() for _ in range(2))
    assert [each.token_times for each in first] == [each.token_times for each in second]
