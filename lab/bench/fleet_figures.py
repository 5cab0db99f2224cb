"""Loads for `fleet.py`, and the figures and tables that it makes of their answers.

Nothing here needs a node.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvferry.lab.client import Answer
from kvferry.lab.load import markdown, percentile
from kvferry.lab.plan.costs import Costs
from kvferry.lab.plan.loads import Conversation, Turn, arrivals_of, sizes
from kvferry.lab.plan.simulation import FleetSimulation, fixed_roles, least_load
from kvferry.router.choice.fleet import Fleet
from kvferry.router.choice.placement import Limits

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


def is_good(answer: Answer, unloaded: Unloaded, factor: float) -> bool:
    """Return whether an answer keeps both limits. An answer of one token has no gaps to keep one."""
    if answer.ttft_s > factor * unloaded.ttft_s(answer.prompt_tokens):
        return False
    return not answer.gaps or statistics.fmean(answer.gaps) <= factor * unloaded.itl_s


def figures_of(
    answers: Sequence[Answer],
    seconds: float,
    added: Mapping[str, float],
    unloaded: Unloaded,
    num_cores: int,
    factor: float,
) -> dict[str, float]:
    """Return the figures of one round of one way.

    Args:
        seconds: From the start of the load to the last token.
        added: What the nodes' counters have grown by; see `counters`.
        factor: The multiple of an idle node's figures that is the limit.
    """
    times_s = {
        "ttft": [answer.ttft_s for answer in answers],
        "itl": [gap for answer in answers for gap in answer.gaps],
        "pause": [max(answer.gaps) for answer in answers if answer.gaps],
    }
    num_good = sum(is_good(own, unloaded, factor) for own in answers)
    return {
        "goodput": num_good / seconds / num_cores,
        "good": num_good,
        "requests": len(answers),
        **{f"{what}_p50_ms": percentile(own, 0.5) * 1e3 for what, own in times_s.items()},
        **{f"{what}_p99_ms": percentile(own, 0.99) * 1e3 for what, own in times_s.items()},
        "requests_per_s_and_core": len(answers) / seconds / num_cores,
        "output_tokens_per_s": sum(answer.num_tokens for answer in answers) / seconds,
        "cached_share": 1 - added["computed_tokens"] / sum(answer.prompt_tokens for answer in answers),
        "moved_mb": added["moved_bytes"] / 1e6,
        "failed_loads": added["failed_loads"],
        "waited_share": added["waited_s"] / added["ran_s"],
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
    lines = []
    for way, rounds in predicted.items():
        cells = [way]
        for name in PREDICTED:
            before, after = (statistics.median(own[name] for own in each) for each in (rounds, measured[way]))
            cells += [f"{before:,.0f}", f"{after:,.0f}", f"{before / after - 1:+.0%}"]
        lines.append(cells)
    figures = ("TTFT p50, predicted", "p99", "ITL p50")
    titles = ("way", *(title for figure in figures for title in (figure, "measured", "error")))
    return f"{markdown(titles, lines)}\n\nTimes are in ms."


# -- results -----------------------------------------------------------------------------------------


def row_of(load: str, way: str, rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the row of a way: for each figure the median, the least and the greatest of the rounds."""
    told = {key: [own[key] for own in rounds] for key in rounds[0]}
    figures = {key: (statistics.median(own), min(own), max(own)) for key, own in told.items()}
    return {"load": load, "way": way, "rounds": rounds, **figures}


def standing(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say how many requests `auto` serves within the limits, beside the best fixed way of all rounds.

    Returns "" if one of them was not measured.
    """
    good = {row["way"]: [own["good"] for own in row["rounds"]] for row in rows}
    auto, best = good.pop("auto", []), max(good, key=lambda way: sum(good[way]), default="")
    if not (auto and sum(good.get(best, []))):
        return ""
    total, fixed = sum(own["requests"] for own in rows[0]["rounds"]), sum(good[best])
    ratios = [f"{own / other:.2f}" if other else "–" for own, other in zip(auto, good[best], strict=True)]
    return (
        f"Of {total} requests `auto` serves {sum(auto)} within the limits, `{best}` {fixed}: {sum(auto) / fixed:.2f} "
        f"times as many (by round: {', '.join(ratios)}). One request is {1 / fixed:.3f} of that."
    )


def table(rows: Sequence[Mapping[str, Any]], factor: float) -> str:
    """Return the Markdown table of one load: medians, with the least and the greatest of the rounds."""

    def cell(row: Mapping[str, Any], key: str, digits: int, unit: float = 1) -> str:
        median, least, greatest = (f"{round(figure * unit, digits) + 0.0:,.{digits}f}" for figure in row[key])
        return median if least == greatest else f"{median} ({least}–{greatest})"

    columns = (
        (f"goodput {factor:g} ×", "goodput", 3, 1),
        ("all requests", "requests_per_s_and_core", 3, 1),
        ("TTFT p50 ms", "ttft_p50_ms", 0, 1),
        ("p99", "ttft_p99_ms", 0, 1),
        ("ITL p50 ms", "itl_p50_ms", 1, 1),
        ("p99", "itl_p99_ms", 1, 1),
        ("longest pause p50 ms", "pause_p50_ms", 0, 1),
        ("p99", "pause_p99_ms", 0, 1),
        ("tokens/s", "output_tokens_per_s", 1, 1),
        ("cached %", "cached_share", 0, 100),
        ("moved MB", "moved_mb", 0, 1),
        ("waited for a core %", "waited_share", 0, 100),
    )
    lines = [(row["way"], *(cell(row, *column[1:]) for column in columns)) for row in rows]
    return markdown(("", *(title for title, *_ in columns)), lines)
