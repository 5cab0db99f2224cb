"""From which rank of a producer each part of our layers comes: layouts in, shares out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...transports.errors import IncompatiblePeerError
from .layout import KVLayout, LayerLayout
from .slots import Shard, SlotArray

#: A rank of the producer, and what it keeps of a layer.
_Candidate = tuple[int, LayerLayout]


@dataclass(frozen=True)
class Share:
    """A run of one layer's heads, or its whole pages, and the rank that has them.

    Attributes:
        rank: Index of the producer's rank.
        first: First share of the run, counted over the model.
        num: Shares in the run.
    """

    rank: int
    ours: LayerLayout
    theirs: LayerLayout
    first: int
    num: int

    def slots(self) -> tuple[SlotArray, SlotArray] | None:
        """Return what is known about the inside of our pages and theirs; None if they move whole."""
        if self.ours.slots is None or self.theirs.slots is None:
            return None
        return self.ours.slots, self.theirs.slots


def choose_sources(local: KVLayout, remotes: Sequence[KVLayout]) -> list[Share]:
    """Find a rank for each head of each of our layers, using as few ranks as possible.

    A rank may keep other layers, and more heads, than we do. If several ranks keep the same head, it comes
    from the first of them in the order of `remotes`. Layers of ours that lie in the same bytes are filled
    once.

    Returns:
        Shares that fill each of our layers exactly once.

    Raises:
        IncompatiblePeerError: a layer is missing or cannot be paired, or no rank has one of its heads. The
            error names the field.
    """
    holders: dict[str, list[_Candidate]] = {}
    for rank, remote in enumerate(remotes):
        for layer in remote.layers:
            holders.setdefault(layer.name, []).append((rank, layer))
    filled: dict[LayerLayout, tuple[Share, ...]] = {}
    for ours in local.layers:
        shares = tuple(map(_without_names, _shares_of_layer(ours, holders.get(ours.name, []))))
        if filled.setdefault(replace(ours, name=""), shares) != shares:
            raise IncompatiblePeerError(
                field="layers that share a cache", local="some", remote="not the same ones"
            )
    return [share for shares in filled.values() for share in shares]


def _without_names(share: Share) -> Share:
    return replace(share, ours=replace(share.ours, name=""), theirs=replace(share.theirs, name=""))


def _shares_of_layer(ours: LayerLayout, candidates: Sequence[_Candidate]) -> Iterator[Share]:
    """Cover our shard from its first share on. Each step takes the candidate that reaches farthest."""
    _require(f"layers.{ours.name}", bool(candidates), "present", "absent")
    for _, theirs in candidates:
        _require_same_meaning(ours, theirs)
    usable = [candidate for candidate in candidates if _can_be_read(ours, candidate[1])]
    first = ours.shard.first
    while first < ours.shard.end:
        rank, theirs = max(
            usable, key=lambda candidate: _reach(candidate[1].shard, first), default=candidates[0]
        )
        end = min(_reach(theirs.shard, first), ours.shard.end)
        _require(
            f"layers.{ours.name}.shard",
            bool(usable) and end > first,
            _text(ours.shard),
            ", ".join(_text(candidate.shard) for _, candidate in candidates),
        )
        yield Share(rank, ours, theirs, first, end - first)
        first = end


def _reach(shard: Shard, first: int) -> int:
    """Return the share after the last one that `shard` has from `first` on; `first` if it does not have that
    one.
    """
    return shard.end if shard.first <= first < shard.end else first


def _can_be_read(ours: LayerLayout, theirs: LayerLayout) -> bool:
    """Say whether `theirs` can fill `ours`. Whole pages need the same heads on both sides."""
    return ours.shard == theirs.shard or (ours.slots is not None and theirs.slots is not None)


def _require_same_meaning(ours: LayerLayout, theirs: LayerLayout) -> None:
    """Raise an error that names the first field that prevents pairing."""
    prefix = f"layers.{ours.name}"
    _require_equal(f"{prefix}.group_index", ours.group_index, theirs.group_index)
    _require_equal(f"{prefix}.shard.total", ours.shard.total, theirs.shard.total)
    if ours.slots is None or theirs.slots is None:
        for what in ("block_size", "page_format", "page_bytes"):
            _require_equal(f"{prefix}.{what}", getattr(ours, what), getattr(theirs, what))
        return
    sizes = (ours.block_size, theirs.block_size)
    # A token's vectors can move without the rest of its block.
    is_cut = ours.slots.grain == theirs.slots.grain == 1
    _require(f"{prefix}.block_size", not max(sizes) % min(sizes) if is_cut else sizes[0] == sizes[1], *sizes)
    for what in ("element", "grain", "num_parts", "vector_bytes"):
        _require_equal(f"{prefix}.{what}", getattr(ours.slots, what), getattr(theirs.slots, what))


def _require_equal(field: str, local: object, remote: object) -> None:
    _require(field, local == remote, local, remote)


def _require(field: str, holds: bool, local: object, remote: object) -> None:
    if not holds:
        raise IncompatiblePeerError(field=field, local=local, remote=remote)


def _text(shard: Shard) -> str:
    return f"{shard.first}-{shard.end - 1} of {shard.total}"
