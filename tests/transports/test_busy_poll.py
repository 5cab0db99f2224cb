"""A `ucx` node busy-polls for the next step of a read before it blocks, briefly and without delaying other
threads.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from kvferry.transports import Endpoint, Guard, Pool, RegionPairs, TransferEnded
from kvferry.transports._busy_poll import BusyPoll
from kvferry.transports.base import Arena, Event
from kvferry.transports.ucx import UCXTransport
from kvferry.transports.ucx.library import Worker
from kvferry.transports.ucx.options import UCXOptions
from tests.support.patience import DEADLINE_S

GUARD = Guard(1, 7)

needs_ucxx = pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")


@pytest.fixture
def no_switching() -> Iterator[None]:
    """Disable forced switches: a thread keeps the GIL until it releases it by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(before)


class TestBusyPoll:
    def test_ends_by_itself(self) -> None:
        busy_poll, deadline = BusyPoll(0.001), time.monotonic() + DEADLINE_S
        busy_poll.extend()
        while busy_poll.is_on(deadline):
            assert time.monotonic() < deadline
        assert not busy_poll.is_on(deadline)

    def test_is_longer_if_more_steps_are_missing_and_one_of_them_does_not_shorten_it(self) -> None:
        busy_poll, began = BusyPoll(0.01), time.monotonic()
        busy_poll.extend(num_steps=5)
        busy_poll.extend()
        while busy_poll.is_on(began + 30):
            pass
        assert time.monotonic() - began >= 0.05

    def test_does_not_continue_past_the_callers_timeout(self) -> None:
        busy_poll = BusyPoll(30)
        busy_poll.extend()
        assert busy_poll.is_on(time.monotonic() + 30)
        assert not busy_poll.is_on(time.monotonic())

    def test_does_not_begin_with_a_period_of_zero(self) -> None:
        busy_poll = BusyPoll(0)
        busy_poll.extend()
        assert not busy_poll.is_on(time.monotonic() + 30)

    def test_lets_other_threads_have_the_gil(self, no_switching: None) -> None:
        busy_poll, ran, deadline = BusyPoll(30), threading.Event(), time.monotonic() + 30
        other = threading.Thread(target=ran.set)
        other.start()
        while not ran.is_set():
            busy_poll.yield_core()
            assert time.monotonic() < deadline
        other.join()


@pytest.fixture
def open_endpoint() -> Iterator[Callable[[], Endpoint]]:
    """Make endpoints with a pool of 1 MiB whose guard holds. They are closed after the test."""
    arenas: list[Arena] = []  # the pools' memory lives until all transports are closed
    with ExitStack() as resources:

        def make() -> Endpoint:
            # A test does not serve the endpoints that it does not look at, and on a busy machine it takes its
            # time.
            transport = UCXTransport({"peer_timeout_s": 300})
            transport.options = replace(transport.options, spin_us=10_000)
            resources.callback(transport.close)
            transport.guards.set(GUARD.index, GUARD.value)
            arenas.append(transport.allocate(1 << 20))
            return transport.register(Pool([arenas[-1].segment]))

        yield make


def next_event(mine: Endpoint, other: Endpoint) -> Event:
    deadline = time.monotonic() + 30
    while not (events := mine.wait_events(0.01)):
        other.wait_events(0.01)
        assert time.monotonic() < deadline
    return events[0]


def read_all(reader: Endpoint, peer_id: int, owner: Endpoint) -> None:
    reader.start_read(peer_id, RegionPairs(np.array([[0, 0, 1 << 20]])), GUARD, timeout_s=20)
    ended = next_event(reader, owner)
    assert isinstance(ended, TransferEnded)
    assert ended.error is None


@needs_ucxx
def test_nodes_with_nothing_to_do_use_no_processor_time(open_endpoint: Callable[[], Endpoint]) -> None:
    owner, reader = open_endpoint(), open_endpoint()
    peer_id = reader.start_connect(owner.listen(""), timeout_s=20)
    next_event(reader, owner)
    read_all(reader, peer_id, owner)
    for endpoint in (owner, reader):
        began = time.thread_time()
        endpoint.wait_events(0.5)
        assert time.thread_time() - began < 0.1


@needs_ucxx
def test_a_read_does_not_poll_the_workers_of_idle_peers(
    open_endpoint: Callable[[], Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader, idle = open_endpoint(), open_endpoint(), open_endpoint()
    for _ in range(4):
        reader.start_connect(idle.listen(""), timeout_s=20)
        next_event(reader, idle)
    peer_id = reader.start_connect(owner.listen(""), timeout_s=20)
    next_event(reader, owner)
    asked: set[int] = set()
    for name in ("progress", "arm"):
        original = getattr(Worker, name)

        def noted(worker: Worker, original: Callable[[Worker], bool] = original) -> bool:
            asked.add(id(worker))
            return original(worker)

        monkeypatch.setattr(Worker, name, noted)
    # The worker of a new connection is polled until its node has blocked once, and UCX needs both sides to
    # get there.
    for _ in range(50):
        for endpoint in (owner, reader, idle):
            endpoint.wait_events(0.05)
        asked.clear()
        read_all(reader, peer_id, owner)
        if len(asked) == 2:  # the two workers of this connection
            return
    pytest.fail(f"{len(asked)} workers were polled for a read from one peer")


@pytest.mark.parametrize(
    ("options", "mechanism", "threshold"),
    [
        ({}, "ucx:tcp", "inf"),
        ({}, "ucx:rc_mlx5+tcp", "auto"),
        ({"rndv_threshold": "64k"}, "ucx:tcp", "64k"),
    ],
    ids=["nothing but tcp", "rdma", "as the user sets it"],
)
def test_rendezvous_is_disabled_only_if_there_is_only_tcp(
    options: dict[str, str], mechanism: str, threshold: str
) -> None:
    tuned = UCXOptions(**options).tuned_for(mechanism)  # type: ignore[arg-type]
    assert tuned.settings()["RNDV_THRESH"] == threshold
    assert (tuned.settings().get("TLS") == "tcp") == (threshold == "inf")
