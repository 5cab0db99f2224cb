"""`kvferry plan`: measure, simulate, and say how many nodes are needed."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from html import escape
from typing import Final

from ...router.choice.placement import Limits
from ...router.http.access import node_access_of
from ...transports.checked import printable
from ...transports.errors import ConfigurationError
from ..load import Progress, markdown, percentile
from .costs import Costs, read_costs, write_costs
from .loads import Arrival, arrivals_of, read_trace_file
from .measuring import MeasuringError, measure
from .search import Result, search


class HopelessError(Exception):
    """No number of nodes keeps the limits."""


#: Largest number of nodes to try.
MAX_NODES: Final = 64
#: Requests that are simulated, from the start of a trace.
MAX_REQUESTS: Final = 2000
_COLOURS: Final = (
    *("#4269d0", "#efb118", "#ff725c", "#3ca951"),
    *("#a463f2", "#6cc5b0", "#9c6b4e", "#57606a"),
)


def run(arguments: argparse.Namespace, program: str = "kvferry plan") -> int:
    """Measure and simulate what the options ask for; return the exit status."""
    try:
        return _run(arguments)
    except ConfigurationError as error:
        print(printable(f"{program}: {error}"), file=sys.stderr)
        return 2
    except (MeasuringError, HopelessError, OSError) as error:
        print(printable(f"{program}: {error}"), file=sys.stderr)
        return 1
    except ExceptionGroup as group:
        # The answers of a batch were asked for together.
        print(printable(f"{program}: {group.exceptions[0]}"), file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    if arguments.measure:
        costs = _measure(arguments)
    elif arguments.costs:
        costs = read_costs(arguments.costs)
    else:
        costs = Costs()
    return _plan(arguments, costs) if arguments.trace else 0


def _check(arguments: argparse.Namespace) -> None:
    def wrong(option: str, value: object, why: str) -> ConfigurationError:
        return ConfigurationError(f"{option} {why}; got {value!r}", key=option, value=value)

    if not (arguments.measure or arguments.trace):
        raise ConfigurationError("give --trace or --measure: there is nothing else to do", key="--trace")
    if len(arguments.measure) > 2:
        raise wrong(
            "--measure", arguments.measure, "takes one node, or one that computes and one that loads from it"
        )
    for name in ("rate", "ttft_limit_ms", "itl_limit_ms"):
        if not (math.isfinite(value := getattr(arguments, name)) and value > 0):
            raise wrong("--" + name.replace("_", "-"), value, "must be a number greater than 0")
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        if (value := getattr(arguments, name)) < 1:
            raise wrong("--" + name.replace("_", "-"), value, "must be at least 1")
    if not 0 < arguments.share <= 1:
        raise wrong("--share", arguments.share, "must be greater than 0 and at most 1")


# -- measuring ---------------------------------------------------------------------------------------


def _measure(arguments: argparse.Namespace) -> Costs:
    say = Progress()
    before = replace(
        Costs(), chunk_tokens=arguments.max_num_batched_tokens, max_requests=arguments.max_num_seqs
    )
    access = node_access_of(arguments)
    costs, measured = asyncio.run(measure(arguments.measure, before, say, access))
    errors = [each.predicted(costs) / each.seconds - 1 for each in measured if each.seconds > 0]
    worst = max(
        measured, key=lambda each: abs(each.predicted(costs) - each.seconds) / max(each.seconds, 1e-9)
    )
    say(
        f"the costs differ from what was measured by {statistics.median(map(abs, errors)):.0%} in the median, and most for the "
        f"{worst.what}: {worst.predicted(costs) * 1e3:.1f} instead of {worst.seconds * 1e3:.1f} ms"
    )
    if len(arguments.measure) == 1:
        say(
            "handing over was not measured: give a second URL; taken instead: a small model over shared memory"
        )
    if arguments.costs:
        write_costs(costs, arguments.costs)
        say(f"written: {arguments.costs}")
    elif not arguments.trace:
        print(json.dumps(asdict(costs), indent=2))
    return costs


# -- simulating --------------------------------------------------------------------------------------


def _plan(arguments: argparse.Namespace, costs: Costs) -> int:
    say = Progress()
    requests = read_trace_file(arguments.trace, 1.0, MAX_REQUESTS)
    arrivals = [replace(each, at=each.at / arguments.rate) for each in arrivals_of(requests)]
    limits = Limits(arguments.ttft_limit_ms / 1e3, arguments.itl_limit_ms / 1e3)
    possible = [each for each in arrivals if _is_possible(each, costs, limits)]
    if len(possible) < arguments.share * len(arrivals):
        raise HopelessError(_hopeless(arguments, arrivals, costs, len(possible) / len(arrivals)))
    found: dict[str, list[Result]] = {}
    for way in arguments.ways:
        for result in search(way, arrivals, costs, limits, arguments.share, MAX_NODES):
            say(f"{result.way}: {result.num_nodes} nodes keep the limits for {result.share:.1%}")
            found.setdefault(way, []).append(result)
    least = {
        way: min((each for each in results if each.share >= arguments.share), key=_by_nodes, default=None)
        for way, results in found.items()
    }
    if arguments.plot:
        arguments.plot.write_text(plot(found, arguments.share))
    if arguments.json:
        print(json.dumps(_as_json(found, least, costs), indent=2))
    else:
        print(_told(arguments, arrivals, costs, limits, found, least))
    return 0 if any(least.values()) else 1


def _by_nodes(result: Result) -> int:
    return result.num_nodes


def _told(
    arguments: argparse.Namespace,
    arrivals: Sequence[Arrival],
    costs: Costs,
    limits: Limits,
    found: Mapping[str, Sequence[Result]],
    least: Mapping[str, Result | None],
) -> str:
    seconds = max(each.at for each in arrivals)
    prompts = statistics.fmean(each.num_tokens for each in arrivals)
    answers = statistics.fmean(each.num_answer_tokens for each in arrivals)
    rows = []
    for results in found.values():
        for each in sorted(results, key=_by_nodes):
            times = [percentile(own, share) for own in (each.ttfts, each.itls) for share in (0.5, 0.99)]
            cells = (str(each.num_nodes), each.way, f"{each.share:.1%}", f"{each.goodput:.2f}")
            rows.append((*cells, *(f"{own * 1e3:,.0f} ms" for own in times)))
    titles = ("nodes", "way", "within limits", "good requests/s", "TTFT p50", "p99", "ITL p50", "p99")
    lines = [
        f"{len(arrivals)} requests in {seconds:.0f} s: {prompts:.0f} prompt and {answers:.0f} answer tokens on average",
        *("", markdown(titles, rows), ""),
    ]
    wanted = (
        f"TTFT of {arguments.ttft_limit_ms:g} ms and an ITL of {arguments.itl_limit_ms:g} ms for "
        f"{arguments.share:.0%} of the requests"
    )
    for way, result in least.items():
        if result is None:
            lines.append(f"{way}: {MAX_NODES} nodes do not keep a {wanted}")
        else:
            nodes = "node keeps" if result.num_nodes == 1 else "nodes keep"
            lines.append(f"{result.way}: {result.num_nodes} {nodes} a {wanted}")
    return "\n".join(lines)


def _hopeless(
    arguments: argparse.Namespace, arrivals: Sequence[Arrival], costs: Costs, possible: float
) -> str:
    """Say why no number of nodes keeps the limits, and which limits could be kept."""
    text = (
        f"no number of nodes keeps the limits for {arguments.share:.0%} of the requests: {1 - possible:.1%} take longer than one "
        "of them even at an idle node"
    )
    if costs.unloaded_itl_s * 1e3 > arguments.itl_limit_ms:
        return f"{text}; its ITL is {costs.unloaded_itl_s * 1e3:.1f} ms; give a higher --itl-limit-ms"
    ttfts = sorted(costs.unloaded_ttft_s(each.num_tokens) for each in arrivals)
    needed = ttfts[min(int(arguments.share * len(ttfts)), len(ttfts) - 1)] * 1e3
    return f"{text}; give a lower --share, or a --ttft-limit-ms above {needed:,.0f}"


def _is_possible(arrival: Arrival, costs: Costs, limits: Limits) -> bool:
    return costs.unloaded_ttft_s(arrival.num_tokens) <= limits.ttft_s and costs.unloaded_itl_s <= limits.itl_s


def _as_json(
    found: Mapping[str, Sequence[Result]], least: Mapping[str, Result | None], costs: Costs
) -> dict[str, object]:
    def figures(each: Result) -> dict[str, object]:
        times = {"ttft": each.ttfts, "itl": each.itls}
        return {
            "way": each.way,
            "nodes": each.num_nodes,
            "share": each.share,
            "goodput": each.goodput,
            **{
                f"{name}_p{share * 100:.0f}_s": percentile(own, share)
                for name, own in times.items()
                for share in (0.5, 0.99)
            },
        }

    return {
        "costs": asdict(costs),
        "least_nodes": {way: result and result.num_nodes for way, result in least.items()},
        "tried": [figures(each) for results in found.values() for each in results],
    }


def plot(found: Mapping[str, Sequence[Result]], share: float) -> str:
    """Return an SVG: good requests per second by number of nodes, one line per way."""
    lines = {
        way: [(each.num_nodes, each.goodput, each.share >= share) for each in own]
        for way, own in found.items()
    }
    below = f"number of nodes; filled: {share:.0%} of the requests keep the limits"
    return chart(lines, "good requests per second", below)


def chart(
    lines: Mapping[str, Sequence[tuple[float, float, bool]]], title: str, below: str, lowest: float = 0.0
) -> str:
    """Return an SVG with one line per name.

    Args:
        lines: Their points, and whether each is filled.
        below: What the points' first numbers are.
        lowest: Where the vertical axis begins.
    """
    width, height, left, top, inner_width, inner_height = 840, 340, 60, 30, 530, 260
    points = [point for own in lines.values() for point in own]
    most = max(x for x, _, _ in points)
    highest = max(y for _, y, _ in points) or 1.0

    def x_of(number: float) -> float:
        return left + inner_width * number / most

    def y_of(figure: float) -> float:
        return top + inner_height * (1 - (figure - lowest) / (highest - lowest))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="{height - 8}">{escape(below)}</text>',
        f'<text x="{left}" y="14">{escape(title)}</text>',
    ]
    for tick in sorted({round(most * part / 4) for part in range(5)}):
        parts.append(
            f'<text x="{x_of(tick):.0f}" y="{top + inner_height + 18}" text-anchor="middle">{tick}</text>'
        )
    for part in range(5):
        figure = lowest + (highest - lowest) * part / 4
        parts.append(f'<path d="M{left} {y_of(figure):.1f}h{inner_width}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y_of(figure) + 4:.1f}" text-anchor="end">{figure:.2f}</text>')
    for place, (name, own) in enumerate(lines.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        line = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y, _ in sorted(own))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y, is_filled in own:
            fill = colour if is_filled else "white"
            parts.append(
                f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="4" fill="{fill}" stroke="{colour}"/>'
            )
        parts.append(
            f'<text x="{left + inner_width + 10}" y="{top + 12 + 20 * place}" fill="{colour}">● {escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])
