"""The copy loop, compiled and in plain Python, writes exactly the right bytes."""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.transports import _copy_python, copying

# Imported dynamically, because mypy finds its stub only next to the compiled file, which needs a compiler.
native = importlib.import_module("kvferry.transports._native") if copying.IS_COMPILED else None
needs_native = pytest.mark.skipif(native is None, reason="kvferry was installed without a C compiler")

COPIES = [
    pytest.param(copying.copy_regions, id="chosen"),
    pytest.param(_copy_python.copy_regions, id="python"),
]
GATHERS = [
    pytest.param(copying.gather_regions, copying.scatter_regions, id="chosen"),
    pytest.param(_copy_python.gather_regions, _copy_python.scatter_regions, id="python"),
]
LOCATES = [
    pytest.param(copying.locate_regions, id="chosen"),
    pytest.param(_copy_python.locate_regions, id="python"),
]
READS = [
    pytest.param(copying.read_regions_of, id="chosen"),
    pytest.param(_copy_python.read_regions_of, id="python"),
]

# Lengths around every threshold of the loop: its unit of 64 to 256 bytes, and the length from which it
# streams.
LENGTHS = st.one_of(st.integers(1, 300), st.integers(2000, 2700), st.integers(60_000, 70_000))


def words(*values: int) -> npt.NDArray[np.uint64]:
    return np.array(values, dtype=np.uint64)


@pytest.mark.parametrize("copy", COPIES)
@given(st.lists(st.tuples(LENGTHS, st.integers(0, 130), st.integers(0, 130)), min_size=1, max_size=8))
@settings(deadline=None, max_examples=100)
def test_regions_are_copied_to_the_byte(copy: object, rows: list[tuple[int, int, int]]) -> None:
    sizes = [length + 260 for length, _, _ in rows]
    starts = np.cumsum([0, *sizes[:-1]])
    source = np.random.default_rng(0).integers(0, 256, sum(sizes), dtype=np.uint8)
    target = np.zeros(sum(sizes), dtype=np.uint8)
    expected = target.copy()
    regions = []
    for start, (length, dst, src) in zip(starts.tolist(), rows, strict=True):
        expected[start + dst : start + dst + length] = source[start + src : start + src + length]
        regions.append((target.ctypes.data + start + dst, source.ctypes.data + start + src, length))
    dst_addresses, src_addresses, lengths = (words(*column) for column in zip(*regions, strict=True))
    copy(dst_addresses, src_addresses, lengths.astype(np.int64))  # type: ignore[operator]
    assert np.array_equal(target, expected)


@pytest.mark.parametrize(("gather", "scatter"), GATHERS)
@given(st.lists(st.tuples(LENGTHS, st.integers(0, 130)), max_size=8))
@settings(deadline=None, max_examples=50)
def test_regions_are_gathered_end_to_end_and_scattered_again(
    gather: object, scatter: object, rows: list[tuple[int, int]]
) -> None:
    table = np.array(rows, dtype=np.int64).reshape(-1, 2)  # its columns are not contiguous
    lengths, gaps = table[:, 0], table[:, 1]
    offsets = np.cumsum(lengths + gaps) - lengths
    source = np.random.default_rng(0).integers(0, 256, int(table.sum()) + 1, dtype=np.uint8)
    stage, target = np.zeros(int(lengths.sum()) + 1, dtype=np.uint8), np.zeros_like(source)
    gather(stage.ctypes.data, source.ctypes.data + offsets.astype(np.uint64), lengths)  # type: ignore[operator]
    pieces = [source[at : at + length] for at, length in zip(offsets, lengths, strict=True)]
    assert stage.tobytes() == b"".join(piece.tobytes() for piece in pieces) + b"\0"
    scatter(target.ctypes.data + offsets.astype(np.uint64), stage.ctypes.data, lengths)  # type: ignore[operator]
    expected = np.zeros_like(source)
    for at, piece in zip(offsets, pieces, strict=True):
        expected[at : at + len(piece)] = piece
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("locate", LOCATES)
@pytest.mark.parametrize(
    ("bad", "num_bytes"),
    [
        (0, 0),
        (0, -1),
        (-1, 1),
        (9, 2),
        (10, 6),
        (15, 1),
        (2**63 - 1, 2**63 - 1),
        (-(2**63), 2**63 - 1),
        (14, 2),
    ],
)
def test_regions_are_located_up_to_the_first_one_outside_the_segments(
    locate: object, bad: int, num_bytes: int
) -> None:
    ends, shifts = np.array([10, 15]), words(1000, 2**64 - 10)  # the second segment is at address 0
    table = np.array([[0, 10], [10, 5], [bad, num_bytes], [9, 1]])
    addresses = words(*range(4))
    assert locate(addresses, table[:, 0], table[:, 1], ends, shifts) == 2  # type: ignore[operator]
    assert addresses[:2].tolist() == [1000, 0]
    table = table[[0, 1, 3]]
    assert locate(addresses[:3], table[:, 0], table[:, 1], ends, shifts) == 3  # type: ignore[operator]
    assert addresses[:3].tolist() == [1000, 0, 1009]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 3000])
def test_memory_of_a_process_is_read_in_batches(read: object, count: int) -> None:
    source = np.random.default_rng(0).integers(0, 256, count * 16, dtype=np.uint8)
    target = np.zeros_like(source)
    offsets = np.random.default_rng(1).permutation(count).astype(np.uint64) * 16
    lengths = np.full(count, 11, dtype=np.int64)
    read(os.getpid(), target.ctypes.data + offsets, source.ctypes.data + offsets, lengths)  # type: ignore[operator]
    expected = source.reshape(count, 16).copy()
    expected[:, 11:] = 0
    assert np.array_equal(target.reshape(count, 16), expected)


@pytest.mark.parametrize("read", READS)
def test_unmapped_memory_is_an_error(read: object) -> None:
    target = np.zeros(64, dtype=np.uint8)
    arguments = (words(target.ctypes.data), words(8), np.array([64], dtype=np.int64))
    with pytest.raises(OSError, match="Bad address") as caught:
        read(os.getpid(), *arguments)  # type: ignore[operator]
    assert caught.value.errno == errno.EFAULT
    with pytest.raises(ProcessLookupError):
        read(2**30, *arguments)  # type: ignore[operator]


@pytest.mark.parametrize("add", [copying.sum_lengths, _copy_python.sum_lengths], ids=["chosen", "python"])
def test_lengths_from_a_peer_are_added_up_only_if_all_are_in_bounds(
    add: Callable[[npt.NDArray[np.int64], int], int],
) -> None:
    most = 2**62
    for lengths in ([], [1], [3, 5], [2**61, 2**61], [most]):
        assert add(np.array(lengths, dtype=np.int64), most) == sum(lengths)
    for lengths in ([0], [-1], [5, -3], [most + 1], [2**61] * 3, [2**63 - 1] * 3):
        assert add(np.array(lengths, dtype=np.int64), most) == -1


@pytest.mark.parametrize("add", [copying.sum_words, _copy_python.sum_words], ids=["chosen", "python"])
def test_words_are_added_up_as_numpy_does(add: object) -> None:
    table = np.array([[5, 2**62, -1], [7, 2**62, -(2**40)]])
    for column in (*table.T, table.ravel(), table[:0, 0]):
        assert add(column) == int(column.sum())  # type: ignore[operator]
    assert add(words(3, 4)) == 7  # type: ignore[operator]


def test_words_are_stored_and_loaded() -> None:
    table = np.zeros(3, dtype=np.int64)
    address = table.ctypes.data + 8
    for value in (0, 1, 2**63 - 1, 0):
        copying.store_word(address, value)
        assert table.tolist() == [0, value, 0]
        assert copying.load_word(address) == _copy_python.load_word(address) == value
    _copy_python.store_word(address, 5)
    assert copying.load_word(address) == 5


@needs_native
@pytest.mark.parametrize(
    ("dst", "src", "lengths"),
    [
        (np.zeros(2, np.uint64), np.zeros(1, np.uint64), np.zeros(1, np.int64)),
        (np.zeros(1, np.uint32), np.zeros(1, np.uint32), np.zeros(1, np.int32)),
        (np.zeros(1), np.zeros(1), np.zeros(1)),
        (np.zeros((2, 2), np.uint64), np.zeros(2, np.uint64), np.zeros(2, np.int64)),
        (np.uint64(0), np.uint64(0), np.int64(0)),
        (None, None, None),
    ],
)
def test_the_compiled_loop_takes_only_64_bit_integers(dst: object, src: object, lengths: object) -> None:
    assert native is not None
    with pytest.raises((ValueError, TypeError)):
        native.copy_regions(dst, src, lengths)


def test_without_the_compiled_loop_everything_works_and_a_warning_is_logged() -> None:
    """Runs in another interpreter, where the extension cannot be imported."""
    script = """
import sys
import threading
import time
sys.modules["kvferry.transports._native"] = None
import numpy as np
from kvferry.transports import Connected, Guard, Pool, RegionPairs, TransferEnded
from kvferry.transports.shm import SharedMemoryTransport
transports = SharedMemoryTransport({}), SharedMemoryTransport({})
arenas = [transport.allocate(8192) for transport in transports]
producer, consumer = [t.register(Pool([arena.segment])) for t, arena in zip(transports, arenas)]
arenas[0].buffer[:4] = b"good"
transports[0].guards.set(1, 1)
peer_id = consumer.start_connect(producer.listen(""), timeout_s=10)
seen = []
while not any(isinstance(event, Connected) for event in seen):
    producer.wait_events(0.01)
    seen = consumer.wait_events(0.01)
consumer.start_read(peer_id, RegionPairs(np.array([[0, 0, 4]])), Guard(1, 1), timeout_s=10)
(ended,) = consumer.wait_events(10)
print(ended.error, bytes(arenas[1].buffer[:4]))
for transport in transports:
    transport.close()
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "None b'good'", result.stderr
    assert "install a C compiler" in result.stderr


# -- copies on a stream of a GPU ------------------------------------------------------------------------

LAUNCHERS = [
    pytest.param(copying.copy_on_stream, id="chosen"),
    pytest.param(_copy_python.copy_on_stream, id="python"),
]
_MEMCPY = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_uint64,) * 4)


@pytest.mark.parametrize("copy_on_stream", LAUNCHERS)
def test_regions_are_launched_in_order_until_one_fails(copy_on_stream: Any) -> None:
    calls = []

    def launch(*arguments: int) -> int:
        calls.append(arguments)
        return 700 if len(calls) == 3 else 0

    function = _MEMCPY(launch)
    address = ctypes.cast(function, ctypes.c_void_p).value
    # Every second word of an array: the arrays need not be contiguous.
    targets, sources = (
        np.arange(1 << 40, (1 << 40) + 20, 2, dtype=np.uint64)[::2],
        np.arange(5, dtype=np.uint64),
    )
    lengths = np.arange(10, 15, dtype=np.int64)
    assert copy_on_stream(address, 1 << 50, targets, sources, lengths) == 700
    assert calls == [((1 << 40) + 4 * at, at, 10 + at, 1 << 50) for at in range(3)]


@pytest.mark.parametrize("copy_on_stream", LAUNCHERS)
def test_a_driver_that_takes_its_time_keeps_no_other_thread_from_running(copy_on_stream: Any) -> None:
    """`poll(NULL, 0, ms)` stands for the driver: a function with such arguments that takes long and returns
    0.
    """
    function = ctypes.cast(ctypes.CDLL(None).poll, ctypes.c_void_p).value
    zeros, lengths = np.zeros(4, dtype=np.uint64), np.full(4, 250, dtype=np.int64)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(copy_on_stream(function, 0, zeros, zeros, lengths)))
    thread.start()
    time.sleep(0.05)  # during the first call
    assert not seen
    thread.join()
    assert seen == [0]
