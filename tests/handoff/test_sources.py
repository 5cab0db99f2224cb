"""Each head of each layer comes from exactly one rank.

Layouts that cannot be paired are refused by field name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvferry.connector.planning.layout import KVLayout, layer_layout_of_view
from kvferry.connector.planning.slots import Shard, slot_array_of_view
from kvferry.connector.planning.sources import choose_sources
from kvferry.transports.errors import IncompatiblePeerError

NUM_BLOCKS = 4
ALL_HEADS = Shard(0, 4, 4)


def layout_of(
    shard: Shard = ALL_HEADS,
    *,
    num_layers: int = 2,
    first_layer: int = 0,
    block_size: int = 4,
    num_parts: int = 2,
    head_size: int = 8,
) -> KVLayout:
    """Make one rank's layers, each with its own cache."""
    shape = (NUM_BLOCKS, num_parts, block_size, shard.num, head_size)
    strides = [num_parts * block_size * shard.num * head_size]
    for size in shape[1:]:
        strides.append(strides[-1] // size)
    layer_bytes = 2 * NUM_BLOCKS * strides[0]
    layers = tuple(
        layer_layout_of_view(
            f"layers.{first_layer + index}",
            group_index=0,
            page_format=f"float16{shape[1:]}",
            data_offset=index * layer_bytes,
            shape=shape,
            strides=strides,
            itemsize=2,
            block_size=block_size,
            shard=shard,
            slots=slot_array_of_view(shape, strides, itemsize=2, element="float16"),
        )
        for index in range(num_layers)
    )
    return KVLayout(NUM_BLOCKS, num_layers * layer_bytes, layers)


def changed(layout: KVLayout, **changes: Any) -> KVLayout:
    return replace(layout, layers=tuple(replace(layer, **changes) for layer in layout.layers))


def secret(layout: KVLayout, **changes: Any) -> KVLayout:
    """Make the pages of a layout opaque."""
    return changed(layout, slots=None, **changes)


def slots_changed(layout: KVLayout, **changes: Any) -> KVLayout:
    slots = layout.layers[0].slots
    assert slots is not None
    return changed(layout, slots=replace(slots, **changes))


OURS = layout_of()
HALVES = [layout_of(Shard(first, 2, 4)) for first in (0, 2)]
QUARTERS = [layout_of(Shard(first, 1, 4)) for first in range(4)]


def shares(local: KVLayout, remotes: list[KVLayout]) -> list[tuple[int, int, int]]:
    """Return the rank, first head and number of heads of each share."""
    return [(share.rank, share.first, share.num) for share in choose_sources(local, remotes)]


@pytest.mark.parametrize(
    ("local", "remotes", "expected"),
    [
        pytest.param(OURS, [OURS], [(0, 0, 4)], id="identical"),
        pytest.param(OURS, HALVES, [(0, 0, 2), (1, 2, 2)], id="joined"),
        pytest.param(HALVES[1], [OURS], [(0, 2, 2)], id="split"),
        pytest.param(HALVES[1], QUARTERS, [(2, 2, 1), (3, 3, 1)], id="four-to-two"),
        pytest.param(OURS, [*HALVES, *HALVES], [(0, 0, 2), (1, 2, 2)], id="replicated-heads-from-the-first"),
        pytest.param(OURS, [*QUARTERS, OURS], [(4, 0, 4)], id="as-few-ranks-as-possible"),
        pytest.param(OURS, list(reversed(QUARTERS)), [(3 - i, i, 1) for i in range(4)], id="any-order"),
        pytest.param(secret(HALVES[1]), list(map(secret, HALVES)), [(1, 2, 2)], id="whole-pages"),
    ],
)
def test_heads_come_from_the_ranks_that_have_them(
    local: KVLayout, remotes: list[KVLayout], expected: list[tuple[int, int, int]]
) -> None:
    assert shares(local, remotes) == expected * 2  # the same for both layers


def test_layers_come_from_the_stage_that_has_them() -> None:
    stages = [layout_of(num_layers=3), layout_of(first_layer=3, num_layers=1)]
    assert shares(layout_of(num_layers=4), stages) == [(0, 0, 4)] * 3 + [(1, 0, 4)]
    assert shares(layout_of(first_layer=2, num_layers=1), stages) == [(0, 0, 4)]


@pytest.mark.parametrize(
    ("remotes", "field"),
    [
        ([layout_of(block_size=6)], "layers.layers.0.block_size"),
        ([layout_of(Shard(0, 8, 8))], "layers.layers.0.shard.total"),
        ([layout_of(head_size=16)], "layers.layers.0.vector_bytes"),
        ([layout_of(num_parts=1)], "layers.layers.0.num_parts"),
        ([slots_changed(OURS, element="bfloat16")], "layers.layers.0.element"),
        ([changed(OURS, group_index=1)], "layers.layers.0.group_index"),
        ([layout_of(num_layers=1)], "layers.layers.1"),
        ([], "layers.layers.0"),
        (QUARTERS[:3], "layers.layers.0.shard"),
        (QUARTERS[1:], "layers.layers.0.shard"),
        ([HALVES[0], QUARTERS[3]], "layers.layers.0.shard"),
        ([secret(layout_of(block_size=8))], "layers.layers.0.block_size"),
        ([secret(OURS, page_format="packed")], "layers.layers.0.page_format"),
        ([secret(half) for half in HALVES], "layers.layers.0.page_format"),
    ],
)
def test_layouts_that_cannot_be_paired_are_refused_by_name(remotes: list[KVLayout], field: str) -> None:
    with pytest.raises(IncompatiblePeerError) as caught:
        choose_sources(OURS, remotes)
    assert caught.value.field == field


def test_whole_pages_of_other_heads_are_refused() -> None:
    first, second = map(secret, HALVES)
    with pytest.raises(IncompatiblePeerError) as caught:
        choose_sources(first, [second])
    difference = (caught.value.field, caught.value.local, caught.value.remote)
    assert difference == ("layers.layers.0.shard", "0-1 of 4", "2-3 of 4")


def test_layers_that_share_a_cache_are_filled_once_or_not_at_all() -> None:
    one = layout_of(num_layers=1)
    shared = replace(one, layers=(one.layers[0], replace(one.layers[0], name="layers.1")))
    assert shares(shared, [shared]) == [(0, 0, 4)]
    assert shares(OURS, [shared]) == [(0, 0, 4)] * 2
    with pytest.raises(IncompatiblePeerError, match="share a cache"):
        choose_sources(shared, [OURS])
