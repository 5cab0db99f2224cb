"""What tests compare the router's placement with, in `kvferry.sizing.simulation`: fixed ways, and one that knows the future."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kvferry.router.fleet import Fleet
from kvferry.router.placement import Limits
from kvferry.sizing.costs import Costs
from kvferry.sizing.loads import Arrival
from kvferry.sizing.simulation import Chosen, FleetSimulation, Outcome, Way, fixed_roles, least_load


def fixed_ways(num_nodes: int) -> dict[str, Way]:
    """Return the ways that `auto` is compared with."""
    ways: dict[str, Way] = {
        "round-robin": lambda number, in_flight: (number % num_nodes, number % num_nodes),
        "least-load": least_load(num_nodes),
    }
    for num_prefill in range(1, num_nodes):
        num_decode = num_nodes - num_prefill
        ways[f"pair-{num_prefill}+{num_decode}"] = fixed_roles(num_prefill, num_decode)
    return ways


def goodput(outcomes: Sequence[Outcome], costs: Costs, factor: float = 3.0) -> float:
    """Return good requests per second. The limits are multiples of what an idle node takes."""
    seconds = max(each.token_times[-1] for each in outcomes)
    itl_s = factor * costs.unloaded_itl_s
    return (
        sum(each.keeps(factor * costs.unloaded_ttft_s(each.num_prompt_tokens), itl_s) for each in outcomes)
        / seconds
    )


def best_known(
    arrivals: Sequence[Arrival],
    costs: Sequence[Costs],
    starts: Sequence[Chosen],
    seed: int,
    tries: int,
) -> float:
    """Return the goodput of the best assignment that a search over the whole load finds: it knows the future.

    Args:
        starts: Assignments to begin from, such as those of other ways.
    """
    chance = random.Random(seed)
    pairs = [(prefill, decode) for prefill in range(len(costs)) for decode in range(len(costs))]

    def rate(chosen: Chosen) -> float:
        run = FleetSimulation(arrivals, costs, lambda number, in_flight: chosen[number]).run()
        return goodput(run, costs[0]) - 1e-6 * sum(each.ttft_s for each in run)

    best, highest = max(((dict(each), rate(each)) for each in starts), key=lambda each: each[1])
    for _ in range(tries):
        changed = dict(best)
        for number in chance.sample(range(len(arrivals)), min(len(arrivals), chance.choice((1, 1, 2, 3)))):
            changed[number] = chance.choice(pairs)
        if (rated := rate(changed)) >= highest:
            best, highest = changed, rated
    return highest


def routed(limits: Limits | None = None) -> Callable[[Callable[[], float]], Fleet]:
    """Return what makes the router's fleet with a clock."""
    return lambda clock: Fleet("auto", limits or Limits(), clock)
