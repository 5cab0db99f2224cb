"""The protocol keeps its promises in every schedule, and the simulator would notice if it did not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvferry.connector.handoff.consumer import ConsumerProtocol
from kvferry.connector.handoff.events import ClearGuard, LoadEnded, SetGuard, StartRead
from kvferry.connector.handoff.producer import ProducerProtocol
from kvferry.connector.handoff.testing import PromiseBroken, Simulation, explore
from kvferry.transports.regions import Guard


def test_promises_hold_in_thousands_of_schedules() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(1500):
        simulation = Simulation()
        explore(simulation, seed)
        outcomes.update(simulation.outcomes)
    # Every way to end was seen often enough to mean something.
    assert set(outcomes) == {
        "offer delivered",
        "offer aborted",
        "offer expired",
        "load loaded",
        "load failed",
        "load dropped",
    }
    assert min(outcomes.values()) >= 30


@pytest.mark.slow
def test_promises_hold_in_many_more_and_longer_schedules() -> None:
    for seed in range(10_000, 12_500):
        explore(Simulation(), seed, num_steps=200)


def test_a_world_without_faults_loads_everything() -> None:
    simulation = Simulation()
    for number in range(20):
        simulation.offer(0, number)
        simulation.hear(0)
        simulation.claim(2, 0, 0)
        simulation.load(2, 0, number)
        simulation.settle()
    assert simulation.outcomes == {"load loaded": 20, "offer delivered": 20}
    simulation.finish()


numbers = st.integers(0, 63)


class AnySchedule(RuleBasedStateMachine):
    """The same operations, chosen by Hypothesis, which also shrinks what it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.simulation = Simulation()

    @rule(node=numbers, num_blocks=numbers)
    def offer(self, node: int, num_blocks: int) -> None:
        self.simulation.offer(node, num_blocks)

    @rule(node=numbers)
    def hear(self, node: int) -> None:
        self.simulation.hear(node)

    @rule(node=numbers, offer=numbers)
    def abort(self, node: int, offer: int) -> None:
        self.simulation.abort(node, offer)

    @rule(node=numbers, offer=numbers, change=numbers)
    def claim(self, node: int, offer: int, change: int) -> None:
        self.simulation.claim(node, offer, change)

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

    @rule(seconds=st.sampled_from([0.01, 0.2, 2.0, 6.0, 40.0]))
    def tick(self, seconds: float) -> None:
        self.simulation.tick(seconds)

    @rule(node=numbers)
    def kill(self, node: int) -> None:
        self.simulation.kill(node)

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


ONE_VALUE = 2**62


class FreesBeforeItClears(ProducerProtocol):
    def _end(self, *args, **kwargs):
        return super()._end(*args, **kwargs)[::-1]


class NeverClears(ProducerProtocol):
    def _end(self, *args, **kwargs):
        return [action for action in super()._end(*args, **kwargs) if not isinstance(action, ClearGuard)]


class NeverExpires(ProducerProtocol):
    def advance(self, now):
        return []

    def next_deadline(self):
        return float("inf")


class UsesOneGuardValue(ProducerProtocol):
    def offer(self, *args):
        actions = super().offer(*args)
        return [
            replace(action, value=ONE_VALUE) if isinstance(action, SetGuard) else action for action in actions
        ]


class ExpectsOneGuardValue(ConsumerProtocol):
    def _start_read(self, *args):
        return [
            replace(action, guard=Guard(action.guard.index, ONE_VALUE))
            if isinstance(action, StartRead)
            else action
            for action in super()._start_read(*args)
        ]


class ReportsTwice(ConsumerProtocol):
    def read_ended(self, *args):
        actions = super().read_ended(*args)
        return actions + [action for action in actions if isinstance(action, LoadEnded)]


class ReportsBeforeTheReadEnded(ConsumerProtocol):
    def _end(self, handoff, outcome, error, release=True):
        return self._report(handoff, outcome, error)


class AcceptsStaleBytes(ConsumerProtocol):
    def read_ended(self, request_id, error, now):
        return super().read_ended(request_id, None, now)


class ForgetsLoadsOfLostPeers(ConsumerProtocol):
    def _fail_peer(self, *args):
        return [action for action in super()._fail_peer(*args) if not isinstance(action, LoadEnded)]


class NeverGivesUp(ConsumerProtocol):
    def _time_out(self, handoff, now):
        handoff.deadline = float("inf")
        return []


def first_broken_promise(
    producer: type[ProducerProtocol], consumer: type[ConsumerProtocol], checks_after_copy: bool
) -> str:
    for seed in range(5000):
        try:
            explore(Simulation(producer, consumer, checks_after_copy), seed)
        except PromiseBroken as broken:
            return str(broken)
    return "none"


FREED_TOO_EARLY = "the guard is cleared before blocks can be reused"
WRONG_BYTES = "loaded bytes are the offered ones"


@pytest.mark.parametrize(
    ("producer", "consumer", "checks_after_copy", "promise"),
    [
        pytest.param(
            FreesBeforeItClears, ConsumerProtocol, True, FREED_TOO_EARLY, id="guard-cleared-after-free"
        ),
        pytest.param(NeverClears, ConsumerProtocol, True, FREED_TOO_EARLY, id="guard-never-cleared"),
        pytest.param(NeverExpires, ConsumerProtocol, True, "every offer", id="lease-never-expires"),
        pytest.param(UsesOneGuardValue, ExpectsOneGuardValue, True, WRONG_BYTES, id="guard-value-used-again"),
        pytest.param(
            ProducerProtocol, ConsumerProtocol, False, WRONG_BYTES, id="guard-checked-before-the-copy"
        ),
        pytest.param(ProducerProtocol, AcceptsStaleBytes, True, WRONG_BYTES, id="stale-bytes-accepted"),
        pytest.param(ProducerProtocol, ReportsTwice, True, "reported once", id="load-reported-twice"),
        pytest.param(
            ProducerProtocol,
            ReportsBeforeTheReadEnded,
            True,
            "nothing writes",
            id="load-reported-while-reading",
        ),
        pytest.param(
            ProducerProtocol,
            ForgetsLoadsOfLostPeers,
            True,
            "every offer and every load",
            id="lost-load-forgotten",
        ),
        pytest.param(ProducerProtocol, NeverGivesUp, True, "something still waits", id="waits-forever"),
    ],
)
def test_a_planted_bug_is_found(producer, consumer, checks_after_copy, promise) -> None:
    assert promise in first_broken_promise(producer, consumer, checks_after_copy)
