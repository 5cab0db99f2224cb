"""Try many schedules, repeat one, or let a large fleet answer a trace, with progress.

make simulate                                        # 5,000 small schedules
make simulate SEED=7                                 # one of them
make simulate NODES=1000 REQUESTS=100000 TRACE=FILE  # a fleet, whose requests come as the trace says
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..explore import PromiseBroken
from .schedules import Arrival, Fault, Kind, Run, Schedule, draw, explain, failure_of

PROGRESS_S = 5.0
#: Lengths of a trace are divided by this, because blocks have four tokens here.
SCALE = 64
#: Requests per second and node.
RATE = 1.5


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=5000, help="small schedules (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="try only this small schedule")
    parser.add_argument("--nodes", type=int, default=0, help="nodes of one large fleet instead")
    parser.add_argument("--requests", type=int, default=10_000, help="its requests (default: %(default)s)")
    parser.add_argument(
        "--trace", type=Path, help="JSON lines with timestamp, input_length, output_length and hash_ids"
    )
    return parser.parse_args()


def small(options: argparse.Namespace) -> int:
    seeds = range(options.schedules) if options.seed is None else (options.seed,)
    said = began = time.monotonic()
    for number, seed in enumerate(seeds):
        schedule = draw(seed)
        if failure_of(schedule):
            print(explain(schedule))
            return 1
        if time.monotonic() - said > PROGRESS_S:
            said = time.monotonic()
            print(
                f"{number + 1:,} of {len(seeds):,} schedules, {said - began:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    print(f"{len(seeds):,} schedules kept every promise, {time.monotonic() - began:.0f} s")
    return 0


def large(options: argparse.Namespace) -> int:
    """Let a fleet answer, while one node after the other is upgraded, killed or cut off."""
    chance = random.Random(1)
    rows: list[dict[str, Any]] = [{"input_length": 2048, "output_length": 512}]
    if options.trace is not None:
        rows = [json.loads(line) for line in options.trace.read_text().splitlines()]
    routers = -(-options.nodes // 8)
    arrivals, at = [], 0.0
    for number in range(options.requests):
        at += chance.expovariate(RATE * options.nodes)
        row = rows[number % len(rows)]
        own = max(1, min(60, row["input_length"] // SCALE))
        root, shared = (row["hash_ids"][0], 8) if row.get("hash_ids") else (chance.randrange(50), 4)
        answer = max(1, min(16, row["output_length"] // SCALE))
        arrivals.append((number, Arrival(at, root, shared, own, answer, router=chance.randrange(routers))))
    kinds: tuple[Kind, ...] = ("kill", "cut", "drain")
    faults = []
    for number in range(max(1, int(at))):
        kind = chance.choice(kinds)
        node, other = chance.randrange(options.nodes), chance.randrange(options.nodes)
        faults.append(Fault(number + chance.random(), kind, node, other, 2.0))
    shape = replace(draw(0).shape, num_blocks=400, max_num_seqs=16, chunk_tokens=64)
    schedule = Schedule(1, ("kv_both",) * options.nodes, tuple(arrivals), tuple(faults), shape)
    began = said = time.monotonic()

    def progress(done: int, now: float) -> None:
        nonlocal said
        if time.monotonic() - said > PROGRESS_S:
            said = time.monotonic()
            rate = done / (said - began)
            text = f"{done:,} of {options.requests:,} requests, {now:.0f} virtual s, {rate:.0f} requests/s"
            print(text, file=sys.stderr, flush=True)

    try:
        run = Run(schedule, on_progress=progress).run()
    except PromiseBroken as broken:
        print(broken)
        return 1
    seconds = time.monotonic() - began
    shown = (
        "answered",
        "handoffs loaded",
        "answer stopped",
        "answer moved",
        "kills",
        "cuts",
        "drains",
        "failed requests",
    )
    print(
        f"{options.nodes:,} nodes, {options.requests:,} requests, {run.num_tokens:,} tokens: every promise kept, {seconds:.0f} s"
    )
    print(", ".join(f"{what}: {run.counts[what]:,}" for what in shown))
    ttfts = sorted(run.ttft_s)
    print(
        f"TTFT p50 {statistics.median(ttfts) * 1e3:.0f} ms, p99 {ttfts[int(0.99 * (len(ttfts) - 1))] * 1e3:.0f} ms (virtual)"
    )
    return 0


if __name__ == "__main__":
    chosen = parse()
    sys.exit(large(chosen) if chosen.nodes else small(chosen))
