"""Read a node's transfers from `/metrics`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Transfers:
    """Totals of a node's loads since its start."""

    num_loads: int = 0
    num_failures: int = 0
    num_bytes: int = 0
    num_blocks: int = 0
    num_regions: int = 0
    seconds: float = 0.0
    mechanisms: tuple[str, ...] = ()

    def __str__(self) -> str:
        speed = self.num_bytes / self.seconds / 1e9 if self.seconds else 0.0
        return (
            f"{self.num_loads} loads, {self.num_failures} failed; {self.num_blocks} blocks in {self.num_regions} regions, "
            f"{self.num_bytes / 1e6:.1f} MB in {self.seconds * 1e3:.1f} ms ({speed:.1f} GB/s), "
            f"by {', '.join(self.mechanisms) or 'nothing'}"
        )


async def read_transfers(session: aiohttp.ClientSession, url: str) -> Transfers:
    """Read a node's totals. All are zero if it has none."""
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    total: defaultdict[str, float] = defaultdict(float)
    for sample in samples:
        total[sample.name] += sample.value
    mechanisms = {sample.labels.get("mechanism", "") for sample in samples}
    return Transfers(
        num_loads=int(total["kvferry_load_seconds_count"]),
        num_failures=int(total["kvferry_load_failures_total"]),
        num_bytes=int(total["kvferry_load_bytes_sum"]),
        num_blocks=int(total["kvferry_load_blocks_sum"]),
        num_regions=int(total["kvferry_load_regions_sum"]),
        seconds=total["kvferry_load_seconds_sum"],
        mechanisms=tuple(sorted(mechanisms - {""})),
    )
