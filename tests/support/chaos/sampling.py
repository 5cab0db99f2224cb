"""Sample what the services of a soak hold over time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from kvferry.lab.client import call, totals_of

from .services import Service

#: A paused service says nothing.
PATIENCE_S = 1.0
_BLOCKS, _FREE_BLOCKS = "kvferry_engine_blocks", "kvferry_engine_free_blocks"
_VLLM_USAGE, _OFFERS, _LOADS = "vllm:kv_cache_usage_perc", "kvferry_live_leases", "kvferry_load_seconds_count"


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


def read(file: Path) -> list[Sample]:
    return [Sample(**json.loads(line)) for line in file.read_text().splitlines()]


def num_loads(samples: Sequence[Sample]) -> int:
    """Return how many loads the services have ended.

    Those between the last sample of a process and its end are missing.
    """
    last = {sample.process: sample.loads or 0 for sample in samples}
    return int(sum(last.values()))
