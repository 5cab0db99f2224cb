"""A `ucx` node looks for the next step of a read for a moment before it sleeps: not long, and at nobody's cost."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec

import numpy as np
import pytest

from kvferry.transports import Guard, Pool, RegionPairs, TransferEnded
from kvferry.transports.base import Event
from kvferry.transports.ucx import UCXTransport
from kvferry.transports.ucx.options import UCXOptions
from kvferry.transports.ucx.vigil import Vigil

GUARD = Guard(1, 7)


@pytest.fixture
def no_switching() -> Iterator[None]:
    """A thread keeps the GIL until it lets go of it by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(before)


class TestTheVigil:
    def test_ends_by_itself(self) -> None:
        vigil, deadline = Vigil(0.001), time.monotonic() + 30
        vigil.begin()
        while vigil.lasts(deadline):
            assert time.monotonic() < deadline
        assert not vigil.lasts(deadline)

    def test_is_longer_where_more_steps_are_missing_and_not_cut_short_by_one_of_them(self) -> None:
        vigil, began = Vigil(0.01), time.monotonic()
        vigil.begin(num_steps=5)
        vigil.begin()
        while vigil.lasts(began + 30):
            pass
        assert time.monotonic() - began >= 0.05

    def test_is_not_held_past_the_time_that_the_caller_has(self) -> None:
        vigil = Vigil(30)
        vigil.begin()
        assert vigil.lasts(time.monotonic() + 30)
        assert not vigil.lasts(time.monotonic())

    def test_does_not_begin_where_it_has_no_length(self) -> None:
        vigil = Vigil(0)
        vigil.begin()
        assert not vigil.lasts(time.monotonic() + 30)

    def test_lets_other_threads_have_the_gil(self, no_switching: None) -> None:
        vigil, ran, deadline = Vigil(30), threading.Event(), time.monotonic() + 30
        other = threading.Thread(target=ran.set)
        other.start()
        while not ran.is_set():
            vigil.give_way()
            assert time.monotonic() < deadline
        other.join()


@pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")
def test_nodes_with_nothing_to_do_use_no_processor_time() -> None:
    with ExitStack() as resources:
        owner, reader = (UCXTransport({"spin_us": 10_000}) for _ in range(2))
        arenas = [transport.allocate(1 << 20) for transport in (owner, reader)]
        for transport, arena in zip((owner, reader), arenas, strict=True):
            resources.callback(transport.close)
            transport.register(Pool([arena.segment]))
        owner.guards.set(GUARD.index, GUARD.value)
        peer_id = reader.start_connect(owner.listen(""), timeout_s=20)
        next_event(reader, owner)
        reader.start_read(peer_id, RegionPairs(np.array([[0, 0, 1 << 20]])), GUARD, timeout_s=20)
        ended = next_event(reader, owner)
        assert isinstance(ended, TransferEnded)
        assert ended.error is None
        for transport in (owner, reader):
            began = time.thread_time()
            transport.wait_events(0.5)
            assert time.thread_time() - began < 0.1


def next_event(mine: UCXTransport, other: UCXTransport) -> Event:
    deadline = time.monotonic() + 30
    while not (events := mine.wait_events(0.01)):
        other.wait_events(0.01)
        assert time.monotonic() < deadline
    return events[0]


@pytest.mark.parametrize(
    ("options", "mechanism", "threshold"),
    [
        ({}, "ucx:tcp", "inf"),
        ({}, "ucx:rc_mlx5+tcp", "auto"),
        ({"rndv_threshold": "64k"}, "ucx:tcp", "64k"),
    ],
    ids=["nothing but tcp", "rdma", "as the user says"],
)
def test_only_where_there_is_nothing_but_tcp_all_is_sent_at_once(
    options: dict[str, str], mechanism: str, threshold: str
) -> None:
    tuned = UCXOptions(**options).tuned_for(mechanism)  # type: ignore[arg-type]
    assert tuned.settings()["RNDV_THRESH"] == threshold
    assert (tuned.settings().get("TLS") == "tcp") == (threshold == "inf")
