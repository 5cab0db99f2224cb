"""kvferry's own transports."""

from __future__ import annotations

import ctypes
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np

from kvferry.transports import Connected, Event, Guard, RegionPairs, Segment, TransferEnded
from kvferry.transports import Pool as TransportPool
from kvferry.transports.registry import create_transport

from .contender import TIMEOUT_S, Pool, Reader, Setup, pool_memory

#: What the owner holds for the whole pool.
GUARD = Guard(1, 7)
_EventType = TypeVar("_EventType", bound=Event)


class Node:
    """A transport with a registered pool, and its endpoint.

    Options: `scheme`; `transport`, the transport's own options; `in_arena`, whether the transport allocates the pool.
    """

    def __init__(self, setup: Setup) -> None:
        self.transport = create_transport(setup.options["scheme"], setup.options["transport"])
        if setup.options["in_arena"]:
            self._arena = self.transport.allocate(setup.pool_bytes)
            segment = self._arena.segment
        else:
            self._memory = pool_memory(setup.pool_bytes)
            segment = Segment(np.frombuffer(self._memory, dtype=np.int64).ctypes.data, setup.pool_bytes)
        self.endpoint = self.transport.register(TransportPool([segment]))
        words = (ctypes.c_int64 * (setup.pool_bytes // 8)).from_address(segment.address)
        self.pool: Pool = np.frombuffer(memoryview(words), dtype=np.int64)


def own_ours(setup: Setup, reader: Connection) -> None:
    node = Node(setup)
    node.pool[:] = np.arange(len(node.pool))
    node.transport.guards.set(GUARD.index, GUARD.value)
    reader.send(node.endpoint.listen(""))
    while not reader.poll():
        node.endpoint.wait_events(0.05)
    node.transport.close()


class OurReader(Reader):
    """The reader."""

    def __init__(self, setup: Setup, address: str) -> None:
        self._node = Node(setup)
        self.pool = self._node.pool
        self.pool[:] = -1
        self._endpoint = self._node.endpoint
        self._peer_id = self._endpoint.start_connect(address, timeout_s=TIMEOUT_S)
        self._wait(Connected)

    def _wait(self, wanted: type[_EventType]) -> _EventType:
        for event in self._endpoint.wait_events(TIMEOUT_S):
            if isinstance(event, wanted):
                return event
            raise RuntimeError(f"expected {wanted.__name__}, got {event}")
        raise TimeoutError(f"timed out after {TIMEOUT_S:g} s waiting for {wanted.__name__}")

    def read(self, pairs: RegionPairs) -> str:
        self._endpoint.start_read(self._peer_id, pairs, GUARD, timeout_s=TIMEOUT_S)
        ended = self._wait(TransferEnded)
        if ended.error is not None:
            raise ended.error
        return ended.mechanism

    def close(self) -> None:
        self._node.transport.close()
