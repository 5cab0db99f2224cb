"""A pool on a GPU that another process maps: reads are right and ordered with kernels, also when the producer dies.

`tests/transports/test_cuda_ipc.py` tests the same code without a GPU, with a stand-in for the driver.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.connector.computed import mark_computed
from kvferry.connector.handoff.events import GroupBlocks, RemoteOffer
from kvferry.connector.metadata import HandoffMetadata
from kvferry.connector.options import ConnectorOptions
from kvferry.connector.testing import CacheShape, engine_config
from kvferry.connector.worker_half import HandoffWorker
from kvferry.transports.base import Connected, Event, PeerLost, TransferEnded
from kvferry.transports.regions import Guard, Pool, Segment
from kvferry.transports.shm import SharedMemoryTransport
from kvferry.transports.testing import pairs_of

PROGRAM = Path(__file__).parent / "children" / "gpu_producer.py"
POOL_BYTES = 64 << 20
HELD = Guard(3, 9)
SHAPE = CacheShape(dtype=torch.float32)
ABOUT_A_SECOND = 1 << 30  # in cycles

Start = Callable[[str, str], tuple["subprocess.Popen[str]", dict[str, Any]]]

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this test needs two CUDA devices")
BOTH_PLACES = [
    pytest.param("cuda:0", id="one GPU"),
    pytest.param("cuda:1", id="two GPUs", marks=two_gpus),
]


@pytest.fixture
def start() -> Iterator[Start]:
    """`(role, device)` → a producer process, and the JSON object that it prints."""
    children: list[subprocess.Popen[str]] = []

    def start(role: str, device: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        command = [sys.executable, str(PROGRAM), role, device]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None
        return child, json.loads(child.stdout.readline())

    yield start
    for child in children:
        child.kill()
        child.communicate()


class Reader:
    """A transport with a pool on GPU 0."""

    def __init__(self) -> None:
        self.memory = torch.zeros(POOL_BYTES, dtype=torch.uint8, device="cuda:0")
        torch.cuda.synchronize()
        self.transport = SharedMemoryTransport()
        self.endpoint = self.transport.register(Pool([Segment(self.memory.data_ptr(), POOL_BYTES, "cuda")]))
        self.seen: list[Event] = []

    def until(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not is_done():
            assert time.monotonic() < deadline, f"only {self.seen}"
            self.seen += self.endpoint.wait_events(0.1)

    def connect(self, address: str) -> int:
        peer_id = self.endpoint.start_connect(address, timeout_s=60)
        self.until(lambda: any(getattr(event, "peer_id", 0) == peer_id for event in self.seen))
        assert Connected(peer_id, incoming=False) in self.seen, self.seen
        return peer_id

    def start_read(self, peer_id: int, *rows: tuple[int, int, int]) -> int:
        return self.endpoint.start_read(peer_id, pairs_of(*rows), HELD, timeout_s=60)

    def ends(self) -> list[TransferEnded]:
        return [event for event in self.seen if isinstance(event, TransferEnded)]


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.transport.close()


def pattern(first: int, num_bytes: int) -> torch.Tensor:
    return (torch.arange(first, first + num_bytes) * 7 % 251).to(torch.uint8)


@pytest.mark.parametrize("device", BOTH_PLACES)
def test_bytes_of_another_process_arrive(device: str, start: Start, reader: Reader) -> None:
    peer_id = reader.connect(start("pool", device)[1]["address"])
    reader.start_read(peer_id, (5, 1000, POOL_BYTES - 2000))
    reader.until(lambda: len(reader.ends()) == 1)
    assert (reader.ends()[0].error, reader.ends()[0].mechanism) == (None, "cuda_ipc")
    assert torch.equal(reader.memory[5 : POOL_BYTES - 1995].cpu(), pattern(1000, POOL_BYTES - 2000))


@pytest.mark.parametrize("device", BOTH_PLACES)
def test_scattered_regions_arrive_in_their_places(device: str, start: Start, reader: Reader) -> None:
    peer_id = reader.connect(start("pool", device)[1]["address"])
    rows = [(slot * 8192, (2047 - slot) * 4096, 512 + slot) for slot in range(2048)]
    reader.start_read(peer_id, *rows)
    reader.until(lambda: len(reader.ends()) == 1)
    assert reader.ends()[0].error is None
    memory = reader.memory.cpu()
    for local, remote, num_bytes in rows:
        assert torch.equal(memory[local : local + num_bytes], pattern(remote, num_bytes))
        assert not memory[local + num_bytes : local + 8192].any()


def test_a_producer_that_is_killed_during_reads_delivers_only_right_bytes(
    start: Start, reader: Reader
) -> None:
    child, told = start("pool", "cuda:0")
    peer_id = reader.connect(told["address"])
    ids = [reader.start_read(peer_id, (0, 0, POOL_BYTES)) for _ in range(64)]
    reader.until(lambda: bool(reader.ends()))
    child.send_signal(signal.SIGKILL)
    reader.until(lambda: any(isinstance(event, PeerLost) for event in reader.seen))
    assert sorted(ended.transfer_id for ended in reader.ends()) == ids
    assert torch.equal(reader.memory.cpu(), pattern(0, POOL_BYTES)) or reader.ends()[-1].error is not None
    # The GPU still works in this process, and another producer can be read.
    again = reader.connect(start("pool", "cuda:0")[1]["address"])
    reader.memory.zero_()
    torch.cuda.synchronize()
    reader.start_read(again, (0, 0, POOL_BYTES))
    reader.until(lambda: len(reader.ends()) == len(ids) + 1)
    assert reader.ends()[-1].error is None
    assert torch.equal(reader.memory.cpu(), pattern(0, POOL_BYTES))


def test_a_mark_is_passed_once_all_earlier_kernels_have_run() -> None:
    device = torch.device("cuda:0")
    torch.cuda._sleep(ABOUT_A_SECOND)  # type: ignore[no-untyped-call]
    is_computed = mark_computed(device)
    assert not is_computed()
    torch.cuda.synchronize()
    assert is_computed()


@pytest.mark.parametrize("device", BOTH_PLACES)
def test_a_load_never_races_a_forward_pass(device: str, start: Start) -> None:
    """The producer still computes the offered blocks, and this process still writes the blocks that it loads into."""
    told = start("offer", device)[1]
    config = SHAPE.kv_cache_config()
    worker = HandoffWorker(engine_config("shm"), config, SharedMemoryTransport(), ConnectorOptions())
    try:
        num_bytes = sum(tensor.size for tensor in config.kv_cache_tensors)
        pool = worker.allocate_kv_memory(num_bytes, torch.device("cuda:0")).view(SHAPE.dtype)
        cache = pool.view(SHAPE.num_blocks, SHAPE.num_layers, *SHAPE.logical_page).transpose(0, 1)
        worker.register_cross_layers_kv_cache(cache)
        torch.cuda._sleep(ABOUT_A_SECOND)  # type: ignore[no-untyped-call]
        cache[:, 3:5] = 2.0
        offer = RemoteOffer(
            "producer", told["epoch"], "p", 1, (told["address"],), 2 * SHAPE.block_size, ((1, 2),)
        )
        worker.submit(HandoffMetadata(claims={"d": offer}, loads={"d": (GroupBlocks(0, (3, 4)),)}))
        deadline = time.monotonic() + 60
        while "d" not in worker.get_finished()[1]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert worker.take_load_errors() == {}
        assert (cache[:, 3:5] == 7.0).all()
    finally:
        worker.shutdown()
