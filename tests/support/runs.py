"""A run of the tests: it goes on when a worker process dies, and says at its end how much memory it took.

Loaded as a plugin by `tests/conftest.py`. It does nothing in the workers of pytest-xdist.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

#: Seconds between two looks at the memory of all processes.
LOOK_S = 2.0


class Scheduler(LoadFileScheduling):  # type: ignore[misc]
    """xdist's scheduler of whole files, mended for workers that die, as when the kernel needs their memory.

    xdist 3.8 gives the test that was running to another worker, which dies of it as well, and so on without
    an end. And it gives work to a worker that has just started and has collected no tests, which ends the run
    with a `KeyError`.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        """Take a worker's files away from it; return the test that it died of, if it did not end well."""
        workload = self.assigned_work.pop(node)
        running = next(
            ((unit, test) for unit in workload.values() for test, is_done in unit.items() if not is_done),
            None,
        )
        if running is None:
            return None
        unit, test = running
        unit[test] = True  # it is reported as failed, and not run again
        self.workqueue.update({file: unit for file, unit in workload.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return str(test)

    def _reschedule(self, node: WorkerController) -> None:
        if node in self.registered_collections:
            super()._reschedule(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduler | None:
    return Scheduler(config, log) if config.getvalue("dist") == "loadfile" else None


def memory_of_processes_below(root: int) -> int:
    """Return the bytes that a process and its descendants use, memory that they share counted once."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue  # it has ended
    total = 0
    for pid in parents:
        above: int | None = pid
        while above is not None and above != root:
            above = parents.get(above)
        if above == root:
            try:
                shares = (Path("/proc") / str(pid) / "smaps_rollup").read_text()
            except OSError:
                continue
            total += sum(
                int(line.split()[1]) << 10 for line in shares.splitlines() if line.startswith("Pss:")
            )
    return total


class PeakMemory:
    """Looks at the memory of this process and its descendants now and then, and keeps the most that
    it saw.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="peak-memory", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self.num_bytes = max(self.num_bytes, memory_of_processes_below(os.getpid()))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        self._is_over.set()
        self._thread.join()
        terminalreporter.write_line(f"at most {self.num_bytes / (1 << 30):.1f} GiB of memory were in use")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        config.pluginmanager.register(PeakMemory())
