"""Which layers two nodes hand over.

A draft model's layers may be missing on either side; all others must be on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...transports.errors import IncompatiblePeerError
from .layout import KVLayout
from .sources import choose_sources

#: Two block tables that belong together: index of the group on our side, and on the producer's.
GroupPair = tuple[int, int]


@dataclass(frozen=True)
class CommonLayers:
    """The layouts of two nodes without the draft layers that are left out.

    Attributes:
        local: Our layout. The `group_index` of its layers is an index into `groups`.
        remotes: The layouts of the producer's ranks, likewise.
        groups: The block tables that belong together.
        left_out: Names of our draft layers that nothing is read into.
    """

    local: KVLayout
    remotes: tuple[KVLayout, ...]
    groups: tuple[GroupPair, ...]
    left_out: tuple[str, ...]


def common_layers(local: KVLayout, remotes: Sequence[KVLayout]) -> CommonLayers | None:
    """Leave out the draft layers that only one of two nodes lists, and those that cannot be paired.

    A draft model can change how an engine groups the target model's layers, so a layer may use another block
    table than on a node without that draft model. Layers of either side are therefore grouped anew, by both
    block tables.

    Returns:
        None if neither node has a draft model, so that nothing may be left out.
    """
    ours = {layer.name: layer for layer in local.layers}
    theirs = {layer.name: layer for remote in remotes for layer in remote.layers}
    if not any(layer.is_draft for layer in (*ours.values(), *theirs.values())):
        return None
    pair_of = {
        name: (layer.group_index, theirs[name].group_index) for name, layer in ours.items() if name in theirs
    }
    groups = sorted(set(pair_of.values()))
    index = {name: groups.index(pair) for name, pair in pair_of.items()}

    def regrouped(layout: KVLayout, left_out: Sequence[str] = ()) -> KVLayout:
        kept = (
            layer
            for layer in layout.layers
            if not layer.is_draft or (layer.name in index and layer.name not in left_out)
        )
        layers = (replace(layer, group_index=index.get(layer.name, layer.group_index)) for layer in kept)
        return replace(layout, layers=tuple(layers))

    candidates = [regrouped(remote) for remote in remotes]
    left_out = [
        layer.name
        for layer in local.layers
        if layer.is_draft and not _can_be_filled(regrouped(replace(local, layers=(layer,))), candidates)
    ]
    return CommonLayers(
        regrouped(local, left_out),
        tuple(regrouped(remote, left_out) for remote in remotes),
        tuple(groups),
        tuple(left_out),
    )


def _can_be_filled(one_layer: KVLayout, remotes: Sequence[KVLayout]) -> bool:
    try:
        return bool(choose_sources(one_layer, remotes))
    except IncompatiblePeerError:
        return False
