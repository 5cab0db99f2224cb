"""Turning errors of the outside (sockets, libraries, files) into errors of our own tree.

A library may raise anything. An exception of a type that no caller expects would end the thread that owns the transport,
and with it all peers. An error of our own tree ends only the call or the peer that caused it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ._descriptors import remedy
from ._limited_log import LimitedLog
from .errors import BackpressureError, KVTransferError, TransportError

_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


def typed(
    error: Exception, what: str, kind: type[KVTransferError] = TransportError, *, limit: str = ""
) -> KVTransferError:
    """Turn an exception into one of ours; return one of ours unchanged.

    Args:
        what: What failed, for the message.
        kind: Type of the result. If descriptors ran out, it is a `BackpressureError` that names the remedy instead.
        limit: Another limit that the library reports with the same errno, for the message.
    """
    if isinstance(error, KVTransferError):
        return error
    if getattr(error, "errno", None) in _NO_DESCRIPTORS:
        return BackpressureError(f"{what}: {error}{f' ({limit})' if limit else ''}; {remedy()}")
    # The messages of OSError and ZMQError name the errno. Of other errors, the type often says more than the message.
    return kind(f"{what}: {error}" if hasattr(error, "errno") else f"{what}: {error!r}")


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


@contextmanager
def survived(what: str, log: LimitedLog) -> Iterator[None]:
    """Log whatever the body raises, and continue, so that a failed step of a clean-up does not prevent the next one."""
    try:
        yield
    except Exception as error:
        log.warning("%s: %r", what, error, exc_info=error)


def unexpected(error: Exception, what: str, log: LimitedLog) -> KVTransferError:
    """Like `typed`, but log the traceback of an error that is not ours: it ends a peer that may not have caused it."""
    if not isinstance(error, KVTransferError):
        log.warning("%s: %r", what, error, exc_info=error)
    return typed(error, what)
