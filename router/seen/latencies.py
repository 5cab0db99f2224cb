"""Keep percentiles of a time over the last minutes, for the router's page, in bounded memory."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from typing import Any, Final

#: The percentiles of each slot of time, and how many slots are kept: five minutes.
SLOT_S: Final = 10
NUM_SLOTS: Final = 30
SHARES: Final = (0.5, 0.9, 0.99)

#: A time is counted in a bucket whose end is this many times its beginning, so a percentile is wrong by 5 %
#: at most.
_RATIO: Final = 1.1
_SHORTEST_S: Final = 1e-4
_LONGEST_S: Final = 3600.0


class Latencies:
    """Counts times in buckets, per slot of `SLOT_S` seconds."""

    def __init__(self) -> None:
        self._slots: deque[tuple[int, Counter[int]]] = deque(maxlen=NUM_SLOTS)

    def note(self, seconds: float) -> None:
        """Count a time that has just ended.

        Shorter and longer ones than the buckets count in the first and the last one.
        """
        slot = int(time.monotonic() / SLOT_S)
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, Counter()))
        bounded = min(max(seconds, _SHORTEST_S), _LONGEST_S)
        self._slots[-1][1][int(math.log(bounded / _SHORTEST_S, _RATIO))] += 1

    def report(self) -> dict[str, Any]:
        """Return as JSON the percentiles in milliseconds, of all and per slot: oldest first, None where
        nothing was counted.

        The last slot is not over.
        """
        end = int(time.monotonic() / SLOT_S)
        slots = {slot: counts for slot, counts in self._slots if slot > end - NUM_SLOTS}
        kept = [slots.get(slot) for slot in range(end - NUM_SLOTS + 1, end + 1)]
        return {
            "all": _percentiles(sum(slots.values(), Counter())),
            "slots": [_percentiles(counts) for counts in kept],
        }


def _percentiles(counts: Counter[int] | None) -> list[float] | None:
    if not counts:
        return None
    ranks = [math.ceil(share * counts.total()) for share in SHARES]
    found: list[float] = []
    num = 0
    for bucket in sorted(counts):
        num += counts[bucket]
        while len(found) < len(ranks) and num >= ranks[len(found)]:
            found.append(round(_SHORTEST_S * _RATIO ** (bucket + 0.5) * 1e3, 3))
    return found
