"""`UCXTransport`: the contract of `transports.base`, by the pieces of this package."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import ClassVar

from .._memory import WordTable, private_arena
from .._options import parse_options
from .._poller import Poller
from ..base import MAX_MESSAGE_BYTES, Arena, Event, Transport
from ..errors import KVTransferStateError, ProtocolError, TransportClosedError
from ..regions import Guard, Pool, RegionPairs
from .library import require_network
from .node import Node
from .options import SCHEME, Address, UCXOptions
from .peers import Local
from .reads import limits_of
from .serving import PoolServer
from .stages import Stages

__all__ = ["UCXTransport"]


class UCXTransport(Transport):
    """Peers over what UCX finds: RDMA or TCP. See the package for how a read works.

    The owner's thread does all work, also that of UCX. A peer whose owner does not call `wait_events` for
    `peer_timeout_s` is lost to the others.

    Args:
        options: See `UCXOptions`.

    Raises:
        ConfigurationError: an option is unknown or wrong, or UCX has nothing here that fits them.
        BackendUnavailableError: `ucxx` cannot be imported; the message says how to install it.
    """

    scheme: ClassVar[str] = SCHEME

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        self._options = parse_options(UCXOptions, options, SCHEME)
        require_network(self._options)
        self._words = WordTable.anonymous(self._options.num_guards)
        self.guards = self._words
        self._poller = Poller()
        self._events: list[Event] = []
        self._nodes: list[Node] = []

    def __repr__(self) -> str:
        return f"<UCXTransport{' closed' if self._poller.is_closed else ''}>"

    # -- memory --------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> Arena:
        self._require_open()
        return private_arena(num_bytes)

    def register(self, pool: Pool) -> None:
        self._require_open()
        if self._nodes:
            raise KVTransferStateError("a pool is registered already")
        limits = limits_of(self._options)
        source = PoolServer(pool, self._words, Stages(limits.slice_bytes + limits.alone_bytes))
        self._nodes.append(Node(Local(self._options, source, self._events), self._poller))

    def _node(self) -> Node:
        self._require_open()
        if not self._nodes:
            raise KVTransferStateError("register a pool first")
        return self._nodes[0]

    def _require_open(self) -> None:
        if self._poller.is_closed:
            raise TransportClosedError("the transport is closed")

    # -- peers ---------------------------------------------------------------------------------------

    def listen(self, address: str) -> str:
        """Accept peers on `ucx://host:port`; port 0 lets the system choose, an empty address the options.

        Raises:
            ConfigurationError: the address is malformed, taken or not ours to bind; it is beyond this machine
                without `allow_plaintext`; or it is a wildcard and `advertise_host` is not set.
        """
        node = self._node()
        if not address:
            return node.listen(self._options.bind_host, self._options.ports())
        parsed = Address.parse(address)
        return node.listen(parsed.host, range(parsed.port, parsed.port + 1))

    def start_connect(self, address: str, *, timeout_s: float) -> int:
        """Begin to connect; `Connected` or `PeerLost` follows within `timeout_s`.

        Raises:
            ConfigurationError: the address is malformed, of another scheme, or beyond this machine without
                `allow_plaintext`.
        """
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
        until = time.monotonic() + timeout_s
        while True:
            left_s = until - time.monotonic()
            for node in self._nodes:
                node.turn(left_s)
            if not self._nodes:
                self._poller.poll(left_s)
            if self._poller.take_woken() or self._events or time.monotonic() >= until:
                events = list(self._events)
                self._events.clear()
                return events

    def wake(self) -> None:
        self._poller.wake()

    def close(self) -> None:
        if self._poller.is_closed:
            return
        # Before the peers hear of it: what they still fetch is not promised any more.
        self._words.clear_all()
        for node in self._nodes:
            node.close()
        self._nodes.clear()
        self._poller.close()
