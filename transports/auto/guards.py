"""Guards that peers check over any of several transports."""

from __future__ import annotations

from collections.abc import Sequence

from ..base import GuardTable


class JoinedGuards(GuardTable):
    """Each word is stored in every table; the smallest table bounds their number."""

    def __init__(self, tables: Sequence[GuardTable]) -> None:
        self._tables = tables
        self.num_guards = min(table.num_guards for table in tables)

    def set(self, index: int, value: int) -> None:
        for table in self._tables:
            table.set(index, value)

    def clear(self, index: int) -> None:
        for table in self._tables:
            table.clear(index)
