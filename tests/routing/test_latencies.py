"""The percentiles of the last minutes that the router's page shows."""

from __future__ import annotations

import random

import pytest

from kvferry.router.seen.metrics import NUM_SLOTS, SLOT_S, Latencies


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("kvferry.router.seen.metrics.time.monotonic", lambda: now[0])
    return now


def test_percentiles_are_within_five_percent(clock: list[float]) -> None:
    latencies = Latencies()
    draw = random.Random(7)
    times = sorted(draw.lognormvariate(-3, 1.5) for _ in range(1000))
    for seconds in times:
        latencies.note(seconds)
    exact = [times[rank - 1] * 1e3 for rank in (500, 900, 990)]
    assert latencies.report()["all"] == pytest.approx(exact, rel=0.05)


def test_each_slot_has_its_own_and_what_is_older_than_all_is_forgotten(clock: list[float]) -> None:
    latencies = Latencies()
    for seconds in (0.01, 1.0):
        latencies.note(seconds)
        clock[0] += SLOT_S
    clock[0] += SLOT_S * (NUM_SLOTS - 4)
    slots = latencies.report()["slots"]
    assert [place for place, slot in enumerate(slots) if slot is not None] == [1, 2]
    assert slots[1] == pytest.approx([10.0] * 3, rel=0.05)
    assert slots[2] == pytest.approx([1000.0] * 3, rel=0.05)
    clock[0] += 3 * SLOT_S
    assert latencies.report() == {"all": None, "slots": [None] * NUM_SLOTS}


def test_what_is_kept_is_bounded(clock: list[float]) -> None:
    latencies = Latencies()
    for number in range(10_000):
        clock[0] += SLOT_S / 3
        latencies.note(10.0 ** (number % 40 - 20))
    assert len(latencies.report()["slots"]) == NUM_SLOTS
    assert len(latencies._slots) == NUM_SLOTS
    assert max(max(counts) for _, counts in latencies._slots) < 200
