"""How the suites fail: with the promise that was broken, and what was seen instead."""

from __future__ import annotations


class BrokenPromiseError(AssertionError):
    """A connector did what its contract rules out.

    Attributes:
        promise: What it must do instead.
        seen: What it did.
    """

    def __init__(self, promise: str, seen: str) -> None:
        super().__init__(f"broken promise: {promise}\nseen: {seen}")
        self.promise = promise
        self.seen = seen


class StillWaitingError(BrokenPromiseError, TimeoutError):
    """What a test waits for did not happen in time."""

    def __init__(self, timeout_s: float, seen: str) -> None:
        super().__init__(
            "every transfer ends and is reported in time", f"timed out after {timeout_s:g} s of steps; {seen}"
        )


def promise(text: str, *, kept: bool, seen: object = "") -> None:
    """Fail unless a promise is kept.

    Args:
        text: The promise, as a sentence about what a connector does.
        seen: What the test saw; part of the message.

    Raises:
        BrokenPromiseError: `kept` is False.
    """
    __tracebackhide__ = True
    if not kept:
        raise BrokenPromiseError(text, str(seen))
