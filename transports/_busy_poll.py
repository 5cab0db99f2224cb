"""Polling for a moment before blocking: to wake a thread takes as long as the rest of a small read."""

from __future__ import annotations

import ctypes
import time
from typing import Final

from .copying import busy_poll

#: Releases the GIL, which `os.sched_yield` keeps before Python 3.12.
_sched_yield: Final = ctypes.CDLL(None).sched_yield

#: A thread that waits longer than this for its core to come back shares it with more than its peer. The
#: scheduler then serves it sooner if it blocks.
_MAX_YIELD_S = 0.001

#: How long it does not busy-poll after that.
_BACKOFF_S = 0.1


class BusyPoll:
    """The period in which the next step of a read is expected, and in which a node polls instead of blocking.

    Args:
        period_s: How long the period lasts after each step, in seconds.
    """

    def __init__(self, period_s: float) -> None:
        self.period_s = period_s
        self._ends_at = 0.0
        self._backs_off_until = 0.0

    def extend(self, num_steps: int = 1) -> None:
        """Start the period again, because a step was made. The next visible one is `num_steps` steps away."""
        self._ends_at = max(self._ends_at, time.monotonic() + num_steps * self.period_s)

    def is_on(self, until: float) -> bool:
        """Whether to poll once more, and not later than `until`."""
        now = time.monotonic()
        return self._backs_off_until <= now < min(self._ends_at, until)

    def wait(self, epoll: int, until: float) -> bool:
        """Poll an epoll set until it is ready, the period is over, or `until`; return whether it is ready."""
        now = time.monotonic()
        end = min(self._ends_at, until)
        if not self._backs_off_until <= now < end:
            return False
        found = busy_poll(epoll, end - now, _MAX_YIELD_S)
        if found < 0:
            self._backs_off_until = time.monotonic() + _BACKOFF_S
        return found > 0

    def yield_core(self) -> None:
        """Let other processes have the core, and other threads the GIL, if they want them."""
        began = time.monotonic()
        _sched_yield()
        now = time.monotonic()
        if now - began > _MAX_YIELD_S:
            self._backs_off_until = now + _BACKOFF_S
