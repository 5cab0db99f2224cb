"""`ZeroMQTransport`: the contract of `transports.base`, by the pieces of this package."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Mapping
from typing import ClassVar

from .._memory import WordTable, private_arena
from .._options import parse_options
from ..base import MAX_MESSAGE_BYTES, Arena, Event, Transport
from ..errors import KVTransferStateError, ProtocolError, TransportClosedError
from ..regions import Guard, Pool, RegionPairs
from .node import Node
from .options import SCHEME, Address, ZeroMQOptions
from .security import Security
from .sockets import Sockets

__all__ = ["ZeroMQTransport"]


class ZeroMQTransport(Transport):
    """Peers over TCP, on this host or another. See the package for how a read works.

    The owner's thread does all work but libzmq's own (`io_threads`, and one thread of pyzmq's for the whole
    process, which lets go of memory that libzmq has sent). In an asyncio program give it a thread of its own, or
    `await loop.run_in_executor(owner, transport.wait_events, 0.1)` with an executor of one thread.

    Args:
        options: See `ZeroMQOptions`.

    Raises:
        ConfigurationError: an option is unknown or wrong, or a key file cannot be used. Nothing was opened.
        BackendUnavailableError: keys are given, and this libzmq has no CURVE.
    """

    scheme: ClassVar[str] = SCHEME

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        self._options = parse_options(ZeroMQOptions, options, SCHEME)
        self._security = Security(self._options)
        self._words = WordTable.anonymous(self._options.num_guards)
        self.guards = self._words
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = threading.Lock()
        self._is_closed = False
        self._nodes: list[Node] = []

    def __repr__(self) -> str:
        return f"<ZeroMQTransport{' closed' if self._is_closed else ''}>"

    # -- memory --------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> Arena:
        self._require_open()
        return private_arena(num_bytes)

    def register(self, pool: Pool) -> None:
        self._require_open()
        if self._nodes:
            raise KVTransferStateError("a pool is registered already")
        sockets = Sockets(self._options, self._security, self._wakeup)
        self._nodes.append(Node(self._options, sockets, pool, self._words))

    def _node(self) -> Node:
        self._require_open()
        if not self._nodes:
            raise KVTransferStateError("register a pool first")
        return self._nodes[0]

    def _require_open(self) -> None:
        if self._is_closed:
            raise TransportClosedError("the transport is closed")

    # -- peers ---------------------------------------------------------------------------------------

    def listen(self, address: str) -> str:
        """Accept peers on `zeromq://host:port`; port 0 lets the system choose, an empty address the options.

        Raises:
            ConfigurationError: the address is malformed, taken or not ours to bind; CURVE is needed and there
                are no keys; or the address is a wildcard and `advertise_host` is not set.
        """
        node = self._node()
        if not address:
            return node.listen(self._options.bind_host, self._options.ports())
        parsed = Address.parse(address)
        return node.listen(parsed.host, range(parsed.port, parsed.port + 1))

    def start_connect(self, address: str, *, timeout_s: float) -> int:
        return self._node().connect(Address.parse(address), timeout_s)

    def disconnect(self, peer_id: int) -> None:
        for node in self._nodes:
            node.disconnect(peer_id)

    def send(self, peer_id: int, message: bytes) -> None:
        node = self._node()
        if len(message) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message has at most {MAX_MESSAGE_BYTES} bytes, not {len(message)}")
        node.send(peer_id, message)

    def start_read(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int:
        return self._node().start_read(peer_id, pairs, guard, timeout_s)

    # -- the owner's loop ----------------------------------------------------------------------------

    def wait_events(self, timeout_s: float) -> list[Event]:
        self._require_open()
        deadline = time.monotonic() + timeout_s
        if not self._nodes:
            self._take_wake(select.select([self._wakeup], [], [], max(0.0, timeout_s))[0] != [])
            return []
        (node,) = self._nodes
        while True:
            is_woken = self._take_wake(node.turn(deadline - time.monotonic()))
            events = node.take_events()
            if events or is_woken or time.monotonic() >= deadline:
                return events

    def _take_wake(self, is_woken: bool) -> bool:
        if is_woken:
            os.eventfd_read(self._wakeup)
        return is_woken

    def wake(self) -> None:
        with self._closing:
            if not self._is_closed:
                os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        for node in self._nodes:
            node.close()
        self._nodes.clear()
        os.close(self._wakeup)
