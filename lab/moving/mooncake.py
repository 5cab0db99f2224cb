"""Mooncake's transfer engine over TCP, with one batch of addresses per read."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvferry.transports import RegionPairs

from .contender import Reader, Setup, pool_memory


class _Engine:
    """An engine with a registered pool. Peers find each other without a metadata service."""

    def __init__(self, setup: Setup) -> None:
        from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

        self.engine: Any = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("cannot start Mooncake's engine")
        self._memory = pool_memory(setup.pool_bytes)
        self.pool = np.frombuffer(self._memory, dtype=np.int64)
        self.address = self.pool.ctypes.data
        if self.engine.register_memory(self.address, setup.pool_bytes):
            raise RuntimeError("cannot register the pool with Mooncake")


def own_mooncake(setup: Setup, reader: Connection) -> None:
    node = _Engine(setup)
    node.pool[:] = np.arange(len(node.pool))
    reader.send((f"127.0.0.1:{node.engine.get_rpc_port()}", node.address))
    reader.recv()


class MooncakeReader(Reader):
    """The reader."""

    def __init__(self, setup: Setup, address: tuple[str, int]) -> None:
        self._owner, self._remote_address = address
        self._node = _Engine(setup)
        self.pool = self._node.pool

    def read(self, pairs: RegionPairs) -> str:
        status = self._node.engine.batch_transfer_sync_read(
            self._owner,
            (pairs.local_offsets + self._node.address).tolist(),
            (pairs.remote_offsets + self._remote_address).tolist(),
            pairs.lengths.tolist(),
        )
        if status:
            raise RuntimeError(f"read failed with Mooncake's status {status}")
        return "mooncake:tcp"

    def close(self) -> None:
        """Do nothing: the engine ends with the process."""
