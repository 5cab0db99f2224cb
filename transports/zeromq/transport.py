"""`ZeroMQTransport`: the contract of `transports.base`, by the pieces of this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from .._network import NetworkTransport
from .._options import parse_options
from ..regions import Pool
from .node import Node
from .options import SCHEME, Address, ZeroMQOptions
from .security import Security
from .sockets import Sockets


class ZeroMQTransport(NetworkTransport[Node]):
    """Peers over TCP, on this host or another. See the package for how a read works.

    The owner's thread does all work but libzmq's own (`io_threads`). In an asyncio program give it a thread of its own, or
    `await loop.run_in_executor(owner, transport.wait_events, 0.1)` with an executor of one thread.

    Args:
        options: See `ZeroMQOptions`.

    Raises:
        ConfigurationError: an option is unknown or wrong, or a key file cannot be used. Nothing was opened.
        BackendUnavailableError: keys are given, and this libzmq has no CURVE.
    """

    scheme: ClassVar[str] = SCHEME
    options_type = ZeroMQOptions

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        self._options = parse_options(ZeroMQOptions, options, SCHEME)
        self._security = Security(self._options)
        super().__init__(self._options.num_guards)

    def _make_node(self, pool: Pool) -> Node:
        sockets = Sockets(self._options, self._security, self._poller)
        try:
            return Node(self._options, sockets, pool, self.guards, self._poller.interrupt)
        except BaseException:
            sockets.close()
            raise

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
