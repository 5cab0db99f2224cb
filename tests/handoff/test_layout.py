"""A layout says where pages lie. A hostile peer's layout is refused with the name of the wrong field."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvferry.connector.planning.layout import (
    KVLayout,
    LayerLayout,
    layer_layout_of_view,
    per_layer_layout,
    uniform_layout,
)
from kvferry.connector.planning.slots import Shard, SlotArray, slot_array_of_view
from kvferry.transports.errors import ConfigurationError, ProtocolError

NAMES = ["layers.0", "layers.1", "layers.2"]
SIZES: dict[str, Any] = {
    "page_bytes": 32,
    "num_blocks": 5,
    "block_size": 4,
    "page_format": "(2,4,1,2) float16",
}


@pytest.mark.parametrize("build", [uniform_layout, per_layer_layout])
def test_a_layout_survives_the_wire(build: Any) -> None:
    layout = build(NAMES, **SIZES)
    assert KVLayout.from_plain(layout.to_plain()) == layout


def test_uniform_is_block_major_and_per_layer_is_layer_major() -> None:
    uniform, per_layer = uniform_layout(NAMES, **SIZES), per_layer_layout(NAMES, **SIZES)
    assert uniform.pool_bytes == per_layer.pool_bytes == 3 * 5 * 32
    assert [(layer.base_offset, layer.block_stride) for layer in uniform.layers] == [
        (0, 96),
        (32, 96),
        (64, 96),
    ]
    assert [(layer.base_offset, layer.block_stride) for layer in per_layer.layers] == [
        (0, 32),
        (160, 32),
        (320, 32),
    ]


# -- views -------------------------------------------------------------------------------------------


def layer_of(
    shape: Sequence[int], strides: Sequence[int], kernel_blocks_per_block: int, data_offset: int = 0
) -> LayerLayout:
    return layer_layout_of_view(
        "x",
        group_index=3,
        page_format="f",
        data_offset=data_offset,
        shape=shape,
        strides=strides,
        itemsize=2,
        block_size=4,
        kernel_blocks_per_block=kernel_blocks_per_block,
    )


def pages_by_layout(array: np.ndarray, num_kernel_blocks: int, kernel_blocks_per_block: int) -> list[bytes]:
    base = array.base if array.base is not None else array
    layer = layer_of(array.shape, [stride // 2 for stride in array.strides], kernel_blocks_per_block)
    pool = base.tobytes()
    return [
        b"".join(
            pool[layer.base_offset + block * layer.block_stride + offset :][:num_bytes]
            for offset, num_bytes in layer.fragments
        )
        for block in range(num_kernel_blocks // kernel_blocks_per_block)
    ]


@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.integers(1, 3), st.randoms())
def test_pages_of_any_stride_order_are_read_in_logical_order(
    page_shape: list[int], kernel_blocks_per_block: int, random: Any
) -> None:
    shape = [2 * kernel_blocks_per_block, *page_shape]
    order = list(range(len(shape)))
    random.shuffle(order)
    physical = np.arange(np.prod(shape), dtype=np.int16).reshape([shape[axis] for axis in order])
    logical = physical.transpose(np.argsort(order))
    assert logical.shape == tuple(shape)
    expected = [logical[i : i + kernel_blocks_per_block].tobytes() for i in (0, kernel_blocks_per_block)]
    assert pages_by_layout(logical, shape[0], kernel_blocks_per_block) == expected


@pytest.mark.parametrize(
    ("shape", "strides", "kernel_blocks", "fragments"),
    [
        pytest.param((6, 2, 4, 1, 8), (64, 32, 8, 8, 1), 1, ((0, 128),), id="contiguous-page"),
        pytest.param((6, 2, 4, 1, 8), (64, 32, 8, 8, 1), 2, ((0, 256),), id="two-kernel-blocks-in-a-row"),
        pytest.param(
            (6, 2, 4, 1, 8), (32, 192, 8, 8, 1), 1, ((0, 64), (384, 64)), id="keys-and-values-apart"
        ),
        pytest.param(
            (6, 2, 4, 1, 8), (192, 32, 8, 8, 1), 2, ((0, 128), (384, 128)), id="layers-between-blocks"
        ),
        pytest.param(
            (6, 2, 2, 8), (32, 8, 16, 1), 1, ((0, 16), (32, 16), (16, 16), (48, 16)), id="heads-before-tokens"
        ),
        pytest.param((6, 1, 1, 1), (7, 99, 99, 99), 1, ((0, 2),), id="axes-of-one"),
    ],
)
def test_fragments_are_as_few_as_possible(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    kernel_blocks: int,
    fragments: tuple[tuple[int, int], ...],
) -> None:
    layer = layer_of(shape, strides, kernel_blocks, data_offset=10)
    assert (layer.group_index, layer.page_format, layer.base_offset) == (3, "f", 10)
    assert layer.block_stride == kernel_blocks * strides[0] * 2
    assert layer.fragments == fragments
    elements = int(np.prod(shape[1:])) * kernel_blocks
    assert layer.page_bytes == 2 * elements


@pytest.mark.parametrize(
    ("shape", "strides", "kernel_blocks"),
    [((), (), 1), ((4, 0), (1, 1), 1), ((4, 2), (2,), 1), ((4, 2), (-2, 1), 1), ((5, 2), (2, 1), 2)],
)
def test_a_view_without_whole_blocks_is_refused(
    shape: tuple[int, ...], strides: tuple[int, ...], kernel_blocks: int
) -> None:
    with pytest.raises(ConfigurationError, match="cache of x"):
        layer_of(shape, strides, kernel_blocks)


def test_pages_whose_vectors_are_not_contiguous_are_opaque() -> None:
    assert slot_array_of_view((4, 2, 4, 1, 8), (64, 32, 1, 8, 4), itemsize=2, element="f") is None


# -- hostile peers -----------------------------------------------------------------------------------


def plain_layout() -> dict[str, Any]:
    return uniform_layout(NAMES, **SIZES).to_plain()


SLOTS: dict[str, Any] = {
    "element": "float16",
    "num_parts": 2,
    "vector_bytes": 4,
    "kernel_block_size": 4,
    "kernel_block_stride": 96,
    "slot_stride": 4,
    "part_stride": 16,
    "head_stride": 0,
    "grain": 1,
}


def test_the_slots_of_a_page_survive_the_wire() -> None:
    layout = KVLayout.from_plain(with_layer(slots=SLOTS, shard={"first": 2, "num": 1, "total": 8}))
    assert layout.layers[0].shard == Shard(2, 1, 8)
    assert layout.layers[0].slots == SlotArray(**SLOTS)
    assert KVLayout.from_plain(layout.to_plain()) == layout


def with_layer(**changes: object) -> dict[str, Any]:
    plain = plain_layout()
    first, *others = plain["layers"]
    return plain | {"layers": (first | changes, *others)}


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({}, r"layout.num_blocks is missing"),
        (plain_layout() | {"more": 1}, r"layout.more is unknown"),
        (
            plain_layout() | {"num_blocks": True},
            r"layout.num_blocks must be an integer from 1 to 2147483647, got True",
        ),
        (plain_layout() | {"num_blocks": 0}, r"layout.num_blocks must be an integer from 1"),
        (plain_layout() | {"num_blocks": 6}, r"layout.layers\[0\] ends at byte 512 of a pool of 480"),
        (plain_layout() | {"pool_bytes": 479}, r"layout.layers\[2\] ends at byte 480 of a pool of 479"),
        (plain_layout() | {"pool_bytes": 2**63}, r"layout.pool_bytes must be an integer from 1"),
        (plain_layout() | {"layers": [1]}, r"layout.layers\[0\] must be a mapping, got 1"),
        (plain_layout() | {"layers": (1,)}, r"layout.layers\[0\] must be a mapping, got 1"),
        (
            plain_layout() | {"layers": ({},) * 5000},
            r"layout.layers must be a list of at most 4096 entries, got 5000",
        ),
        (
            plain_layout() | {"layers": plain_layout()["layers"] * 2},
            r"layout.layers must have a different name each",
        ),
        (with_layer(name=1), r"layout.layers\[0\].name must be a string"),
        (with_layer(group_index=64), r"layout.layers\[0\].group_index must be an integer from 0 to 63"),
        (with_layer(base_offset=-1), r"layout.layers\[0\].base_offset must be an integer from 0"),
        (with_layer(base_offset=2**60), r"layout.layers\[0\] ends at byte"),
        (with_layer(block_stride=0), r"layout.layers\[0\].block_stride must be an integer from 1"),
        (with_layer(block_stride=2**60), r"layout.layers\[0\] ends at byte"),
        (with_layer(block_size=0), r"layout.layers\[0\].block_size must be an integer from 1"),
        (with_layer(shard=1), r"layout.layers\[0\].shard must be a mapping, got 1"),
        (with_layer(shard={"first": 0, "num": 1}), r"layout.layers\[0\].shard.total is missing"),
        (with_layer(shard={"first": 1, "num": 8, "total": 8}), r"shard ends at share 9 of 8"),
        (with_layer(slots=[]), r"layout.layers\[0\].slots must be a mapping, got \[\]"),
        (with_layer(slots=SLOTS | {"num_parts": 3}), r"slots.num_parts must be an integer from 1 to 2"),
        (with_layer(slots=SLOTS | {"slot_stride": -4}), r"slots.slot_stride must be an integer from 0"),
        (
            with_layer(slots=SLOTS | {"kernel_block_size": 3}),
            r"kernel_block_size must divide block_size 4, got 3",
        ),
        (with_layer(slots=SLOTS | {"kernel_block_stride": 200}), r"layout.layers\[0\] ends at byte 832"),
        (with_layer(slots=SLOTS | {"part_stride": 2**60}), r"layout.layers\[0\] ends at byte"),
        (with_layer(fragments=()), r"layout.layers\[0\].fragments must be a list of at least one pair"),
        (
            with_layer(fragments=((0, 0),)),
            r"layout.layers\[0\].fragments must be a list of at least one pair",
        ),
        (
            with_layer(fragments=((0, 1, 2),)),
            r"layout.layers\[0\].fragments must be a list of at least one pair",
        ),
        (with_layer(fragments=((1,),)), r"layout.layers\[0\].fragments must be a list of at least one pair"),
        (
            with_layer(fragments=((-1, 1),)),
            r"layout.layers\[0\].fragments must be a list of at least one pair",
        ),
        (with_layer(fragments=((0, 2**60),)), r"layout.layers\[0\] ends at byte"),
        (
            with_layer(fragments=((0, 1),) * (2**18 + 1)),
            r"fragments must be a list of at most 262144 entries, got 262145",
        ),
        (with_layer(fragments=((0, 1),) * 2**18), r"layout.layers must have at most 262144 fragments"),
    ],
)
def test_a_hostile_layout_is_refused_by_name(plain: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        KVLayout.from_plain(plain)


def test_every_byte_of_an_accepted_layout_is_inside_the_pool() -> None:
    layout = KVLayout.from_plain(plain_layout())
    for layer, block in product(layout.layers, range(layout.num_blocks)):
        for offset, num_bytes in layer.fragments:
            start = layer.base_offset + block * layer.block_stride + offset
            assert 0 <= start < start + num_bytes <= layout.pool_bytes
