"""Writers in other processes that are killed or stopped in the middle of a write."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.transports import Connected, Guard, PeerLost, Pool, Regions
from kvferry.transports.base import Event
from kvferry.transports.registry import create_transport

PEER = Path(__file__).parent / "children" / "writing_peer.py"
POOL_BYTES = 16 << 20
HELD = Guard(3, 9)
MARK = 255  # no writer writes it
SCHEMES = [
    "shm",
    "zeromq",
    pytest.param("ucx", marks=pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")),
]


class Target:
    """Our side, into which one writer writes without a pause."""

    def __init__(self, scheme: str) -> None:
        self.transport = create_transport(scheme, {})
        self.arena = self.transport.allocate(POOL_BYTES)
        self.transport.register(Pool([self.arena.segment]))
        self.transport.guards.set(HELD.index, HELD.value)
        command = [sys.executable, str(PEER), scheme, self.transport.listen("")]
        self.writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.seen: list[Event] = []

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self.arena.buffer, dtype=np.uint8)

    def until(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not is_done():
            assert time.monotonic() < deadline, f"only {self.seen}"
            self.seen += self.transport.wait_events(0.05)

    def let_write(self) -> int:
        """Accept the writer, and wait until it is at it. Returns its peer id."""
        self.until(lambda: bool(self.seen))
        (connected,) = self.seen
        assert isinstance(connected, Connected)
        everything = Regions(np.array([[0, POOL_BYTES]], dtype=np.int64))
        self.transport.accept_writes(connected.peer_id, HELD, everything)
        self.transport.send(connected.peer_id, b"begin")
        self.until(lambda: self.memory[-1] >= 3)
        return connected.peer_id

    def is_lost(self) -> bool:
        return any(isinstance(event, PeerLost) for event in self.seen)

    def close(self) -> None:
        self.writer.kill()
        self.writer.communicate()
        self.transport.close()


@pytest.fixture(params=SCHEMES)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    target = Target(request.param)
    yield target
    target.close()


def test_nothing_is_written_after_a_killed_writer_was_lost(target: Target) -> None:
    target.let_write()
    target.writer.kill()
    target.until(target.is_lost)
    target.memory[:] = MARK
    for _ in range(10):
        assert target.transport.wait_events(0.01) == []
    assert np.all(target.memory == MARK)


def test_a_writer_that_wakes_up_after_it_was_dropped_writes_nothing(target: Target) -> None:
    """Stopped in the middle of a write, dropped, and woken when its place is another's."""
    peer_id = target.let_write()
    target.writer.send_signal(signal.SIGSTOP)
    target.seen += target.transport.wait_events(0.01)
    target.transport.disconnect(peer_id)
    target.memory[:] = MARK  # the guard still holds
    target.writer.send_signal(signal.SIGCONT)
    target.until(lambda: target.writer.poll() is not None)
    assert target.writer.stdout is not None
    assert target.writer.stdout.read() == "lost\n"
    assert np.all(target.memory == MARK)


def test_a_cleared_guard_ends_writing(target: Target) -> None:
    target.let_write()
    target.transport.guards.clear(HELD.index)
    target.seen += target.transport.wait_events(0.05)
    for _ in range(10):
        target.seen += target.transport.wait_events(0.01)
    # The write that had begun may have ended; no other began.
    assert np.ptp(target.memory) <= 1
