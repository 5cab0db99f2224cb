"""`zeromq` between real processes: one is killed or stopped, and the other notices within seconds."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvferry.transports import Connected, Event, Guard, PeerLost, Pool, RegionPairs, TransferEnded
from kvferry.transports.errors import PeerLostError
from kvferry.transports.zeromq import ZeroMQTransport

PEER = Path(__file__).parent / "children" / "zeromq_peer.py"
POOL_BYTES = 64 << 20
HELD = Guard(3, 9)

#: `peer_timeout_s` is 2; the rest is for a busy machine.
NOTICED_S = 3.0

Start = Callable[..., "subprocess.Popen[str]"]


class Node:
    """Our side: a transport, its pool, and what it reported."""

    def __init__(self) -> None:
        self.transport = ZeroMQTransport()
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

    def start_read(self, peer_id: int) -> int:
        pairs = RegionPairs(np.array([(0, 0, POOL_BYTES)], dtype=np.int64))
        return self.transport.start_read(peer_id, pairs, HELD, timeout_s=30)


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
def owner(node: Node, start: Start) -> tuple[subprocess.Popen[str], int]:
    """A process that serves its pool, and our id of it."""
    process = start("serve")
    peer_id = node.transport.start_connect(said(process), timeout_s=20)
    node.until(lambda: node.saw(Connected))
    return process, peer_id


def test_bytes_cross_between_processes(node: Node, owner: tuple[subprocess.Popen[str], int]) -> None:
    node.start_read(owner[1])
    node.until(lambda: node.saw(TransferEnded))
    (ended,) = (event for event in node.seen if isinstance(event, TransferEnded))
    assert ended.error is None
    assert ended.mechanism == "tcp"
    expected = (np.arange(POOL_BYTES) * 7 % 251).astype(np.uint8)
    assert np.array_equal(np.frombuffer(node.arena.buffer, dtype=np.uint8), expected)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_owner_that_goes_is_noticed(
    node: Node, owner: tuple[subprocess.Popen[str], int], how: signal.Signals
) -> None:
    """Also in the middle of reads: each ends once, before the loss is told."""
    process, peer_id = owner
    ids = [node.start_read(peer_id) for _ in range(8)]
    process.send_signal(how)
    node.until(lambda: node.saw(PeerLost), NOTICED_S)
    ended = [event for event in node.seen if isinstance(event, TransferEnded)]
    assert sorted(event.transfer_id for event in ended) == ids
    assert all(event.error is None or isinstance(event.error, PeerLostError) for event in ended)
    assert isinstance(node.seen[-1], PeerLost)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_that_goes_is_noticed(node: Node, start: Start, how: signal.Signals) -> None:
    process = start("connect", node.transport.listen(""))
    node.until(lambda: node.saw(Connected))
    assert said(process) == "connected"
    process.send_signal(how)
    node.until(lambda: node.saw(PeerLost), NOTICED_S)


def test_a_peer_that_is_idle_is_kept(node: Node, owner: tuple[subprocess.Popen[str], int]) -> None:
    """Heartbeats are ZeroMQ's own: neither side needs to call anything for them."""
    time.sleep(2.5)
    node.start_read(owner[1])
    node.until(lambda: node.saw(TransferEnded))
    assert not node.saw(PeerLost)


def test_an_asyncio_program_can_own_a_transport(start: Start) -> None:
    """One executor thread owns the transport; the event loop runs on meanwhile."""
    address = said(start("serve"))

    async def read_once() -> list[Event]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as thread:
            node = await loop.run_in_executor(thread, Node)
            peer_id = await loop.run_in_executor(
                thread, lambda: node.transport.start_connect(address, timeout_s=20)
            )
            while not node.saw(TransferEnded):
                events = await loop.run_in_executor(thread, node.transport.wait_events, 1.0)
                node.seen += events
                if any(isinstance(event, Connected) for event in events):
                    await loop.run_in_executor(thread, node.start_read, peer_id)
            await loop.run_in_executor(thread, node.transport.close)
        return node.seen

    ended = asyncio.run(read_once())[-1]
    assert isinstance(ended, TransferEnded)
    assert ended.error is None
