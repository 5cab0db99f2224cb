"""Measure one operation on the queue of free blocks, for pools of 1e3 to 1e6 blocks.

    python benchmarks/free_queue.py [--json] [--sizes 1000 10000 ...] [--seconds 0.2]

An operation takes the same number of steps for every pool size, so each row should be flat. The exception is `scattered`,
which takes blocks from all over the pool: in a large pool, neither they nor their neighbours in the queue are in a CPU
cache. A prefix hit takes consecutive blocks, like `in order`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import time
from collections.abc import Callable, Iterator

from kvferry.runner_mixin.kv_cache import FreeKVCacheBlockQueue, KVCacheBlock

SIZES = (1_000, 10_000, 100_000, 1_000_000)
BATCH = 64
ROUNDS = 64
SCATTERED = 7919  # a prime stride visits every block of the sizes above, far from the one before

Operation = Callable[[FreeKVCacheBlockQueue, Iterator[KVCacheBlock]], None]
"""Run one batch of operations on a queue, with blocks to pick from."""


def pop_and_append(queue: FreeKVCacheBlockQueue, blocks: Iterator[KVCacheBlock]) -> None:
    for _ in range(BATCH):
        queue.append(queue.popleft())


def pop_n_and_append_n(queue: FreeKVCacheBlockQueue, blocks: Iterator[KVCacheBlock]) -> None:
    queue.append_n(queue.popleft_n(BATCH))


def remove_and_append(queue: FreeKVCacheBlockQueue, blocks: Iterator[KVCacheBlock]) -> None:
    for block in itertools.islice(blocks, BATCH):
        queue.remove(block)
        queue.append(block)


# Name → operation, and the stride with which it picks blocks.
OPERATIONS: dict[str, tuple[Operation, int]] = {
    "popleft + append": (pop_and_append, 1),
    f"popleft_n({BATCH}) + append_n": (pop_n_and_append_n, 1),
    "remove + append, in order": (remove_and_append, 1),
    "remove + append, scattered": (remove_and_append, SCATTERED),
}


def measure(num_blocks: int, operation: Operation, stride: int, seconds: float) -> float:
    """Return nanoseconds per block: the median over rounds of several batches."""
    blocks = [KVCacheBlock(i) for i in range(num_blocks)]
    queue = FreeKVCacheBlockQueue(blocks)
    picks = (blocks[i * stride % num_blocks] for i in itertools.count())
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not samples:
        start = time.perf_counter_ns()
        for _ in range(ROUNDS):
            operation(queue, picks)
        samples.append((time.perf_counter_ns() - start) / (ROUNDS * BATCH))
    return sorted(samples)[len(samples) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, metavar="BLOCKS", help="sizes of the pools"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.2, help="seconds per size and operation (default: %(default)s)"
    )
    options = parser.parse_args()
    gc.disable()  # otherwise the garbage collector would traverse a million blocks during the measurement
    figures = {
        name: {size: measure(size, operation, stride, options.seconds) for size in options.sizes}
        for name, (operation, stride) in OPERATIONS.items()
    }
    if options.json:
        print(json.dumps({"unit": "ns per block", "figures": figures}, indent=2))
        return
    print(f"{'ns per block':<28}" + "".join(f"{size:>12,}" for size in options.sizes))
    for name, row in figures.items():
        print(f"{name:<28}" + "".join(f"{row[size]:>12.0f}" for size in options.sizes))


if __name__ == "__main__":
    main()
