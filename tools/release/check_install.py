"""Check an installed kvferry: import it without PyTorch, and read memory through its compiled part.

    PYTHON tools/release/check_install.py

Exits with status 0 if the version is that of the distribution, `kvferry.transports` and `kvferry.connector`
import without PyTorch, the copy loop is compiled, and one endpoint can read another's pool.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys

import numpy as np

import kvferry
import kvferry.connector
from kvferry.connector import SharedMemoryConnector
from kvferry.transports import Connected, Guard, Pool, RegionPairs, TransferEnded
from kvferry.transports.copying import IS_COMPILED
from kvferry.transports.registry import create_transport

NUM_BYTES = 1 << 20
GUARD = Guard(index=3, value=7)
DEADLINE_S = 10.0


def read_from_a_peer() -> None:
    """Let one endpoint read half of another's pool, and compare every byte."""
    owner, reader = (create_transport("inproc", {}) for _ in range(2))
    pools = [transport.allocate(NUM_BYTES) for transport in (owner, reader)]
    there, here = (np.frombuffer(pool.buffer, dtype=np.uint8) for pool in pools)
    there[:] = np.random.default_rng(1).integers(0, 256, NUM_BYTES, dtype=np.uint8)
    serving, reading = (
        transport.register(Pool([pool.segment]))
        for transport, pool in zip((owner, reader), pools, strict=True)
    )
    owner.guards.set(GUARD.index, GUARD.value)
    peer = reading.start_connect(serving.listen(""), timeout_s=DEADLINE_S)
    (connected,) = reading.wait_events(DEADLINE_S)
    assert connected == Connected(peer, incoming=False), connected
    half = NUM_BYTES // 2
    pairs = RegionPairs(np.array([[0, half, half]], dtype=np.int64))
    reading.start_read(peer, pairs, GUARD, timeout_s=DEADLINE_S)
    (ended,) = reading.wait_events(DEADLINE_S)
    assert isinstance(ended, TransferEnded), ended
    assert ended.error is None, ended
    assert np.array_equal(here[:half], there[half:])
    reader.close()
    owner.close()


assert kvferry.__version__ == importlib.metadata.version("kvferry"), kvferry.__version__
assert IS_COMPILED, "the copy loop is not compiled: was there a C compiler?"
assert issubclass(SharedMemoryConnector, kvferry.connector.KVConnectorBase)
read_from_a_peer()
assert "torch" not in sys.modules, "importing kvferry's connectors imported torch"
print(f"kvferry {kvferry.__version__} works on {platform.machine()} with Python {platform.python_version()}")
