"""Memory in which small regions travel together."""

from __future__ import annotations

import numpy as np

from ..regions import AddressArray, Int64Array

__all__ = ["Stage", "Stages"]

_STAGE_BYTES = 1 << 20
_MAX_IDLE = 64


class Stage:
    """Memory for one slice."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = np.empty(num_bytes, dtype=np.uint8)
        self.address = int(self._memory.ctypes.data)

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def addresses_of(self, lengths: Int64Array) -> AddressArray:
        """Where regions lie, end to end: shape `(num_regions,)`."""
        return (np.cumsum(lengths) - lengths).astype(np.uint64) + np.uint64(self.address)


class Stages:
    """Stages that are used again, since new memory costs more than the copy into it."""

    def __init__(self) -> None:
        self._idle: list[Stage] = []

    def take(self, num_bytes: int) -> Stage:
        if num_bytes <= _STAGE_BYTES and self._idle:
            return self._idle.pop()
        return Stage(max(num_bytes, _STAGE_BYTES))

    def give_back(self, stage: Stage) -> None:
        """Nobody writes into it or reads it any more."""
        if stage.num_bytes == _STAGE_BYTES and len(self._idle) < _MAX_IDLE:
            self._idle.append(stage)
