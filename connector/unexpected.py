"""Exceptions that no call documents: made typed errors in one place, and logged at a bounded rate."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from ..transports._limited_log import LimitedLog
from ..transports.errors import KVTransferError, UnexpectedError

logger = logging.getLogger(__name__)

#: The same kind of failure is logged at most this often.
_REPEAT_S = 60.0


class Unexpected:
    """Turns whatever a call to the outside raises into a `KVTransferError`.

    Each caller then ends what the call was about, as it does for the errors that the call documents.
    """

    def __init__(self) -> None:
        self._log = LimitedLog(logger, max_lines=1, interval_s=_REPEAT_S)

    @contextmanager
    def typed(self, what: str) -> Iterator[None]:
        """Run the body; `what` says in words what it does.

        Raises:
            UnexpectedError: the body raised something that is not a `KVTransferError`. It was logged with its traceback.
        """
        try:
            yield
        except Exception as bug:
            error = self.as_typed(what, bug)
            if error is bug:
                raise
            raise error from bug

    def as_typed(self, what: str, bug: Exception) -> KVTransferError:
        """Return the error to go on with instead of `bug`; log `bug` if it is not a `KVTransferError` itself."""
        if isinstance(bug, KVTransferError):
            return bug
        error = UnexpectedError(f"{what} raised {type(bug).__name__}: {bug}")
        self.log(what, bug)
        # Neither a log record nor the error may keep the frames alive, because the frames keep the pool alive.
        error.__cause__ = bug.with_traceback(None)
        return error

    @contextmanager
    def logged(self, what: str) -> Iterator[None]:
        """Run a body that nothing depends on: whatever it raises is only logged."""
        try:
            yield
        except Exception as bug:  # noqa: BLE001 - whatever it is, nothing depends on it
            self.log(what, bug)

    def log(self, what: str, bug: Exception) -> None:
        """Log an exception with its traceback."""

        def message() -> str:
            trace = "".join(traceback.format_exception(bug)).rstrip()
            return f"unexpected error: {what} raised this:\n{trace}"

        self._log.error(message, key=(what, type(bug)))
