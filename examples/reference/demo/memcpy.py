"""How fast this machine copies memory, to hold a transfer's speed against."""

from __future__ import annotations

import statistics
import time

import numpy as np

#: Larger than caches, so that each copy reads and writes memory, as a transfer does.
ARENA_BYTES = 192 << 20
NUM_SAMPLES = 7


def memcpy_gb_per_s(num_bytes: int) -> float:
    """Copy `num_bytes` bytes that no cache holds, one thread, several times; the median speed in 10**9 bytes a second."""
    num_slots = max(2, ARENA_BYTES // num_bytes)
    source = np.ones(num_slots * num_bytes, dtype=np.uint8)
    target = np.ones_like(source)  # written once: a first touch is not what is measured
    seconds = []
    for sample in range(NUM_SAMPLES):
        start = (sample * 7919 % num_slots) * num_bytes
        began = time.perf_counter()
        np.copyto(target[start : start + num_bytes], source[start : start + num_bytes])
        seconds.append(time.perf_counter() - began)
    return num_bytes / statistics.median(seconds) / 1e9
