"""Contenders whose pools are on a GPU: plain copies, plain sockets with staging, and kvferry's transports.

A setup's options are `reader` and `owner`, the places of the pools (see `tests/support/gpu_memory.py`), and
for kvferry's transports `scheme` and `transport`, its options.
"""

from __future__ import annotations

import ctypes
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvferry.lab.moving.contender import TIMEOUT_S, Reader, Setup
from kvferry.transports import RegionPairs, TransferEnded
from kvferry.transports.cuda_mover import CudaMover
from kvferry.transports.movers import Ticket
from kvferry.transports.regions import Pool as TransportPool
from tests.support.gpu_memory import Memory, PoolNode, allocate, stand_in_driver

#: Regions of a read whose first and last words are checked.
_MAX_CHECKED = 32

#: Bytes per staging buffer of plain sockets: as much as one slice of kvferry's transports.
_SLICE_BYTES = 2 << 20


@contextmanager
def driver_of(setup: Setup) -> Iterator[None]:
    """Have the stand-in for CUDA's driver if a pool is in its memory."""
    with ExitStack() as stack:
        if "stand-in" in (setup.options["reader"], setup.options["owner"]):
            stack.enter_context(stand_in_driver())
        yield


def _words(num_bytes: int) -> Any:
    """Return the owner's pool: each word of 8 bytes holds its own index."""
    return np.arange(num_bytes // 8, dtype=np.int64).view(np.uint8)


class GpuReader(Reader):
    """A reader whose pool may be on a GPU.

    Attributes:
        memory: The pool.
    """

    memory: Memory

    def check(self, pairs: RegionPairs) -> None:
        for local, remote, num_bytes in pairs.table[:_MAX_CHECKED].tolist():
            for at in (0, num_bytes - 8):
                word = int(self.memory.read(local + at, 8).view(np.int64)[0])
                if word != (remote + at) // 8:
                    raise ValueError(f"wrong bytes: word {remote + at} is {word}")
        self.memory.fill(0xFF)


# -- plain copies ------------------------------------------------------------------------------------


def own_nothing(setup: Setup, reader: Connection) -> None:
    """Do nothing until the end: plain copies are within the reader."""
    reader.send("")
    reader.recv()


class CopyReader(GpuReader):
    """One `cuMemcpyAsync` of all bytes in one run, between a pool on the GPU and another one, or pinned
    memory.

    The option `direction` is `within`, `from` or `to` the GPU.
    """

    def __init__(self, setup: Setup, address: object) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(driver_of(setup))
        self.memory = allocate(setup.options["reader"], setup.pool_bytes)
        other = allocate(setup.options["reader"], setup.pool_bytes)
        # Its ring is pinned memory, and its streams are as kvferry's.
        pool = TransportPool([self.memory.segment])
        mover = CudaMover(pool, setup.pool_bytes, setup.pool_bytes)
        self._mover = mover
        buffer = mover.scatter_ring.take(setup.pool_bytes)
        assert buffer is not None
        here, there = self.memory.segment.address, other.segment.address
        self._name = setup.options["direction"]
        self._ends = {
            "within": (here, there),
            "from": (buffer.address, here),
            "to": (here, buffer.address),
        }[self._name]

    def read(self, pairs: RegionPairs) -> str:
        target, source = (np.array([at], dtype=np.uint64) for at in self._ends)
        ticket = self._mover.start_scatter_each(target, source, np.array([pairs.num_bytes], dtype=np.int64))
        wait_for(self._mover, ticket)
        return f"cuMemcpyAsync {self._name} the GPU"

    def check(self, pairs: RegionPairs) -> None:
        """Do nothing: no region was read."""

    def close(self) -> None:
        self._mover.close()
        self._stack.close()


def wait_for(mover: CudaMover, ticket: Ticket) -> None:
    """Wait for the end of a copy. Raises KVTransferError: it failed."""
    while not ticket.is_over:
        select.select([mover.fileno()], [], [], 0.005)
        mover.poll()
    if ticket.error is not None:
        raise ticket.error


# -- plain sockets -----------------------------------------------------------------------------------


class _Side:
    """A pool on a GPU and its mover, for one end of a socket."""

    def __init__(self, setup: Setup, place: str) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(driver_of(setup))
        self.memory = allocate(place, setup.pool_bytes)
        pool = TransportPool([self.memory.segment])
        self.mover = CudaMover(pool, _SLICE_BYTES, 2 * _SLICE_BYTES)

    def slices(self, offsets: Any, num_bytes: int) -> list[tuple[Any, Any]]:
        """Return the addresses and lengths of the regions, by slices that fit into a staging buffer."""
        addresses = (offsets + self.memory.segment.address).astype(np.uint64)
        if num_bytes > _SLICE_BYTES:
            raise ValueError(f"regions must not be longer than {_SLICE_BYTES} bytes, got {num_bytes}")
        per_slice = _SLICE_BYTES // num_bytes
        parts = (addresses[at : at + per_slice] for at in range(0, len(addresses), per_slice))
        return [(part, np.full(len(part), num_bytes, dtype=np.int64)) for part in parts]

    def close(self) -> None:
        self.mover.close()
        self._stack.close()


def _view(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


def own_staged_sockets(setup: Setup, reader: Connection) -> None:
    """Send slices from a GPU over one loopback TCP connection; while one is sent, the next one is copied."""
    side = _Side(setup, setup.options["owner"])
    side.memory.write(_words(setup.pool_bytes))
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
            table = connection.recv(8 * num_regions, socket.MSG_WAITALL)
            _send_slices(side, np.frombuffer(table, dtype=np.int64), num_bytes, connection)
    side.close()


def _send_slices(side: _Side, offsets: Any, num_bytes: int, connection: socket.socket) -> None:
    mover = side.mover
    under_way: list[tuple[Any, Ticket, int]] = []
    slices = side.slices(offsets, num_bytes)
    for index in range(len(slices) + 1):
        if index < len(slices):
            addresses, lengths = slices[index]
            buffer = mover.gather_ring.take(_SLICE_BYTES)
            assert buffer is not None
            ticket = mover.start_gather(buffer.address, addresses, lengths)
            under_way.append((buffer, ticket, int(lengths.sum())))
        if index:
            buffer, ticket, size = under_way.pop(0)
            wait_for(mover, ticket)
            connection.sendall(_view(buffer.address, size))
            mover.gather_ring.give_back(buffer)


class StagedSocketReader(GpuReader):
    """The other end: while one slice is copied to the GPU, the next one is received."""

    def __init__(self, setup: Setup, address: tuple[str, int]) -> None:
        self._side = _Side(setup, setup.options["reader"])
        self.memory = self._side.memory
        self.memory.fill(0xFF)
        self._socket = socket.create_connection(address, TIMEOUT_S)
        self._socket.settimeout(None)

    def read(self, pairs: RegionPairs) -> str:
        num_bytes = int(pairs.lengths[0])
        offsets = pairs.remote_offsets.astype("<i8").tobytes()
        self._socket.sendall(struct.pack("<QQ", len(pairs), num_bytes) + offsets)
        mover = self._side.mover
        under_way: list[tuple[Any, Ticket]] = []
        for addresses, lengths in self._side.slices(pairs.local_offsets, num_bytes):
            if len(under_way) == 2:
                self._finish(*under_way.pop(0))
            buffer = mover.scatter_ring.take(_SLICE_BYTES)
            assert buffer is not None
            self._receive(_view(buffer.address, int(lengths.sum())))
            under_way.append((buffer, mover.start_scatter(addresses, buffer.address, lengths)))
        for ended in under_way:
            self._finish(*ended)
        return "tcp+staged"

    def _receive(self, view: memoryview) -> None:
        while view:
            num_bytes = self._socket.recv_into(view)
            if not num_bytes:
                raise ConnectionError("the owner closed the connection")
            view = view[num_bytes:]

    def _finish(self, buffer: Any, ticket: Ticket) -> None:
        wait_for(self._side.mover, ticket)
        self._side.mover.scatter_ring.give_back(buffer)

    def close(self) -> None:
        self._socket.close()
        self._side.close()


# -- kvferry -----------------------------------------------------------------------------------------


def own_pool(setup: Setup, reader: Connection) -> None:
    """Serve a pool by one of kvferry's transports."""
    with driver_of(setup):
        node = PoolNode(
            setup.options["owner"],
            setup.options["scheme"],
            setup.pool_bytes,
            **setup.options["transport"],
        )
        node.write(_words(setup.pool_bytes))
        reader.send(node.endpoint.listen(""))
        while not reader.poll():
            node.endpoint.wait_events(0.05)
        node.close()


class PoolReader(GpuReader):
    """Reads by one of kvferry's transports."""

    def __init__(self, setup: Setup, address: str) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(driver_of(setup))
        self._node = PoolNode(
            setup.options["reader"],
            setup.options["scheme"],
            setup.pool_bytes,
            **setup.options["transport"],
        )
        (self.memory,) = self._node.memories
        self.memory.fill(0xFF)
        self._peer_id = self._node.connect(address)

    def read(self, pairs: RegionPairs) -> str:
        transfer_id = self._node.start_read(self._peer_id, pairs)
        while True:
            for event in self._node.endpoint.wait_events(TIMEOUT_S):
                if isinstance(event, TransferEnded) and event.transfer_id == transfer_id:
                    if event.error is not None:
                        raise event.error
                    return event.mechanism

    def close(self) -> None:
        self._node.close()
        self._stack.close()
