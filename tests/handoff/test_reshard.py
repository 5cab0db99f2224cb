"""Nodes of different shapes: every needed byte comes from the same vector of the producer, and no other byte
moves.
"""

from __future__ import annotations

import timeit
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvferry.connector.handoff.events import GroupBlocks
from kvferry.connector.handoff.pairing import plan_for
from kvferry.connector.planning.layout import KVLayout, LayerLayout, layer_layout_of_view
from kvferry.connector.planning.plan import Planner
from kvferry.connector.planning.reshard import GroupTables, ReshardPlanner
from kvferry.connector.planning.slots import Shard, head_array_of_view, slot_array_of_view
from kvferry.transports.errors import IncompatiblePeerError, RegionError
from kvferry.transports.regions import RegionPairs

# -- nodes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """What two nodes have in common. Layer `i` is in group `i % num_groups`."""

    num_layers: int = 4
    num_heads: int = 4
    num_parts: int = 2
    vector_bytes: int = 2
    num_groups: int = 1


@dataclass(frozen=True)
class Shape:
    """The shape of a rank's cache.

    Attributes:
        page_order: Physical order of (part, slot, head) inside a kernel block.
    """

    block_size: int = 4
    kernel_block_size: int = 4
    num_blocks: int = 8
    page_order: tuple[int, int, int] = (0, 1, 2)
    uniform: bool = True


NHD, HND = (0, 1, 2), (0, 2, 1)


@dataclass(frozen=True)
class Rank:
    """One rank's pool. `views`: layer → the heads of `shard` as (kernel block, slot, part, head, byte)."""

    pool: np.ndarray
    layout: KVLayout
    views: dict[str, np.ndarray]
    shard: Shard


def rank_of(model: Model, shape: Shape, layers: Sequence[int], shard: Shard, seed: int = 0) -> Rank:
    num_kernel_blocks = shape.num_blocks * shape.block_size // shape.kernel_block_size
    page = (model.num_parts, shape.kernel_block_size, shard.num)
    physical_page = tuple(page[axis] for axis in shape.page_order)
    outer = (num_kernel_blocks, len(layers)) if shape.uniform else (len(layers), num_kernel_blocks)
    pool = np.random.default_rng(seed).integers(
        0, 256, int(np.prod((*outer, *page, model.vector_bytes))), dtype=np.uint8
    )
    physical = pool.reshape(*outer, *physical_page, model.vector_bytes)
    if shape.uniform:  # within a layer, the kernel blocks of a block are consecutive
        physical = physical.swapaxes(0, 1)
    logical = physical.transpose(0, 1, *(2 + np.argsort(shape.page_order)), 5)
    described, views = [], {}
    for index, number in enumerate(layers):
        name = f"layers.{number}"
        view = logical[index]
        views[name] = view.swapaxes(1, 2)
        described.append(layer_of(name, number % model.num_groups, view, pool, shape, shard))
    return Rank(pool, KVLayout(shape.num_blocks, pool.size, tuple(described)), views, shard)


def layer_of(
    name: str, group_index: int, view: np.ndarray, pool: np.ndarray, shape: Shape, shard: Shard
) -> LayerLayout:
    return layer_layout_of_view(
        name,
        group_index=group_index,
        page_format=f"u1{shape.kernel_block_size, *view.shape[1:]}",
        data_offset=view.__array_interface__["data"][0] - pool.__array_interface__["data"][0],
        shape=view.shape,
        strides=view.strides,
        itemsize=1,
        block_size=shape.block_size,
        kernel_blocks_per_block=shape.block_size // shape.kernel_block_size,
        shard=shard,
        slots=slot_array_of_view(view.shape, view.strides, itemsize=1, element="u1"),
    )


def shards_of(num_heads: int, tp_size: int) -> list[Shard]:
    """Split heads evenly, as engines do. With more ranks than heads, several ranks keep the same head."""
    num = max(1, num_heads // tp_size)
    return [Shard(rank * num_heads // tp_size, num, num_heads) for rank in range(tp_size)]


def ranks_of(model: Model, shape: Shape, *, tp: int = 1, stages: Sequence[Sequence[int]] = ()) -> list[Rank]:
    """Make all ranks of a node: for each pipeline stage (its layers) the tensor-parallel ranks."""
    return [
        rank_of(model, shape, layers, shard, seed=100 * stage + index)
        for stage, layers in enumerate(stages or [range(model.num_layers)])
        for index, shard in enumerate(shards_of(model.num_heads, tp))
    ]


def tables_of(first: int, local: Sequence[int], remote: Sequence[int]) -> GroupTables:
    return GroupTables(first, np.array(local, dtype=np.int64), np.array(remote, dtype=np.int64))


def replicas_made_equal(producers: Sequence[Rank]) -> None:
    """Give ranks that keep the same head the same bytes."""
    first: dict[tuple[str, int], np.ndarray] = {}
    for rank in producers:
        for name, view in rank.views.items():
            for head in range(rank.shard.num):
                vectors = view[:, :, :, head]
                vectors[:] = first.setdefault((name, rank.shard.first + head), vectors)


# -- an oracle that copies token by token, head by head ----------------------------------------------


def slot_view(view: np.ndarray, shape: Shape, block: int, offset: int) -> np.ndarray:
    """Return one token's bytes as (part, head, byte)."""
    kernel_block, within = divmod(block * shape.block_size + offset, shape.kernel_block_size)
    return view[kernel_block, within]  # type: ignore[no-any-return]


def expected_pool(
    ours: Rank,
    our_shape: Shape,
    producers: Sequence[Rank],
    their_shape: Shape,
    groups: Sequence[GroupTables],
    num_tokens: int,
) -> np.ndarray:
    """Return our pool as it must be after the load. Works in place, and restores the pool."""
    before = ours.pool.copy()
    for layer in ours.layout.layers:
        group = groups[layer.group_index]
        for token in range(num_tokens):
            position = token // our_shape.block_size - group.first_block_index
            if not 0 <= position < len(group.local_block_ids) or not group.local_block_ids[position]:
                continue
            target = slot_view(
                ours.views[layer.name],
                our_shape,
                int(group.local_block_ids[position]),
                token % our_shape.block_size,
            )
            their_block = int(group.remote_block_ids[token // their_shape.block_size])
            for head in range(ours.shard.num):
                wanted = ours.shard.first + head
                source = next(
                    rank
                    for rank in producers
                    if layer.name in rank.views and rank.shard.first <= wanted < rank.shard.end
                )
                vectors = slot_view(
                    source.views[layer.name], their_shape, their_block, token % their_shape.block_size
                )
                target[:, head] = vectors[:, wanted - source.shard.first]
    expected = ours.pool.copy()
    ours.pool[:] = before
    return expected


def copied(ours: Rank, producers: Sequence[Rank], plans: Sequence[RegionPairs]) -> np.ndarray:
    """Return our pool after copying the regions. Check that each byte is written at most once."""
    pool, times = ours.pool.copy(), np.zeros(ours.pool.size, dtype=np.int64)
    for rank, pairs in zip(producers, plans, strict=True):
        for to, source, num_bytes in pairs.table.tolist():
            pool[to : to + num_bytes] = rank.pool[source : source + num_bytes]
            times[to : to + num_bytes] += 1
    assert times.max(initial=0) <= 1
    return pool


# -- which bytes -------------------------------------------------------------------------------------


@st.composite
def shapes(draw: st.DrawFn, block_size: int) -> Shape:
    kernel = draw(st.sampled_from([size for size in (1, 2, 3, 4, 6, 12) if not block_size % size]))
    return Shape(
        block_size,
        kernel,
        num_blocks=12,
        page_order=tuple(draw(st.permutations(range(3)))),
        uniform=draw(st.booleans()),
    )


@st.composite
def stages(draw: st.DrawFn, num_layers: int) -> list[range]:
    cuts = sorted({0, num_layers, *draw(st.lists(st.integers(1, num_layers - 1), max_size=2))})
    return [range(first, end) for first, end in pairwise(cuts)]


@st.composite
def loads(draw: st.DrawFn, num_tokens: int, ours: Shape, theirs: Shape) -> GroupTables:
    ids = st.permutations(range(1, 12))
    num_ours, num_theirs = -(-num_tokens // ours.block_size), -(-num_tokens // theirs.block_size)
    first = draw(st.integers(0, num_ours))
    local = [block * draw(st.sampled_from((1, 1, 1, 0))) for block in draw(ids)[: num_ours - first]]
    return tables_of(first, local, draw(ids)[:num_theirs])


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_the_plan_copies_the_same_bytes_as_the_oracle(data: st.DataObject) -> None:
    draw = data.draw
    parts = draw(st.sampled_from((1, 2)))
    model = Model(
        num_layers=draw(st.integers(2, 4)),
        num_heads=1 if parts == 1 else draw(st.sampled_from((1, 2, 4))),
        num_parts=parts,
        vector_bytes=draw(st.integers(1, 3)),
        num_groups=draw(st.sampled_from((1, 2))),
    )
    small, factor = draw(st.sampled_from(((1, 6), (2, 3), (2, 2), (4, 1), (3, 4), (6, 2))))
    sizes = draw(st.permutations((small, small * factor)))
    our_shape, their_shape = (draw(shapes(size)) for size in sizes)
    producers = ranks_of(
        model, their_shape, tp=draw(st.sampled_from((1, 2, 4, 8))), stages=draw(stages(model.num_layers))
    )
    replicas_made_equal(producers)
    ours = draw(
        st.sampled_from(
            ranks_of(
                model, our_shape, tp=draw(st.sampled_from((1, 2, 4))), stages=draw(stages(model.num_layers))
            )
        )
    )
    num_tokens = draw(st.integers(1, 11 * min(sizes)))
    groups = [draw(loads(num_tokens, our_shape, their_shape)) for _ in range(ours.layout.num_groups)]
    planner = ReshardPlanner(ours.layout, [rank.layout for rank in producers])
    plans = planner.plan(groups, num_tokens)
    expected = expected_pool(ours, our_shape, producers, their_shape, groups, num_tokens)
    assert (copied(ours, producers, plans) == expected).all()
    assert_merged(plans)


def assert_merged(plans: Sequence[RegionPairs]) -> None:
    """Check that no two regions could be merged."""
    for pairs in plans:
        starts = {(to, source) for to, source, _ in pairs.table.tolist()}
        ends = {(to + size, source + size) for to, source, size in pairs.table.tolist()}
        assert not starts & ends


# -- how many regions --------------------------------------------------------------------------------

UNIFORM, PER_LAYER = Shape(num_blocks=20), Shape(num_blocks=20, uniform=False)
HEADS_FIRST = replace(UNIFORM, page_order=HND)
EIGHT = replace(UNIFORM, block_size=8, kernel_block_size=8)
EIGHT_OF_FOURS = replace(PER_LAYER, block_size=8)

FOUR = tables_of(0, range(1, 5), range(11, 15))
TWO_FROM_FOUR = tables_of(0, [1, 2], range(11, 15))
THREE_FROM_TWO = tables_of(1, range(1, 4), [11, 12])  # the first four tokens are already cached


# A page of 4 layers is 4 * 2 runs of keys or values. If the last run of a page and the first one of the next
# page are adjacent on both sides, they are merged: hence the subtractions.
@pytest.mark.parametrize(
    ("ours", "our_tp", "theirs", "their_tp", "blocks", "num_tokens", "num_regions"),
    [
        (UNIFORM, 1, UNIFORM, 1, FOUR, 16, [1]),
        (UNIFORM, 1, UNIFORM, 1, FOUR, 14, [4 * 2]),
        (PER_LAYER, 1, PER_LAYER, 1, FOUR, 16, [4]),
        (UNIFORM, 1, PER_LAYER, 1, FOUR, 16, [4 * 4]),
        (HEADS_FIRST, 1, HEADS_FIRST, 2, FOUR, 16, [4 * 4 * 2] * 2),
        (HEADS_FIRST, 2, HEADS_FIRST, 1, FOUR, 16, [4 * 4 * 2]),
        (UNIFORM, 1, UNIFORM, 2, FOUR, 16, [16 * 4 * 2] * 2),
        (UNIFORM, 2, UNIFORM, 4, FOUR, 16, [16 * 4 * 2] * 2 + [0] * 2),
        (UNIFORM, 1, HEADS_FIRST, 1, FOUR, 16, [16 * 4 * 2 * 4 - (4 * 4 * 2 - 1)]),
        (EIGHT_OF_FOURS, 1, PER_LAYER, 1, TWO_FROM_FOUR, 16, [4]),
        (EIGHT, 1, UNIFORM, 1, TWO_FROM_FOUR, 16, [4 * 4 * 2 - 1]),
        (UNIFORM, 1, EIGHT, 1, THREE_FROM_TWO, 16, [3 * 4 * 2 - 1]),
    ],
)
def test_bytes_that_are_adjacent_on_both_sides_are_one_region(
    ours: Shape,
    our_tp: int,
    theirs: Shape,
    their_tp: int,
    blocks: GroupTables,
    num_tokens: int,
    num_regions: list[int],
) -> None:
    consumer, *_ = ranks_of(Model(), ours, tp=our_tp)
    producers = ranks_of(Model(), theirs, tp=their_tp)
    plans = ReshardPlanner(consumer.layout, [rank.layout for rank in producers]).plan([blocks], num_tokens)
    assert [len(pairs) for pairs in plans] == num_regions


def test_equal_nodes_get_the_regions_of_the_plain_planner() -> None:
    ours, theirs = (ranks_of(Model(), Shape())[0].layout for _ in range(2))
    pairs = np.array([(3, 5), (4, 6), (1, 2)], dtype=np.int64)
    (plan,) = ReshardPlanner(ours, [theirs]).plan([tables_of(0, pairs[:, 0], pairs[:, 1])], 12)
    assert (plan.table == Planner(ours, theirs).plan([pairs]).table).all()


def test_replicated_heads_come_from_one_rank() -> None:
    model = Model(num_heads=2)
    consumer, *_ = ranks_of(model, Shape(page_order=HND))
    producers = ranks_of(model, Shape(page_order=HND), tp=8)
    plans = ReshardPlanner(consumer.layout, [rank.layout for rank in producers]).plan(
        [tables_of(0, [1], [2])], 4
    )
    assert [rank for rank, pairs in enumerate(plans) if len(pairs)] == [0, 4]


def test_a_grant_of_another_number_of_groups_is_refused() -> None:
    consumer, *_ = ranks_of(Model(), Shape())
    producers = ranks_of(Model(), Shape(), tp=2)
    planner = plan_for(consumer.layout, [rank.layout for rank in producers], 0)
    assert planner.plan((GroupBlocks(0, (1,)),), ((2,),), num_tokens=4)
    with pytest.raises(RegionError, match="1 groups to load; the producer granted 2"):
        planner.plan((GroupBlocks(0, (1,)),), ((2,), (3,)), num_tokens=4)


def test_a_latent_vector_without_heads_comes_from_one_rank() -> None:
    model = Model(num_heads=1, num_parts=1)
    consumer, *_ = ranks_of(model, Shape(), tp=2)
    producers = ranks_of(model, Shape(), tp=4)
    plans = ReshardPlanner(consumer.layout, [rank.layout for rank in producers]).plan(
        [tables_of(0, [1, 2], [3, 4])], 8
    )
    assert [len(pairs) for pairs in plans] == [1, 0, 0, 0]


def test_a_hundred_thousand_regions_take_milliseconds() -> None:
    model = Model(num_layers=32, num_heads=8, vector_bytes=1)
    shape = Shape(block_size=16, kernel_block_size=16, num_blocks=820, page_order=HND)
    (consumer,) = ranks_of(model, shape)
    producers = ranks_of(model, shape, tp=2)
    planner = ReshardPlanner(consumer.layout, [rank.layout for rank in producers])
    generator = np.random.default_rng(0)
    local, remote = ((generator.permutation(819)[:800] + 1).tolist() for _ in range(2))
    tables = [tables_of(0, local, remote)]
    assert sum(map(len, planner.plan(tables, 12800))) == 800 * 32 * 2 * 2
    assert min(timeit.repeat(lambda: planner.plan(tables, 12800), number=1, repeat=5)) < 0.1  # idle: 0.006


# -- pages that are transferred whole ----------------------------------------------------------------


def secret(layout: KVLayout) -> KVLayout:
    """Make the pages of a layout opaque."""
    return replace(layout, layers=tuple(replace(layer, slots=None) for layer in layout.layers))


def test_opaque_pages_are_transferred_whole_from_the_rank_with_the_same_shard() -> None:
    shape = Shape()
    producers = [secret(rank.layout) for rank in ranks_of(Model(), shape, tp=2)]
    second = secret(ranks_of(Model(), shape, tp=2)[1].layout)
    plans = ReshardPlanner(second, producers).plan([tables_of(0, [1, 2], [3, 4])], 5)
    assert [len(pairs) for pairs in plans] == [0, 1]
    assert plans[1].num_bytes == 2 * sum(layer.page_bytes for layer in second.layers)


# -- heads that are transferred whole ----------------------------------------------------------------


def rank_with_packed_heads(shard: Shard, *, block_size: int = 4, seed: int = 0) -> Rank:
    """Two layers, each as (block, head, slot, byte); the engine keeps the slots of a block in an order of its
    own.
    """
    shape = (2, 8, shard.num, block_size, 6)
    pool = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)), dtype=np.uint8)
    views = dict(zip(("layers.0", "layers.1"), pool.reshape(shape), strict=True))
    layers = tuple(
        layer_layout_of_view(
            name,
            group_index=0,
            page_format=f"u1{view.shape[1:]}",
            data_offset=index * view.nbytes,
            shape=view.shape,
            strides=view.strides,
            itemsize=1,
            block_size=block_size,
            shard=shard,
            slots=head_array_of_view(view.shape, view.strides, itemsize=1, element="u1", is_packed=True),
        )
        for index, (name, view) in enumerate(views.items())
    )
    return Rank(pool, KVLayout(8, pool.size, layers), views, shard)


@pytest.mark.parametrize(("our_tp", "their_tp"), [(1, 2), (2, 1), (1, 4), (4, 2), (2, 4), (8, 2), (2, 8)])
def test_packed_heads_move_whole_between_any_numbers_of_ranks(our_tp: int, their_tp: int) -> None:
    producers = [rank_with_packed_heads(shard, seed=1 + i) for i, shard in enumerate(shards_of(4, their_tp))]
    replicas_made_equal(
        [
            replace(rank, views={name: view.swapaxes(1, 2)[:, :, None] for name, view in rank.views.items()})
            for rank in producers
        ]
    )
    heads: dict[tuple[str, int], np.ndarray] = {
        (name, rank.shard.first + head): view[:, head]
        for rank in producers
        for name, view in rank.views.items()
        for head in range(rank.shard.num)
    }
    for shard in shards_of(4, our_tp):
        ours = rank_with_packed_heads(shard)
        planner = ReshardPlanner(ours.layout, [rank.layout for rank in producers])
        plans = planner.plan([tables_of(0, [1, 2], [5, 3])], 5)
        found = copied(ours, producers, plans)
        for name, view in ours.views.items():
            for head in range(shard.num):
                view[1, head], view[2, head] = (heads[name, shard.first + head][block] for block in (5, 3))
        assert (found == ours.pool).all()


def test_packed_heads_need_equal_blocks() -> None:
    ours, theirs = (rank_with_packed_heads(Shard(0, 4, 4), block_size=size) for size in (4, 8))
    with pytest.raises(IncompatiblePeerError, match=r"layers\.0\.block_size differs"):
        ReshardPlanner(ours.layout, [theirs.layout])


def test_heads_whose_share_of_a_block_is_in_pieces_move_with_whole_pages() -> None:
    view = np.zeros((8, 4, 2, 6), dtype=np.uint8).swapaxes(1, 2)  # slots before heads
    known = {"itemsize": 1, "element": "u1"}
    assert head_array_of_view(view.shape, view.strides, is_packed=True, **known) is None
    array = head_array_of_view(view.shape, view.strides, is_packed=False, **known)
    assert array is not None
    assert (array.slot_stride, array.head_stride, array.vector_bytes, array.grain) == (12, 6, 6, 1)


# -- refusals ----------------------------------------------------------------------------------------

LAYOUT = ranks_of(Model(), Shape())[0].layout


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([tables_of(0, [8], [1])], "local block 8 .* from 1 to 7"),
        ([tables_of(0, [-1], [1])], "local block -1"),
        ([tables_of(0, [1], [0])], "remote block 0"),
        ([tables_of(0, [1], [8])], "remote block 8"),
        ([tables_of(0, [1], [2**61])], "remote block 2305843009213693952"),
        ([tables_of(0, [1, 2], [1])], "block 1 of the request is needed; the producer granted 1"),
        ([tables_of(0, [1, 2, 3], [1, 2, 3])], "begins at token 8; 7 tokens are offered"),
        ([tables_of(-1, [1], [2])], "begins at token -4"),
        ([tables_of(0, [1, 1], [1, 2])], "written twice"),
        ([], "0 block tables for 1 groups"),
    ],
)
def test_blocks_that_must_not_be_transferred_are_refused(tables: list[GroupTables], message: str) -> None:
    with pytest.raises(RegionError, match=message):
        ReshardPlanner(LAYOUT, [LAYOUT]).plan(tables, 7)


def test_a_larger_block_is_not_filled_if_the_producer_has_freed_a_part_of_it() -> None:
    (larger,) = ranks_of(Model(), Shape(block_size=8))
    with pytest.raises(RegionError, match="remote block 0"):
        ReshardPlanner(larger.layout, [LAYOUT]).plan([tables_of(0, [1], [0, 5])], 8)


def test_a_position_without_a_local_block_is_left_out() -> None:
    (plan,) = ReshardPlanner(LAYOUT, [LAYOUT]).plan([tables_of(0, [0, 3], [0, 5])], 8)
    assert plan.num_bytes == sum(layer.page_bytes for layer in LAYOUT.layers)
