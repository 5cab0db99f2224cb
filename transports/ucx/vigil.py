"""Looking instead of sleeping, for a moment: to be woken takes as long as the rest of a small read."""

from __future__ import annotations

import ctypes
import time
from typing import Final

#: Without the GIL, which `os.sched_yield` keeps before Python 3.12.
_sched_yield: Final = ctypes.CDLL(None).sched_yield

#: Who gets the core back only after this time shares it with more than a peer, and is served sooner as a sleeper.
_SLICE_S = 0.001

#: For how long he does not look again.
_REST_S = 0.1


class Vigil:
    """The time in which the next step is expected.

    Args:
        length_s: How long it is, from each step on.
    """

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._ends_at = 0.0
        self._rests_until = 0.0

    def begin(self, num_steps: int = 1) -> None:
        """A step was made; one that can be seen from here is so many away."""
        self._ends_at = max(self._ends_at, time.monotonic() + num_steps * self._length_s)

    def lasts(self, until: float) -> bool:
        """Whether to look once more, and not later than `until`."""
        now = time.monotonic()
        return self._rests_until <= now < min(self._ends_at, until)

    def give_way(self) -> None:
        """Let others have the core, if there are any; other threads also the GIL."""
        began = time.monotonic()
        _sched_yield()
        now = time.monotonic()
        if now - began > _SLICE_S:
            self._rests_until = now + _REST_S
