"""What tests compare the router's placement with, in `kvferry.lab.plan.simulation`: fixed ways, one that
knows the future, and several routers that share the nodes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kvferry.lab.plan.costs import Costs
from kvferry.lab.plan.loads import Arrival
from kvferry.lab.plan.simulation import Chosen, FleetSimulation, Outcome, Way, fixed_roles, least_load
from kvferry.router.choice.fleet import Fleet
from kvferry.router.choice.placement import Limits
from kvferry.router.nodes.states import Occupancy


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


class SharedFleet(FleetSimulation):
    """A run in which several routers take the requests in turn.

    Args:
        is_told: At each check, a router learns what a node has to do for all of them. Otherwise it knows of
            its own requests only.
        check_s: Seconds between two checks.
    """

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        costs: Sequence[Costs],
        num_routers: int,
        *,
        is_told: bool = True,
        check_s: float = 1.0,
    ) -> None:
        super().__init__(arrivals, costs)
        self._fleets = [routed()(lambda: self.now) for _ in range(num_routers)]
        self._check_s = check_s
        if is_told:
            for number, fleet in enumerate(self._fleets):
                self._at(check_s * (number + 0.5) / num_routers, self._check, fleet)

    def _arrive(self, number: int) -> None:
        self._fleet = self._fleets[number % len(self._fleets)]
        super()._arrive(number)

    def _check(self, fleet: Fleet) -> None:
        for url, node in zip(self.urls, self.nodes, strict=True):
            # vLLM counts a prompt as running when it has begun to compute it.
            num_waiting = len(node.waiting) + max(0, len(node.prompts) - 1)
            num_running = len(node.answers) + min(1, len(node.prompts))
            fleet.note_all(url, Occupancy(num_running, num_waiting, 0.0))
        if len(self.outcomes) < len(self.arrivals):
            self._at(self.now + self._check_s, self._check, fleet)


def routed(limits: Limits | None = None) -> Callable[[Callable[[], float]], Fleet]:
    """Return what makes the router's fleet with a clock."""
    return lambda clock: Fleet("auto", limits or Limits(), clock)
