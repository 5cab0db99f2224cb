"""`UCXTransport`: the contract of `transports.base`, by the pieces of this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from .._descriptors import Reserve, warn_if_few
from .._network import NetworkTransport
from .._options import parse_options
from ..regions import Pool
from .library import NUM_HELD, PER_CONNECTION, Context, require_network
from .node import Node
from .options import SCHEME, Address, UCXOptions
from .peers import Local
from .reads import limits_of
from .serving import PoolServer
from .stages import Stages


class UCXTransport(NetworkTransport[Node]):
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
    options_type = UCXOptions

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        parsed = parse_options(UCXOptions, options, SCHEME)
        self._options = parsed.tuned_for(require_network(parsed))
        super().__init__(self._options.num_guards)

    def _make_node(self, pool: Pool) -> Node:
        limits = limits_of(self._options)
        source = PoolServer(pool, self.guards, Stages(limits.slice_bytes + limits.alone_bytes))
        warn_if_few(SCHEME, NUM_HELD, self._options.max_connecting, PER_CONNECTION)
        reserve = Reserve(NUM_HELD)
        try:
            context = Context(self._options, reserve)
        except BaseException:
            reserve.close()
            raise
        return Node(Local(self._options, context, source, []), self._poller)

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
            BackpressureError: see `Transport.start_connect`.
        """
        return self._node().connect(Address.parse(address), timeout_s)
