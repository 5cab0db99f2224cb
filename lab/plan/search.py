"""The least number of nodes that keeps the limits, for each way to use them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from ...router.choice.fleet import Fleet
from ...router.choice.placement import Limits
from ...router.choice.prefixes import PIECE_TOKENS
from .costs import Costs
from .loads import Arrival
from .simulation import FleetSimulation, Outcome, Way, fixed_roles, least_load

WayName = Literal["plain", "pair", "auto"]
WAYS: Final[dict[WayName, str]] = {
    "plain": "plain nodes, the request goes to the one with the fewest in flight",
    "pair": "prefill nodes and decode nodes, every prompt is handed over; the best of a few splits",
    "auto": "kvferry router over nodes that do both, which decides for each request",
}
assert set(WAYS) == set(get_args(WayName))


@dataclass(frozen=True)
class Result:
    """What a number of nodes does in one way.

    Attributes:
        way: With the split, for a pair.
        share: Of the requests that keep both limits.
        goodput: Such requests per second.
        ttfts, itls: Seconds, in ascending order: to each first token, and of each request on average between
            two.
    """

    way: str
    num_nodes: int
    share: float
    goodput: float
    ttfts: Sequence[float]
    itls: Sequence[float]


def simulate(
    way: WayName, num_nodes: int, arrivals: Sequence[Arrival], costs: Costs, limits: Limits
) -> Result:
    """Simulate a load on `num_nodes` nodes used in one way.

    For a pair, return the result of the best split.
    """
    nodes = [costs] * num_nodes
    if way == "pair":
        runs = [
            _result(
                f"pair {first}+{num_nodes - first}",
                FleetSimulation(arrivals, nodes, fixed_roles(first, num_nodes - first)).run(),
                num_nodes,
                limits,
            )
            for first in _splits(num_nodes)
        ]
        return max(runs, key=lambda run: run.share)
    balancer: Way | None = least_load(num_nodes) if way == "plain" else None
    fleet = None if way == "plain" else lambda clock: Fleet("auto", limits, clock)
    return _result(way, FleetSimulation(arrivals, nodes, balancer, fleet).run(), num_nodes, limits)


def _splits(num_nodes: int) -> list[int]:
    """Return numbers of prefill nodes to try."""
    return sorted({max(1, min(num_nodes - 1, round(num_nodes * part / 8))) for part in range(1, 8)})


def _result(way: str, outcomes: Sequence[Outcome], num_nodes: int, limits: Limits) -> Result:
    good = sum(each.keeps(limits.ttft_s, limits.itl_s) for each in outcomes)
    seconds = max(each.token_times[-1] for each in outcomes)
    return Result(
        way,
        num_nodes,
        good / len(outcomes),
        good / seconds,
        sorted(each.ttft_s for each in outcomes),
        sorted(each.mean_itl_s for each in outcomes if len(each.token_times) > 1),
    )


def least_possible(arrivals: Sequence[Arrival], costs: Costs) -> int:
    """Return a number of nodes below which the work takes longer than the load lasts, though each prompt is
    computed once.

    Queues grow all the time then, so trying fewer takes long and says nothing.
    """
    span = max(each.at for each in arrivals) or 1.0
    num_prompt_tokens = PIECE_TOKENS * len({key for each in arrivals for key in each.keys})
    per_answer_token = costs.answer_s + costs.step_s / costs.max_requests
    work_s = num_prompt_tokens * costs.prompt_token_s
    work_s += sum(each.num_answer_tokens for each in arrivals) * per_answer_token
    return max(1, int(work_s / span))


def search(
    way: WayName,
    arrivals: Sequence[Arrival],
    costs: Costs,
    limits: Limits,
    share: float,
    max_nodes: int,
    run: Callable[..., Result] = simulate,
) -> Iterator[Result]:
    """Yield the result of each number of nodes that is tried. More nodes are taken to be no worse.

    The numbers double until one keeps the limits for that share of the requests. Between it and the one
    before it, halves are tried.
    """
    low = 2 if way == "pair" else 1
    number = max(low, min(max_nodes, least_possible(arrivals, costs)))
    failed = low - 1
    while True:
        result = run(way, number, arrivals, costs, limits)
        yield result
        if result.share >= share:
            break
        failed = number
        if number >= max_nodes:
            return
        number = min(max_nodes, 2 * number)
    while number - failed > 1:
        middle = (number + failed) // 2
        result = run(way, middle, arrivals, costs, limits)
        yield result
        if result.share >= share:
            number = middle
        else:
            failed = middle
