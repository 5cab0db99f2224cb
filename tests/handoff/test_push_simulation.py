"""The protocol keeps its promises where producers write, and the simulator would notice if it did not."""

from __future__ import annotations

from collections import Counter

import pytest

from kvferry.connector.handoff.consumer import ConsumerProtocol
from kvferry.connector.handoff.events import Send
from kvferry.connector.handoff.messages import Written
from kvferry.connector.handoff.producer import ProducerProtocol
from kvferry.connector.handoff.testing import PUSH_GUARDS, PromiseBroken, Simulation, Spread, explore


def test_promises_hold_where_producers_write() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(400):
        simulation = Simulation(push_guards=PUSH_GUARDS)
        explore(simulation, seed)
        outcomes.update(simulation.outcomes)
    assert outcomes["load loaded"] >= 100
    assert {"offer delivered", "load failed", "load dropped"} <= set(outcomes)


def test_promises_hold_where_producers_of_another_shape_write() -> None:
    for seed in range(40):
        spreads = (Spread(4), Spread(2), Spread(1, 2))
        explore(Simulation(spreads=spreads, push_guards=PUSH_GUARDS), seed, num_steps=120)


class ReportsBeforeTheWriteEnded(ConsumerProtocol):
    def _end(self, load, verdict):
        return self._report(load, verdict)


class SaysWrittenOfWhatIsOver(ProducerProtocol):
    def write_ended(self, write, error, mechanism):
        actions = super().write_ended(write, error, mechanism)
        done = Written(write.request_id, write.lease, write.guard.value, mechanism)
        return [Send(action.peer_id, done) if isinstance(action, Send) else action for action in actions]


class NeverAnswers(ProducerProtocol):
    def write_ended(self, *args):
        return [action for action in super().write_ended(*args) if not isinstance(action, Send)]


def explore_many(producer: type[ProducerProtocol], consumer: type[ConsumerProtocol]) -> None:
    for seed in range(3000):
        explore(Simulation(producer, consumer, push_guards=PUSH_GUARDS), seed, num_steps=160)


@pytest.mark.parametrize(
    ("producer", "consumer", "promise"),
    [
        # Its guard stays set as well; which of the two is seen first depends on the schedule.
        (ProducerProtocol, ReportsBeforeTheWriteEnded, "nothing writes|guards are clear"),
        (SaysWrittenOfWhatIsOver, ConsumerProtocol, "loaded bytes"),
    ],
    ids=["load-reported-while-written", "failed-write-is-told-as-done"],
)
def test_a_planted_bug_is_found(producer, consumer, promise: str) -> None:
    with pytest.raises(PromiseBroken, match=promise):
        explore_many(producer, consumer)


def test_a_producer_that_never_answers_is_given_up() -> None:
    simulation = Simulation(NeverAnswers, push_guards=PUSH_GUARDS)
    simulation.offer(0, 1)
    simulation.claim(1, 0, 0)
    simulation.load(1, 0, 0)
    simulation.settle()
    assert not simulation.outcomes
    simulation.finish()
    assert simulation.outcomes["load failed"] == 1
