"""File descriptors: the limit of this process, and a reserve for libraries that abort without one.

libzmq and UCX abort the process if they find no free descriptor at certain moments, for example when they
start a thread. So a transport holds a few descriptors back and releases them for the duration of such a call.
If they cannot be had, the call is not made: it is refused with an error that names the limit.

The limit itself is left alone, because it belongs to the program: one that uses `select()` breaks on
descriptors above 1023.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import BackpressureError

logger = logging.getLogger(__name__)

#: The limit that messages recommend.
_AMPLE = 65536

_warned: set[str] = set()


def descriptor_limit() -> int:
    """Return how many descriptors this process may have open: the soft limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _AMPLE if soft == resource.RLIM_INFINITY else soft


def remedy() -> str:
    """Say what to do about a lack of descriptors, for the end of a message."""
    return (
        f"this process may open {descriptor_limit()} file descriptors: raise the limit with `ulimit -n {_AMPLE}`, or "
        f"LimitNOFILE={_AMPLE} in a systemd unit"
    )


def warn_if_few(scheme: str, num_held: int, max_connecting: int, per_connection: int) -> None:
    """Log one warning per process and transport if connections may find no descriptors.

    Args:
        num_held: Descriptors that the transport holds back.
        max_connecting: Connections that it makes at a time.
        per_connection: Descriptors per connection.
    """
    needed = num_held + max_connecting * per_connection
    free = descriptor_limit() - _num_open()
    if free < needed and scheme not in _warned:
        _warned.add(scheme)
        logger.warning(
            "transport %r may need %d file descriptors (max_connecting=%d connections of %d each, %d held back), and %d "
            "are free: connections will be refused when they run out; %s",
            scheme,
            needed,
            max_connecting,
            per_connection,
            num_held,
            max(0, free),
            remedy(),
        )


def _num_open() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # no /proc, or no descriptor to open it with
        return 0


class Reserve:
    """`num_held` descriptors that are held back. Only one thread may use it."""

    def __init__(self, num_held: int) -> None:
        self.num_held = num_held
        self._held: list[int] = []

    def refill(self) -> bool:
        """Hold back `num_held` descriptors again, or as many as there are; return whether it is all
        of them.
        """
        return self._take(self.num_held)

    def _take(self, num: int) -> bool:
        while len(self._held) < num:
            try:
                self._held.append(os.eventfd(0, os.EFD_CLOEXEC))
            except OSError:
                return False
        return True

    def spend(self) -> None:
        """Close the held descriptors, so that others can be opened."""
        while self._held:
            os.close(self._held.pop())

    @contextmanager
    def lent(self, num_needed: int, what: str) -> Iterator[None]:
        """Release the reserve while the body makes a call that needs at most `num_needed` descriptors.

        That many must be free in addition to the reserve. So a thread that opens files at the same time would
        have to take the whole reserve before the call finds none.

        Args:
            what: What fails, for the message.

        Raises:
            BackpressureError: fewer are free. The body did not run.
        """
        is_there = self._take(self.num_held + num_needed)
        if not is_there:
            self._give_back_surplus()
            raise BackpressureError(
                f"{what}: fewer than {num_needed} file descriptors are free, not counting {self.num_held} held back; "
                f"{remedy()}"
            )
        self.spend()
        try:
            yield
        finally:
            self.refill()

    def require(self, num_needed: int, what: str) -> None:
        """Check that descriptors are free for a call that survives without.

        Raises BackpressureError: see `lent`.
        """
        with self.lent(num_needed, what):
            pass

    def _give_back_surplus(self) -> None:
        while len(self._held) > self.num_held:
            os.close(self._held.pop())

    close = spend
