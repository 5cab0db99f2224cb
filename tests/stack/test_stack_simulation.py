"""The whole stack in virtual time: real schedulers, pools, connectors, handoffs, exchanges and placement,
drawn from seeds.

KVFERRY_SCHEDULES is how many schedules are tried; `make simulate` tries 5,000.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest

from tests.support.explore import first_broken
from tests.support.stack_simulator.bugs import BUGS
from tests.support.stack_simulator.schedules import (
    AMPLE,
    Arrival,
    Fault,
    Run,
    Schedule,
    draw,
    explain,
    failure_of,
    shrunk,
)

NUM_SCHEDULES = int(os.environ.get("KVFERRY_SCHEDULES", "60"))
NUM_PARTS = 4
#: By the name of a bug, what the simulation says of it.
FOUND = {
    "free before release": "a step reads only right blocks",
    "guard never cleared": "guards are clear",
    "lost heartbeat": "everything is over in the end",
    "offer of what is not computed": "no load fails without a fault",
    "withdrawn offer kept": "the producer forgets what ended",
    "abort that forgets the peer": "the consumer forgets what ended",
    "completion before the last byte": "a load ends after the last byte",
    "missing generation check": "a step reads only right blocks",
    "loads of a lost peer forgotten": "each request ends",
    "wait without a deadline": "each request ends",
    "swallowed failure": "a step reads only right blocks",
    "wrong group's table": "a step reads only right blocks",
    "pairing by position": "a step reads only right blocks",
    "stale prefix hash": "a step reads only right blocks",
    "token sent twice": "each token comes once, in its place (a token came twice)",
    "double move of an answer": "nothing raises an exception",
    "last token of a move lost": "each token comes once, in its place",
    "end reported twice": "a client gets one end",
}


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_whatever_breaks_each_answer_is_right_and_nothing_is_left(part: int) -> None:
    for seed in range(part, NUM_SCHEDULES, NUM_PARTS):
        schedule = draw(seed)
        assert not failure_of(schedule), explain(schedule)


@pytest.mark.parametrize("name", BUGS)
def test_each_planted_bug_is_caught(name: str) -> None:
    broken = first_broken(lambda seed: Run(draw(seed), BUGS[name]).run(), range(800))
    assert str(broken).startswith(FOUND[name]), broken


def test_schedules_reach_what_they_are_about() -> None:
    """Otherwise the tests above show nothing."""
    counts = sum((Run(draw(seed)).run().counts for seed in range(60)), start=Counter[str]())
    reached = {
        *(
            "handoffs loaded",
            "asked both",
            "alone",
            "preemptions",
            "kills",
            "cuts",
            "drains",
            "answer stopped",
        ),
        *("decode lost", "prefill lost", "offers expired", "offers aborted", "loads failed", "answer moved"),
    }
    assert all(counts[each] for each in reached), {each: counts[each] for each in reached}


def test_a_seed_gives_one_schedule_and_one_run() -> None:
    first, second = (Run(draw(7)).run() for _ in range(2))
    assert (first.counts, first.ttft_s) == (second.counts, second.ttft_s)


def test_a_failure_is_shrunk_to_what_it_needs() -> None:
    bug = BUGS["wrong group's table"]
    schedule = draw(0)
    assert len(schedule.arrivals) > 1
    smaller = shrunk(schedule, bug)
    assert len(smaller.arrivals) == 1
    assert not smaller.faults
    assert failure_of(smaller, bug)
    assert f"SEED={schedule.seed}" in explain(schedule, bug)


def test_of_two_full_pools_that_wait_for_each_other_one_gives_way() -> None:
    """A rendezvous holds blocks of its decode node, and waits for blocks of its prefill node.

    Those are held by an offer whose load waits for the decode node's blocks. The rendezvous gives its blocks
    up.
    """
    run = Run(draw(975)).run()
    assert run.counts["loads failed"]
    patience = run.schedule.shape.handoff.progress_wait_s
    assert patience < run.clock.now < 2 * patience
    ample = replace(run.schedule, shape=replace(run.schedule.shape, num_blocks=AMPLE))
    assert Run(ample).run().clock.now < patience


def test_a_thousand_requests_cross_a_fleet_that_is_upgraded() -> None:
    roles = ("kv_both",) * 8
    arrivals = tuple(
        (number, Arrival(number * 0.02, number % 7, 12, 5 + number % 23, 1 + number % 6))
        for number in range(1000)
    )
    faults = tuple(Fault(1.0 + 2.0 * number, "drain", number) for number in range(len(roles)))
    run = Run(Schedule(1, roles, arrivals, faults, replace(draw(0).shape, num_blocks=400))).run()
    assert run.counts["answered"] == 1000
    assert run.counts["drains"] == len(roles)
