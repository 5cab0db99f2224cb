"""The bytes of blocks, which an owner lets peers read, against sets of bytes and against plans."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvferry.connector.planning.extents import BlockExtents
from kvferry.connector.planning.layout import KVLayout, LayerLayout, per_layer_layout, uniform_layout
from kvferry.connector.planning.plan import plan
from kvferry.transports.regions import Extents

NAMES = [f"layers.{index}" for index in range(3)]
SIZES: dict[str, Any] = {"page_bytes": 24, "num_blocks": 40, "block_size": 4, "page_format": "f"}
PAIRS = st.tuples(st.integers(0, 60), st.integers(1, 12))


@given(st.lists(PAIRS, max_size=8), st.lists(PAIRS, max_size=4))
def test_regions_are_covered_if_all_their_bytes_are(
    runs: list[tuple[int, int]], regions: list[tuple[int, int]]
) -> None:
    columns = np.array(runs, dtype=np.int64).reshape(-1, 2)
    extents = Extents(columns[:, 0], columns[:, 0] + columns[:, 1])
    allowed = {byte for start, size in runs for byte in range(start, start + size)}
    wanted = {byte for start, size in regions for byte in range(start, start + size)}
    asked = np.array(regions, dtype=np.int64).reshape(-1, 2)
    assert extents.cover(asked[:, 0], asked[:, 1]) == (wanted <= allowed)


def test_block_tables_of_groups_without_layers_here_are_no_bytes() -> None:
    layout = uniform_layout(NAMES, **SIZES)
    extents = BlockExtents(layout).of([[2], [5, 6]])
    assert extents.cover(np.array([2 * 72]), np.array([72]))
    assert not extents.cover(np.array([5 * 72]), np.array([1]))


def fragmented_layout() -> KVLayout:
    """Two groups in one pool, and keys and values apart, with room between pages."""
    layers = tuple(
        LayerLayout(f"layers.{number}", number % 2, "f", number * 100, 1000, ((0, 24), (50, 24)), 4)
        for number in range(4)
    )
    return KVLayout(40, 40_000, layers)


@pytest.mark.parametrize(
    "layout", [uniform_layout(NAMES, **SIZES), per_layer_layout(NAMES, **SIZES), fragmented_layout()]
)
@given(st.data())
def test_a_plan_reads_all_bytes_of_the_blocks_and_no_others(layout: KVLayout, data: st.DataObject) -> None:
    tables = [
        data.draw(st.lists(st.integers(1, 39), unique=True, max_size=12)) for _ in range(layout.num_groups)
    ]
    blocks = [np.array([(each, each) for each in table], dtype=np.int64).reshape(-1, 2) for table in tables]
    regions, extents = plan(layout, layout, blocks), BlockExtents(layout).of(tables)
    assert extents.cover(regions.remote_offsets, regions.lengths)
    read = {
        byte
        for start, size in zip(regions.remote_offsets.tolist(), regions.lengths.tolist(), strict=True)
        for byte in range(start, start + size)
    }
    near = {byte + step for byte in read for step in (-1, 1)} - read
    for byte in near:
        assert not extents.cover(np.array([byte]), np.array([1]))
