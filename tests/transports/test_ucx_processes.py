"""`ucx` between real processes: one is killed or stopped, and the other lives on and notices within seconds."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from kvferry.transports import Connected, Event, Guard, PeerLost, Pool, RegionPairs, TransferEnded
from kvferry.transports.errors import PeerLostError
from kvferry.transports.ucx import UCXTransport

pytestmark = pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")

PEER = Path(__file__).parent / "children" / "ucx_peer.py"
POOL_BYTES = 24 << 20
HELD = Guard(3, 9)

#: `peer_timeout_s` is 2, of this node's own attention; the rest is for a busy machine.
NOTICED_S = 4.0

Start = Callable[..., "subprocess.Popen[str]"]
Owner = tuple["subprocess.Popen[str]", int]


class Node:
    """Our side: a transport, its pool, and what it reported."""

    def __init__(self) -> None:
        self.transport = UCXTransport()
        self.arena = self.transport.allocate(POOL_BYTES)
        self.transport.register(Pool([self.arena.segment]))
        self.seen: list[Event] = []

    def until(self, is_done: Callable[[], bool], timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_done():
            assert time.monotonic() < deadline, f"only {self.seen}"
            self.seen += self.transport.wait_events(0.02)

    def saw(self, kind: type[Event]) -> bool:
        return any(isinstance(event, kind) for event in self.seen)

    def connect(self, address: str) -> int:
        peer_id = self.transport.start_connect(address, timeout_s=20)
        self.until(lambda: Connected(peer_id, incoming=False) in self.seen)
        return peer_id

    def start_read(self, peer_id: int) -> int:
        pairs = RegionPairs(np.array([(0, 0, POOL_BYTES)], dtype=np.int64))
        return self.transport.start_read(peer_id, pairs, HELD, timeout_s=30)

    def ends(self) -> list[TransferEnded]:
        return [event for event in self.seen if isinstance(event, TransferEnded)]


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.transport.close()


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a peer process."""
    processes: list[subprocess.Popen[str]] = []

    def start_one(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(PEER), *arguments]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield start_one
    for process in processes:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def owner(node: Node, start: Start) -> Owner:
    """A process that serves its pool, and our id of it."""
    process = start("serve")
    return process, node.connect(said(process))


def assert_read_whole(node: Node, peer_id: int) -> None:
    np.frombuffer(node.arena.buffer, dtype=np.uint8)[:] = 0
    transfer_id = node.start_read(peer_id)
    node.until(lambda: node.ends()[-1:] != [] and node.ends()[-1].transfer_id == transfer_id)
    ended = node.ends()[-1]
    assert ended.error is None
    assert ended.mechanism == "ucx:tcp"
    expected = (np.arange(POOL_BYTES) * 7 % 251).astype(np.uint8)
    assert np.array_equal(np.frombuffer(node.arena.buffer, dtype=np.uint8), expected)


def test_bytes_cross_and_the_transport_that_ucx_chose_is_named(node: Node, owner: Owner) -> None:
    assert_read_whole(node, owner[1])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_owner_that_goes_is_noticed_and_another_can_be_read(
    node: Node, owner: Owner, start: Start, how: signal.Signals
) -> None:
    """In the middle of reads: each ends once, before the loss is told, and nothing is left of them."""
    process, peer_id = owner
    other = start("serve")
    ids = [node.start_read(peer_id) for _ in range(8)]
    node.until(lambda: len(node.ends()) >= 1)
    process.send_signal(how)
    node.until(lambda: node.saw(PeerLost), NOTICED_S)
    ended = node.ends()
    assert sorted(event.transfer_id for event in ended) == ids
    assert all(event.error is None or isinstance(event.error, PeerLostError) for event in ended)
    assert isinstance(node.seen[-1], PeerLost)
    assert_read_whole(node, node.connect(said(other)))


def test_a_killed_owner_is_noticed_at_once(node: Node, owner: Owner) -> None:
    owner[0].kill()
    began = time.monotonic()
    node.until(lambda: node.saw(PeerLost), 1.5)
    assert time.monotonic() - began < 1.5


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_that_goes_is_noticed(node: Node, start: Start, how: signal.Signals) -> None:
    process = start("connect", node.transport.listen(""))
    node.until(lambda: node.saw(Connected))
    assert said(process) == "connected"
    process.send_signal(how)
    node.until(lambda: node.saw(PeerLost), NOTICED_S)


def test_a_peer_that_is_idle_is_kept(node: Node, owner: Owner) -> None:
    deadline = time.monotonic() + 2.5
    while time.monotonic() < deadline:
        node.seen += node.transport.wait_events(0.5)
    assert not node.saw(PeerLost)
    assert_read_whole(node, owner[1])


def test_a_node_that_looked_away_does_not_take_its_peers_for_lost(node: Node, owner: Owner) -> None:
    """Nor do its peers it, if it was not longer than they wait."""
    time.sleep(1.2)
    assert_read_whole(node, owner[1])
    assert not node.saw(PeerLost)


@pytest.mark.slow
def test_owners_that_are_killed_in_turn_leave_nothing(node: Node, start: Start) -> None:
    """The leak guard counts descriptors; what UCX held for the dead is gone while we live on."""
    for _ in range(5):
        process = start("serve")
        peer_id = node.connect(said(process))
        node.start_read(peer_id)
        node.seen += node.transport.wait_events(0.02)
        process.kill()
        node.seen.clear()
        node.until(lambda: node.saw(PeerLost), NOTICED_S)
