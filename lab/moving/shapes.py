"""The transfers to measure: the blocks of one request, in one layout of one model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.transports import RegionPairs


@dataclass(frozen=True)
class Shape:
    """Some blocks of a model in one layout. All regions have the same length and lie at multiples of it."""

    model: str
    layout: str
    num_layers: int
    page_bytes: int
    num_blocks: int

    def __str__(self) -> str:
        size = (
            f"{self.region_bytes >> 20} MiB"
            if self.region_bytes >= 1 << 20
            else f"{self.region_bytes >> 10} KiB"
        )
        blocks = "block" if self.num_blocks == 1 else "blocks"
        return f"{self.model}, {self.num_blocks} {blocks}, {self.layout}: {self.num_regions:,} x {size}"

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.page_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def is_uniform(self) -> bool:
        return self.layout == "uniform"

    @property
    def region_bytes(self) -> int:
        return self.block_bytes if self.is_uniform else self.page_bytes

    @property
    def num_regions(self) -> int:
        return self.num_bytes // self.region_bytes

    def pairs(self, pool_bytes: int, random: np.random.Generator) -> RegionPairs:
        """Choose other blocks each time, scattered over both pools of `pool_bytes` bytes."""
        capacity = pool_bytes // self.block_bytes
        ends = [random.permutation(capacity)[: self.num_blocks] for _ in range(2)]
        if not self.is_uniform:  # each layer has a pool of its own
            first = np.arange(self.num_layers)[:, None] * capacity
            ends = [(first + end[None, :]).ravel() for end in ends]
        lengths = np.full(self.num_regions, self.region_bytes)
        offsets = [end * self.region_bytes for end in ends]
        return RegionPairs(np.stack([*offsets, lengths], axis=1).astype(np.int64))


def shapes_of(num_blocks: int) -> list[Shape]:
    """Return shapes of many blocks and of one, in both layouts, for a model like Llama-3.1-8B and for SmolLM2-135M."""
    return [
        Shape(model, layout, num_layers, page_bytes, count)
        for model, num_layers, page_bytes in (("llama-8b", 32, 64 << 10), ("smollm2-135m", 30, 12 << 10))
        for count in (num_blocks, 1)
        for layout in ("uniform", "per-layer")
    ]
