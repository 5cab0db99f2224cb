"""Loads for `fleet.py`, and the figures, tables and plot that it makes of their answers.

Nothing here needs a node.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from kvferry.lab.client import Answer
from kvferry.lab.load import line, markdown, percentile
from kvferry.lab.plan.costs import Costs
from kvferry.lab.plan.loads import Conversation, Turn, arrivals_of, sizes
from kvferry.lab.plan.simulation import FleetSimulation, fixed_roles, least_load
from kvferry.router.choice.fleet import Fleet
from kvferry.router.choice.placement import Limits

#: The multiples of an idle node's figures for which goodput is printed.
FACTORS = (2.0, 3.0, 5.0, 10.0)
#: Which of a request's gaps between tokens must keep the limit.
ITL_RULES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "p95": lambda gaps: percentile(gaps, 0.95),
    "longest": max,
}
#: Tokens below this number may be special ones.
FIRST_TOKEN = 100


# -- loads -------------------------------------------------------------------------------------------


#: (chance, number of requests, factor of all lengths) → conversations.
Load = Callable[[random.Random, int, float], list[Conversation]]


def arrivals(chance: random.Random, number: int) -> list[float]:
    """Return arrivals of a Poisson process with one arrival per unit of time."""
    return list(itertools.accumulate(chance.expovariate(1.0) for _ in range(number)))


def varied(chance: random.Random, mean: float) -> int:
    """Return a length that differs from the mean by at most half of it."""
    return max(2, round(chance.uniform(0.5, 1.5) * mean))


def random_prompts(prompt_tokens: int, answer_tokens: int) -> Load:
    """Return a load of independent requests."""

    def request(chance: random.Random, own: int, at: float, size: float) -> Turn:
        prompt = (f"prompt {own}", varied(chance, size * prompt_tokens))
        return Turn(at, (prompt,), varied(chance, size * answer_tokens))

    return lambda chance, number, size: [
        (request(chance, own, at, size),) for own, at in enumerate(arrivals(chance, number))
    ]


def interference(chance: random.Random, number: int, size: float) -> list[Conversation]:
    """Let a few long answers be streamed, at even intervals, while long prompts arrive."""
    num_long = max(2, number // 8)
    prompts = random_prompts(1024, 8)(chance, number - num_long, size)
    apart = prompts[-1][0].after / num_long
    for own in range(num_long):
        prompts.append((Turn(own * apart, ((f"question {own}", round(32 * size)),), round(192 * size)),))
    return prompts


def conversations(chance: random.Random, number: int, size: float) -> list[Conversation]:
    """Let conversations of four turns begin. Users think for two units of time on average."""

    def turn(own: int, number: int, at: float) -> Turn:
        message = (f"message {own} {number}", varied(chance, size * (64 if number else 256)))
        return Turn(chance.expovariate(0.5) if number else at, (message,), varied(chance, size * 32))

    begins = arrivals(chance, max(1, number // 4))
    return [tuple(turn(own, number, at) for number in range(4)) for own, at in enumerate(begins)]


LOADS: Mapping[str, Load] = {
    "short-answers": random_prompts(256, 8),
    "long-answers": random_prompts(64, 96),
    "long-prompts": random_prompts(1024, 16),
    "interference": interference,
    "conversations": conversations,
}


def prompt_tokens(salt: str, turn: Turn, vocabulary: int) -> list[int]:
    """Return the tokens that a turn appends. They depend on the salt and on the pieces' keys alone."""
    return [
        token
        for key, number in turn.pieces
        for token in random.Random(f"{salt} {key}").choices(range(FIRST_TOKEN, vocabulary), k=number)
    ]


# -- figures -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unloaded:
    """What one idle node takes.

    Attributes:
        ttfts: Tokens of a prompt → seconds to the first token, in ascending order.
        itl_s: Seconds between two tokens.
    """

    ttfts: Mapping[int, float]
    itl_s: float

    def ttft_s(self, num_tokens: int) -> float:
        """Return the time for a prompt of any length: between two that were measured, on the straight
        line.
        """
        points = list(self.ttfts.items())
        for (low, low_s), (high, high_s) in itertools.pairwise(points):
            if low <= num_tokens <= high:
                return low_s + (high_s - low_s) * (num_tokens - low) / (high - low)
        return points[0][1] if num_tokens < points[0][0] else points[-1][1]


def paced(
    plan: Sequence[Conversation], unloaded: Unloaded, num_nodes: int, intensity: float
) -> tuple[list[Conversation], float]:
    """Return the plan with times in seconds, and the seconds per unit of its time.

    The last turn is then due after the time that the nodes need for all requests one by one, divided by the
    intensity. What users wait for answers of earlier turns is not counted.
    """
    work_s = sum(unloaded.ttft_s(prompt) + unloaded.itl_s * (answer - 1) for prompt, answer in sizes(plan))
    span = max(sum(turn.after for turn in turns) for turns in plan)
    unit_s = work_s / num_nodes / intensity / span if span else 1.0
    return [tuple(replace(turn, after=turn.after * unit_s) for turn in turns) for turns in plan], unit_s


def is_good(answer: Answer, unloaded: Unloaded, factor: float, itl_rule: str) -> bool:
    """Return whether an answer keeps both limits. An answer of one token has no gaps to keep one."""
    if answer.ttft_s > factor * unloaded.ttft_s(answer.prompt_tokens):
        return False
    return not answer.gaps or ITL_RULES[itl_rule](answer.gaps) <= factor * unloaded.itl_s


GOODPUT = "goodput_"


def goodput_key(factor: float) -> str:
    return f"{GOODPUT}{factor:g}x"


def figures_of(
    answers: Sequence[Answer],
    seconds: float,
    added: Mapping[str, float],
    unloaded: Unloaded,
    num_cores: int,
    factors: Sequence[float],
    itl_rule: str,
) -> dict[str, float]:
    """Return the figures of one round of one way.

    Args:
        seconds: From the start of the load to the last token.
        added: What the nodes' counters have grown by; see `counters`.
    """
    times_s = {
        "ttft": [answer.ttft_s for answer in answers],
        "itl": [gap for answer in answers for gap in answer.gaps],
        "pause": [max(answer.gaps) for answer in answers if answer.gaps],
    }
    good = {factor: sum(is_good(own, unloaded, factor, itl_rule) for own in answers) for factor in factors}
    return {
        **{goodput_key(factor): number / seconds / num_cores for factor, number in good.items()},
        **{f"{what}_p50_ms": percentile(own, 0.5) * 1e3 for what, own in times_s.items()},
        **{f"{what}_p99_ms": percentile(own, 0.99) * 1e3 for what, own in times_s.items()},
        "requests_per_s_and_core": len(answers) / seconds / num_cores,
        "output_tokens_per_s": sum(answer.num_tokens for answer in answers) / seconds,
        "cached_share": 1 - added["computed_tokens"] / sum(answer.prompt_tokens for answer in answers),
        "moved_mb": added["moved_bytes"] / 1e6,
        "failed_loads": added["failed_loads"],
        "seconds": seconds,
    }


# -- predictions -------------------------------------------------------------------------------------

#: What is predicted, and compared with what was measured afterwards.
PREDICTED = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms")


def predict(way: str, plan: Sequence[Conversation], costs: Costs, num_nodes: int) -> dict[str, float] | None:
    """Return figures of one round of a way, as `kvferry plan` simulates it; None: it cannot simulate this
    way.
    """
    kind, _, split = way.partition("-")
    balancer, fleet = None, None
    if way == "least-load":
        balancer = least_load(num_nodes)
    elif way == "round-robin":
        balancer = lambda number, in_flight: (number % num_nodes, number % num_nodes)
    elif kind == "pair":
        balancer = fixed_roles(*map(int, split.split("+")))
    elif way == "auto":
        fleet = lambda clock: Fleet("auto", Limits(), clock)
    else:
        return None
    simulation = FleetSimulation(arrivals_of(plan), [costs] * num_nodes, balancer, fleet)
    outcomes = simulation.run()
    ttfts = [each.ttft_s for each in outcomes]
    gaps = [later - early for each in outcomes for early, later in itertools.pairwise(each.token_times)]
    times = percentile(ttfts, 0.5), percentile(ttfts, 0.99), percentile(gaps, 0.5)
    return {name: seconds * 1e3 for name, seconds in zip(PREDICTED, times, strict=True)}


def comparison(
    predicted: Mapping[str, Sequence[Mapping[str, float]]],
    measured: Mapping[str, Sequence[Mapping[str, float]]],
) -> str:
    """Return a table: way → what was predicted and measured, as medians over the rounds."""
    lines = [
        "| way | TTFT p50, predicted | measured | error | p99 | measured | error | ITL p50 | measured | error |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for way, rounds in predicted.items():
        cells = [way]
        for name in PREDICTED:
            before, after = (statistics.median(own[name] for own in each) for each in (rounds, measured[way]))
            cells += [f"{before:,.0f}", f"{after:,.0f}", f"{before / after - 1:+.0%}"]
        lines.append(line(*cells))
    return "\n".join([*lines, "", "Times are in ms."])


# -- results -----------------------------------------------------------------------------------------


def row_of(load: str, way: str, rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the row of a way: for each figure the median, the least and the greatest of the rounds.

    `goodput_…_of_all` are the good requests of all rounds by the time of all rounds.
    """
    told = {key: [own[key] for own in rounds] for key in rounds[0]}
    figures = {key: (statistics.median(own), min(own), max(own)) for key, own in told.items()}
    # A round has few requests, so the sum over all rounds says more than the median of their rates.
    seconds = sum(told["seconds"])
    for key in told:
        if key.startswith(GOODPUT):
            rate = sum(own[key] * own["seconds"] for own in rounds) / seconds
            figures[f"{key}_of_all"] = (rate, rate, rate)
    return {"load": load, "way": way, "rounds": rounds, **figures}


def table(rows: Sequence[Mapping[str, Any]], factors: Sequence[float], factor: float) -> str:
    """Return the Markdown tables of one load: medians, with the least and the greatest of the rounds."""

    def cell(row: Mapping[str, Any], key: str, digits: int, unit: float = 1) -> str:
        median, least, greatest = (f"{round(figure * unit, digits) + 0.0:,.{digits}f}" for figure in row[key])
        return median if least == greatest else f"{median} ({least}–{greatest})"

    columns = {
        f"goodput {factor:g} ×": (goodput_key(factor), 3, 1),
        "all rounds": (f"{goodput_key(factor)}_of_all", 3, 1),
        "TTFT p50 ms": ("ttft_p50_ms", 0, 1),
        "p99": ("ttft_p99_ms", 0, 1),
        "ITL p50 ms": ("itl_p50_ms", 1, 1),
        "p99 ": ("itl_p99_ms", 1, 1),
        "longest pause p50 ms": ("pause_p50_ms", 0, 1),
        "p99  ": ("pause_p99_ms", 0, 1),
        "tokens/s": ("output_tokens_per_s", 1, 1),
        "cached %": ("cached_share", 0, 100),
        "moved MB": ("moved_mb", 0, 1),
    }
    goodputs = {f"goodput {each:g} ×": (goodput_key(each), 3, 1) for each in factors}
    goodputs |= {"all requests": ("requests_per_s_and_core", 3, 1)}
    tables = []
    for titles in (columns, goodputs):
        lines = [(row["way"], *(cell(row, *column) for column in titles.values())) for row in rows]
        tables.append(markdown(("", *(title.strip() for title in titles)), lines))
    return "\n\n".join(tables)


COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2")


def plot(rows: Sequence[Mapping[str, Any]], factors: Sequence[float]) -> str:
    """Return an SVG with one panel per load: goodput over the limits' multiples, with the spread over the
    rounds.
    """
    loads, ways = ([*dict.fromkeys(row[key] for row in rows)] for key in ("load", "way"))
    width, height, left, top = 300, 190, 48, 40
    num_columns = min(3, len(loads))
    total_height = -(-len(loads) // num_columns) * (height + 24) + 30
    size = f'width="{num_columns * width}" height="{total_height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">']
    parts.append('<rect width="100%" height="100%" fill="white"/>')

    def text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> None:
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(words)}</text>')

    for number, way in enumerate(ways):
        colour = f'fill="{COLOURS[number % len(COLOURS)]}"'
        text(10 + number * 110, 16, f"● {way}", "start", f'{colour} font-weight="bold"')
    text(10, total_height - 6, "good requests per second and core, over the multiple of both limits", "start")
    for place, load in enumerate(loads):
        x0, y0 = place % num_columns * width + left, place // num_columns * (height + 24) + top
        inner_width, inner_height = width - left - 20, height - 50
        own = [row for row in rows if row["load"] == load]
        highest = max(row[goodput_key(factor)][2] for row in own for factor in factors) or 1.0

        def y_of(figure: float, y0: float = y0, inner: float = inner_height, top: float = highest) -> float:
            return y0 + 16 + inner * (1 - figure / top)

        text(x0 + inner_width / 2, y0 + 6, load, more='font-weight="bold"')
        for figure in (0, highest / 2, highest):
            y = y_of(figure)
            parts.append(f'<path d="M{x0} {y:.1f}h{inner_width}" stroke="#ddd"/>')
            text(x0 - 4, y + 4, f"{figure:.2f}", "end")
        xs = [x0 + inner_width * (number + 0.5) / len(factors) for number in range(len(factors))]
        for x, factor in zip(xs, factors, strict=True):
            text(x, y_of(0) + 14, f"{factor:g} ×")
        for row in own:
            number = ways.index(row["way"])
            points = []
            for x, factor in zip(xs, factors, strict=True):
                median, least, greatest = row[goodput_key(factor)]
                x += 4 * (number - (len(ways) - 1) / 2)  # beside each other
                points.append(f"{x:.1f},{y_of(median):.1f}")
                parts.append(
                    f'<path d="M{x:.1f} {y_of(least):.1f}V{y_of(greatest):.1f}" stroke="{COLOURS[number % len(COLOURS)]}"/>'
                )
            style = f'fill="none" stroke="{COLOURS[number % len(COLOURS)]}" stroke-width="2"'
            parts.append(f'<polyline points="{" ".join(points)}" {style}/>')
    return "\n".join([*parts, "</svg>\n"])
