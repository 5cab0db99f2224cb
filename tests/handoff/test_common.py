"""The layers of a draft model are handed over if both nodes have the same one, and left out otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvferry.connector.handoff.events import GroupBlocks
from kvferry.connector.handoff.pairing import NodePlanner, plan_for
from kvferry.connector.planning.layout import KVLayout, draft_layer_name, per_layer_layout
from kvferry.transports.errors import IncompatiblePeerError, RegionError

PAGE = 8
NUM_BLOCKS = 10
TARGET = ["a", "b"]
DRAFT = draft_layer_name("one", "c")
OTHER_DRAFT = draft_layer_name("other", "c")
#: Layer → index of its group on a node with a draft model that changed the groups.
REGROUPED = {"a": 1, "b": 0, DRAFT: 2}


def layout_of(names: Sequence[str], groups: dict[str, int] | None = None) -> KVLayout:
    layout = per_layer_layout(names, page_bytes=PAGE, num_blocks=NUM_BLOCKS, block_size=4, page_format="f")
    layers = (replace(layer, group_index=(groups or {}).get(layer.name, 0)) for layer in layout.layers)
    return replace(layout, layers=tuple(layers))


def regions(planner: NodePlanner, ours: Sequence[int], theirs: Sequence[int]) -> list[tuple[int, ...]]:
    """Plan one block per group, and return the offsets of our pages and theirs."""
    plans = planner.plan(
        tuple(GroupBlocks(0, (block,)) for block in ours), tuple((block,) for block in theirs), num_tokens=4
    )
    return [tuple(map(int, pair[:2])) for plan in plans for pair in plan.pairs.table]


def page(layer: int, block: int) -> int:
    return (layer * NUM_BLOCKS + block) * PAGE


def test_the_same_draft_model_is_handed_over() -> None:
    planner = plan_for(layout_of([*TARGET, DRAFT]), [layout_of([*TARGET, DRAFT])], 0)
    assert planner.left_out == ()
    assert regions(planner, [3], [5]) == [(page(layer, 3), page(layer, 5)) for layer in range(3)]


@pytest.mark.parametrize(
    ("ours", "theirs", "left_out"),
    [([DRAFT], [], (DRAFT,)), ([], [DRAFT], ()), ([DRAFT], [OTHER_DRAFT], (DRAFT,))],
)
def test_without_the_same_draft_model_the_target_model_is_handed_over(
    ours: list[str], theirs: list[str], left_out: tuple[str, ...]
) -> None:
    planner = plan_for(layout_of([*TARGET, *ours]), [layout_of([*TARGET, *theirs])], 0)
    assert planner.left_out == left_out
    assert regions(planner, [3], [5]) == [(page(layer, 3), page(layer, 5)) for layer in range(2)]


def test_a_draft_layer_that_cannot_be_paired_is_left_out() -> None:
    theirs = layout_of([*TARGET, DRAFT])
    theirs = replace(theirs, layers=(*theirs.layers[:2], replace(theirs.layers[2], page_format="g")))
    planner = plan_for(layout_of([*TARGET, DRAFT]), [theirs], 0)
    assert planner.left_out == (DRAFT,)
    assert len(regions(planner, [3], [5])) == 2


def test_a_draft_model_can_change_the_groups_of_the_target_model() -> None:
    ours, theirs = layout_of([*TARGET, DRAFT], REGROUPED), layout_of(TARGET, {"a": 0, "b": 1})
    planner = plan_for(ours, [theirs], 0)
    assert regions(planner, [3, 4, 5], [6, 7]) == [(page(0, 4), page(0, 6)), (page(1, 3), page(1, 7))]
    with pytest.raises(RegionError, match="granted 1 groups"):
        regions(planner, [3, 4, 5], [6])


def test_layers_of_the_target_model_are_never_left_out() -> None:
    with pytest.raises(IncompatiblePeerError, match=r"layers\.b"):
        plan_for(layout_of([*TARGET, DRAFT]), [layout_of(["a", DRAFT])], 0)


def test_a_stage_without_draft_layers_reads_from_one_that_has_them() -> None:
    stages = [layout_of(["a"]), layout_of(["b", DRAFT])]
    planner = plan_for(layout_of([*TARGET, DRAFT]), stages, 0)
    assert planner.left_out == ()
    assert regions(planner, [3], [5]) == [
        (page(0, 3), page(0, 5)),
        (page(1, 3), page(0, 5)),
        (page(2, 3), page(1, 5)),
    ]
    first_stage = plan_for(layout_of(["a"]), stages, 0)
    assert regions(first_stage, [3], [5]) == [(page(0, 3), page(0, 5))]
