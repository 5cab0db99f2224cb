"""Measure how fast this machine copies memory, to compare the speed of transfers with."""

from __future__ import annotations

import statistics
import time

import numpy as np

#: Larger than the CPU's caches, so that each copy reads and writes memory, as a transfer does.
ARENA_BYTES = 192 << 20
NUM_SAMPLES = 7


def memcpy_gb_per_s(num_bytes: int) -> float:
    """Copy `num_bytes` uncached bytes several times in one thread; return the median speed in 10**9 bytes per second."""
    num_slots = max(2, ARENA_BYTES // num_bytes)
    source = np.ones(num_slots * num_bytes, dtype=np.uint8)
    target = np.ones_like(source)  # also touches each page once, because the first touch would slow the copy
    seconds = []
    for sample in range(NUM_SAMPLES):
        start = (sample * 7919 % num_slots) * num_bytes
        began = time.perf_counter()
        np.copyto(target[start : start + num_bytes], source[start : start + num_bytes])
        seconds.append(time.perf_counter() - began)
    return num_bytes / statistics.median(seconds) / 1e9
