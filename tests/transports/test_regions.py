"""Pools address their segments by consecutive offsets, and refuse regions that are not inside one segment."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transports import Pool, RegionPairs, Segment
from kvferry.transports.errors import RegionError

INT64 = st.integers(-(2**63), 2**63 - 1)
SEGMENTS = st.lists(
    st.builds(Segment, address=st.integers(1, 2**47), num_bytes=st.integers(1, 1000)), min_size=1, max_size=6
)


def addresses(pool: Pool, *regions: tuple[int, int]) -> list[int]:
    table = np.array(regions, dtype=np.int64).reshape(-1, 2)
    return [int(address) for address in pool.addresses(table[:, 0], table[:, 1])]


def test_segments_lie_end_to_end() -> None:
    pool = Pool([Segment(1000, 10), Segment(50, 5)])
    assert pool.num_bytes == 15
    assert [pool.segment_offset(index) for index in range(2)] == [0, 10]
    assert addresses(pool, (0, 10), (9, 1), (10, 5), (14, 1)) == [1000, 1009, 50, 54]
    assert pool.segment_indices(np.array([0, 9, 10, 14, 15])).tolist() == [0, 0, 1, 1, 2]


def test_no_regions_are_no_addresses() -> None:
    assert addresses(Pool([Segment(1, 1)])) == []


@pytest.mark.parametrize("segments", [[], [Segment(5, 0)], [Segment(5, 10), Segment(5, -1)]])
def test_a_pool_without_bytes_is_refused(segments: list[Segment]) -> None:
    with pytest.raises(RegionError):
        Pool(segments)


@given(SEGMENTS, INT64, INT64)
def test_a_region_that_is_not_in_one_segment_is_refused(
    segments: list[Segment], offset: int, num_bytes: int
) -> None:
    pool = Pool(segments)
    starts = [pool.segment_offset(index) for index in range(len(segments))]
    expected = [
        segment.address + offset - start
        for start, segment in zip(starts, segments, strict=True)
        if num_bytes > 0 and start <= offset and offset + num_bytes <= start + segment.num_bytes
    ]
    if expected:
        assert addresses(pool, (offset, num_bytes)) == expected
    else:
        with pytest.raises(RegionError):
            addresses(pool, (offset, num_bytes))


def test_the_error_names_the_first_bad_region() -> None:
    with pytest.raises(RegionError, match=r"region 1 \(offset 8, 3 bytes\).*10 bytes"):
        addresses(Pool([Segment(0, 10)]), (0, 1), (8, 3), (99, 1))


def test_region_pairs_are_three_columns() -> None:
    pairs = RegionPairs(np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int64))
    assert len(pairs) == 2
    assert pairs.num_bytes == 9
    assert pairs.local_offsets.tolist() == [1, 4]
    assert pairs.remote_offsets.tolist() == [2, 5]
    assert pairs.lengths.tolist() == [3, 6]


@pytest.mark.parametrize(
    "table", [np.zeros((2, 2), np.int64), np.zeros(3, np.int64), np.zeros((2, 3), np.int32)]
)
def test_other_tables_are_refused(table: np.ndarray) -> None:
    with pytest.raises(RegionError):
        RegionPairs(table)
