"""Memory in which small regions travel together."""

from __future__ import annotations

import numpy as np

_MAX_IDLE = 16


class StagingBuffer:
    """Memory for one slice."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = np.empty(num_bytes, dtype=np.uint8)
        self.address = int(self._memory.ctypes.data)

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes


class StagingBuffers:
    """Staging buffers that are used again, because new memory costs more than the copy into it.

    Args:
        num_bytes: Of each. Larger ones can be taken, and are not kept.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._idle: list[StagingBuffer] = []

    def take(self, num_bytes: int) -> StagingBuffer:
        """Take a buffer of at least `num_bytes`. Its content is undefined."""
        if num_bytes <= self._num_bytes and self._idle:
            return self._idle.pop()
        return StagingBuffer(max(num_bytes, self._num_bytes))

    def give_back(self, buffer: StagingBuffer) -> None:
        """Keep a buffer for the next slice. Nothing may read it or write into it any more."""
        if buffer.num_bytes == self._num_bytes and len(self._idle) < _MAX_IDLE:
            self._idle.append(buffer)
