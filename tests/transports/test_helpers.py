"""The helpers for authors of transports: addresses, what is served, encodings, slices, and the poller."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transports import (
    Guard,
    Pool,
    RegionPairs,
    ServedPool,
    SliceLimits,
    SlicePlan,
    WordTable,
    decode_rows,
    decode_sizes,
    encode_rows,
    encode_sizes,
    private_arena,
)
from kvferry.transports.errors import ConfigurationError, ProtocolError
from kvferry.transports.movers import HostMover
from kvferry.transports.network import HostPort
from kvferry.transports.regions import Int64Array
from kvferry.transports.streams import Poller

PAGE = 4096


def rows_of(*rows: tuple[int, int]) -> Int64Array:
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


@pytest.mark.parametrize("text", ["x://10.0.0.1:5555", "x://[fe80::1%eth0]:1", "x://node-3:65535"])
def test_an_address_reads_as_it_is_written(text: str) -> None:
    assert f"x://{HostPort.parse(text, 'x')}" == text


@pytest.mark.parametrize(
    "text",
    ["x://", "x://host", "x://:1", "x://host:65536", "x://host:1/path", "x://user@host:1", "x://host;ipc:1"]
    + ["x://host:1?a=b", "x://host:1#a", "y://host:1", "x://[::1:1", "host:1", ""],
)
def test_a_malformed_address_is_named(text: str) -> None:
    with pytest.raises(ConfigurationError, match="x://host:port") as caught:
        HostPort.parse(text, "x")
    assert caught.value.value == text


def test_bytes_are_taken_out_of_a_pool_and_put_into_it() -> None:
    arena = private_arena(PAGE)
    served = ServedPool(Pool([arena.segment]), WordTable.anonymous(8), HostMover(0))
    served.guards.set(3, 7)
    rows = rows_of((10, 2), (20, 3))
    addresses = served.locate(rows, Guard(3, 7))
    served.write(addresses, rows[:, 1], b"abcde")
    assert bytes(arena.buffer[10:12]) + bytes(arena.buffer[20:23]) == b"abcde"
    assert served.read(addresses, rows[:, 1]) == b"abcde"
    for data in (b"", b"abcd", b"abcdef"):
        with pytest.raises(ProtocolError):
            served.write(addresses, rows[:, 1], data)
    assert served.read(addresses, rows[:, 1]) == b"abcde"


@pytest.mark.parametrize(
    ("rows", "guard"),
    [
        ([(0, PAGE + 1)], Guard(3, 7)),
        ([(-1, 1)], Guard(3, 7)),
        ([(2**62, 2**62)], Guard(3, 7)),
        ([(0, 1)], Guard(8, 7)),
        ([(0, 1)], Guard(-1, 7)),
        ([(0, 1)], Guard(3, 0)),
    ],
)
def test_a_request_outside_the_pool_or_the_table_is_refused(
    rows: list[tuple[int, int]], guard: Guard
) -> None:
    arena = private_arena(PAGE)
    with pytest.raises(ProtocolError):
        ServedPool(Pool([arena.segment]), WordTable.anonymous(8), HostMover(0)).locate(rows_of(*rows), guard)


def test_sizes_and_rows_are_decoded_as_they_were_encoded() -> None:
    assert decode_sizes(encode_sizes((1, 2**60 - 1))) == (1, 2**60 - 1)
    rows = rows_of((5, 6), (2**62, 1))
    assert np.array_equal(decode_rows(encode_rows(rows), max_rows=2, max_bytes=7), rows)
    assert decode_rows(b"", max_rows=2, max_bytes=7).shape == (0, 2)


@given(st.binary(max_size=100))
def test_garbage_is_refused_and_nothing_else(data: bytes) -> None:
    for decode in (decode_sizes, lambda d: decode_rows(d, max_rows=4, max_bytes=100)):
        try:
            decode(data)
        except ProtocolError:
            pass


@given(
    st.lists(st.integers(1, 300), max_size=40),
    st.integers(1, 100),
    st.integers(1, 5),
    st.sampled_from([40, 1 << 62]),
)
def test_slices_cover_a_read_once_and_stay_below_twice_their_size(
    lengths: list[int], slice_bytes: int, max_rows: int, alone_bytes: int
) -> None:
    offsets = np.cumsum([0, *lengths])[:-1]
    pairs = RegionPairs(
        np.stack([offsets, offsets + 1000, np.array(lengths)], axis=1).astype(np.int64).reshape(-1, 3)
    )
    targets = pairs.local_offsets.astype(np.uint64)
    plan = SlicePlan.of(pairs, targets, SliceLimits(slice_bytes, max_rows, alone_bytes))
    covered: list[int] = []
    for index in range(len(plan)):
        rows, addresses = plan.rows_of(index), plan.targets_of(index)
        assert 0 < len(rows) <= max_rows
        assert rows[:, 1].sum() < 2 * slice_bytes
        assert len(rows) == 1 or rows[:, 1].max() < alone_bytes
        for (offset, num_bytes), address in zip(rows.tolist(), addresses.tolist(), strict=True):
            assert offset == address + 1000
            covered += range(address, address + num_bytes)
    assert covered == list(range(sum(lengths)))
    assert len(plan.rows_of(len(plan))) == 0


def test_a_call_from_another_thread_ends_the_wait_and_is_made_in_the_owner_s() -> None:
    poller = Poller()
    callers: list[threading.Thread] = []
    other = threading.Thread(
        target=poller.call_soon, args=(lambda: callers.append(threading.current_thread()),)
    )
    other.start()
    while not callers:
        assert poller.poll(20)
    other.join()
    assert callers == [threading.current_thread()]
    poller.close()
    poller.call_soon(callers.clear)
    assert callers
