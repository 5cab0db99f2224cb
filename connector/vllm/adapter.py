"""`KvferryConnector`: vLLM's connector interface over kvferry's two halves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from ...transports.errors import KVTransferStateError
from ...transports.registry import create_transport
from ..p2p.scheduler import HandoffScheduler
from ..p2p.worker import HandoffWorker, new_epoch
from .config import (
    answer_fields,
    can_continue_answers,
    connector_options,
    engine_config,
    event_publisher,
    kv_cache_config,
    served_groups,
)
from .identity import model_identity
from .metadata import LoadErrors, StepMetadata, WorkerHandshake
from .scheduler import SchedulerSide
from .sharing import SharedOffers
from .stats import KvferryPromMetrics, KvferryStats
from .weights import watch_engine_cores
from .windows import WindowBlocks
from .worker import WorkerSide

if TYPE_CHECKING:
    import torch

    from ..kv_cache_specs import KVCacheConfig

if not hasattr(KVConnectorBase_V1, "on_new_request"):
    raise ImportError("KVConnectorBase_V1 has no on_new_request")

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # before 0.32 vLLM does not tell the sources of hits apart
    CacheHitSource = None

#: Before 0.30 a connector can report a failed load to vLLM only by its blocks, and only with a single group.
#: If the connector is not a `SupportsHMA`, vLLM puts all layers into one group.
_Groups: type = SupportsHMA if hasattr(KVConnectorBase_V1, "get_transfer_results") else object


class KvferryConnector(KVConnectorBase_V1, _Groups):  # type: ignore[misc]
    """Hands the blocks of finished prompts over between vLLM nodes; the decode node reads the prefill node's
    pool.

    Loads are asynchronous, and nothing is saved layer by layer. The options in `kv_connector_extra_config`
    are those of `ConnectorOptions`.

    Args:
        vllm_config: vLLM's configuration.
        role: Which half this is.
        kv_cache_config: vLLM's pool.

    Raises:
        ConfigurationError: an option is unknown or has a bad value, or vLLM is configured in a way that is
            not supported; vLLM does not start.
        BackendUnavailableError: the transport cannot work here; the message says what would help.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_where_vllm_logs()
        is_scheduler = role == KVConnectorRole.SCHEDULER
        make = _scheduler_side if is_scheduler else _worker_side
        self._side: SchedulerSide | WorkerSide = make(vllm_config, kv_cache_config)

    @property
    def _scheduler(self) -> SchedulerSide:
        if isinstance(self._side, SchedulerSide):
            return self._side
        raise KVTransferStateError("a method of the scheduler half was called on a worker half")

    @property
    def _worker(self) -> WorkerSide:
        if isinstance(self._side, WorkerSide):
            return self._side
        raise KVTransferStateError("a method of the worker half was called on a scheduler half")

    #: For `kvferry.connector.testing.vllm`, whose nodes have none: only windows and chunks need vLLM's block
    #: pool.
    can_do_without_block_pool = True
    #: vLLM's label for the tokens that we load, in its metrics since 0.32.
    _cache_hit_source = getattr(CacheHitSource, "P2P", None)

    # -- for vLLM's front end, which makes no connector ----------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Ask for one run of bytes per block over all layers, if the user wants that; vLLM falls back where
        it cannot.
        """
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        connector_options(extra)  # this is called before there is a pool, so a wrong option is reported early
        return "BLHNC" if extra.get("cross_layer_blocks") is True else None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False: none of our calls is part of a graph.

        vLLM calls this while it reads its configuration, so a wrong option is reported then.
        """
        connector_options(extra_config)
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return True: since vLLM 0.33, which asks this, workers tell connectors before the cache goes."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvferryStats:
        return KvferryStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvferryPromMetrics:
        return KvferryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- either half ---------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KvferryStats | None:
        return self._side.get_kv_connector_stats() if isinstance(self._side, WorkerSide) else None

    def shutdown(self) -> None:
        if isinstance(self._side, WorkerSide):
            self._side.shutdown()

    # -- worker half ---------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[None] | None:
        return self._worker.get_mem_pool_context()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        """End every handoff and let go of the caches, before vLLM frees their memory. Idempotent."""
        self._worker.sleep()

    def restore_kv_caches(self) -> None:
        """Serve the caches again, as another start of the node. Idempotent."""
        self._worker.wake_up()

    def begin_anew(self, weights: str, why: str) -> None:
        """End every handoff, and describe these weights to peers from now on; see `weights`."""
        self._worker.begin_anew(weights, why)

    def get_handshake_metadata(self) -> WorkerHandshake:
        return self._worker.get_handshake_metadata()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Have all of the step's orders but its loads carried out: this is vLLM's first call of every step.

        The open offers of preempted requests end here, before the step writes into their blocks.
        """
        self._worker.carry_out(cast(StepMetadata, kv_connector_metadata))

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Start the step's loads; since 0.29 vLLM calls `start_load_kv` only after the forward pass.

        Do nothing if called again for the same step.
        """
        super().bind_connector_metadata(connector_metadata)
        self._worker.start_loads(cast(StepMetadata, connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Return at once: the loads were started when the step's metadata was bound."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: no load is synchronous."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Return at once: the cache is read where it is."""

    def wait_for_save(self) -> None:
        """Return at once: nothing is saved."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        finished = self._worker.take_finished()
        return KVConnectorTransferResults(
            finished_sending=finished.sent,
            finished_recving=finished.received,
            failed_recving=finished.failed,
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Take what ended; vLLM before 0.30 calls this instead of `get_transfer_results`."""
        return self._worker.get_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Take the blocks of the failed loads of `get_finished`; empty after `get_transfer_results`, which
        names requests.
        """
        return self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> LoadErrors | None:
        """Take why loads have failed, for the scheduler half."""
        return self._worker.take_load_errors() if isinstance(self._side, WorkerSide) else None

    # -- scheduler half ------------------------------------------------------------------------------

    #: vLLM asks once, for all requests of the engine. If it is True, each request that is preempted loses the
    #: tokens that are being computed. Only one whose prompt is to be offered must lose them, because it would
    #: end without blocks otherwise. `SchedulerSide` sees to that.
    requires_kv_delivery = False

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.bind_block_pool(gpu_block_pool)

    @property
    def scheduler_side(self) -> SchedulerSide:
        """What this connector is, if it is a scheduler half."""
        return self._scheduler

    def reset_cache(self) -> bool:
        """End every handoff: what was computed until now must not be used any more."""
        self._scheduler.reset_cache()
        return True

    @property
    def num_remembered_requests(self) -> int:
        """Requests whose handoff is not over; 0 while the node is idle."""
        return self._scheduler.num_remembered_requests

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, WorkerHandshake]) -> None:
        self._scheduler.set_handshake_metadata(metadata)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], WorkerHandshake]
    ) -> None:
        """Learn where the workers can be reached, by (stage, tensor-parallel rank); vLLM without stages calls
        the other one.
        """
        ranks = enumerate(sorted(metadata))
        self._scheduler.set_handshake_metadata({rank: metadata[place] for rank, place in ranks})

    def on_new_request(self, request: Any) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Return the groups that every load fills: not those of a draft model, which the peer may not
        have.
        """
        return self._loaded_groups

    @cached_property
    def _loaded_groups(self) -> tuple[int, ...]:
        served = tuple(served_groups(self._kv_cache_config, self._vllm_config))
        pool = kv_cache_config(self._kv_cache_config, self._vllm_config)
        return tuple(served[group] for group in pool.target_groups)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, block_ids)


def _scheduler_side(vllm_config: Any, config: Any) -> SchedulerSide:
    watch_engine_cores()
    pool = kv_cache_config(config, vllm_config)
    transfer = engine_config(vllm_config, pool).kv_transfer
    assert transfer is not None
    shared = SharedOffers(bool(vllm_config.cache_config.enable_prefix_caching))
    parallel = vllm_config.parallel_config
    # Behind one address a router cannot know which of several engines computes a prompt.
    has_own_address = getattr(parallel, "data_parallel_size", 1) == 1 or getattr(
        parallel, "data_parallel_external_lb", False
    )
    half = HandoffScheduler(transfer, pool)
    served = tuple(served_groups(config, vllm_config))
    specs = (group.kv_cache_spec for group in pool.kv_cache_groups)
    windows = WindowBlocks(dict(zip(served, specs, strict=True)))
    is_zeroed = bool(getattr(config, "needs_kv_cache_zeroing", False))
    return SchedulerSide(
        half,
        shared,
        windows,
        served,
        can_meet=has_own_address,
        can_be_early=not is_zeroed,
        answer_fields=answer_fields(vllm_config),
        can_continue=can_continue_answers(vllm_config),
        # Behind one address a router cannot know whose cache an event is about.
        publisher=event_publisher(vllm_config) if has_own_address else {},
    )


def _worker_side(vllm_config: Any, config: Any) -> WorkerSide:
    from vllm.distributed import get_pp_group, get_tp_group

    tensor, stages = get_tp_group(), get_pp_group()
    # A start of the node is one start, whatever the number of ranks: first each stage agrees, then all take
    # the first stage's.
    epoch = stages.broadcast_object(tensor.broadcast_object(new_epoch()))
    options = connector_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
    pool = kv_cache_config(config, vllm_config)
    half = HandoffWorker(
        engine_config(
            vllm_config,
            pool,
            tensor.rank_in_group,
            stages.rank_in_group,
            _num_layers(pool, stages),
            epoch,
            model_identity(vllm_config, has_draft=bool(pool.draft_layers), by_name=options.weights_by_name),
        ),
        pool,
        create_transport(options.transport, options.transport_options),
        options,
    )
    return WorkerSide(vllm_config, config, half)


def _num_layers(pool: KVCacheConfig, stages: Any) -> int:
    """Return the number of the target model's layers that keep a cache, over all stages; 0 if there is one
    stage.
    """
    if stages.world_size == 1:
        return 0
    import torch

    counts = [0] * stages.world_size
    here = len({name for group in pool.kv_cache_groups for name in group.layer_names} - pool.draft_layers)
    torch.distributed.all_gather_object(counts, here, group=stages.cpu_group)
    return sum(counts)


def _log_where_vllm_logs() -> None:
    """Send our log to vLLM's handlers, because vLLM sets up only its own logger; not if the user has set ours
    up.
    """
    ours, theirs = logging.getLogger("kvferry"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
