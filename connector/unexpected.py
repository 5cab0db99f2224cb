"""Exceptions that no call documents: made typed errors at one place, and logged without flooding the log."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..transports.errors import KVTransferError, UnexpectedError

logger = logging.getLogger(__name__)

#: The same thing is logged at most this often.
_REPEAT_S = 60.0


@dataclass
class _Seen:
    logged: float
    num_since: int = 0


class RepeatLog:
    """Logs the same thing at most once a minute; the next line tells how often it happened meanwhile.

    A peer can make the same thing happen thousands of times per second, so what it makes us log must be bounded.
    Keys must not come from peers: they are remembered for good.

    Args:
        now: A clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seen: dict[Hashable, _Seen] = {}

    def log(self, level: int, key: Hashable, message: Callable[[], str]) -> None:
        """Log what `message` returns, unless something of the same key was logged within the last minute."""
        seen, now = self._seen.get(key), self._now()
        if seen is not None and now < seen.logged + _REPEAT_S:
            seen.num_since += 1
            return
        repeats = f" ({seen.num_since} more since it was last logged)" if seen and seen.num_since else ""
        self._seen[key] = _Seen(now)
        logger.log(level, "%s%s", message(), repeats)


class Unexpected:
    """Owns the failures of calls to the outside: whatever they raise becomes a `KVTransferError`.

    Each caller then ends what the call was about as it does for the errors that the call documents.
    """

    def __init__(self) -> None:
        self._log = RepeatLog()

    @contextmanager
    def typed(self, what: str) -> Iterator[None]:
        """Run the body; `what` says in words what it does.

        Raises:
            UnexpectedError: the body raised something that is no `KVTransferError`. It was logged with its traceback.
        """
        try:
            yield
        except Exception as bug:
            error = self.as_typed(what, bug)
            if error is bug:
                raise
            raise error from bug

    def as_typed(self, what: str, bug: Exception) -> KVTransferError:
        """The error to go on with in the place of `bug`, which is logged if it is no `KVTransferError` itself."""
        if isinstance(bug, KVTransferError):
            return bug
        error = UnexpectedError(f"{what} raised {type(bug).__name__}: {bug}")
        self.log(what, bug)
        # Neither a log record nor the error may keep the frames, and with them the pool, alive.
        error.__cause__ = bug.with_traceback(None)
        return error

    @contextmanager
    def logged(self, what: str) -> Iterator[None]:
        """Run a body that nothing depends on: whatever it raises is logged, and that is all."""
        try:
            yield
        except Exception as bug:  # noqa: BLE001 - whatever it is, nothing depends on it
            self.log(what, bug)

    def log(self, what: str, bug: Exception) -> None:
        """Log an exception with its traceback."""

        def message() -> str:
            trace = "".join(traceback.format_exception(bug)).rstrip()
            return f"unexpected error: {what} raised this:\n{trace}"

        self._log.log(logging.ERROR, (what, type(bug)), message)
