"""Consistent hashing with bounded loads: the same key goes to the same node, as long as that node has room.

A node has many points on a ring of hashes, and a key belongs to the node of the next point. When one of N
nodes comes or goes, about 1/N of the keys move. When a node has its share of the load, its keys go on to the
next node on the ring (Mirrokni, Thorup and Zadimoghaddam, *Consistent Hashing with Bounded Loads*, 2016).
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterable, Iterator, Mapping

from .states import bound

#: Points per node. The share of the keys of a node varies by about 1 / sqrt(POINTS), that is 8 %.
POINTS = 160


class Ring:
    """The points of some nodes.

    It depends on their names alone, so that all routers send a key to the same node.
    """

    def __init__(self, names: Iterable[str]) -> None:
        points = sorted(
            (_hash(f"{name}#{index}".encode()), name) for name in names for index in range(POINTS)
        )
        self._hashes = [point for point, _ in points]
        self._names = [name for _, name in points]

    def walk(self, key: bytes) -> Iterator[str]:
        """Yield every node once, in the order in which the key prefers them."""
        begin = bisect.bisect_left(self._hashes, _hash(key))
        seen: set[str] = set()
        for name in (*self._names[begin:], *self._names[:begin]):
            if name not in seen:
                seen.add(name)
                yield name


def choose(ring: Ring, key: bytes, loads: Mapping[str, int], factor: float) -> str:
    """Return the first node on the ring that has room for one more request.

    Nodes of the ring that are not in `loads` are passed over, as if they were not on the ring.

    Args:
        loads: The requests that each usable node has. All of them are on the ring, and there is at least one.
    """
    limit = bound(loads, factor)
    return next(name for name in ring.walk(key) if name in loads and loads[name] < limit)


def _hash(data: bytes) -> int:
    # Not Python's `hash`, which differs from process to process.
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())
