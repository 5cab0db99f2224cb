"""A connector between two nodes, of which one reads the other's pool through a transport."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from ...transports.registry import BUILT_IN, check_options, create_transport, load_transport
from ..base import KVConnectorBase, KVConnectorRole
from ..factory import connector_name
from .options import ConnectorOptions
from .scheduler import HandoffScheduler
from .worker import HandoffWorker

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..kv_cache_specs import KVCacheConfig


class PeerToPeerConnector(KVConnectorBase):
    """Hand a prompt's blocks over: the consumer reads them from the producer's pool.

    A concrete connector, which `connector_over` makes, names its transport and is otherwise empty. Loads are
    asynchronous; nothing is saved layer by layer. The options are those of `ConnectorOptions`.

    Raises:
        KVTransferStateError: `config.kv_transfer` is None.
        ConfigurationError: an option, or an option of the transport, is unknown or has a bad value.
        BackendUnavailableError: the transport cannot work here; the message says what would help.
    """

    #: Scheme of the transport that carries the bytes.
    transport_scheme: ClassVar[str]

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        # A subclass with its own constructor may take more options.
        if cls.__init__ is PeerToPeerConnector.__init__:
            parsed = ConnectorOptions.from_mapping(options, cls.transport_scheme)
            check_options(cls.transport_scheme, parsed.transport_options)

    def __init__(self, config: EngineConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        # Parsed before either half is made, so that both roles refuse a wrong option.
        transfer = config.kv_transfer
        self._options = ConnectorOptions.from_mapping(
            transfer.kv_connector_extra_config if transfer else {}, self.transport_scheme
        )
        super().__init__(config, role, kv_cache_config)

    def make_scheduler_half(self) -> HandoffScheduler:
        return HandoffScheduler(self.kv_transfer_config, self.kv_cache_config)

    def make_worker_half(self) -> HandoffWorker:
        options = self._options
        transport = create_transport(self.transport_scheme, options.transport_options)
        return HandoffWorker(self.config, self.kv_cache_config, transport, options)

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return self._options.cross_layer_blocks


@cache
def connector_over(scheme: str) -> type[PeerToPeerConnector]:
    """Return the one connector class over a transport, which is named after the transport's class.

    Raises:
        ConfigurationError: no such transport is installed.
    """
    # A built-in transport is not imported for its name: its library may be missing here.
    target = BUILT_IN[scheme].target if scheme in BUILT_IN else f":{load_transport(scheme).__name__}"
    body = {
        "__doc__": f"Hand over by transport {scheme!r}.",
        "__module__": "kvferry.connector",  # where its name leads to it
        "transport_scheme": scheme,
    }
    return type(connector_name(target), (PeerToPeerConnector,), body)
