"""Judge the router's choice of nodes against every way that knows the load in advance, in virtual time.

    .venv/bin/python -m kvferry.lab.bench.placement [--loads NAME ...] [--trace FILE ...] [--nodes N ...]
        [--factors X ...] [--kinds cpu|gpu ...] [--seed N] [--skip N] [--known FILE] [--vary NAME ...]

A *cell* is a load, a number of nodes, a kind of node, and a factor. Factor 1 is the rate at which the best
fixed way still keeps the limits for `CARRIED` of the requests that it serves when it is almost idle. Fixed
ways are plain nodes and the splits into prefill and decode nodes. For each cell this prints the share of the
requests that are within the limits with plain nodes, with the best split, and with `auto`. The ratio says
what `auto` serves in comparison with the better one of the other two. The last column has the milliseconds of
CPU of one choice. A request is within the limits if its first token takes at most `PATIENCE` times what it
would take at an idle node, and its other tokens do on average.

The fleet is that of `kvferry plan`, and `auto` runs the router's own code. Lengths and arrivals follow from
the seed, or from a trace without its first `--skip` requests: other seeds and other parts show what was tuned
to these. With `--known`, fixed ways are simulated once and then read from that file.

`--vary` judges the cells again with a constant of the router multiplied by each of `VARIED_BY`, and prints a
line for each. Where they are much the same, the constant could have been another one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvferry.lab.load import line, markdown
from kvferry.lab.plan.costs import Costs
from kvferry.lab.plan.loads import Arrival, Conversation, arrivals_of, read_trace_file
from kvferry.lab.plan.main import chart
from kvferry.lab.plan.simulation import FleetSimulation, Outcome, fixed_roles, least_load
from kvferry.router.choice.estimates import Line
from kvferry.router.choice.fleet import Fleet
from kvferry.router.choice.placement import Choice, Limits

from .fleet_figures import LOADS, Unloaded, paced

#: Multiple of an idle node's times that is the limit.
PATIENCE = 3.0
#: Share of the requests that an almost idle fleet serves, which the best fixed way serves at the rate that it
#: just carries.
CARRIED = 0.95
#: What is hoped for in each cell.
WANTED = 0.97
#: Intensities above it are not tried.
MAX_INTENSITY = 100.0
#: Splits that are tried for many nodes; with fewer nodes it is every split.
NUM_SPLITS = 16
#: A load that changes its kind, the kinds in turn, and the seconds of each at factor 1.
CHANGING, EACH_S = "changing", 120.0
IN_TURN = ("short-answers", "long-prompts", "long-answers", "interference")
#: Constants of `kvferry.router.choice` that were chosen, and what `--vary` multiplies them by. Of one that is
#: a share near 1, it is the rest of 1.
VARIED = (
    "1-estimates.FADING",
    "1-estimates.SURELY_KEPT",
    "estimates.WEIGHT",
    "estimates.LATELY_S",
    "estimates.ALIKE",
    "placement.MAX_TIMES",
    "placement.WEIGHT_IN_THE_WAY",
    "roles.GROWTH",
)
VARIED_BY = (0.5, 0.7, 1.4, 2.0)


@dataclass(frozen=True)
class Kind:
    """A kind of node.

    Attributes:
        scale: What the lengths of traces are divided by.
        num_each: Requests per node in a run.
    """

    costs: Costs
    scale: float
    num_each: int


KINDS: Mapping[str, Kind] = {
    # vLLM with a small model on one core.
    "cpu": Kind(Costs(), 16.0, 100),
    # Something like a GPU: prompts are cheap, steps are short, a handover is a large part of a short prompt.
    "gpu": Kind(Costs(0.008, 4e-5, 3e-4, 2048, 0.004, 2e-6), 4.0, 200),
}


@dataclass(frozen=True)
class Cell:
    """What is judged. `load` is the name of one, or the path of a trace."""

    load: str
    kind: str
    num_nodes: int
    seed: int = 0
    skip: int = 0


@dataclass(frozen=True)
class Verdict:
    """What each way serves within the limits, as shares of the requests.

    Attributes:
        splits: By the number of prefill nodes.
        chosen_s: Seconds that one choice of `auto` took on average.
    """

    cell: Cell
    factor: float
    plain: float
    splits: Mapping[str, float]
    auto: float
    chosen_s: float

    @property
    def ratio(self) -> float:
        """What `auto` serves in comparison with the best other way."""
        return self.auto / max(self.plain, *self.splits.values(), 1e-9)


def plan_of(cell: Cell, number: int = 0) -> list[Conversation]:
    """Return the requests of a cell; 0: as many as its nodes need to be busy for a while."""
    kind = KINDS[cell.kind]
    number = number or min(6000, max(600, kind.num_each * cell.num_nodes))
    if cell.load == CHANGING:
        return list(changing(cell))
    if cell.load in LOADS:
        return LOADS[cell.load](random.Random(f"{cell.seed} {cell.load}"), number, 1.0)
    rows = read_trace_file(Path(cell.load), kind.scale, 100_000)[cell.skip :]
    begin, found, at = rows[0][0].after, list[Conversation](), 0.0
    while len(found) < number:
        copy, last = len(found), at
        for (turn,) in rows[: number - len(found)]:
            pieces = tuple((f"{copy} {key}", length) for key, length in turn.pieces) if copy else turn.pieces
            at = last + turn.after - begin
            found.append((replace(turn, after=at, pieces=pieces),))
    return found


def changing(cell: Cell) -> Iterator[Conversation]:
    """Yield requests of one kind after the other, each at the rate that the best way for it carries."""
    for place, load in enumerate(IN_TURN):
        own = replace(cell, load=load)
        intensity = carried(own).intensity
        _, unit_s = at_rate(plan_of(own), own, intensity)
        for (turn,) in at_rate(plan_of(own, round(EACH_S / unit_s)), own, intensity)[0]:
            pieces = tuple((f"{load} {key}", length) for key, length in turn.pieces)
            yield (replace(turn, after=turn.after + place * EACH_S, pieces=pieces),)


def at_rate(plan: Sequence[Conversation], cell: Cell, intensity: float) -> tuple[list[Conversation], float]:
    """Return a plan at a rate, 1 for the work that the nodes can do one request at a time; see `paced`."""
    costs = KINDS[cell.kind].costs
    points = {number: costs.unloaded_ttft_s(number) for number in (1, 512, 1024, 2048, 1 << 20)}
    return paced(plan, Unloaded(points, costs.unloaded_itl_s), cell.num_nodes, intensity)


def arrivals_at(plan: Sequence[Conversation], cell: Cell, intensity: float) -> list[Arrival]:
    """Return the requests of a plan at a rate."""
    return arrivals_of(at_rate(plan, cell, intensity)[0])


def share_of(outcomes: Sequence[Outcome], costs: Costs) -> float:
    """Return the share of the requests that are within the limits."""
    itl_s = PATIENCE * costs.unloaded_itl_s
    kept = (each.keeps(PATIENCE * costs.unloaded_ttft_s(each.num_prompt_tokens), itl_s) for each in outcomes)
    return statistics.fmean(kept)


def share_of_split(arrivals: Sequence[Arrival], costs: Costs, num_nodes: int, first: int) -> float:
    """Return the share that prefill and decode nodes serve, `first` of them prefill nodes."""
    way = fixed_roles(first, num_nodes - first)
    return share_of(FleetSimulation(arrivals, [costs] * num_nodes, way).run(), costs)


def share_of_plain(arrivals: Sequence[Arrival], costs: Costs, num_nodes: int) -> float:
    """Return the share that plain nodes serve."""
    return share_of(FleetSimulation(arrivals, [costs] * num_nodes, least_load(num_nodes)).run(), costs)


def climb(rate: Callable[[int], float], start: int, num_nodes: int) -> tuple[int, float]:
    """Return the best split that is found by going up from one, and its share."""
    known: dict[int, float] = {}

    def at(first: int) -> float:
        if first not in known:
            known[first] = rate(first)
        return known[first]

    best = start
    step = max(1, num_nodes // NUM_SPLITS)
    while True:
        near = [each for each in (best - step, best + step) if 0 < each < num_nodes]
        better = max(near, key=at, default=best)
        if better == best or at(better) <= at(best):
            return best, at(best)
        best = better


@dataclass
class Fixed:
    """What the fixed ways do in a cell.

    Attributes:
        intensity: What the best of them just carries; see `paced`.
        first: Prefill nodes of the best split there.
        shares: By factor, what plain nodes serve, and what the splits that were tried do.
    """

    intensity: float
    first: int
    shares: dict[str, tuple[float, dict[str, float]]] = field(default_factory=dict)


def carried(cell: Cell) -> Fixed:
    """Find the rate that the best fixed way just carries."""
    plan, costs, num_nodes = plan_of(cell), KINDS[cell.kind].costs, cell.num_nodes
    first = max(1, num_nodes // 2)
    if cell.load == CHANGING:  # its parts have that rate already
        return Fixed(at_rate(plan, cell, 1.0)[1], first)

    def share(intensity: float) -> float:
        nonlocal first
        arrivals = arrivals_at(plan, cell, intensity)
        first, found = climb(partial(share_of_split, arrivals, costs, num_nodes), first, num_nodes)
        return max(found, share_of_plain(arrivals, costs, num_nodes))

    low, high = 0.02, 0.5
    # Some traces have requests that come together, which few nodes never serve in time.
    wanted = CARRIED * share(low)
    while share(high) >= wanted and high < MAX_INTENSITY:
        low, high = high, high * 2
    while high / low > 1.04:
        middle = math.sqrt(low * high)
        if share(middle) >= wanted:
            low = middle
        else:
            high = middle
    return Fixed(low, first)


class Timed(Fleet):
    """The router's fleet, which notes how long its choices take."""

    num, seconds = 0, 0.0

    def choose(self, *arguments: Any, **options: Any) -> Choice | None:
        began = time.process_time()
        try:
            return super().choose(*arguments, **options)
        finally:
            self.seconds += time.process_time() - began
            self.num += 1


def auto_of(arrivals: Sequence[Arrival], costs: Costs, num_nodes: int) -> tuple[float, float]:
    """Return the share that `auto` serves, and the seconds of one choice."""
    made: list[Timed] = []

    def fleet(clock: Callable[[], float]) -> Fleet:
        made.append(Timed("auto", Limits(), clock))
        return made[0]

    outcomes = FleetSimulation(arrivals, [costs] * num_nodes, fleet=fleet).run()
    return share_of(outcomes, costs), made[0].seconds / made[0].num


def vary(name: str, factor: float) -> None:
    """Multiply a constant of `VARIED` in this process, wherever it was imported."""
    is_rest, module, constant = name.startswith("1-"), *name.removeprefix("1-").split(".")
    before = getattr(sys.modules[f"kvferry.router.choice.{module}"], constant)
    value = 1 - (1 - before) * factor if is_rest else type(before)(before * factor)
    for path, each in sys.modules.items():
        if path.startswith("kvferry.router.choice.") and getattr(each, constant, None) is before:
            setattr(each, constant, value)
    defaults = Line.__init__.__defaults__ or ()
    Line.__init__.__defaults__ = tuple(value if each is before else each for each in defaults)


def judge(cell: Cell, factors: Sequence[float], fixed: Fixed | None = None) -> tuple[list[Verdict], Fixed]:
    """Return the verdict for each factor, and what the fixed ways do.

    Args:
        fixed: What is known of that already.
    """
    fixed = fixed or carried(cell)
    costs, num_nodes, plan, verdicts = KINDS[cell.kind].costs, cell.num_nodes, plan_of(cell), []
    for factor in factors:
        arrivals = arrivals_at(plan, cell, factor * fixed.intensity)
        if f"{factor:g}" not in fixed.shares:
            splits: dict[str, float] = {}

            def rate(first: int) -> float:
                splits[str(first)] = share_of_split(arrivals, costs, num_nodes, first)  # noqa: B023
                return splits[str(first)]  # noqa: B023

            climb(rate, fixed.first, num_nodes)
            fixed.shares[f"{factor:g}"] = share_of_plain(arrivals, costs, num_nodes), splits
        plain, splits = fixed.shares[f"{factor:g}"]
        verdicts.append(Verdict(cell, factor, plain, splits, *auto_of(arrivals, costs, num_nodes)))
    return verdicts, fixed


TITLES = ("load", "kind", "nodes", "factor", "plain", "best split", "auto", "ratio", "ms")


def row(each: Verdict) -> list[str]:
    """Return the cells of a table's row."""
    first = max(each.splits, key=lambda split: each.splits[split])
    split = f"{each.splits[first]:.1%} ({first}+{each.cell.num_nodes - int(first)})"
    cells = [Path(each.cell.load).stem, each.cell.kind, str(each.cell.num_nodes), f"{each.factor:g}"]
    cells += [f"{each.plain:.1%}", split, f"{each.auto:.1%}", f"{each.ratio:.3f}"]
    return [*cells, f"{each.chosen_s * 1e3:.3f}"]


def summary(ratios: Sequence[float]) -> str:
    """Return what all cells have in common."""
    num_less = sum(each < WANTED for each in ratios)
    mean = statistics.fmean(ratios)
    return f"{len(ratios)} cells: mean {mean:.3f}, least {min(ratios):.3f}, {num_less} below {WANTED:g}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = partial(parser.add_argument, metavar="NAME")
    loads = "loads (default: all but changing)"
    add("--loads", nargs="*", default=list(LOADS), choices=[*LOADS, CHANGING], help=loads)
    add("--trace", nargs="*", default=[], metavar="FILE", help="traces, as further loads (default: none)")
    nodes = "sizes of fleets (default: 2 4 8)"
    add("--nodes", nargs="+", type=int, default=[2, 4, 8], metavar="N", help=nodes)
    factors = "multiples of the rate that is just carried (default: 0.7 1 1.3)"
    add("--factors", nargs="+", type=float, default=[0.7, 1.0, 1.3], metavar="X", help=factors)
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of nodes (default: all)")
    add("--seed", type=int, default=0, metavar="N", help="seed of lengths and arrivals (default: 0)")
    add("--skip", type=int, default=0, metavar="N", help="requests of a trace that are left out (default: 0)")
    add("--known", type=Path, metavar="FILE", help="keep there what the fixed ways serve (default: nowhere)")
    add("--processes", type=int, default=2, metavar="N", help="cells that are judged at once (default: 2)")
    add("--vary", nargs="*", default=[], choices=VARIED, help="constants to change (default: none)")
    add("--plot", type=Path, metavar="FILE", help="plot what --vary finds there, as SVG (default: nowhere)")
    options = parser.parse_args()
    if min(options.nodes) < 2 or min(options.factors) <= 0 or options.skip < 0:
        parser.error("--nodes must be at least 2, --factors greater than 0, and --skip at least 0")
    return options


def main() -> None:
    options = parse()
    has_known = options.known is not None and options.known.exists()
    known = json.loads(options.known.read_text()) if has_known else {}
    cells = [
        Cell(load, kind, num, options.seed, options.skip if load in options.trace else 0)
        for num in options.nodes
        for kind in options.kinds
        for load in (*options.loads, *options.trace)
    ]

    def judged(*change: Any) -> Iterator[Verdict]:
        with ProcessPoolExecutor(options.processes, None, vary if change else None, change) as pool:
            names = [json.dumps(asdict(cell)) for cell in cells]
            fixed = [Fixed(**known[name]) if name in known else None for name in names]
            all_found = pool.map(judge, cells, [options.factors] * len(cells), fixed)
            for name, (verdicts, found) in zip(names, all_found, strict=True):
                known[name] = asdict(found)
                if options.known is not None:
                    options.known.write_text(json.dumps(known, indent=1) + "\n")
                yield from verdicts

    print(markdown(TITLES, []), flush=True)
    ratios: list[float] = []
    for each in judged():
        ratios.append(each.ratio)
        print(line(*row(each)), flush=True)
    print(f"\n{summary(ratios)}")
    lines = {name: [(1.0, statistics.fmean(ratios), True)] for name in options.vary}
    for name, factor in itertools.product(lines, VARIED_BY):
        changed = [each.ratio for each in judged(name, factor)]
        lines[name].append((factor, statistics.fmean(changed), True))
        print(f"{name} x {factor:g}: {summary(changed)}", flush=True)
    if lines and options.plot is not None:
        title = "auto / best fixed way, mean of the cells"
        options.plot.write_text(chart(lines, title, "factor of the constant", 0.9))


if __name__ == "__main__":
    main()
