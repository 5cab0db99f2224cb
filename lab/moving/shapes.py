"""What one read moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.transports import RegionPairs


@dataclass(frozen=True)
class Shape:
    """Regions of equal length, scattered over both pools. All lie at multiples of their length.

    Attributes:
        model, num_blocks, layout: The blocks of a request that they stand for; empty if they stand for none.
        num_parts: Parts of equal size into which the pool is divided; each has as many of the regions.
    """

    num_regions: int
    region_bytes: int
    model: str = ""
    num_blocks: int = 0
    layout: str = ""
    num_parts: int = 1

    def __str__(self) -> str:
        whole, unit = (
            (self.region_bytes >> 20, "MiB")
            if self.region_bytes >= 1 << 20
            else (self.region_bytes >> 10, "KiB")
        )
        blocks = f"{self.name}: " if self.model else ""
        return f"{blocks}{self.num_regions} x {whole} {unit}"

    @property
    def name(self) -> str:
        """The blocks that it stands for, in words."""
        blocks = "block" if self.num_blocks == 1 else "blocks"
        return f"{self.model}, {self.num_blocks} {blocks}, {self.layout}"

    @property
    def num_bytes(self) -> int:
        return self.num_regions * self.region_bytes

    def pairs(self, pool_bytes: int, random: np.random.Generator) -> RegionPairs:
        """Choose other regions of two pools of `pool_bytes` bytes each time."""
        per_part = pool_bytes // self.region_bytes // self.num_parts
        first = np.arange(self.num_parts)[:, None] * per_part
        table = np.empty((self.num_regions, 3), dtype=np.int64)
        for side in (0, 1):
            chosen = random.permutation(per_part)[: self.num_regions // self.num_parts]
            table[:, side] = (first + chosen).ravel() * self.region_bytes
        table[:, 2] = self.region_bytes
        return RegionPairs(table)


def shapes_of(num_blocks: int) -> list[Shape]:
    """Return shapes of many blocks and of one, in both layouts, for a model like Llama-3.1-8B and for
    SmolLM2-135M.
    """
    shapes = []
    for model, num_layers, page_bytes in (("llama-8b", 32, 64 << 10), ("smollm2-135m", 30, 12 << 10)):
        for count in (num_blocks, 1):
            shapes.append(Shape(count, num_layers * page_bytes, model, count, "uniform"))
            # Each layer has a pool of its own.
            shapes.append(Shape(count * num_layers, page_bytes, model, count, "per-layer", num_layers))
    return shapes
