"""Whether a peer's process still runs."""

from __future__ import annotations

import select


def has_ended(process: int) -> bool:
    """Whether a process has ended, given as a descriptor from `os.pidfd_open`. Any thread may ask."""
    # A new object each time: it raises if two threads poll it at once.
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))
