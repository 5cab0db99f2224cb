"""Run steps, each within a time limit of its own, and write a page after each."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from types import FrameType
from typing import Any

#: Lines of a log on the page.
LOG_LINES = 40


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
            lines += ["", "```", *result.why.splitlines()[-LOG_LINES:], *result.logs.splitlines(), "```"]
    return "\n".join(lines) + "\n"
