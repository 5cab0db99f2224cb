"""The guards of this node's offers, which the engine can take back at any moment.

The handoff thread sets and clears guards as the protocol says. It can be late: orders wait for the GPU, and a
peer's message may be under way. A request that is preempted loses its blocks before the engine's next step
writes, and the step must not wait for any of this. So the engine's thread clears the guard itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial

from ...transports.base import GuardTable
from ..handoff.events import BlockTables
from ..planning.extents import BlockExtents


class OfferGuards:
    """A guard table that two threads use: the one that carries out orders, and the one that submits them.

    Orders are numbered as they are submitted. The lock is held for a few stores only.

    Args:
        extents: The bytes of blocks, for owners that check what peers read.
    """

    def __init__(self, table: GuardTable, extents: BlockExtents) -> None:
        self._table = table
        self._extents = extents
        self._lock = threading.Lock()
        self._request_of: dict[int, str] = {}  # by index, of the guards that are set
        self._retracted: dict[str, int] = {}  # by request: the last order whose offers are void

    # -- the handoff thread --------------------------------------------------------------------------

    def set(self, index: int, value: int, request_id: str, number: int) -> bool:
        """Make a guard hold `value` for the offer of a request, on behalf of order `number`.

        Returns:
            False if the request has lost its blocks since the order was submitted. Then the guard stays
            clear.
        """
        # One step with `retract`: a guard that is set after the engine has cleared it would let peers accept
        # what the next step writes. A grant may be in flight before or after; a peer that reads by it finds
        # the guard cleared.
        with self._lock:
            if self._is_void(request_id, number):
                return False
            self._table.set(index, value)
            self._request_of[index] = request_id
            return True

    def allow(self, index: int, block_ids: BlockTables) -> None:
        """Let peers read these blocks, and no others, under a guard. Call it before `set`."""
        self._table.allow(index, partial(self._extents.of, block_ids))

    def clear(self, index: int) -> None:
        """Clear a guard. The engine may have cleared it already."""
        with self._lock:
            self._table.clear(index)
            self._request_of.pop(index, None)

    def is_void(self, request_id: str, number: int) -> bool:
        """Return whether a request has lost the blocks that order `number` is about."""
        with self._lock:
            return self._is_void(request_id, number)

    def carried_out(self, number: int) -> None:
        """Forget what concerns orders up to this one only."""
        with self._lock:
            if self._retracted:
                self._retracted = {
                    request_id: last for request_id, last in self._retracted.items() if last > number
                }

    def _is_void(self, request_id: str, number: int) -> bool:
        return number <= self._retracted.get(request_id, -1)

    # -- the engine's thread -------------------------------------------------------------------------

    def retract(self, request_ids: Iterable[str], last: int) -> None:
        """Clear the guards of these requests' offers, and keep orders up to `last` from setting them.

        An exception of the table goes through; then call it again, or take it that peers accept what these
        blocks contain.
        """
        wanted = set(request_ids)
        with self._lock:
            for request_id in wanted:
                self._retracted[request_id] = last
            for index, request_id in tuple(self._request_of.items()):
                if request_id in wanted:
                    self._table.clear(index)
                    # The word stays this offer's until the protocol has ended it, so no other offer is
                    # harmed.
                    del self._request_of[index]
