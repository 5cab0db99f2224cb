"""Run steps, each within a time limit of its own, and write a page after each."""

from __future__ import annotations

import os
import platform
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

#: Lines of a log on the page.
LOG_LINES = 40
#: A rehearsal is no measurement, so a busy machine may take longer over it.
REHEARSAL_FACTOR = 5
#: Of the time for all steps, the part that those still to come can count on.
KEPT = 0.5


class Verdict(StrEnum):
    PASSED = "passed"
    FAILED = "FAILED"
    SKIPPED = "skipped"
    NOT_RUN = "not run"


class SkippedError(Exception):
    """A step makes no sense here. The message says why."""


class OverLimitError(Exception):
    """A step took too long."""


@dataclass(frozen=True)
class Step:
    """One thing to try.

    Attributes:
        limit_s: Its time limit, in seconds.
        run: Gets what all steps share, yields lines of Markdown as soon as they are known, and raises if
            something is wrong.
    """

    name: str
    limit_s: float
    about: str
    run: Callable[[Any], Iterator[str]]


@dataclass
class Result:
    """What a step did.

    Attributes:
        why: The reason, if it did not pass.
        logs: The ends of its servers' logs, if it failed.
    """

    name: str
    verdict: Verdict = Verdict.NOT_RUN
    why: str = ""
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)
    logs: str = ""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OverLimitError in the main thread if the block takes longer."""

    def end(number: int, frame: FrameType | None) -> None:
        raise OverLimitError(f"stopped at its limit of {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    # Again and again, in case some code discards the exception, but not while servers are being ended.
    signal.setitimer(signal.ITIMER_REAL, seconds, 60.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(step: Step, context: Any, limit_s: float, logs: Callable[[], str]) -> Result:
    """Run a step, at most `limit_s` seconds.

    Args:
        logs: Returns the ends of the servers' logs; called if the step fails.
    """
    result, began = Result(step.name), time.monotonic()
    try:
        with time_limit(limit_s):
            for line in step.run(context):
                result.lines.append(line)
        result.verdict = Verdict.PASSED
    except SkippedError as error:
        result.verdict, result.why = Verdict.SKIPPED, str(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, the next step runs
        result.verdict, result.why = Verdict.FAILED, f"{type(error).__name__}: {error}"
        result.logs = logs()
    result.seconds = time.monotonic() - began
    return result


def page(title: str, machine: Sequence[str], results: Sequence[Result]) -> str:
    """Return the page: the machine, a table of all steps, and what each has yielded."""
    lines = [f"# {title}", "", *machine, "", "| step | result | seconds |", "|---|---|---|"]
    for result in results:
        first = result.why.partition("\n")[0][:200].replace("|", "\\|")
        lines.append(
            f"| {result.name} | {': '.join(filter(None, [result.verdict, first]))} | {result.seconds:.0f} |"
        )
    for result in results:
        if result.lines or result.verdict is Verdict.FAILED:
            lines += ["", f"## {result.name}", "", *result.lines]
        if result.verdict is Verdict.FAILED:
            lines += ["", "```", *result.why.splitlines(), *result.logs.splitlines(), "```"]
    return "\n".join(lines) + "\n"


def machine(packages: Sequence[str]) -> list[str]:
    """Return a table of the machine, and of those packages that are installed."""
    import torch

    found = [("Python", platform.python_version()), ("CPU cores", str(os.cpu_count()))]
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        memory = f"{properties.total_memory >> 30} GiB"
        found.append(("GPU", f"{torch.cuda.device_count()} x {properties.name}, {memory}"))
        found.append(("CUDA of PyTorch", str(torch.version.cuda)))
    with suppress(OSError):
        found.append(("NVIDIA driver", Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]))
    for name in packages:
        with suppress(PackageNotFoundError):
            found.append((name, version(name)))
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in found)]


def run_all(
    steps: Sequence[Step],
    context: Any,
    output: Path,
    page_of: Callable[[Sequence[Result]], str],
    seconds: float,
    *,
    logs: Callable[[], str] = str,
    on_failure: Callable[[], None] = lambda: None,
) -> int:
    """Run steps, and write the page after each. Returns 1 if one has failed, otherwise 0.

    Args:
        seconds: No step goes on after them. Each step leaves some of them to those after it.
        logs: See `run`.
        on_failure: Called after a step that has failed.
    """
    results = [Result(step.name) for step in steps]
    until = time.monotonic() + seconds
    share = min(1.0, KEPT * seconds / sum(step.limit_s for step in steps))
    for index, step in enumerate(steps):
        kept_s = share * sum(later.limit_s for later in steps[index + 1 :])
        limit_s = min(step.limit_s, until - time.monotonic() - kept_s)
        if limit_s <= 0:
            results[index].why = "no time was left"
        else:
            print(f"{step.name} (at most {limit_s:.0f} s): {step.about}", flush=True)
            results[index] = result = run(step, context, limit_s, logs)
            print(f"  {result.verdict} after {result.seconds:.0f} s {result.why[-2000:]}", flush=True)
            if result.verdict is Verdict.FAILED:
                on_failure()
        output.write_text(page_of(results), encoding="utf-8")
    print(f"the page is {output}")
    return int(any(result.verdict is Verdict.FAILED for result in results))
