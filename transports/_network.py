"""What the transports to other hosts have in common: all but their node, which knows the network."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Generic, Protocol, TypeVar

from ._adapter import AdaptedEndpoint
from ._memory import WordTable, private_arena, require_host
from ._outside import outside, typed
from ._poller import Poller
from .base import MAX_MESSAGE_BYTES, Arena, Endpoint, Event, Transport
from .errors import ConfigurationError, KVTransferStateError, ProtocolError, TransportClosedError
from .regions import Guard, Pool, RegionPairs


class NetworkNode(Protocol):
    """Everything between `register` and `close`. Methods that are named as the transport's do what those say."""

    def disconnect(self, peer_id: int) -> None: ...

    def send(self, peer_id: int, message: bytes) -> None: ...

    def start_read(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int: ...

    def turn(self, timeout_s: float) -> None:
        """Wait at most `timeout_s`, or until the transport's poller is woken; handle what happened."""

    def take_events(self) -> list[Event]:
        """Take what happened so far."""

    def close(self) -> None: ...


Node = TypeVar("Node", bound=NetworkNode)


class NetworkTransport(Transport, Generic[Node]):
    """A transport whose node does the work, from `register` on.

    Args:
        num_guards: Words in the guard table.
    """

    guards: WordTable

    def __init__(self, num_guards: int) -> None:
        with outside("cannot open a transport", ConfigurationError):
            self.guards = WordTable.anonymous(num_guards)
            self._poller = Poller()
        self._nodes: list[Node] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{' closed' if self._poller.is_closed else ''}>"

    @abstractmethod
    def _make_node(self, pool: Pool) -> Node: ...

    # -- memory --------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> Arena:
        self._require_open()
        with outside(f"cannot allocate {num_bytes} bytes", ConfigurationError):
            return private_arena(num_bytes)

    def register(self, pool: Pool) -> Endpoint:
        self._require_open()
        if self._nodes:
            raise KVTransferStateError("a pool is registered already")
        require_host(pool, self.scheme)
        with outside(f"cannot open transport {self.scheme!r}", ConfigurationError):
            self._nodes.append(self._make_node(pool))
        return AdaptedEndpoint(self)

    def _node(self) -> Node:
        self._require_open()
        if not self._nodes:
            raise KVTransferStateError("register a pool first")
        return self._nodes[0]

    def _require_open(self) -> None:
        if self._poller.is_closed:
            raise TransportClosedError("the transport is closed")

    # -- peers ---------------------------------------------------------------------------------------

    def disconnect(self, peer_id: int) -> None:
        for node in self._nodes:
            node.disconnect(peer_id)

    def send(self, peer_id: int, message: bytes) -> None:
        node = self._node()
        if len(message) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message has at most {MAX_MESSAGE_BYTES} bytes, not {len(message)}")
        try:
            node.send(peer_id, message)
        except Exception as error:
            if (ours := typed(error, "cannot send a message")) is error:
                raise
            raise ours from error

    def start_read(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int:
        return self._node().start_read(peer_id, pairs, guard, timeout_s=timeout_s)

    # -- the owner's loop ----------------------------------------------------------------------------

    def wait_events(self, timeout_s: float) -> list[Event]:
        self._require_open()
        until = time.monotonic() + timeout_s
        while True:
            left_s = until - time.monotonic()
            events: list[Event] = []
            for node in self._nodes:
                node.turn(left_s)
                events = node.take_events()
            if not self._nodes:
                self._poller.poll(left_s)
            if self._poller.take_woken() or events or time.monotonic() >= until:
                return events

    def wake(self) -> None:
        self._poller.wake()

    def close(self) -> None:
        if self._poller.is_closed:
            return
        # Before the peers hear of it: what they still fetch is not promised any more.
        self.guards.clear_all()
        for node in self._nodes:
            node.close()
        self._nodes.clear()
        self._poller.close()
