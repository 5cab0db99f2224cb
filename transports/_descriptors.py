"""File descriptors: how many there may be, and some held back for libraries that cannot do without.

libzmq and UCX abort the process where they find none at certain moments, such as when they start a thread. So a few
are held back, and given up for just as long as such a call takes; where that few are not to be had, the call is not
made, and refused with an error that names the limit.

The limit itself stays as it is: it belongs to the program. One that uses `select()` breaks on descriptors above 1023.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import BackpressureError

logger = logging.getLogger(__name__)

#: What a program is told to raise its limit to, at least.
_AMPLE = 65536

_warned: set[str] = set()


def descriptor_limit() -> int:
    """How many descriptors this process may have open: the soft limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _AMPLE if soft == resource.RLIM_INFINITY else soft


def remedy() -> str:
    """What to do about a lack of descriptors, in words."""
    return (
        f"this process may open {descriptor_limit()} file descriptors: raise the limit with `ulimit -n {_AMPLE}`, or "
        f"LimitNOFILE={_AMPLE} in a systemd unit"
    )


def warn_if_few(scheme: str, num_held: int, max_connecting: int, per_connection: int) -> None:
    """Log one warning per process and transport if connections may find no descriptors.

    Args:
        num_held: What the transport holds back.
        max_connecting: How many connections it makes at a time.
        per_connection: Descriptors for each of them.
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
    except OSError:  # no /proc; or no descriptor for it
        return 0


class Reserve:
    """Descriptors held back. One thread owns it.

    Args:
        num_held: How many.
    """

    def __init__(self, num_held: int) -> None:
        self.num_held = num_held
        self._held: list[int] = []

    @property
    def is_full(self) -> bool:
        return len(self._held) >= self.num_held

    def refill(self) -> bool:
        """Hold back as many as there should be, as far as there are any. Returns whether that worked."""
        return self._take(self.num_held)

    def _take(self, num: int) -> bool:
        while len(self._held) < num:
            try:
                self._held.append(os.eventfd(0, os.EFD_CLOEXEC))
            except OSError:
                return False
        return True

    def spend(self) -> None:
        """Give up what is held back."""
        while self._held:
            os.close(self._held.pop())

    @contextmanager
    def lent(self, num_needed: int, what: str) -> Iterator[None]:
        """Give up what is held back to a call that needs at most `num_needed` descriptors.

        They must be there beside the reserve, so that another thread that opens files at the same time would have to
        take the whole reserve before the call finds none.

        Args:
            what: What fails, for the error's message.

        Raises:
            BackpressureError: fewer are free. The call was not made.
        """
        is_there = self._take(self.num_held + num_needed)
        if not is_there:
            self._give_back_surplus()
            raise BackpressureError(
                f"{what}: it takes {num_needed} file descriptors beside {self.num_held} held back, and they are not "
                f"there; {remedy()}"
            )
        self.spend()
        try:
            yield
        finally:
            self.refill()

    def require(self, num_needed: int, what: str) -> None:
        """Check that there are descriptors for a call that survives without. Raises BackpressureError: see `lent`."""
        with self.lent(num_needed, what):
            pass

    def _give_back_surplus(self) -> None:
        while len(self._held) > self.num_held:
            os.close(self._held.pop())

    close = spend
