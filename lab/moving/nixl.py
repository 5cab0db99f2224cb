"""NIXL over UCX in its fastest form: descriptor lists prepared once, one request by index per read, no progress thread.

The progress thread, which is on by default, spins in both processes and takes processor time from the transfer.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvferry.transports import RegionPairs

from .contender import TIMEOUT_S, Reader, Setup, pool_memory


def _installed() -> str:
    """Return the name of the distribution of NIXL that is installed; if none is, that of the one for CUDA 12."""
    for name in ("nixl-cu13", "nixl-cu12"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    return "nixl-cu12"


NIXL = _installed()


class Agent:
    """An agent with a registered pool. Option: `error_handling`, UCX's mode."""

    def __init__(self, name: str, setup: Setup) -> None:
        api: Any = importlib.import_module(f"{NIXL.replace('-', '_')}._api")
        self.agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        self.agent.create_backend("UCX", {"ucx_error_handling_mode": setup.options["error_handling"]})
        self._memory = pool_memory(setup.pool_bytes)
        self.pool = np.frombuffer(self._memory, dtype=np.int64)
        self.address = self.pool.ctypes.data
        self._registered = self.agent.register_memory([(self.address, setup.pool_bytes, 0, "")], "DRAM")

    def deregister(self) -> None:
        """Take the pool back from NIXL."""
        self.agent.deregister_memory(self._registered)


def own_nixl(setup: Setup, reader: Connection) -> None:
    """Poll all the time: without it nothing moves over TCP."""
    node = Agent("owner", setup)
    node.pool[:] = np.arange(len(node.pool))
    reader.send((node.agent.get_agent_metadata(), node.address))
    while not reader.poll():
        node.agent.get_new_notifs()
        os.sched_yield()


class NixlReader(Reader):
    """The reader."""

    def __init__(self, setup: Setup, address: tuple[bytes, int]) -> None:
        metadata, self._remote_address = address
        self._node = Agent("reader", setup)
        self._agent = self._node.agent
        self.pool = self._node.pool
        self._owner = self._agent.add_remote_agent(metadata)
        self._prepared: dict[int, tuple[Any, Any]] = {}

    def read(self, pairs: RegionPairs) -> str:
        region_bytes = int(pairs.lengths[0])
        if region_bytes not in self._prepared:
            self._prepared[region_bytes] = self._prepare(region_bytes)
        local, remote = self._prepared[region_bytes]
        local_indices, remote_indices = ((at // region_bytes).astype(np.int32) for at in pairs.table.T[:2])
        request = self._agent.make_prepped_xfer("READ", local, local_indices, remote, remote_indices)
        _until_done(self._agent.transfer(request), lambda: self._agent.check_xfer_state(request))
        backend = self._agent.query_xfer_backend(request)
        self._agent.release_xfer_handle(request)
        return f"nixl:{backend}"

    def close(self) -> None:
        """Do nothing: the agent ends with the process."""

    def _prepare(self, region_bytes: int) -> tuple[Any, Any]:
        """Prepare descriptors for every region of both pools."""
        at = np.arange(self.pool.nbytes // region_bytes, dtype=np.uint64) * region_bytes

        def described(base: int) -> np.ndarray:
            return np.stack([at + base, np.full_like(at, region_bytes), np.zeros_like(at)], axis=1)

        local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", described(self._node.address), "DRAM")
        remote = self._agent.prep_xfer_dlist(self._owner, described(self._remote_address), "DRAM")
        return local, remote


def _until_done(state: str, look: Callable[[], str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while state == "PROC":
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out after {TIMEOUT_S:g} s waiting for NIXL's read")
        os.sched_yield()
        state = look()
    if state != "DONE":
        raise RuntimeError(f"read failed with NIXL's state {state}")
