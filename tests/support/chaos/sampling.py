"""Sample what the services of a soak hold over time, and plot it: `python -m tests.support.chaos.sampling
SAMPLES PLOT.svg`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Self

from kvferry.lab.client import call, totals_of

from .services import Service

#: A paused service says nothing.
PATIENCE_S = 1.0
#: What is plotted, by the attribute of a sample: a title.
MEASURES = {
    "memory_mib": "memory (proportional set size, MiB)",
    "descriptors": "descriptors",
    "threads": "threads",
    "blocks": "blocks in use",
    "offers": "live offers",
}
_BLOCKS, _FREE_BLOCKS = "kvferry_engine_blocks", "kvferry_engine_free_blocks"
_VLLM_USAGE, _OFFERS, _LOADS = "vllm:kv_cache_usage_perc", "kvferry_live_leases", "kvferry_load_seconds_count"
_WIDTH, _HEIGHT, _LEFT, _GAP = 760, 110, 50, 34
_COLOURS = ("#1f6feb", "#8250df", "#1a7f37", "#bf8700", "#cf222e", "#57606a")


@dataclass(frozen=True)
class Sample:
    """What the process of a service holds at a time.

    Attributes:
        at_s: Seconds from the start of the run.
        process: The service's process, by a name of its own.
        memory_mib: Proportional set size of the process and its children: shared pages count by shares.
        blocks: Used blocks of its pool; as a share of the pool if the engine is vLLM. None: it does not say.
        offers: Offers that are not delivered. None: it does not say.
        loads: Loads that the process has ended so far. None: it does not say.
    """

    at_s: float
    service: str
    process: str
    memory_mib: float
    descriptors: int
    threads: int
    blocks: float | None
    offers: float | None
    loads: float | None = None


class Sampler:
    """Samples services in a thread for as long as the block lasts, and appends each sample to a file as a
    line of JSON.
    """

    def __init__(self, services: Sequence[Service], file: Path, period_s: float) -> None:
        self._services, self._file, self._period_s = services, file, period_s
        self._began = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._file.write_text("")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        with self._file.open("a") as file:
            while True:
                is_last = self._is_over.wait(self._period_s)
                for service in self._services:
                    # It may end, or not run yet.
                    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                        print(json.dumps(asdict(self._sampled(service))), file=file, flush=True)
                if is_last:
                    return

    def _sampled(self, service: Service) -> Sample:
        process = service.process
        roots = [Path(f"/proc/{pid}") for pid in process.pids]
        memory_kib = sum(_pss_kib((root / "smaps_rollup").read_text()) for root in roots)
        # Not `process.url`, which a process that was started again has told to nothing that reads it.
        values = _metrics_of(f"http://127.0.0.1:{service.port}")
        blocks = values[_BLOCKS] - values[_FREE_BLOCKS] if _BLOCKS in values else values.get(_VLLM_USAGE)
        return Sample(
            at_s=round(time.monotonic() - self._began, 2),
            service=service.name,
            process=process.name,
            memory_mib=round(memory_kib / 1024, 1),
            descriptors=sum(1 for root in roots for _ in (root / "fd").iterdir()),
            threads=sum(1 for root in roots for _ in (root / "task").iterdir()),
            blocks=blocks,
            offers=values.get(_OFFERS),
            loads=values.get(_LOADS),
        )


def _pss_kib(rollup: str) -> int:
    return sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))


def _metrics_of(url: str) -> dict[str, float]:
    """Return a page of metrics, samples of the same name summed; empty if the service does not answer."""
    with suppress(OSError):
        return totals_of(call("GET", url, "/metrics", timeout_s=PATIENCE_S).decode())
    return {}


# -- plot --------------------------------------------------------------------------------------------


def read(file: Path) -> list[Sample]:
    return [Sample(**json.loads(line)) for line in file.read_text().splitlines()]


def num_loads(samples: Sequence[Sample]) -> int:
    """Return how many loads the services have ended.

    Those between the last sample of a process and its end are missing.
    """
    last = {sample.process: sample.loads or 0 for sample in samples}
    return int(sum(last.values()))


def plot(samples: Sequence[Sample]) -> str:
    """Return an SVG image with one diagram per measure, and in each a line per service, broken where its
    process ends.
    """
    names = sorted({sample.service for sample in samples})
    colours = dict(zip(names, _COLOURS, strict=False))
    end_s = max(sample.at_s for sample in samples)
    body: list[str] = []
    for x, name in zip(range(_LEFT, _WIDTH, 115), names, strict=False):
        body.append(f'<text x="{x}" y="14" fill="{colours[name]}">{escape(name)}</text>')
    top = _GAP
    for measure, title in MEASURES.items():
        known = [sample for sample in samples if getattr(sample, measure) is not None]
        body += _diagram(title, measure, known, colours, top + 10, end_s)
        top += _HEIGHT + _GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" font-family="sans-serif" font-size="11">'
    return "\n".join((head, f'<rect width="{_WIDTH}" height="{top}" fill="white"/>', *body, "</svg>\n"))


def _diagram(
    title: str,
    measure: str,
    samples: Iterable[Sample],
    colours: Mapping[str, str],
    top: float,
    end_s: float,
) -> Iterator[str]:
    lines: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        lines[sample.service, sample.process].append((sample.at_s, getattr(sample, measure)))
    highest = max((value for line in lines.values() for _, value in line), default=0.0) or 1.0
    bottom, right = top + _HEIGHT, _WIDTH - 10
    yield f'<text x="{_LEFT}" y="{top - 4:.0f}" font-weight="bold">{escape(title)}</text>'
    for value, y in ((highest, top), (0, bottom)):
        yield f'<text x="{_LEFT - 5}" y="{y + 4:.0f}" text-anchor="end">{_shown(value)}</text>'
        yield f'<line x1="{_LEFT}" y1="{y}" x2="{right}" y2="{y}" stroke="#d0d7de"/>'
    yield f'<text x="{right}" y="{bottom + 13:.0f}" text-anchor="end">{end_s / 60:.0f} min</text>'
    paths: dict[str, list[str]] = defaultdict(list)
    for (service, _), line in lines.items():
        places = [
            (round(_LEFT + (right - _LEFT) * at_s / end_s), round(bottom - _HEIGHT * value / highest))
            for at_s, value in line
        ]
        # Most of a line is level, and needs its ends only.
        corners = [
            place
            for before, place, after in zip([None, *places], places, [*places[1:], None], strict=False)
            if before is None or after is None or not before[1] == place[1] == after[1]
        ]
        paths[service].append("M" + "L".join(f"{x},{y}" for x, y in corners))
    for service, parts in paths.items():
        yield f'<path d="{"".join(parts)}" fill="none" stroke="{colours[service]}"/>'


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main(words: Sequence[str]) -> int:
    if len(words) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    Path(words[1]).write_text(plot(read(Path(words[0]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
