"""`UCXTransport`: options, guards and memory; `backend` does the rest."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import ClassVar

from .._descriptors import warn_if_few
from .._limited_log import LimitedLog
from .._memory import WordTable, private_arena, require_host
from .._options import parse_options
from .._outside import outside
from ..base import Arena, Endpoint
from ..endpoint import HandshakeLimits, PeerEndpoint, PeerTable, PeerTransport
from ..errors import ConfigurationError
from ..regions import Pool
from .backend import UCXBackend
from .library import NUM_HELD, PER_CONNECTION, require_network
from .options import SCHEME, UCXOptions
from .reads import limits_of
from .serving import PoolServer
from .staging import StagingBuffers

logger = logging.getLogger(__name__)


class UCXTransport(PeerTransport):
    """Peers over what UCX finds: RDMA or TCP. See the package for how a read works.

    The owner's thread does all work, also that of UCX. If the owner does not call `wait_events` for `peer_timeout_s`,
    its peers lose it.

    Args:
        options: See `UCXOptions`.

    Raises:
        ConfigurationError: an option is unknown or wrong, or UCX has nothing here that fits them.
        BackendUnavailableError: `ucxx` cannot be imported; the message says how to install it.
    """

    scheme: ClassVar[str] = SCHEME
    options_type = UCXOptions
    guards: WordTable

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        super().__init__()
        parsed = parse_options(UCXOptions, options, SCHEME)
        self._options = parsed.tuned_for(require_network(parsed))
        with outside("cannot open a transport", ConfigurationError):
            self.guards = WordTable.anonymous(self._options.num_guards)

    def _allocate(self, num_bytes: int) -> Arena:
        return private_arena(num_bytes)

    def _open(self, pool: Pool) -> Endpoint:
        require_host(pool, SCHEME)
        options = self._options
        warn_if_few(SCHEME, NUM_HELD, options.max_connecting, PER_CONNECTION)
        slices = limits_of(options)
        source = PoolServer(pool, self.guards, StagingBuffers(slices.slice_bytes + slices.alone_bytes))
        table = PeerTable(
            lambda peers: UCXBackend(peers, options, source),
            HandshakeLimits(options.handshake_timeout_s, options.max_connecting),
            log=LimitedLog(logger),
        )
        return PeerEndpoint(SCHEME, table)
