"""The contract of a connector: its two halves, what an engine shows them, and `KVConnectorBase`, which
authors subclass.

A connector runs in two places on a node. The *scheduler half* sits beside the engine's scheduler and decides
which blocks of which request cross between nodes. The *worker half*, one per rank, moves them. They
communicate only through the metadata that `build_connector_meta` returns in each step, and through what
`get_finished` and the methods after it report.

`docs/connector-contract.md` is the specification: the order of all calls, what a block table contains, and
what aborts, preemptions and exceptions mean. The meaning of each method follows vLLM's KVConnectorBase_V1
(0.32).
"""

from __future__ import annotations

import enum
import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..transports.errors import KVTransferStateError
from .compat import half_of_defaults

if TYPE_CHECKING:
    import torch

    from .config import EngineConfig
    from .kv_cache_specs import KVCacheConfig
    from .output import KVConnectorOutput


_Connector = TypeVar("_Connector")


class KVConnectorRole(enum.Enum):
    SCHEDULER = "scheduler"
    WORKER = "worker"


class KVConnectorMetadata(ABC):  # noqa: B024 - a marker: each connector has its own contents
    """One step's orders from the scheduler half to the worker halves."""


class KVConnectorHandshakeMetadata(ABC):  # noqa: B024 - a marker: each connector has its own contents
    """What a worker half sends the scheduler half, once, after its caches are registered."""


class ContentItem(Protocol):
    """An image, a sound, or vectors: placeholder tokens whose ids do not say what they stand for."""

    @property
    def identifier(self) -> str:
        """Hash of the item's contents."""

    @property
    def offset(self) -> int:
        """Position of its first token in the prompt."""

    @property
    def length(self) -> int: ...


class ConnectorRequest(Protocol):
    """The part of an engine's request that a connector reads. A connector changes nothing in it."""

    @property
    def request_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def all_token_ids(self) -> Sequence[int]:
        """The prompt and the tokens of the answer so far."""

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose keys and values are in the request's blocks."""

    @property
    def cache_salt(self) -> str | None:
        """Separates caches: requests with different salts never share one."""

    @property
    def lora_id(self) -> str | None:
        """Name of the LoRA adapter that the request runs with."""

    @property
    def mm_features(self) -> Sequence[ContentItem]:
        """Items in the prompt whose contents the token ids do not determine."""

    @property
    def prompt_embeds(self) -> torch.Tensor | None:
        """`(num_prompt_tokens, hidden_size)`: vectors that replace all of the prompt's tokens, or None."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...
    @property
    def finish_reason(self) -> str | None:
        """`"stop"`, `"length"`, `"abort"`, `"error"`, `"moved"`, or None while it runs.

        `"moved"`: the engine has stopped the answer after a token, so that another node can go on with it.
        """


class ScheduledRequest(Protocol):
    """What one step computes of one request: its tokens `[num_computed_tokens, num_computed_tokens +
    num_scheduled_tokens)`.

    The step writes their keys and values into the request's blocks. The record never changes.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose keys and values are in the request's blocks before the step computes
        anything.

        Tokens that this step loads synchronously are among them.
        """

    @property
    def num_scheduled_tokens(self) -> int:
        """Number of tokens that the step computes; at least 1."""

    @property
    def block_ids(self) -> Sequence[Sequence[int]]:
        """The request's whole block table, one list per KV cache group, including the blocks that this step
        fills.
        """


class SchedulerOutput(Protocol):
    """The part of an engine's step that a connector and the runner mixin read."""

    @property
    def kv_connector_metadata(self) -> KVConnectorMetadata | None: ...
    @property
    def scheduled_requests(self) -> Sequence[ScheduledRequest]:
        """The requests that the step computes, each once.

        A request that loads asynchronously is not among them.
        """

    @property
    def finished_req_ids(self) -> set[str]:
        """Requests that finished since the previous step."""

    @property
    def preempted_req_ids(self) -> set[str]: ...
    @property
    def total_num_scheduled_tokens(self) -> int: ...


class SchedulerHalf(ABC):
    """Decide which blocks of which request cross between nodes.

    One per node, beside the engine's scheduler. It sees requests and touches no memory. A subclass must
    implement `get_num_new_matched_tokens`, `update_state_after_alloc` and `build_connector_meta`; everything
    else has a default.
    """

    def set_handshake_metadata(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:  # noqa: B027
        """Receive what the worker halves sent, by rank. Called once, before the first request."""

    def describe(self) -> dict[str, Any]:
        """Return what a router should know of this start of the node, in JSON's types.

        Called after `set_handshake_metadata`.
        """
        return {}

    def on_new_request(self, request: ConnectorRequest) -> None:  # noqa: B027
        """Take note of a request that the engine accepted; no blocks are allocated yet.

        Raises:
            ConnectorError: the request's `kv_transfer_params` are malformed, or its id belongs to an earlier
                request whose transfer is not over. The engine refuses the request and does not call
                `request_finished` for it.
        """

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond `num_computed_tokens` this connector can load. Has no side effects.

        Called in each step in which the request could get its first blocks, also after a preemption, until it
        gets them.

        Args:
            num_computed_tokens: Tokens that the node's own prefix cache already holds: a multiple of the
                block size, and less than the request's tokens. `request.num_computed_tokens` is 0.

        Returns:
            `(num_tokens, is_async)`. If `num_tokens` is None, the engine asks again in a later step. If
            `is_async`, the request waits and holds its blocks until a worker half names it in
            `finished_recving`. The load may contain the last token only if `is_async`, and must not go beyond
            it.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Take note of the blocks that were allocated for the request.

        Called whenever the request gets blocks after it waited: at its start, after an asynchronous load, and
        after a preemption. Not called for the blocks of later chunks or of generated tokens;
        `build_connector_meta` sees those.

        Args:
            block_ids: The request's whole block table, one list per KV cache group: blocks for the node's own
                prefix, for the tokens to load, and, unless the load is asynchronous, for those that this step
                computes.
            num_external_tokens: Tokens to load after the node's own prefix, as `get_num_new_matched_tokens`
                returned; 0 if the load is over or there was nothing to load.

        Raises:
            ConnectorError: the load cannot be ordered, and nothing of it was. The request fails.
        """

    def request_progressed(  # noqa: B027
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]]
    ) -> None:
        """Take note that a step computed a part of the prompt, up to `request.num_computed_tokens`, but not
        its end.

        Called after each such step, before the next one is planned. If the request loses its blocks, it is
        computed again and this is called from the beginning again; the next `build_connector_meta` gets its
        id in `preempted_req_ids`.

        Args:
            block_ids: The request's block table so far, one list per KV cache group, with blocks for exactly
                `request.num_computed_tokens` tokens. The engine still owns the blocks: the request may lose
                them in any step.
        """

    def request_stopping(self, request: ConnectorRequest) -> None:  # noqa: B027
        """Take note that the answer is to stop after the next token, so that another node can go on with it.

        Called before the step that computes this token is planned. `request_finished` follows with the
        `finish_reason` `"moved"`, unless the answer ends otherwise by then.
        """

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Take the orders for the worker halves in this step.

        Called every step; must not change its argument.

        If it raises, it is called once more; so forget the orders only when they are returned.

        Args:
            scheduler_output: What the step computes, and which requests finished or lost their blocks.
        """

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:  # noqa: B027
        """Take note of the worker halves' report, before the engine acts on it.

        Called after each step that computed something, and after each one that has something to report.
        """

    def request_finished(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Take note that the request is over and that its blocks are about to be freed.

        Called once per request.

        `request.finish_reason` says why. The first `request.num_computed_tokens` tokens are in the blocks.

        Args:
            block_ids: The request's whole block table, one list per KV cache group; the lists are empty if it
                has no blocks. Blocks of a load that is under way are among them, and the engine keeps those
                until the load ends.

        Returns:
            `(delay_free, kv_transfer_params)`. If `delay_free`, the engine keeps the blocks until a worker
            half names the request in `finished_sending`. The params go to the client, which passes them to
            the consumer.
        """
        return False, None

    def take_events(self) -> Iterable[Any]:
        """Take what happened to the cache since the last call."""
        return ()

    def shutdown(self) -> None:  # noqa: B027 - a half may have nothing to free
        """Free everything. Idempotent."""


class WorkerHalf(ABC):
    """Move the blocks that the scheduler half ordered.

    One per rank, beside the model runner. It sees caches and decides nothing. A subclass must implement
    `start_load_kv`; everything else has a default.
    """

    _connector_metadata: KVConnectorMetadata | None = None

    # -- memory --------------------------------------------------------------------------------------

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Whether one block of all layers should be one contiguous run of bytes."""
        return False

    @property
    def allocates_memory(self) -> bool:
        """Whether this half overrides `allocate_kv_memory`, so that it matters where the pool lies."""
        return type(self).allocate_kv_memory is not WorkerHalf.allocate_kv_memory

    def allocate_kv_memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Allocate the memory of the whole KV cache pool where this connector moves bytes best.

        Returns:
            `(num_bytes,)` int8, zeroed, contiguous, on `device`.
        """
        import torch

        return torch.zeros(num_bytes, dtype=torch.int8, device=device)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:  # noqa: B027
        """Receive each layer's cache. Called once, when the caches are bound.

        Args:
            kv_caches: Layer name → the layer's cache in logical order; axis 0 is kernel blocks. Layers
                that share a cache appear under each name. The logical order of attention is (kernel block,
                key or value, slot, head, element); of attention with one latent (kernel block, slot,
                element).
        """

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: type[Any]) -> None:
        """Receive the uniform cache. Called instead of `register_kv_caches` if cross-layer blocks are in use.

        Args:
            kv_cache: `(num_layers, *backend shape)` in logical order; physically block-major.
            attn_backend: The backend whose shape and stride order were used.
        """
        raise NotImplementedError(
            "this connector cannot register a cross-layer cache: it implements register_kv_caches only; "
            "either implement register_cross_layers_kv_cache or return False from prefer_cross_layer_blocks"
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return what the scheduler half must know about this rank. Called once, after registration."""
        return None

    # -- one step ------------------------------------------------------------------------------------

    def handle_preemptions(self, preempted_req_ids: set[str]) -> None:  # noqa: B027
        """Stop using the blocks of requests that lose them.

        The first call of a step with preemptions, before any of these blocks can be overwritten, and before
        the step's metadata is bound. Requests that failed because a hook raised are named as well.
        """

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Set the scheduler half's orders for this step."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """Forget the step's metadata. Last call of a step."""
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        """Return whether a step is under way."""
        return self._connector_metadata is not None

    @property
    def connector_metadata(self) -> KVConnectorMetadata:
        """The scheduler half's orders for this step.

        Raises:
            KVTransferStateError: no step is under way.
        """
        if self._connector_metadata is None:
            raise KVTransferStateError(
                "no connector metadata is bound: no step is under way; call bind_connector_metadata first"
            )
        return self._connector_metadata

    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads of this step.

        Returns at once; called in every step, even one that computes nothing.

        Args:
            forward_context: What the layers of this step see, `runner_mixin.ForwardContext`: layers and
                metadata by layer name. Without layers if the step computes nothing.
        """

    def wait_for_layer_load(self, layer_name: str) -> None:  # noqa: B027
        """Block until the layer's part of this step's *synchronous* loads is in place.

        Called for each layer with a cache of its own on this rank, just before the layer writes the step's
        keys and values; attention and recurrent layers alike. If the forward pass fails, it is called for the
        other layers as well. Not called in a step that computes nothing.
        """

    def save_kv_layer(  # noqa: B027
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Start to save the layer's cache, which this step has written; by default do nothing.

        Called for the same layers as `wait_for_layer_load`, just after the layer. The step wrote the slots of
        the tokens that `scheduled_requests` names, and nothing else; `connector_metadata` must say which
        blocks these are. The rest of the cache may change at any time. The blocks may be overwritten as soon
        as `wait_for_save` returns.

        Args:
            kv_layer: The layer's whole cache with this rank's heads: the tensor that was registered under
                `layer_name`, or the layer's part of the cross-layer cache. Axis 0 is kernel blocks: block `b`
                is `kv_layer[b * n : (b + 1) * n]`, where `n` is `len(kv_layer) //
                kv_cache_config.num_blocks`.
            attn_metadata: What the layer's attention backend was given for this step: the ragged batch of all
                requests, with block tables and slots. Its class belongs to the backend; None for a recurrent
                layer. Requests are in the order of `scheduled_requests`.
        """

    def wait_for_save(self) -> None:  # noqa: B027
        """Block until what `save_kv_layer` started to save may be overwritten.

        Called in every step, also if it computes nothing or its forward pass failed. After a step in which a
        hook raised, the next call also waits for what that step still loads or saves.
        """

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Take the requests whose asynchronous transfers ended: `(finished_sending, finished_recving)`.

        Each request is named once per direction, including one whose load failed; see
        `get_block_ids_with_load_errors`.

        Args:
            finished_req_ids: Requests that finished since the previous step.
        """
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Take the local blocks whose loads failed; no later than the `get_finished` that names their
        request.
        """
        return set()

    def take_load_errors(self) -> dict[str, str]:
        """Take the reasons of failed loads, by request, for the client; with the `get_finished` that names
        it.
        """
        return {}

    def get_kv_connector_stats(self) -> Any:
        """Take the figures of the interval since the last call, or None."""
        return None

    # -- health and end ------------------------------------------------------------------------------

    @property
    def failure(self) -> str:
        """Why this half can transfer nothing any more, for operators; empty while it can.

        An engine asks after every step and while it is idle, and shows the answer in its health check.
        Requests that need a transfer fail until the node is restarted: once set, this never becomes empty
        again.
        """
        return ""

    @property
    def warning(self) -> str:
        """Why some transfers fail although this half works, for example a peer that it cannot reach.

        Asked as often as `failure`; empty again as soon as the cause is gone.
        """
        return ""

    def shutdown(self) -> None:  # noqa: B027 - a half may have nothing to free
        """Free everything. Idempotent. Handoffs that are not over end as aborted."""


def _forwarding(connector: type[_Connector]) -> type[_Connector]:
    """Give the class each public member of the two interfaces that it lacks: one that calls that of the half
    it holds.
    """
    for interface, half in ((SchedulerHalf, "_scheduler"), (WorkerHalf, "_worker")):
        for name, member in vars(interface).items():
            if not name.startswith("_") and name not in vars(connector):
                setattr(connector, name, _forward(name, member, half))
    return connector


def _forward(name: str, member: Any, half: str) -> Any:
    find = operator.attrgetter(f"{half}.{name}")
    if isinstance(member, property):
        return property(find, doc=member.__doc__)

    @functools.wraps(member)
    def call(self: KVConnectorBase, *args: Any, **kwargs: Any) -> Any:
        return find(self)(*args, **kwargs)

    return call


@_forwarding
class KVConnectorBase(SchedulerHalf, WorkerHalf):
    """A connector in one of its two roles.

    A subclass returns a `SchedulerHalf` from `make_scheduler_half` and a `WorkerHalf` from
    `make_worker_half`. Each instance holds the one of its role, and passes calls of that half's methods on to
    it. A class in vLLM's style, which implements the methods of both halves itself, works as well; see
    `compat.py`.

    Args:
        config: The node's configuration; `config.kv_transfer` is set.
        role: Which half this is. Calling a method of the other half raises `KVTransferStateError`.
        kv_cache_config: The pool's blocks, tensors and groups.

    Raises:
        KVTransferStateError: `config.kv_transfer` is None.
        ConfigurationError: an option in `kv_connector_extra_config` is unknown or has a bad value, or the
            subclass has no half for `role`.
    """

    def __init__(self, config: EngineConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        if config.kv_transfer is None:
            raise KVTransferStateError("cannot make a connector: EngineConfig.kv_transfer is None; set it")
        self.config = config
        self.kv_transfer_config = config.kv_transfer
        self.kv_cache_config = kv_cache_config
        self.role = role
        is_scheduler = role is KVConnectorRole.SCHEDULER
        self._half: SchedulerHalf | WorkerHalf = (
            self.make_scheduler_half() if is_scheduler else self.make_worker_half()
        )

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuse options that the constructor would refuse, as far as this is known before there is a pool.

        An engine calls this before it loads a model. By default nothing is checked.

        Args:
            options: `kv_connector_extra_config`.

        Raises:
            ConfigurationError: an option is unknown or has a bad value.
        """

    def make_scheduler_half(self) -> SchedulerHalf:
        """Make the half for `KVConnectorRole.SCHEDULER`.

        The constructor calls this once, after it set its attributes.
        """
        half: SchedulerHalf = half_of_defaults(SchedulerHalf, type(self), KVConnectorBase)
        return half

    def make_worker_half(self) -> WorkerHalf:
        """Make the half for `KVConnectorRole.WORKER`.

        The constructor calls this once, after it set its attributes.
        """
        half: WorkerHalf = half_of_defaults(WorkerHalf, type(self), KVConnectorBase)
        return half

    @property
    def _scheduler(self) -> SchedulerHalf:
        if isinstance(self._half, SchedulerHalf):
            return self._half
        raise self._wrong_half("scheduler", "worker")

    @property
    def _worker(self) -> WorkerHalf:
        if isinstance(self._half, WorkerHalf):
            return self._half
        raise self._wrong_half("worker", "scheduler")

    def _wrong_half(self, wanted: str, present: str) -> KVTransferStateError:
        return KVTransferStateError(
            f"a method of the {wanted} half was called on a {present} half: this {type(self).__name__} was made with "
            f"{self.role}; call it on the one that was made with KVConnectorRole.{wanted.upper()}"
        )

    # Only two kinds of members are written out: those that both halves have or that this class adds to, and
    # those that the interfaces leave abstract, so that type checkers let a subclass leave them to its half.
    # `_forwarding` adds the rest.

    def shutdown(self) -> None:
        self._half.shutdown()

    def get_kv_connector_stats(self) -> Any:
        return self._half.get_kv_connector_stats() if isinstance(self._half, WorkerHalf) else None

    @property
    def failure(self) -> str:
        return self._half.failure if isinstance(self._half, WorkerHalf) else ""

    @property
    def warning(self) -> str:
        return self._half.warning if isinstance(self._half, WorkerHalf) else ""

    @property
    def allocates_memory(self) -> bool:
        is_overridden = type(self).allocate_kv_memory is not KVConnectorBase.allocate_kv_memory
        return is_overridden or self._worker.allocates_memory

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        self._scheduler.update_state_after_alloc(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.build_connector_meta(scheduler_output)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_load_kv(forward_context, **kwargs)
