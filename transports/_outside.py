"""Errors of calls to the outside (sockets, libraries, files), as errors of our own tree.

A library may raise anything. An exception of a type that no caller expects would end the thread that owns the
transport, and with it every peer; as one of ours it ends the call or the peer that it belongs to.
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
    """Turn an exception into one of ours. One that is ours already stays as it is.

    Args:
        what: What failed, for the message.
        kind: What it becomes, unless descriptors ran out: that is a `BackpressureError` which names the remedy.
        limit: Another limit that libraries report as if descriptors had run out, for the message.
    """
    if isinstance(error, KVTransferError):
        return error
    if getattr(error, "errno", None) in _NO_DESCRIPTORS:
        return BackpressureError(f"{what}: {error}{f' ({limit})' if limit else ''}; {remedy()}")
    # The messages of OSError and ZMQError name the errno; of other types the type is the better half.
    return kind(f"{what}: {error}" if hasattr(error, "errno") else f"{what}: {error!r}")


@contextmanager
def outside(what: str, kind: type[KVTransferError] = TransportError) -> Iterator[None]:
    """Have whatever is raised inside leave as one of our errors. See `typed`."""
    try:
        yield
    except Exception as error:
        ours = typed(error, what, kind)
        if ours is error:
            raise
        raise ours from error


@contextmanager
def survived(what: str, log: LimitedLog) -> Iterator[None]:
    """Log whatever is raised inside, and go on: a step of a clean-up must not keep the next one from being taken."""
    try:
        yield
    except Exception as error:
        log.warning("%s: %r", what, error, exc_info=error)


def unexpected(error: Exception, what: str, log: LimitedLog) -> KVTransferError:
    """As `typed`, where the error ends a peer that did nothing to deserve it: then the log has the traceback."""
    if not isinstance(error, KVTransferError):
        log.warning("%s: %r", what, error, exc_info=error)
    return typed(error, what)
