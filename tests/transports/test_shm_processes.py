"""`shm` between real processes: what it reads without their help, and which users' processes it serves.

What it has in common with the other transports is in `test_network_processes`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvferry.transports import PeerLost, Pool, RegionPairs, Segment
from kvferry.transports.errors import PeerLostError, PeerRefusedError, StaleRegionError
from kvferry.transports.regions import Guard
from kvferry.transports.shm import SharedMemoryTransport
from tests.support.peers import HELD, Node, Peer, Reader, peers, said

PROGRAM = Path(__file__).parent / "children" / "network_peer.py"
POOL_BYTES = 24 << 20
NOBODY = 65534
SEVERAL_USERS = {"allowed_uids": [0, NOBODY]}

#: No region may lie in two parts of a pool.
PART_BYTES = POOL_BYTES // 3
WHOLE = RegionPairs(np.array([(at, at, PART_BYTES) for at in range(0, POOL_BYTES, PART_BYTES)]))
BYTE = RegionPairs(np.array([(0, 0, 1)]))

Start = Callable[..., Peer]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a peer process."""
    with peers() as start_peer:
        yield lambda *task, **options: start_peer(str(PROGRAM), "shm", json.dumps(options), *task)


@pytest.fixture
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    """A node with the options of the parameter."""
    reader = Reader(SharedMemoryTransport(getattr(request, "param", {})), POOL_BYTES)
    yield reader
    reader.transport.close()


def start_read(reader: Reader, peer_id: int, pairs: RegionPairs = WHOLE, guard: Guard = HELD) -> int:
    return reader.endpoint.start_read(peer_id, pairs, guard, timeout_s=20)


def has_read(reader: Reader, peer_id: int) -> bool:
    """Read the whole pool of a peer. Returns whether its bytes have arrived."""
    return reader.end_of(start_read(reader, peer_id)).error is None and reader.has_pattern(POOL_BYTES)


@pytest.mark.parametrize(
    ("parts", "mechanism"),
    [("arena", "mapped"), ("foreign", "process_vm_readv"), ("arena+foreign+arena", "process_vm_readv")],
)
def test_a_pool_is_read_across_processes(
    start: Start, reader: Reader, parts: str, mechanism: str, caplog: pytest.LogCaptureFixture
) -> None:
    peer_id = reader.connect(said(start("serve", parts=parts)))
    with caplog.at_level(logging.WARNING):
        assert has_read(reader, peer_id)
        assert has_read(reader, peer_id)
    assert {end.mechanism for end in reader.ends()} == {mechanism}
    warnings = [record for record in caplog.records if "process_vm_readv" in record.message]
    assert len(warnings) == (mechanism == "process_vm_readv")
    stale = reader.end_of(start_read(reader, peer_id, guard=Guard(3, 10)))
    assert isinstance(stale.error, StaleRegionError)


def test_if_a_peer_is_killed_while_its_memory_is_copied_each_read_ends_once(
    start: Start, reader: Reader
) -> None:
    process = start("serve", parts="foreign")
    peer_id = reader.connect(said(process))
    started = [start_read(reader, peer_id) for _ in range(30)]
    process.kill()
    process.wait()
    started += [start_read(reader, peer_id) for _ in range(3)]
    reader.until(lambda: bool(reader.of(PeerLost)))
    assert isinstance(reader.seen[-1], PeerLost)
    assert sorted(end.transfer_id for end in reader.ends()) == started
    assert all(end.error is None or isinstance(end.error, PeerLostError) for end in reader.ends())
    assert isinstance(reader.ends()[-1].error, PeerLostError)


@pytest.mark.parametrize("reader", [{"copy_threads": 8}], indirect=True)
def test_many_threads_read_the_memory_of_one_process_at_once(
    start: Start, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    peer_id = reader.connect(said(start("serve", parts="foreign")))
    with caplog.at_level(logging.WARNING):
        started = [start_read(reader, peer_id, BYTE) for _ in range(2000)]
        reader.until(lambda: len(reader.ends()) == len(started))
    assert [end.error for end in reader.ends() if end.error is not None] == []
    assert len(caplog.records) == 1


@pytest.mark.parametrize("parts", ["arena", "foreign"])
def test_a_stopped_peer_can_still_be_read(start: Start, reader: Reader, parts: str) -> None:
    process = start("serve", parts=parts)
    peer_id = reader.connect(said(process))
    process.send_signal(signal.SIGSTOP)
    assert has_read(reader, peer_id)


@needs_root
def test_a_listener_of_another_user_is_refused(start: Start, reader: Reader) -> None:
    reader.endpoint.start_connect(said(start("serve", uid=NOBODY, **SEVERAL_USERS)), timeout_s=20)
    reader.until(lambda: bool(reader.of(PeerLost)))
    assert isinstance(reader.of(PeerLost)[0].error, PeerRefusedError)
    assert str(NOBODY) in str(reader.of(PeerLost)[0].error)


@needs_root
def test_a_connection_from_another_user_is_refused(
    start: Start, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    process = start("try", reader.endpoint.listen(""), uid=NOBODY, **SEVERAL_USERS)
    reader.until(lambda: process.poll() is not None)
    assert said(process).startswith("PeerLostError")
    assert reader.seen == []
    assert "runs as user 65534" in caplog.text


@needs_root
@pytest.mark.parametrize("reader", [SEVERAL_USERS], indirect=True)
def test_an_allowed_user_is_served(start: Start, reader: Reader) -> None:
    assert has_read(reader, reader.connect(said(start("serve", uid=NOBODY, **SEVERAL_USERS))))


@needs_root
def test_memory_that_may_not_be_read_is_a_clear_error(start: Start) -> None:
    """A pool of root's ordinary memory, read by another user's process."""
    values = np.ones(POOL_BYTES, dtype=np.uint8)
    owner = Node(SharedMemoryTransport(SEVERAL_USERS), Pool([Segment(values.ctypes.data, POOL_BYTES)]))
    owner.transport.guards.set(HELD.index, HELD.value)
    try:
        process = start("try", owner.endpoint.listen(""), uid=NOBODY, **SEVERAL_USERS)
        owner.until(lambda: process.poll() is not None)
    finally:
        owner.transport.close()
    assert process.stdout is not None
    answer = process.stdout.read()
    assert "PeerRefusedError" in answer
    assert "CAP_SYS_PTRACE" in answer
