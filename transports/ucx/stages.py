"""Memory in which small regions travel together."""

from __future__ import annotations

import numpy as np

_MAX_IDLE = 16


class Stage:
    """Memory for one slice."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = np.empty(num_bytes, dtype=np.uint8)
        self.address = int(self._memory.ctypes.data)

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes


class Stages:
    """Stages that are used again, since new memory costs more than the copy into it.

    Args:
        num_bytes: Of each. Larger ones can be had, and are not kept.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._idle: list[Stage] = []

    def take(self, num_bytes: int) -> Stage:
        if num_bytes <= self._num_bytes and self._idle:
            return self._idle.pop()
        return Stage(max(num_bytes, self._num_bytes))

    def give_back(self, stage: Stage) -> None:
        """Nobody writes into it or reads it any more."""
        if stage.num_bytes == self._num_bytes and len(self._idle) < _MAX_IDLE:
            self._idle.append(stage)
