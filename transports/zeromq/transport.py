"""`ZeroMQTransport`: options, keys, guards and memory; `backend` does the rest."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import ClassVar

from .._limited_log import LimitedLog
from .._memory import WordTable, private_arena, require_host
from .._options import parse_options
from .._outside import outside
from ..base import Arena, Endpoint
from ..endpoint import HandshakeLimits, PeerEndpoint, PeerTable, PeerTransport
from ..errors import ConfigurationError
from ..regions import Pool
from .backend import ZeroMQBackend
from .options import SCHEME, ZeroMQOptions
from .security import Security
from .serving import PoolServer

logger = logging.getLogger(__name__)


class ZeroMQTransport(PeerTransport):
    """Peers over TCP, on this host or another. See the package for how a read works.

    The owner's thread does all work except libzmq's own (`io_threads`). In an asyncio program give it an executor of one
    thread: `await loop.run_in_executor(owner, endpoint.wait_events, 0.1)`.

    Args:
        options: See `ZeroMQOptions`.

    Raises:
        ConfigurationError: an option is unknown or wrong, or a key file cannot be used. Nothing was opened.
        BackendUnavailableError: keys are given, and this libzmq has no CURVE.
    """

    scheme: ClassVar[str] = SCHEME
    options_type = ZeroMQOptions
    guards: WordTable

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        super().__init__()
        self._options = parse_options(ZeroMQOptions, options, SCHEME)
        self._security = Security(self._options)
        with outside("cannot open a transport", ConfigurationError):
            self.guards = WordTable.anonymous(self._options.num_guards)

    def _allocate(self, num_bytes: int) -> Arena:
        return private_arena(num_bytes)

    def _open(self, pool: Pool) -> Endpoint:
        require_host(pool, SCHEME)
        options = self._options
        source = PoolServer(pool, self.guards)
        table = PeerTable(
            lambda peers: ZeroMQBackend(peers, options, self._security, source),
            HandshakeLimits(options.handshake_timeout_s, options.max_connecting),
            log=LimitedLog(logger),
        )
        return PeerEndpoint(SCHEME, table)
