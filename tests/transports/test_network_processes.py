"""Transports between processes: one is killed or stopped; the other survives and notices within seconds."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.transports import Connected, Event, PeerLost, TransferEnded
from kvferry.transports.errors import PeerLostError
from kvferry.transports.registry import create_transport
from tests.support.gpu_pools import GpuPools
from tests.support.peers import HELD, Peer, Reader, peers, said

ROOT, PEER = Path(__file__).parents[2], "tests.transports.children.network_peer"
POOL_BYTES = 24 << 20

#: Cases: transport, options, mechanism. Bare `nixl` is on shared memory here, because it refuses TCP.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "shm": ("shm", {}, "mapped"),
    "zeromq": ("zeromq", {}, "tcp"),
    "tcp": ("tcp", {}, "tcp"),
    "ucx": ("ucx", {}, "ucx:tcp"),
    "nixl": ("nixl", {}, "nixl:UCX:^tcp"),
    "nixl-tcp": ("nixl", {"refuse_tcp": False, "tls": "tcp"}, "nixl:UCX:tcp"),
}

#: The pools of these are on a GPU. The rings have room for two slices.
TIGHT = {"slice_bytes": 1 << 20, "staging_bytes": 4 << 20}
CASES |= {f"{scheme}, staged": (scheme, TIGHT, "+staged") for scheme in ("zeromq", "tcp", "ucx")}

#: `peer_timeout_s` is 2 s of time in which this node handles events. The rest is a reserve for busy machines.
NOTICED_S = 4.0

UCX = pytest.param("ucx", marks=pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed"))

needs_nixl = pytest.mark.skipif(
    find_spec("nixl_cu12") is None and find_spec("nixl_cu13") is None, reason="NIXL is not installed"
)
NIXL = [pytest.param(case, marks=needs_nixl) for case in CASES if case.startswith("nixl")]

Start = Callable[..., Peer]
Owner = tuple[Peer, int]


class Node(Reader):
    """The node in this process."""

    def __init__(self, case: str) -> None:
        scheme, options, _ = CASES[case]
        super().__init__(create_transport(scheme, options), POOL_BYTES)

    def saw(self, kind: type[Event]) -> bool:
        return bool(self.of(kind))

    def read_whole(self, peer_id: int) -> TransferEnded:
        """Read the peer's whole pool, and check every byte."""
        self.memory[:] = 0
        ended = self.end_of(self.start_read(peer_id))
        assert ended.error is None
        assert self.has_pattern(POOL_BYTES)
        return ended


@pytest.fixture(params=["shm", "zeromq", "tcp", UCX, *NIXL])
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def node(case: str) -> Iterator[Node]:
    node = Node(case)
    yield node
    node.transport.close()


@pytest.fixture
def start(case: str) -> Iterator[Start]:
    """Start a peer process."""
    scheme, options, _ = CASES[case]
    with peers(cwd=ROOT) as start_peer:
        yield lambda *arguments, **more: start_peer(
            "-m", PEER, scheme, json.dumps({**options, **more}), *arguments
        )


@pytest.fixture(params=[signal.SIGKILL, signal.SIGSTOP])
def how(request: pytest.FixtureRequest, case: str) -> signal.Signals:
    """How a process is lost."""
    if case == "shm" and request.param == signal.SIGSTOP:
        pytest.skip("a read over shared memory needs nothing of a process that is stopped")
    return signal.Signals(request.param)


@pytest.fixture
def owner(node: Node, start: Start) -> Owner:
    """A process that serves its pool, and its peer id."""
    process = start("serve")
    return process, node.connect(said(process))


def test_bytes_are_transferred_and_the_mechanism_is_named(node: Node, owner: Owner, case: str) -> None:
    assert node.read_whole(owner[1]).mechanism == CASES[case][2]


def test_the_loss_of_an_owner_is_noticed_and_another_can_be_read(
    node: Node, owner: Owner, start: Start, how: signal.Signals
) -> None:
    """The owner goes during reads.

    Each read ends once, before the loss is reported, and nothing of it is left.
    """
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
    node.read_whole(node.connect(said(other)))


def test_the_death_of_an_owner_is_noticed_at_once(node: Node, owner: Owner) -> None:
    owner[0].kill()
    node.until(lambda: node.saw(PeerLost), 1.5)


def test_the_loss_of_a_reader_is_noticed(node: Node, start: Start, how: signal.Signals) -> None:
    process = start("connect", node.endpoint.listen(""))
    node.until(lambda: node.saw(Connected))
    assert said(process) == "connected"
    process.send_signal(how)
    node.until(lambda: node.saw(PeerLost), NOTICED_S)


@pytest.mark.parametrize("case", ["tcp", UCX, *NIXL], indirect=True)
def test_a_peer_that_is_idle_is_kept(node: Node, owner: Owner) -> None:
    deadline = time.monotonic() + 2.5
    while time.monotonic() < deadline:
        node.seen += node.endpoint.wait_events(0.5)
    assert not node.saw(PeerLost)
    node.read_whole(owner[1])


def test_a_node_that_was_paused_does_not_consider_its_peers_lost(node: Node, owner: Owner) -> None:
    """Its peers do not consider it lost either, if the pause is shorter than their timeout."""
    time.sleep(1.2)
    node.read_whole(owner[1])
    assert not node.saw(PeerLost)


@pytest.mark.parametrize("case", ["zeromq"], indirect=True)
def test_a_peer_is_kept_whose_owner_does_nothing(node: Node, owner: Owner) -> None:
    """ZeroMQ's own threads answer heartbeats."""
    time.sleep(2.5)
    node.read_whole(owner[1])
    assert not node.saw(PeerLost)


@pytest.mark.parametrize("case", ["zeromq"], indirect=True)
async def test_an_asyncio_program_can_own_a_transport(start: Start, case: str) -> None:
    """One executor thread owns the transport, and the event loop keeps running."""
    address = said(start("serve"))

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as thread:
        node = await loop.run_in_executor(thread, Node, case)
        peer_id = await loop.run_in_executor(
            thread, lambda: node.endpoint.start_connect(address, timeout_s=20)
        )
        while not node.saw(TransferEnded):
            events = await loop.run_in_executor(thread, node.endpoint.wait_events, 1.0)
            node.seen += events
            if any(isinstance(event, Connected) for event in events):
                await loop.run_in_executor(thread, node.start_read, peer_id)
        await loop.run_in_executor(thread, node.transport.close)
    ended = node.seen[-1]
    assert isinstance(ended, TransferEnded)
    assert ended.error is None


@pytest.mark.slow
@pytest.mark.full
def test_owners_that_are_killed_one_after_the_other_leave_nothing(node: Node, start: Start) -> None:
    """Everything that was held for the killed owners must be released. The leak checks count descriptors."""
    for _ in range(5):
        process = start("serve")
        peer_id = node.connect(said(process))
        node.start_read(peer_id)
        node.seen += node.endpoint.wait_events(0.02)
        process.kill()
        node.seen.clear()
        node.until(lambda: node.saw(PeerLost), NOTICED_S)


class TestPoolsOnGpus:
    """Both processes have their pools on a GPU.

    Whatever ends one, the other has all its staging buffers back.
    """

    @pytest.fixture(params=["zeromq", "tcp", UCX])
    def case(self, request: pytest.FixtureRequest) -> str:
        return f"{request.param}, staged"

    @pytest.fixture
    def node(self, gpu_pools: GpuPools, case: str) -> Iterator[Node]:
        node = Node(case)
        node.transport.guards.set(HELD.index, HELD.value)
        yield node
        node.transport.close()

    def test_an_owner_dies_between_gather_and_send(
        self, node: Node, start: Start, gpu_pools: GpuPools
    ) -> None:
        memory = np.frombuffer(node.arena.buffer, dtype=np.uint8)
        memory[:] = 5
        node.start_read(node.connect(said(start("serve", on_gpu="copied"))))
        node.until(lambda: node.saw(PeerLost), NOTICED_S)
        (ended,) = node.ends()
        assert isinstance(ended.error, PeerLostError)
        assert (memory == 5).all(), "nothing was sent"
        node.until(gpu_pools.are_idle, NOTICED_S)

    def test_a_reader_dies_between_receive_and_scatter(
        self, node: Node, start: Start, gpu_pools: GpuPools
    ) -> None:
        start("read", node.endpoint.listen(""), on_gpu="launched")
        node.until(lambda: node.saw(PeerLost))
        node.until(gpu_pools.are_idle, NOTICED_S)

    @pytest.mark.slow
    @pytest.mark.full
    def test_a_peer_freezes_that_reads_and_is_read(
        self, node: Node, start: Start, gpu_pools: GpuPools
    ) -> None:
        process = start("read", node.endpoint.listen(""), on_gpu="never")
        node.until(lambda: node.saw(Connected))
        (peer_id,) = (event.peer_id for event in node.seen if isinstance(event, Connected))
        ids = [node.start_read(peer_id) for _ in range(4)]
        node.until(lambda: len(node.ends()) >= 1)
        process.send_signal(signal.SIGSTOP)
        node.until(lambda: node.saw(PeerLost), NOTICED_S)
        assert sorted(event.transfer_id for event in node.ends()) == ids
        node.until(gpu_pools.are_idle, NOTICED_S)
        node.read_whole(node.connect(said(start("serve", on_gpu="never"))))
