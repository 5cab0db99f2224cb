"""The other process of the CUDA tests.

It serves a stand-in's GPU pool, prints its address, and ends with its stdin.

Guard 3 holds 9. Byte i of the pool is `i * 7 % 251`.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

from kvferry.transports import Pool
from kvferry.transports.shm import SharedMemoryTransport
from tests.support.cuda_stand_in import BINDINGS, CudaDriverStandIn

POOL_BYTES = 1 << 20


def main() -> None:
    driver: Any = CudaDriverStandIn()
    sys.modules.update(dict.fromkeys(BINDINGS, driver))
    transport = SharedMemoryTransport()
    arena = driver.allocate(POOL_BYTES)
    np.frombuffer(arena.buffer, dtype=np.uint8)[:] = np.arange(POOL_BYTES) * 7 % 251
    endpoint = transport.register(Pool([arena.segment]))
    transport.guards.set(3, 9)
    print(endpoint.listen(""), flush=True)
    is_over = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        is_over.set()
        endpoint.wake()

    threading.Thread(target=watch, daemon=True).start()
    while not is_over.is_set():
        endpoint.wait_events(60)
    transport.close()


if __name__ == "__main__":
    main()
