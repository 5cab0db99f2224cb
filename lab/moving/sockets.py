"""The baseline for network transports: plain sockets over one loopback TCP connection.

The reader sends a list of offsets. The owner answers with `sendmsg` from its pool, and the reader receives the bytes into
place with `recvmsg_into`. Nothing is checked.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from kvferry.transports import RegionPairs

from .contender import TIMEOUT_S, Reader, Setup, pool_memory

#: Buffers per call; more are not faster.
_MAX_BUFFERS = 64


def own_sockets(setup: Setup, reader: Connection) -> None:
    memory = pool_memory(setup.pool_bytes)
    np.frombuffer(memory, dtype=np.int64)[:] = np.arange(setup.pool_bytes // 8)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(TIMEOUT_S)
        reader.send(listener.getsockname())
        connection, _ = listener.accept()
    with connection:
        connection.settimeout(None)
        pool = memoryview(memory)
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
    """The reader."""

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
