"""A peer's guard table, mapped here for reading."""

from __future__ import annotations

from .._memory import WORD_BYTES, address_of, guard_holds
from ..regions import Guard
from ..serving import stale
from .arena import map_received


class PeerGuards:
    """The words that a peer sets and clears. Any thread may check them until `close`.

    Attributes:
        num_guards: Words in the table.
    """

    def __init__(self, descriptor: int, num_guards: int) -> None:
        """Map the table. The caller still closes the descriptor.

        Raises:
            ProtocolError: the descriptor is not a table of that size.
        """
        self.num_guards = num_guards
        self._mapping = map_received(descriptor, num_guards * WORD_BYTES)
        self._address = address_of(self._mapping.memory)

    def check(self, guard: Guard) -> None:
        """Check that a guard holds. Call it after the copy: then what was copied is what the guard promised.

        Raises:
            StaleRegionError: it does not hold.
        """
        if not guard_holds(self._address, guard):
            raise stale(guard)

    def close(self) -> None:
        """Unmap. The last read has ended: a check after this would crash the process."""
        self._mapping.close()
