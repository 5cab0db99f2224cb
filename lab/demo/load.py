"""Show what disaggregation is for: answers stream while long prompts arrive.

Two nodes on one core each answer the same requests twice: as two plain nodes, each of which computes what it
is sent, and as a pair, in which one node computes prompts and the other answers. A long prompt stops the
answers of the node that computes it. What is compared is how long, and what that costs.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ..client import Answer, ask, served_model
from ..engine.progress import Elapsed
from ..load import aligned, percentile
from ..servers import LaunchedProcess, Launcher
from .display import say

#: A cell of a line without a token is this long: longer than a step of a few answers on one core takes.
CELL_S = 0.1
LINE_CELLS = 96
NUM_STREAMS, STREAM_TOKENS = 4, 96
NUM_LONG, LONG_ANSWER_TOKENS = 5, 4
#: Seconds from one long prompt to the next, and until the first one.
LONG_EVERY_S, FIRST_LONG_S = 1.5, 1.0
#: The most prompt tokens in a step, as in `docs/benchmarks.md`. Less would shorten the pauses of plain nodes,
#: and make each prompt slower.
CHUNK_TOKENS = 512
WARM_UP = "This prompt only makes the nodes compute their first step, which is much slower than later ones. "


@dataclass(frozen=True)
class Way:
    """How the two nodes are used: the router's option for each of them, and its other ones."""

    name: str
    nodes: tuple[str, str]
    arguments: tuple[str, ...] = ()


PLAIN = Way("two plain nodes", ("--node", "--node"), ("--placement", "never"))
TOGETHER = Way("with kvferry", ("--prefill", "--decode"))


@dataclass
class Stream:
    """One request of the load, and its answer.

    Attributes:
        due: Seconds from the beginning of the load until it is sent.
    """

    prompt: str
    max_tokens: int
    due: float
    answer: Answer = field(default_factory=Answer)

    @property
    def is_long(self) -> bool:
        """Whether it is one of the long prompts."""
        return self.max_tokens == LONG_ANSWER_TOKENS


def load_of(text: str) -> list[Stream]:
    """The requests: short prompts with long answers first, then long prompts.

    No two begin alike, so no cache helps.
    """
    answers = [
        Stream(f"{number + 1} lines about ferry number {number}:", STREAM_TOKENS, 0.1 * number)
        for number in range(NUM_STREAMS)
    ]
    prompts = [
        Stream(f"Text {number}. {text}", LONG_ANSWER_TOKENS, FIRST_LONG_S + LONG_EVERY_S * number)
        for number in range(NUM_LONG)
    ]
    return answers + prompts


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Let processes that start inside the block inherit one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def start_nodes(launcher: Launcher, arguments: Sequence[str], timeout_s: float) -> list[LaunchedProcess]:
    """Start two nodes and wait until they are ready. Each gets a core of its own if there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    nodes = []
    for number in range(2):
        with on_core(cores[number % len(cores)]):
            chunk = ("--max-num-batched-tokens", str(CHUNK_TOKENS), "--threads", "1")
            nodes.append(launcher.start_node(f"node {number}", "both", *arguments, *chunk))
    launcher.wait_ready(nodes, timeout_s)
    return nodes


class Line:
    """Draws what happens to one answer as it happens: a dot per token, `|` where a long prompt arrives, else
    a blank.
    """

    def __init__(self, name: str) -> None:
        self._indent = f"{name:>16} "
        self._cells = 0
        self._new = ""

    def note(self, mark: str) -> None:
        """Remember what has happened since the last cell."""
        self._new += mark

    def draw(self) -> None:
        """Draw what has happened since the last time."""
        for mark in self._new or " ":
            if self._cells % LINE_CELLS == 0:
                sys.stdout.write(
                    ("\n" if self._cells else "") + (self._indent if not self._cells else " " * 17)
                )
            sys.stdout.write(mark)
            self._cells += 1
        self._new = ""
        sys.stdout.flush()


async def run_load(url: str, streams: Sequence[Stream], line: Line, salt: str) -> float:
    """Send the requests when they are due, and draw the first one's answer.

    Returns the seconds until the last has ended.
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0)) as session:
        for number in range(4):
            await ask(session, url, WARM_UP * (1 + 4 * number), 2, cache_salt=f"{salt} {number}")
        started = time.monotonic()

        async def send(stream: Stream, is_drawn: bool) -> None:
            await asyncio.sleep(stream.due)
            if stream.is_long:
                line.note("|")

            fields: dict[str, Any] = {"return_token_ids": True, "cache_salt": salt, "ignore_eos": True}
            if is_drawn:
                fields["on_text"] = lambda text: line.note(".")
            stream.answer = await ask(session, url, stream.prompt, stream.max_tokens, **fields)

        async def draw() -> None:
            while True:
                await asyncio.sleep(CELL_S)
                line.draw()

        drawing = asyncio.create_task(draw())
        try:
            await asyncio.gather(*(send(stream, stream is streams[0]) for stream in streams))
        finally:
            drawing.cancel()
        line.draw()
        print(flush=True)
        return time.monotonic() - started


# -- figures -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """What a load felt like, in seconds.

    Attributes:
        ttfts: Of all requests, from the time when each was due.
        gaps: Between tokens of the answers that are streamed.
        num_handed_over: Requests whose prompt the other node computed.
    """

    ttfts: Sequence[float]
    gaps: Sequence[float]
    num_tokens: int
    seconds: float
    num_handed_over: int

    @classmethod
    def of(cls, streams: Sequence[Stream], seconds: float) -> Figures:
        return cls(
            ttfts=[stream.answer.ttft_s for stream in streams],
            gaps=[gap for stream in streams if not stream.is_long for gap in stream.answer.gaps],
            num_tokens=sum(len(stream.answer.token_ids) for stream in streams),
            seconds=seconds,
            num_handed_over=sum(stream.answer.loaded_tokens > 0 for stream in streams),
        )

    @property
    def row(self) -> tuple[float, ...]:
        """The columns of the table, in ms and tokens per second."""
        return (
            *(1e3 * percentile(self.gaps, share) for share in (0.5, 0.99)),
            1e3 * max(self.gaps),
            *(1e3 * percentile(self.ttfts, share) for share in (0.5, 0.99)),
            self.num_tokens / self.seconds,
        )


COLUMNS = ("ITL p50", "p99", "longest pause", "TTFT p50", "p99", "tokens/s")


def format_load_table(plain: Figures, together: Figures) -> str:
    """Both rows, and the ratios."""
    ratios = [
        f"{ours / theirs:.2f}" if theirs else "-"
        for theirs, ours in zip(plain.row, together.row, strict=True)
    ]
    rows = [
        ["ms", *COLUMNS],
        [PLAIN.name, *(f"{value:,.0f}" for value in plain.row)],
        [TOGETHER.name, *(f"{value:,.0f}" for value in together.row)],
        ["ratio", *ratios],
    ]
    return "\n".join(aligned(rows))


def verdict_of(plain: Figures, together: Figures, num_cores: int) -> str:
    """The last words: the longest pause with and without, and why it is no shorter if it is not."""
    longest, instead = max(together.gaps), max(plain.gaps)
    text = f"longest pause in a running answer: {longest:.2f} s instead of {instead:.2f} s"
    if longest < 0.8 * instead:
        return text
    if num_cores < 2:
        why = "both nodes share one core, so a prompt stops every answer wherever it is computed"
    elif not together.num_handed_over:
        why = "no cache was handed over, so the node that answers computed every prompt; see the log of the nodes"
    else:
        why = "a step of the node that answers takes that long by itself, or other work takes its core"
    return f"{text}\nkvferry is not better here: {why}"


def show_load(model_arguments: Sequence[str], text: str, start_timeout_s: float) -> bool:
    """Run the load in both ways, and show it.

    Args:
        text: What the long prompts are made of.

    Returns:
        Whether every request was answered.
    """
    say(
        f"\n{NUM_STREAMS} answers stream while {NUM_LONG} long prompts arrive, at two nodes with one core each. The lines show one "
        f"of the answers:\na dot per token, a blank per {CELL_S * 1e3:.0f} ms without one, | where a long prompt arrives at a node\n"
    )
    found: list[Figures] = []
    answers: list[list[Stream]] = []
    with Launcher() as launcher:
        with Elapsed("starting two nodes"):
            nodes = start_nodes(launcher, model_arguments, start_timeout_s)
        for way in (PLAIN, TOGETHER):
            urls = [
                word for option, node in zip(way.nodes, nodes, strict=True) for word in (option, node.url)
            ]
            router = launcher.start("router", "router", "--port", "0", *urls, *way.arguments)
            launcher.wait_ready([router], start_timeout_s)
            streams = load_of(
                text[: served_model(nodes[0].url)["max_model_len"] - 32]
            )  # no token is shorter than a character
            seconds = asyncio.run(run_load(router.url, streams, Line(way.name), way.name))
            answers.append(streams)
            if failed := [stream.answer.error for stream in streams if stream.answer.error]:
                say(f"{len(failed)} of {len(streams)} requests failed; the first: {failed[0]}")
                return False
            found.append(Figures.of(streams, seconds))
            router.stop()
    plain, together = found
    same = sum(one.answer.token_ids == other.answer.token_ids for one, other in zip(*answers, strict=True))
    print(f"\n{format_load_table(plain, together)}\n", flush=True)
    print(
        f"{same} of {len(answers[0])} answers have the same tokens both times; {together.num_handed_over} prompts were handed over"
    )
    print(verdict_of(plain, together, len(os.sched_getaffinity(0))), flush=True)
    return True
