"""Pools of two processes, on a GPU or in main memory, over each transport: bytes, layouts, and both
directions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvferry.transports import MessageReceived, PeerLost, RegionPairs
from kvferry.transports.errors import BackendUnavailableError
from tests.support.gpu_memory import NUM_SEGMENTS, SEGMENT_BYTES, PoolNode, StartChild, pattern

SCHEMES = ["tcp", "zeromq", "ucx", "nixl", "auto"]
#: Each pool serves the first half of each segment, and receives into the second.
HALF = SEGMENT_BYTES // 2
#: Size of a region, and regions per segment: whole blocks, or one layer's pages of many blocks.
LAYOUTS = {"uniform": (1 << 20, 3), "per-layer": (16 << 10, 200)}


def pairs_of(layout: str, seed: int) -> RegionPairs:
    """Choose different blocks on both sides.

    The last region of each segment is shorter, and its size is odd.
    """
    size, count = LAYOUTS[layout]
    random = np.random.default_rng(seed)
    rows = []
    for segment in range(NUM_SEGMENTS):
        slots = (random.permutation(HALF // size)[:count].tolist() for _ in range(2))
        for local, remote in zip(*slots, strict=True):
            at = segment * SEGMENT_BYTES
            rows.append((at + HALF + local * size, at + remote * size, size))
        rows[-1] = (rows[-1][0] + 3, rows[-1][1] + 500, size - 1001)
    return RegionPairs(np.array(rows, dtype=np.int64))


def place_of(kind: str, scheme: str, gpu_place: str) -> str:
    if kind == "GPU" and scheme == "nixl" and gpu_place == "stand-in":
        pytest.skip("NIXL reaches the memory of real GPUs only")
    return gpu_place if kind == "GPU" else "cpu"


@pytest.fixture(scope="module", params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["GPU", "CPU"])
def owner(
    request: pytest.FixtureRequest, scheme: str, gpu_place: str, start_lasting_child: StartChild
) -> Any:
    """A process with a pool on the GPU or in main memory. It serves all tests with the same parameters."""
    place = place_of(request.param, scheme, gpu_place)
    _, told = start_lasting_child("pool.py", place, scheme)
    return told


@pytest.fixture(params=["GPU", "CPU"])
def reader(
    request: pytest.FixtureRequest, scheme: str, owner: Any, gpu_place: str, gpu_driver: None
) -> Iterator[PoolNode]:
    place = place_of(request.param, scheme, gpu_place)
    try:
        node = PoolNode(place, scheme, SEGMENT_BYTES, NUM_SEGMENTS)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    yield node
    node.close()


def expected(before: Any, pairs: RegionPairs) -> Any:
    after = before.copy()
    for local, remote, num_bytes in pairs.table.tolist():
        after[local : local + num_bytes] = pattern(remote, num_bytes)
    return after


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_arrive_in_their_places_and_nowhere_besides(
    layout: str, scheme: str, owner: Any, reader: PoolNode, record_property: Any
) -> None:
    before = pattern(0, reader.num_bytes, seed=1)
    reader.write(before)
    pairs = pairs_of(layout, seed=1)
    ended = reader.end_of(reader.start_read(reader.connect(owner["address"]), pairs))
    assert ended.error is None
    record_property("mechanism", ended.mechanism)
    assert np.array_equal(reader.read(), expected(before, pairs))
    if scheme in ("tcp", "zeromq", "ucx"):
        assert ended.mechanism.endswith("+staged") == (reader.memories[0].segment.kind == "cuda")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_nodes_read_from_each_other_at_the_same_time(layout: str, owner: Any, reader: PoolNode) -> None:
    before = pattern(0, reader.num_bytes, seed=1)
    reader.write(before)
    peer_id = reader.connect(owner["address"])
    theirs, ours = pairs_of(layout, seed=2), pairs_of(layout, seed=3)
    reader.endpoint.send(peer_id, theirs.table.tobytes())
    ended = reader.end_of(reader.start_read(peer_id, ours))
    assert ended.error is None
    reader.until(lambda: any(isinstance(event, MessageReceived) for event in reader.seen))
    (answer,) = (event.message for event in reader.seen if isinstance(event, MessageReceived))
    assert answer.decode() == ""
    assert np.array_equal(reader.read(), expected(before, ours))


@pytest.mark.rehearsed
def test_an_owner_that_is_killed_during_staged_reads_costs_those_reads_alone(
    gpu_place: str, gpu_driver: None, start_child: StartChild
) -> None:
    child, told = start_child("pool.py", gpu_place, "tcp")
    node = PoolNode(gpu_place, "tcp", SEGMENT_BYTES, NUM_SEGMENTS)
    try:
        peer_id = node.connect(told["address"])
        pairs = pairs_of("uniform", seed=1)
        ids = [node.start_read(peer_id, pairs) for _ in range(8)]
        node.until(lambda: bool(node.ends()))
        child.kill()
        node.until(lambda: any(isinstance(event, PeerLost) for event in node.seen))
        assert sorted(ended.transfer_id for ended in node.ends()) == ids
        assert node.ends()[0].error is None
        # Every staging buffer is back, and the GPU still works: another owner can be read.
        again = node.connect(start_child("pool.py", gpu_place, "tcp")[1]["address"])
        node.write(np.zeros(node.num_bytes, dtype=np.uint8))
        assert node.end_of(node.start_read(again, pairs)).error is None
        assert np.array_equal(node.read(), expected(np.zeros(node.num_bytes, dtype=np.uint8), pairs))
    finally:
        node.close()
