"""Turning errors of the outside (sockets, libraries, files) into errors of our own tree.

A library may raise anything. An exception of a type that no caller expects would end the thread that owns the
transport, and with it all peers. An error of our own tree ends only the call or the peer that caused it.
Those that a call documents (`outside`) are answers; all others are bugs, which are logged with their
traceback (`undocumented`, `survived`).
"""

from __future__ import annotations

import errno
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from ._descriptors import remedy
from .errors import BackpressureError, KVTransferError, TransportError, UnexpectedError
from .limited_log import LimitedLog

_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


def typed(
    error: Exception, what: str, kind: type[KVTransferError] = TransportError, *, limit: str = ""
) -> KVTransferError:
    """Turn an exception into one of ours; return one of ours unchanged.

    Args:
        what: What failed, for the message.
        kind: Type of the result. If descriptors ran out, it is a `BackpressureError` that names the remedy
            instead.
        limit: Another limit that the library reports with the same errno, for the message.
    """
    if isinstance(error, KVTransferError):
        return error
    if getattr(error, "errno", None) in _NO_DESCRIPTORS:
        return BackpressureError(f"{what}: {error}{f' ({limit})' if limit else ''}; {remedy()}")
    return kind(_text(error, what))


def _text(error: Exception, what: str) -> str:
    # The messages of OSError and ZMQError name the errno. Of other errors, the type often says more than the
    # message.
    return f"{what}: {error}" if hasattr(error, "errno") else f"{what}: {error!r}"


@contextmanager
def outside(what: str, kind: type[KVTransferError] = TransportError) -> Iterator[None]:
    """Turn whatever the body raises into one of our errors; see `typed`."""
    try:
        yield
    except Exception as error:
        ours = typed(error, what, kind)
        if ours is error:
            raise
        raise ours from error


# -- what no call documents --------------------------------------------------------------------------


def unexpected(error: Exception, what: str, log: LimitedLog) -> KVTransferError:
    """Turn an exception that no call documents into an `UnexpectedError`, and log it; return one of ours
    unchanged.
    """
    if isinstance(error, KVTransferError):
        return error
    log_traceback(error, what, log)
    # Never a `BackpressureError`: that would say that nothing has begun, which is not known of such a call.
    ours = UnexpectedError(_text(error, what))
    # Neither a log record nor the error may keep the frames alive, because the frames keep the pool alive.
    ours.__cause__ = error.with_traceback(None)
    return ours


@contextmanager
def undocumented(what: str, log: LimitedLog) -> Iterator[None]:
    """Turn whatever the body raises without documenting it into an `UnexpectedError`; see `unexpected`."""
    try:
        yield
    except Exception as error:
        ours = unexpected(error, what, log)
        if ours is error:
            raise
        raise ours from error


@contextmanager
def survived(what: str, log: LimitedLog) -> Iterator[None]:
    """Log whatever the body raises, and continue: nothing depends on it, or the next step of a clean-up must
    come.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, nothing depends on it
        log_traceback(error, what, log)


def bug_log(logger: logging.Logger) -> LimitedLog:
    """Make a log for exceptions that could repeat for ever: one of a kind per minute is logged, and the
    others are counted.
    """
    return LimitedLog(logger, max_lines=1, interval_s=60.0)


def log_traceback(error: Exception, what: str, log: LimitedLog) -> None:
    """Log an exception with its traceback; see `LimitedLog` about `what`, which is a part of the key."""

    def message() -> str:
        return f"{what}:\n{''.join(traceback.format_exception(error)).rstrip()}"

    log.error(message, key=(what, type(error)))
