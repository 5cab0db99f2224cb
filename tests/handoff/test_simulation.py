"""The protocol keeps its promises in every schedule, and the simulator detects it when they are broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import permutations
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvferry.connector.handoff.consumer import ConsumerProtocol
from kvferry.connector.handoff.producer import ProducerProtocol
from tests.support.handoff_simulator import (
    PromiseBroken,
    Simulation,
    Spread,
    explore,
    explore_without_faults,
)
from tests.support.handoff_simulator.planted import (
    OUT_OF_BOUNDS,
    PLANTED,
    WRONG_BYTES,
    DeliversToTheFirstRank,
    ExpectsOneGuardValue,
    ForgetsClaimsThatCameFirst,
    ForgetsProgressWhileItReads,
    Planted,
    ReleasesTheFirstRankOnly,
    ReportsWithTheFirstPart,
    UsesOneGuardValue,
)


def test_promises_hold_in_thousands_of_schedules() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(1500):
        simulation = Simulation()
        explore(simulation, seed)
        outcomes.update(simulation.outcomes)
    # Every outcome occurred often enough for the test to be meaningful.
    assert set(outcomes) == {
        "offer delivered",
        "offer aborted",
        "offer expired",
        "load loaded",
        "load failed",
        "load dropped",
    }
    assert min(outcomes.values()) >= 30


ALIKE = (Spread(), Spread(), Spread())
SPREADS = {
    "tensor-parallel": (Spread(2), Spread(1), Spread(2)),
    "four-two-one": (Spread(4), Spread(2), Spread(1)),
    "pipeline-parallel": (Spread(1, 2), Spread(1), Spread(2, 2)),
}


@pytest.mark.parametrize("spreads", SPREADS.values(), ids=SPREADS)
def test_promises_hold_between_nodes_of_several_ranks(spreads: tuple[Spread, ...]) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(80):
        simulation = Simulation(spreads=spreads)
        explore(simulation, seed, num_steps=120)
        outcomes.update(simulation.outcomes)
    assert {"offer delivered", "load loaded", "load failed", "load dropped"} <= set(outcomes)
    assert outcomes["load loaded"] >= 40


@pytest.mark.parametrize("spreads", SPREADS.values(), ids=SPREADS)
def test_nodes_of_several_ranks_load_everything_without_faults(spreads: tuple[Spread, ...]) -> None:
    simulation = Simulation(spreads=spreads)
    for number, (producer, consumer) in enumerate(permutations(range(3), 2)):
        simulation.offer(producer, number)
        simulation.claim(consumer, 0, 0)
        simulation.load(consumer, 0, number)
        simulation.settle()
    assert set(simulation.outcomes) == {"load loaded", "offer delivered"}
    simulation.finish()


@pytest.mark.parametrize("spreads", SPREADS.values(), ids=SPREADS)
def test_no_handoff_between_several_ranks_waits_for_a_deadline(spreads: tuple[Spread, ...]) -> None:
    """Each rank comes to its orders and messages in its own time. Nothing breaks, and no time passes."""
    outcomes: Counter[str] = Counter()
    for seed in range(60):
        simulation = Simulation(spreads=spreads)
        explore_without_faults(simulation, seed, num_steps=80)
        outcomes.update(simulation.outcomes)
    assert outcomes["load loaded"] >= 200
    assert {"offer delivered", "offer aborted", "load failed"} <= set(outcomes)
    assert outcomes["offer expired"] == 0


def in_blocks(first: int, end: int, size: int) -> list[Any]:
    """Return the first seeds of blocks of schedules.

    `make test` explores one block, and `make test-all` the others.
    """
    return [first, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(first + size, end, size))]


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", in_blocks(30_000, 30_600, 150))
@pytest.mark.parametrize("spreads", [ALIKE, *SPREADS.values()], ids=["alike", *SPREADS])
def test_no_handoff_waits_for_a_deadline_in_many_more_schedules(
    spreads: tuple[Spread, ...], first_seed: int
) -> None:
    for seed in range(first_seed, first_seed + 150):
        explore_without_faults(Simulation(spreads=spreads), seed, num_steps=200)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", in_blocks(20_000, 21_000, 250))
@pytest.mark.parametrize("spreads", SPREADS.values(), ids=SPREADS)
def test_promises_hold_between_nodes_of_several_ranks_in_many_more_schedules(
    spreads: tuple[Spread, ...], first_seed: int
) -> None:
    for seed in range(first_seed, first_seed + 250):
        explore(Simulation(spreads=spreads), seed, num_steps=200)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", in_blocks(10_000, 12_500, 500))
def test_promises_hold_in_many_more_and_longer_schedules(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 500):
        explore(Simulation(), seed, num_steps=200)


def test_without_faults_every_rendezvous_is_loaded() -> None:
    """The claim comes first, and is granted as soon as the request has computed something."""
    simulation = Simulation()
    for number in range(20):
        simulation.meet(2, 0, number)
        simulation.load(2, 0, 0)
        simulation.settle()
        simulation.offer(0, number)
        simulation.settle()
    assert simulation.outcomes == {"load loaded": 20, "offer delivered": 20}
    simulation.finish()


def test_without_faults_everything_is_loaded() -> None:
    simulation = Simulation()
    for number in range(20):
        simulation.offer(0, number)
        simulation.carry_out(0)
        simulation.claim(2, 0, 0)
        simulation.load(2, 0, number)
        simulation.settle()
    assert simulation.outcomes == {"load loaded": 20, "offer delivered": 20}
    simulation.finish()


numbers = st.integers(0, 63)


class AnySchedule(RuleBasedStateMachine):
    """The same operations, chosen by Hypothesis, which also shrinks a failing schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.simulation = Simulation()

    @rule(node=numbers, num_blocks=numbers)
    def offer(self, node: int, num_blocks: int) -> None:
        self.simulation.offer(node, num_blocks)

    @rule(node=numbers)
    def hear(self, node: int) -> None:
        self.simulation.carry_out(node)

    @rule(node=numbers, offer=numbers)
    def compute(self, node: int, offer: int) -> None:
        self.simulation.compute(node, offer)

    @rule(node=numbers, offer=numbers)
    def preempt(self, node: int, offer: int) -> None:
        self.simulation.preempt(node, offer)

    @rule(node=numbers, offer=numbers)
    def abort(self, node: int, offer: int) -> None:
        self.simulation.abort(node, offer)

    @rule(node=numbers, offer=numbers)
    def give_up(self, node: int, offer: int) -> None:
        self.simulation.give_up(node, offer)

    @rule(node=numbers, offer=numbers, change=numbers)
    def claim(self, node: int, offer: int, change: int) -> None:
        self.simulation.claim(node, offer, change)

    @rule(node=numbers, producer=numbers, num_blocks=numbers)
    def meet(self, node: int, producer: int, num_blocks: int) -> None:
        self.simulation.meet(node, producer, num_blocks)

    @rule(node=numbers, request=numbers, first=numbers)
    def load(self, node: int, request: int, first: int) -> None:
        self.simulation.load(node, request, first)

    @rule(node=numbers, request=numbers)
    def drop(self, node: int, request: int) -> None:
        self.simulation.drop(node, request)

    @rule(which=numbers)
    def deliver(self, which: int) -> None:
        self.simulation.deliver(which)

    @rule(which=numbers)
    def copy(self, which: int) -> None:
        self.simulation.copy(which)

    @rule()
    def settle(self) -> None:
        self.simulation.settle()

    @rule(seconds=st.sampled_from([0.01, 0.2, 2.0, 6.0, 40.0]), late=st.integers(0, 7))
    def tick(self, seconds: float, late: int) -> None:
        self.simulation.tick(seconds, late)

    @rule(node=numbers, weights=numbers)
    def change_weights(self, node: int, weights: int) -> None:
        self.simulation.change_weights(node, weights)

    @rule(node=numbers)
    def kill(self, node: int) -> None:
        self.simulation.kill(node)

    @rule(rank=numbers)
    def kill_rank(self, rank: int) -> None:
        self.simulation.kill_rank(rank)

    @rule(link=numbers)
    def sever(self, link: int) -> None:
        self.simulation.sever(link)

    def teardown(self) -> None:
        self.simulation.finish()


TestAnySchedule = AnySchedule.TestCase
TestAnySchedule.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


# -- planted bugs: each must be found ---------------------------------------------------------------


def first_broken_promise(
    producer: type[ProducerProtocol],
    consumer: type[ConsumerProtocol],
    checks_after_copy: bool,
    spreads: tuple[Spread, ...] = ALIKE,
    drive: Callable[..., None] = explore,
) -> str:
    for seed in range(5000):
        try:  # long enough that blocks and guards are reused while a peer still reads
            drive(Simulation(producer, consumer, checks_after_copy, spreads), seed, num_steps=160)
        except PromiseBroken as broken:
            return broken.promise
    return "none"


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_a_planted_bug_is_found(planted: Planted) -> None:
    found = first_broken_promise(planted.producer, planted.consumer, planted.checks_after_copy)
    assert planted.promise in found


@pytest.mark.parametrize(
    ("producer", "consumer", "promises"),
    [
        # Which of the two is broken first depends on the schedule.
        pytest.param(
            ProducerProtocol,
            ReportsWithTheFirstPart,
            ("nothing writes into the blocks of a load that is over", WRONG_BYTES),
            id="one-part-is-the-load",
        ),
        pytest.param(
            DeliversToTheFirstRank,
            ConsumerProtocol,
            ("delivered means loaded by every rank",),
            id="one-rank-is-the-node",
        ),
    ],
)
def test_a_planted_bug_that_shows_only_with_several_ranks_is_found(producer, consumer, promises) -> None:
    assert first_broken_promise(producer, consumer, True, SPREADS["four-two-one"]) in promises


def test_a_guard_value_that_is_used_again_is_found() -> None:
    """Without faults nearly every offer is read, so blocks and a guard are reused under a read soonest."""
    promise = first_broken_promise(
        UsesOneGuardValue, ExpectsOneGuardValue, True, drive=explore_without_faults
    )
    # It reads the blocks of the offer before, which are not those that the guard is set for now.
    assert promise in (WRONG_BYTES, OUT_OF_BOUNDS)


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        (ForgetsClaimsThatCameFirst, ConsumerProtocol),
        (ProducerProtocol, ForgetsProgressWhileItReads),
        (ProducerProtocol, ReleasesTheFirstRankOnly),
    ],
    ids=["claim-forgotten", "progress-forgotten", "rank-not-released"],
)
def test_a_planted_bug_that_a_deadline_would_hide_is_found(producer, consumer) -> None:
    """A timeout or the end of a lease ends these handoffs, so with time they all end."""
    promise = first_broken_promise(
        producer, consumer, True, SPREADS["tensor-parallel"], explore_without_faults
    )
    assert promise == "no handoff waits for a deadline"
