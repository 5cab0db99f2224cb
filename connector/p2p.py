"""A connector between two nodes that read each other's pools: one of two halves, and a transport's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ..transports.errors import KVTransferStateError
from ..transports.registry import check_options, create_transport
from .base import KVConnectorBase, KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorRole
from .metadata import HandoffMetadata, WorkerAddress
from .options import ConnectorOptions
from .scheduler_half import HandoffScheduler
from .stats import KVConnectorStats
from .worker_half import HandoffWorker

if TYPE_CHECKING:
    import torch

    from .base import ConnectorRequest, SchedulerOutput
    from .config import EngineConfig
    from .kv_cache_specs import KVCacheConfig
    from .output import KVConnectorOutput


class PeerToPeerConnector(KVConnectorBase):
    """Hands a prompt's blocks over: the consumer reads them from the producer's pool.

    A concrete connector names its transport and is otherwise empty. Loads are asynchronous; nothing is saved
    layer by layer. The options are those of `ConnectorOptions`.

    Raises:
        KVTransferStateError: `config.kv_transfer` is None.
        ConfigurationError: an option, or an option of the transport, is unknown or has a bad value.
        BackendUnavailableError: the transport cannot work here; the message says what would help.
    """

    #: Scheme of the transport that carries the bytes.
    transport_scheme: ClassVar[str]

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        if cls.__init__ is PeerToPeerConnector.__init__:  # one that is made otherwise may take other options
            check_options(cls.transport_scheme, ConnectorOptions.from_mapping(options).transport)

    def __init__(self, config: EngineConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(config, role, kv_cache_config)
        self._options = ConnectorOptions.from_mapping(self.kv_transfer_config.kv_connector_extra_config)
        self._half: HandoffScheduler | HandoffWorker
        if role is KVConnectorRole.SCHEDULER:
            self._half = HandoffScheduler(self.kv_transfer_config, kv_cache_config)
        else:
            transport = create_transport(self.transport_scheme, self._options.transport)
            self._half = HandoffWorker(config, kv_cache_config, transport, self._options)

    @property
    def _scheduler(self) -> HandoffScheduler:
        if isinstance(self._half, HandoffScheduler):
            return self._half
        raise KVTransferStateError("a method of the scheduler half was called on a worker half")

    @property
    def _worker(self) -> HandoffWorker:
        if isinstance(self._half, HandoffWorker):
            return self._half
        raise KVTransferStateError("a method of the worker half was called on a scheduler half")

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._half.get_kv_connector_stats() if isinstance(self._half, HandoffWorker) else None

    @property
    def failure(self) -> str:
        return self._half.failure if isinstance(self._half, HandoffWorker) else ""

    @property
    def warning(self) -> str:
        return self._half.warning if isinstance(self._half, HandoffWorker) else ""

    def shutdown(self) -> None:
        if isinstance(self._half, HandoffWorker):
            self._half.shutdown()

    # -- worker half ---------------------------------------------------------------------------------

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return self._options.cross_layer_blocks

    def allocate_kv_memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        return self._worker.allocate_kv_memory(num_bytes, device)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._worker.register_kv_caches(kv_caches)

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: type[Any]) -> None:
        self._worker.register_cross_layers_kv_cache(kv_cache)

    def get_handshake_metadata(self) -> WorkerAddress:
        return self._worker.get_handshake_metadata()

    def handle_preemptions(self, preempted_req_ids: set[str]) -> None:
        self._worker.handle_preemptions(preempted_req_ids)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_load_kv(cast(HandoffMetadata, self.connector_metadata))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: no load is synchronous."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Return at once: the cache is read where it is."""

    def wait_for_save(self) -> None:
        """Return at once: nothing is saved."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return self._worker.get_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.get_block_ids_with_load_errors()

    def take_load_errors(self) -> dict[str, str]:
        return self._worker.take_load_errors()

    # -- scheduler half ------------------------------------------------------------------------------

    def set_handshake_metadata(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        self._scheduler.set_handshake_metadata(cast(Mapping[int, WorkerAddress], metadata))

    def recognizes_params(self, kv_transfer_params: Mapping[str, Any]) -> bool:
        addresses = kv_transfer_params.get("remote_addresses", ())
        return isinstance(addresses, list | tuple) and all(
            isinstance(address, str) and address.startswith(f"{self.transport_scheme}:")
            for address in addresses
        )

    def on_new_request(self, request: ConnectorRequest) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        self._scheduler.update_state_after_alloc(request, block_ids, num_external_tokens)

    def request_progressed(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any] | None:
        return self._scheduler.request_progressed(request, block_ids)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.build_connector_meta(scheduler_output.preempted_req_ids)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.update_connector_output(connector_output)

    def request_finished(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, block_ids)
