"""Baselines and other programs as contenders: memcpy, plain sockets, NIXL and Mooncake."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvferry.transports import RegionPairs

from .contender import TIMEOUT_S, Pool, Reader, Setup, pool_memory


def _filled_pool(num_bytes: int) -> Pool:
    """Return the pool of an owner: each word holds its index."""
    pool = np.frombuffer(pool_memory(num_bytes), dtype=np.int64)
    pool[:] = np.arange(len(pool))
    return pool


# -- memcpy ------------------------------------------------------------------------------------------


def own_nothing(setup: Setup, reader: Connection) -> None:
    """Do nothing until the end, because a memcpy needs no owner."""
    reader.send("")
    reader.recv()


class MemcpyReader(Reader):
    """Copies as many bytes in one run, by one thread, within its own process, between places that no CPU
    cache holds.
    """

    def __init__(self, setup: Setup, address: Any) -> None:
        self.pool = np.frombuffer(pool_memory(setup.pool_bytes), dtype=np.int64)
        self._source = np.frombuffer(pool_memory(setup.pool_bytes), dtype=np.int64)
        self._random = np.random.default_rng(0)

    def read(self, pairs: RegionPairs) -> str:
        num_bytes = pairs.num_bytes
        to, of = self._random.integers(0, self.pool.nbytes - num_bytes + 1, 2).tolist()
        ctypes.memmove(
            self.pool.ctypes.data + (to & ~4095), self._source.ctypes.data + (of & ~4095), num_bytes
        )
        return "memcpy"

    def check(self, pairs: RegionPairs) -> None:
        """Do nothing: no region was read."""


# -- plain sockets -----------------------------------------------------------------------------------

#: Buffers per call; more are not faster.
_MAX_BUFFERS = 64


def own_sockets(setup: Setup, reader: Connection) -> None:
    """Answer lists of offsets with `sendmsg` from the pool, over one loopback TCP connection.

    Nothing is checked.
    """
    pool = _filled_pool(setup.pool_bytes).data.cast("B")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(TIMEOUT_S)
        reader.send(listener.getsockname())
        connection, _ = listener.accept()
    with connection:
        connection.settimeout(None)
        while head := connection.recv(16, socket.MSG_WAITALL):
            num_regions, num_bytes = struct.unpack("<QQ", head)
            offsets = struct.unpack(f"<{num_regions}Q", connection.recv(8 * num_regions, socket.MSG_WAITALL))
            _move([pool[at : at + num_bytes] for at in offsets], lambda views: connection.sendmsg(views))


def _move(views: list[memoryview], step: Callable[[list[memoryview]], int]) -> None:
    """Send or receive all of `views`, in as few calls as possible."""
    left = deque(views)
    while left:
        done = step([left[i] for i in range(min(_MAX_BUFFERS, len(left)))])
        while left and done >= len(left[0]):
            done -= len(left.popleft())
        if done:
            left[0] = left[0][done:]


class SocketReader(Reader):
    """Receives the bytes into place with `recvmsg_into`."""

    def __init__(self, setup: Setup, address: tuple[str, int]) -> None:
        self._memory = pool_memory(setup.pool_bytes)
        self.pool = np.frombuffer(self._memory, dtype=np.int64)
        self._socket = socket.create_connection(address, TIMEOUT_S)
        self._socket.settimeout(None)

    def read(self, pairs: RegionPairs) -> str:
        num_bytes = int(pairs.lengths[0])
        offsets = struct.pack(f"<{len(pairs)}Q", *pairs.remote_offsets.tolist())
        self._socket.sendall(struct.pack("<QQ", len(pairs), num_bytes) + offsets)
        pool = memoryview(self._memory)
        views = [pool[at : at + num_bytes] for at in pairs.local_offsets.tolist()]
        _move(views, self._receive)
        return "tcp"

    def _receive(self, views: list[memoryview]) -> int:
        num_bytes = self._socket.recvmsg_into(views)[0]
        if not num_bytes:
            raise ConnectionError("the owner closed the connection")
        return num_bytes

    def close(self) -> None:
        self._socket.close()


# -- NIXL --------------------------------------------------------------------------------------------


def _installed() -> str:
    """Return the name of the distribution of NIXL that is installed; if none is, that of the one for
    CUDA 12.
    """
    for name in ("nixl-cu13", "nixl-cu12"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    return "nixl-cu12"


NIXL = _installed()


class Agent:
    """An agent with a registered pool, over UCX. Option: `error_handling`, UCX's mode.

    It has no progress thread: that spins in both processes, and takes processor time from the transfer.
    """

    def __init__(self, name: str, setup: Setup) -> None:
        api: Any = importlib.import_module(f"{NIXL.replace('-', '_')}._api")
        self.agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        self.agent.create_backend("UCX", {"ucx_error_handling_mode": setup.options["error_handling"]})
        self._memory = pool_memory(setup.pool_bytes)
        self.pool = np.frombuffer(self._memory, dtype=np.int64)
        self.address = self.pool.ctypes.data
        self.agent.register_memory([(self.address, setup.pool_bytes, 0, "")], "DRAM")


def own_nixl(setup: Setup, reader: Connection) -> None:
    """Poll all the time: without it nothing moves over TCP."""
    node = Agent("owner", setup)
    node.pool[:] = np.arange(len(node.pool))
    reader.send((node.agent.get_agent_metadata(), node.address))
    while not reader.poll():
        node.agent.get_new_notifs()
        os.sched_yield()


class NixlReader(Reader):
    """Reads in NIXL's fastest form: descriptor lists prepared once, one request by index per read."""

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


# -- Mooncake ----------------------------------------------------------------------------------------


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
    """Reads over TCP, with one batch of addresses per read."""

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
