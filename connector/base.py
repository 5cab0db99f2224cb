"""`KVConnectorBase`: what an author subclasses.

A connector exists twice on a node, once for each role. The *scheduler* half decides which blocks of which
request cross; the *worker* half, one per rank, moves them. They talk only through the metadata that
`build_connector_meta` returns each step, and through what `get_finished` and its siblings report back.

Order of calls, scheduler half, for one request
    `on_new_request` → `get_num_new_matched_tokens` (any number of times) → `update_state_after_alloc` →
    `build_connector_meta` (every step) → `request_progressed` (where its prompt takes several steps) → … →
    `request_finished` (exactly once).

Order of calls, worker half
    once:  `allocate_kv_memory` → `register_kv_caches` or `register_cross_layers_kv_cache` → `get_handshake_metadata`
    step:  `handle_preemptions` → `bind_connector_metadata` → `start_load_kv` → per layer (`wait_for_layer_load`,
           `save_kv_layer`) → `wait_for_save` → `get_finished` → `get_block_ids_with_load_errors` →
           `take_load_errors` → `get_kv_connector_stats` → `clear_connector_metadata`
    end:   `shutdown`

Source: the meaning of each method, and when an engine calls it, follows vLLM's KVConnectorBase_V1 (0.32).
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..transports.errors import KVTransferStateError

if TYPE_CHECKING:
    import torch

    from .config import EngineConfig
    from .kv_cache_specs import KVCacheConfig
    from .output import KVConnectorOutput


class KVConnectorRole(enum.Enum):
    SCHEDULER = "scheduler"
    WORKER = "worker"


class KVConnectorMetadata(ABC):  # noqa: B024 - a marker: each connector has its own contents
    """What the scheduler half tells the worker halves in one step."""


class KVConnectorHandshakeMetadata(ABC):  # noqa: B024 - a marker: each connector has its own contents
    """What a worker half tells the scheduler half once, when its caches are registered."""


class ContentItem(Protocol):
    """An image, a sound, or vectors: placeholder tokens whose meaning is not in their ids."""

    @property
    def identifier(self) -> str:
        """Hash of the item's contents."""

    @property
    def offset(self) -> int:
        """Position of its first token in the prompt."""

    @property
    def length(self) -> int: ...


class ConnectorRequest(Protocol):
    """What a connector reads of an engine's request. It changes nothing of it."""

    @property
    def request_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are in the request's blocks."""

    @property
    def cache_salt(self) -> str | None:
        """Keeps the cache of those who know it apart from all others'."""

    @property
    def lora_id(self) -> str | None:
        """Name of the adapter that the request runs with."""

    @property
    def mm_features(self) -> Sequence[ContentItem]:
        """Items in the prompt whose contents the token ids do not tell."""

    @property
    def prompt_embeds(self) -> torch.Tensor | None:
        """`(num_prompt_tokens, hidden_size)`: vectors in the place of the whole prompt's tokens, or None."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...
    @property
    def finish_reason(self) -> str | None:
        """`"stop"`, `"length"`, `"abort"`, `"error"`, or None while it runs."""


class SchedulerOutput(Protocol):
    """What a connector and the mixin read of an engine's step."""

    @property
    def kv_connector_metadata(self) -> KVConnectorMetadata | None: ...
    @property
    def finished_req_ids(self) -> set[str]:
        """Requests that finished since the previous step."""

    @property
    def preempted_req_ids(self) -> set[str]: ...
    @property
    def total_num_scheduled_tokens(self) -> int: ...


class KVConnectorBase(ABC):
    """A connector in one of its two roles.

    Args:
        config: The node's configuration; `config.kv_transfer` is set.
        role: Which half this is. Methods of the other half are not called.
        kv_cache_config: The pool's blocks, tensors and groups.

    Raises:
        KVTransferStateError: `config.kv_transfer` is None.
        ConfigurationError: an option in `kv_connector_extra_config` is unknown or has a bad value.
    """

    @classmethod  # noqa: B027 - a connector need not know its options before it is made
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuse options that the constructor would refuse, as far as that can be told before there is a pool.

        An engine asks before it loads a model. A connector that does not override this is asked nothing.

        Args:
            options: `kv_connector_extra_config`.

        Raises:
            ConfigurationError: an option is unknown or has a bad value.
        """

    def __init__(self, config: EngineConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        if config.kv_transfer is None:
            raise KVTransferStateError("a connector needs EngineConfig.kv_transfer")
        self.config = config
        self.kv_transfer_config = config.kv_transfer
        self.kv_cache_config = kv_cache_config
        self.role = role
        self._connector_metadata: KVConnectorMetadata | None = None

    # -- either half ---------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Any:
        """Take the figures of the interval since the last call, or None."""
        return None

    @property
    def failure(self) -> str:
        """Why the worker half transfers nothing any more, in words for operators; empty while it does.

        An engine asks after every step and while it is idle, and then reports it in its health check: requests that need a
        transfer fail until the node is restarted. It never becomes empty again.
        """
        return ""

    @property
    def warning(self) -> str:
        """What keeps some transfers from working although the worker half works, e.g. a peer that it cannot reach.

        Asked as often as `failure`; empty again once it is over.
        """
        return ""

    def shutdown(self) -> None:  # noqa: B027 - nothing to free is a fine default
        """Free everything. Idempotent. Handoffs that are not over end as aborted."""

    # -- worker half: memory -------------------------------------------------------------------------

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Whether one block of all layers should be one contiguous run of bytes."""
        return False

    def allocate_kv_memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Allocate the memory of the whole KV cache pool where this connector moves bytes best.

        Returns:
            `(num_bytes,)` int8, zeroed, contiguous, on `device`.
        """
        import torch

        return torch.zeros(num_bytes, dtype=torch.int8, device=device)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:  # noqa: B027
        """Learn where each layer's cache is. Called once, when the caches are bound.

        Args:
            kv_caches: Layer name → the layer's cache in logical order, axis 0 being kernel blocks. Layers
                that share a cache appear under each name. The logical order of attention is (kernel block,
                key or value, slot, head, element); of attention with one latent (kernel block, slot, element).
        """

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: type[Any]) -> None:
        """Learn the uniform cache, instead of `register_kv_caches`, when cross-layer blocks are in use.

        Args:
            kv_cache: `(num_layers, *backend shape)` in logical order; physically block-major.
            attn_backend: The backend whose shape and stride order were used.
        """
        raise NotImplementedError(f"{type(self).__name__} prefers per-layer caches")

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What the scheduler half must know of this rank, after registration. Called once."""
        return None

    # -- worker half: one step -----------------------------------------------------------------------

    def handle_preemptions(self, preempted_req_ids: set[str]) -> None:  # noqa: B027
        """First call of a step with preemptions, before any of their blocks can be overwritten."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Set what the scheduler half said for this step."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """Forget the step's metadata. Last call of a step."""
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        """Whether a step is under way."""
        return self._connector_metadata is not None

    @property
    def connector_metadata(self) -> KVConnectorMetadata:
        """What the scheduler half said for this step.

        Raises:
            KVTransferStateError: no step is under way.
        """
        if self._connector_metadata is None:
            raise KVTransferStateError("no connector metadata is bound: no step is under way")
        return self._connector_metadata

    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads of this step. Returns at once; called every step, also with nothing to compute."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Block until the layer's part of this step's *synchronous* loads is in place."""

    @abstractmethod
    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """The layer's cache of this step has been written; start to save it, or do nothing."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Block until what `save_kv_layer` started may be overwritten."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Take the requests whose asynchronous transfers ended: `(finished_sending, finished_recving)`.

        Each request is named once per direction. A load that failed is named as well: see
        `get_block_ids_with_load_errors`.

        Args:
            finished_req_ids: Requests that finished since the previous step.
        """
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Take the local blocks whose loads failed; no later than the `get_finished` that names their request."""
        return set()

    def take_load_errors(self) -> dict[str, str]:
        """Take why loads failed, by request, in words for the client; with the `get_finished` that names it."""
        return {}

    # -- scheduler half ------------------------------------------------------------------------------

    def set_handshake_metadata(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:  # noqa: B027
        """Learn what the workers said of themselves, by rank. Once, before the first request."""

    def recognizes_params(self, kv_transfer_params: Mapping[str, Any]) -> bool:
        """Whether params that name no connector can be for this one. Asked where several connectors share a node."""
        return True

    def on_new_request(self, request: ConnectorRequest) -> None:  # noqa: B027
        """The engine accepted the request; nothing is allocated yet.

        Raises:
            ConnectorError: the request's `kv_transfer_params` are malformed, or its id is that of an earlier one
                whose transfer is not over; the engine refuses the request, and `request_finished` is not
                called for it.
        """

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens beyond `num_computed_tokens` that this connector can load. Free of side effects.

        Args:
            num_computed_tokens: Tokens that the node's own prefix cache already holds, a multiple of the block.

        Returns:
            `(num_tokens, is_async)`. `None` tokens: ask again later. Asynchronous: the request waits, holding
            its blocks, until a worker half names it in `finished_recving`.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Blocks were allocated for the request.

        Args:
            block_ids: The request's whole block table, one list per KV cache group.
            num_external_tokens: Tokens to load, as `get_num_new_matched_tokens` said; 0 when the load is over,
                or when there was nothing to load.
        """

    def request_progressed(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any] | None:
        """A step computed a part of the request's prompt, and not its end: `request.num_computed_tokens` says how much.

        Called after each such step, and again from the beginning if the request lost its blocks and is computed once
        more; that it lost them, the next `build_connector_meta` tells.

        Args:
            block_ids: The request's block table so far, one list per KV cache group. The blocks stay the engine's:
                the request may lose them at any step.

        Returns:
            `kv_transfer_params` with which a consumer can begin already; at most once per request. None otherwise.
        """
        return None

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Take what the worker halves must do in this step. Called every step; changes nothing of its argument."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:  # noqa: B027
        """See what the worker halves reported, before the engine acts on it."""

    def request_finished(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request is over, and its blocks are about to be freed. Exactly once per request.

        Returns:
            `(delay_free, kv_transfer_params)`. With `delay_free` the engine keeps the blocks until a worker half
            names the request in `finished_sending`. The params go to the client, for the consumer.
        """
        return False, None

    def take_events(self) -> Iterable[Any]:
        """Take what happened to the cache since the last call."""
        return ()
