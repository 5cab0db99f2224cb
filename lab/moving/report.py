"""Report the results as a table and as JSON lines."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from kvferry.transports.copying import IS_COMPILED

from .results import Result

Machine = Mapping[str, object]


def machine() -> Machine:
    """Describe the machine and the versions that the figures depend on."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in info if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "kernel": platform.release(),
        "huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "shared_huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "congestion_control": _chosen("/proc/sys/net/ipv4/tcp_congestion_control"),
        "python": platform.python_version(),
        "kvferry": importlib.metadata.version("kvferry"),
        "copy_loop": "compiled" if IS_COMPILED else "python",
    }


def _chosen(path: str) -> str:
    """Return the value of a kernel setting; of several choices, the one in brackets."""
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or text


def table(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of one table per shape."""
    for _, group in groupby(results, key=_shape_of):
        rows = list(group)
        first = rows[0]
        blocks = "block" if first.num_blocks == 1 else "blocks"
        yield ""
        yield (
            f"{first.model}, {first.num_blocks} {blocks}, {first.layout}: {first.num_regions:,} regions, "
            f"{first.num_bytes / 2**20:.1f} MiB, {first.num_rounds} rounds"
        )
        yield (
            f"  {'':27}{'p50 ms':>9}{'GB/s':>7}{'x memcpy':>10}  {'(quartiles)':13}"
            f"{'x sockets':>10}{'CPU s/GB':>10}  {'x twin':44}moved by"
        )
        yield from map(_line, rows)


def _shape_of(result: Result) -> tuple[str, int, str]:
    return result.model, result.num_blocks, result.layout


def _line(r: Result) -> str:
    quartiles = f"({r.to_memcpy_quartiles[0]:.2f}-{r.to_memcpy_quartiles[1]:.2f})"
    twin = ""
    if r.twin:
        low, high = r.to_twin_quartiles
        twin = f"{r.to_twin:.2f} ({low:.2f}-{high:.2f}) of {r.twin}"
    return (
        f"  {r.contender:27}{r.p50_ms:>9.3f}{r.gb_per_s:>7.2f}{r.to_memcpy:>10.2f}  {quartiles:13}"
        f"{r.to_sockets:>10.2f}{r.cpu_s_per_gb:>10.2f}  {twin:44}{r.mechanism} {r.version}"
    )


def json_lines(about: Machine, left_out: Mapping[str, str], results: Sequence[Result]) -> Iterator[str]:
    """Yield one object per line. Its `record` is `machine`, `left_out` (with the reason) or `result`."""
    yield json.dumps({"record": "machine", **about})
    for name, reason in left_out.items():
        yield json.dumps({"record": "left_out", "contender": name, "reason": reason})
    for result in results:
        yield json.dumps({"record": "result", **asdict(result)})
