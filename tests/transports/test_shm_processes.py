"""`shm` between real processes, which read each other, die, are stopped, and run as other users."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvferry.transports import Guard, PeerLost, Pool, RegionPairs, Segment, TransferEnded
from kvferry.transports.errors import PeerLostError, PeerRefusedError, StaleRegionError, TransferTimeoutError
from kvferry.transports.shm import SharedMemoryTransport
from tests.support.patience import DEADLINE_S
from tests.support.peers import HELD, Peer, Reader, peers, said

PROGRAM = Path(__file__).parent / "children" / "shm_peer.py"
PART_BYTES = 8 << 20
NOBODY = 65534

Start = Callable[..., tuple[Peer, str]]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a peer process. Returns it, and the first line that it prints."""
    with peers() as start_peer:

        def start(*arguments: str) -> tuple[Peer, str]:
            return (peer := start_peer(str(PROGRAM), *arguments)), said(peer)

        yield start


class ShmReader(Reader):
    """The reading side, with a pool of three parts."""

    def __init__(self, transport: SharedMemoryTransport) -> None:
        super().__init__(transport, 3 * PART_BYTES)

    def start(self, peer_id: int, num_bytes: int, guard: Guard = HELD) -> int:
        starts = np.arange(0, num_bytes, PART_BYTES)
        table = np.stack([starts, starts, np.minimum(num_bytes - starts, PART_BYTES)], axis=1)
        return self.endpoint.start_read(peer_id, RegionPairs(table), guard, timeout_s=20)

    def read(self, peer_id: int, num_bytes: int, guard: Guard = HELD) -> TransferEnded:
        return self.end_of(self.start(peer_id, num_bytes, guard))


@pytest.fixture
def reader() -> Iterator[ShmReader]:
    reader = ShmReader(SharedMemoryTransport())
    yield reader
    reader.transport.close()


@pytest.mark.parametrize(
    ("kind", "mechanism"),
    [("arena", "mapped"), ("foreign", "process_vm_readv"), ("arena+foreign+arena", "process_vm_readv")],
)
def test_a_pool_is_read_across_processes(
    start: Start, reader: ShmReader, kind: str, mechanism: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, address = start("serve", kind)
    peer_id = reader.connect(address)
    num_bytes = PART_BYTES * len(kind.split("+"))
    with caplog.at_level(logging.WARNING):
        ended = reader.read(peer_id, num_bytes)
        reader.read(peer_id, num_bytes)
    assert ended.error is None
    assert ended.mechanism == mechanism
    assert reader.has_pattern(num_bytes)
    warnings = [record for record in caplog.records if "process_vm_readv" in record.message]
    assert len(warnings) == (mechanism == "process_vm_readv")
    assert isinstance(reader.read(peer_id, num_bytes, Guard(3, 10)).error, StaleRegionError)


def test_a_killed_peer_is_lost_at_once(start: Start, reader: ShmReader) -> None:
    process, address = start("serve", "arena")
    peer_id = reader.connect(address)
    process.kill()
    killed = time.monotonic()
    reader.until(lambda: bool(reader.of(PeerLost)))
    assert time.monotonic() - killed < 2.0
    assert reader.of(PeerLost)[0].peer_id == peer_id
    assert isinstance(reader.of(PeerLost)[0].error, PeerLostError)


@pytest.mark.parametrize("kind", ["arena", "foreign"])
def test_if_a_peer_is_killed_during_reads_each_of_them_ends_once(
    start: Start, reader: ShmReader, kind: str
) -> None:
    process, address = start("serve", kind)
    peer_id = reader.connect(address)
    started = [reader.start(peer_id, PART_BYTES) for _ in range(30)]
    process.kill()
    process.wait()
    started += [reader.start(peer_id, PART_BYTES) for _ in range(3)]
    reader.until(lambda: bool(reader.of(PeerLost)))
    assert isinstance(reader.seen[-1], PeerLost)
    assert sorted(end.transfer_id for end in reader.ends()) == started
    assert all(end.error is None or isinstance(end.error, PeerLostError) for end in reader.ends())
    if kind == "foreign":
        assert isinstance(reader.ends()[-1].error, PeerLostError)


def test_many_threads_read_the_memory_of_one_process_at_once(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    _, address = start("serve", "foreign")
    reader = ShmReader(SharedMemoryTransport({"copy_threads": 8}))
    try:
        peer_id = reader.connect(address)
        with caplog.at_level(logging.WARNING):
            started = [reader.start(peer_id, 1) for _ in range(2000)]
            reader.until(lambda: len(reader.ends()) == len(started))
        assert [end.error for end in reader.ends() if end.error is not None] == []
        assert len(caplog.records) == 1
    finally:
        reader.transport.close()


@pytest.mark.parametrize("kind", ["arena", "foreign"])
def test_a_stopped_peer_can_still_be_read(start: Start, reader: ShmReader, kind: str) -> None:
    process, address = start("serve", kind)
    peer_id = reader.connect(address)
    process.send_signal(signal.SIGSTOP)
    assert reader.read(peer_id, PART_BYTES).error is None
    assert reader.has_pattern(PART_BYTES)


def test_connecting_to_a_stopped_peer_times_out(start: Start, reader: ShmReader) -> None:
    process, address = start("serve", "arena")
    process.send_signal(signal.SIGSTOP)
    reader.endpoint.start_connect(address, timeout_s=0.2)
    reader.until(lambda: bool(reader.of(PeerLost)), timeout_s=5)
    assert isinstance(reader.of(PeerLost)[0].error, TransferTimeoutError)


def test_a_killed_reader_is_lost_at_once(start: Start, reader: ShmReader) -> None:
    process, _ = start("connect", reader.endpoint.listen(""))
    reader.until(lambda: bool(reader.seen))
    process.kill()
    killed = time.monotonic()
    reader.until(lambda: bool(reader.of(PeerLost)))
    assert time.monotonic() - killed < 2.0


def test_a_peer_that_closes_ends_its_process(start: Start, reader: ShmReader) -> None:
    process, address = start("serve", "arena")
    reader.connect(address)
    process.communicate(timeout=20)
    assert process.returncode == 0
    reader.until(lambda: bool(reader.of(PeerLost)))


@needs_root
def test_a_listener_of_another_user_is_refused(start: Start, reader: ShmReader) -> None:
    _, address = start("serve", "arena", str(NOBODY))
    reader.endpoint.start_connect(address, timeout_s=20)
    reader.until(lambda: bool(reader.of(PeerLost)))
    assert isinstance(reader.of(PeerLost)[0].error, PeerRefusedError)
    assert str(NOBODY) in str(reader.of(PeerLost)[0].error)


@needs_root
def test_a_connection_from_another_user_is_refused(
    start: Start, reader: ShmReader, caplog: pytest.LogCaptureFixture
) -> None:
    address = reader.endpoint.listen("")
    command = [sys.executable, str(PROGRAM), "read", address, str(NOBODY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        reader.until(lambda: process.poll() is not None)
        assert process.stdout is not None
        assert process.stdout.read().startswith("PeerLostError")
    assert reader.seen == []
    assert "runs as user 65534" in caplog.text


@needs_root
def test_an_allowed_user_is_served(start: Start) -> None:
    _, address = start("serve", "arena", str(NOBODY))
    reader = ShmReader(SharedMemoryTransport({"allowed_uids": [NOBODY]}))
    try:
        assert reader.read(reader.connect(address), PART_BYTES).error is None
        assert reader.has_pattern(PART_BYTES)
    finally:
        reader.transport.close()


@needs_root
def test_memory_that_may_not_be_read_is_a_clear_error() -> None:
    """A pool of root's ordinary memory, read by another user's process."""
    transport = SharedMemoryTransport({"allowed_uids": [NOBODY]})
    values = np.ones(PART_BYTES, dtype=np.uint8)
    endpoint = transport.register(Pool([Segment(values.ctypes.data, PART_BYTES)]))
    transport.guards.set(3, 9)
    command = [sys.executable, str(PROGRAM), "read", endpoint.listen(""), str(NOBODY)]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stderr=subprocess.PIPE) as process:
            deadline = time.monotonic() + DEADLINE_S
            while process.poll() is None and time.monotonic() < deadline:
                endpoint.wait_events(0.1)
            assert process.stdout is not None
            answer = process.stdout.read()
    finally:
        transport.close()
    assert answer.startswith("PeerRefusedError")
    assert "CAP_SYS_PTRACE" in answer
