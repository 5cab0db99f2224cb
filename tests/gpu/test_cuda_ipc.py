"""A pool on a GPU that another process maps: reads are right, also when the producer dies.

`tests/transports/test_cuda_ipc.py` tests the same code with a stand-in for the driver.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvferry.connector.p2p.computed import mark_computed
from kvferry.transports import PeerLost, cuda_copies
from kvferry.transports.testing import pairs_of
from tests.support.gpu_memory import NUM_SEGMENTS, SEGMENT_BYTES, PoolNode, StartChild, pattern
from tests.support.gpu_offers import sleep_on

POOL_BYTES = NUM_SEGMENTS * SEGMENT_BYTES

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this test needs two CUDA devices")
BOTH_PLACES = [
    pytest.param("", id="one GPU"),
    pytest.param("cuda:1", id="two GPUs", marks=two_gpus),
]


@pytest.fixture
def reader(gpu_place: str, gpu_driver: None) -> Iterator[PoolNode]:
    node = PoolNode(gpu_place, "shm", SEGMENT_BYTES, NUM_SEGMENTS)
    yield node
    node.close()


@pytest.mark.parametrize("place", BOTH_PLACES)
def test_bytes_of_another_process_arrive(
    place: str, gpu_place: str, start_child: StartChild, reader: PoolNode
) -> None:
    peer_id = reader.connect(start_child("pool.py", place or gpu_place, "shm")[1]["address"])
    ended = reader.end_of(reader.start_read(peer_id, pairs_of((5, 1000, SEGMENT_BYTES - 2000))))
    assert (ended.error, ended.mechanism) == (None, "cuda_ipc")
    assert np.array_equal(reader.read()[5 : SEGMENT_BYTES - 1995], pattern(1000, SEGMENT_BYTES - 2000))


@pytest.fixture(params=["by a kernel", "one by one"])
def launching_reader(
    request: pytest.FixtureRequest, gpu_place: str, gpu_driver: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PoolNode]:
    """A reader that has a kernel for small regions, or has no compiler for one."""
    if request.param == "one by one":
        monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    cuda_copies._compiled.cache_clear()
    node = PoolNode(gpu_place, "shm", SEGMENT_BYTES, NUM_SEGMENTS)
    yield node
    node.close()


@pytest.mark.parametrize("place", BOTH_PLACES)
def test_scattered_regions_arrive_in_their_places(
    place: str, gpu_place: str, start_child: StartChild, launching_reader: PoolNode
) -> None:
    reader = launching_reader
    peer_id = reader.connect(start_child("pool.py", place or gpu_place, "shm")[1]["address"])
    rows = [(slot * 8192, (2047 - slot) * 4096, 512 + slot) for slot in range(2048)]
    assert reader.end_of(reader.start_read(peer_id, pairs_of(*rows))).error is None
    memory = reader.read()
    for local, remote, num_bytes in rows:
        assert np.array_equal(memory[local : local + num_bytes], pattern(remote, num_bytes))
        assert not memory[local + num_bytes : local + 8192].any()


def test_a_producer_that_is_killed_during_reads_delivers_only_right_bytes(
    gpu_place: str, start_child: StartChild, reader: PoolNode
) -> None:
    everything = pairs_of(*((at, at, SEGMENT_BYTES) for at in range(0, POOL_BYTES, SEGMENT_BYTES)))
    child, told = start_child("pool.py", gpu_place, "shm")
    peer_id = reader.connect(told["address"])
    ids = [reader.start_read(peer_id, everything) for _ in range(64)]
    reader.until(lambda: bool(reader.ends()))
    child.send_signal(signal.SIGKILL)
    reader.until(lambda: any(isinstance(event, PeerLost) for event in reader.seen))
    assert sorted(ended.transfer_id for ended in reader.ends()) == ids
    expected = pattern(0, POOL_BYTES)
    assert np.array_equal(reader.read(), expected) or reader.ends()[-1].error is not None
    # The GPU still works in this process, and another producer can be read.
    again = reader.connect(start_child("pool.py", gpu_place, "shm")[1]["address"])
    reader.write(np.zeros(POOL_BYTES, dtype=np.uint8))
    assert reader.end_of(reader.start_read(again, everything)).error is None
    assert np.array_equal(reader.read(), expected)


def test_a_mark_is_over_once_all_earlier_kernels_have_run() -> None:
    device = torch.device("cuda:0")
    sleep_on(device)
    mark = mark_computed(device)
    assert not mark.is_over()
    busy_s = time.thread_time()
    mark.wait()
    assert mark.is_over()
    # The thread slept: it did not ask the GPU again and again.
    assert time.thread_time() - busy_s < 0.01
