"""The connector suite for vLLM's interface: it runs any `KVConnectorBase_V1` on the model-free node.

It needs vLLM 0.29 or later.

    from kvferry.connector.testing.vllm import VllmConnectorConformance

    class TestMine(VllmConnectorConformance):
        @pytest.fixture
        def transfer(self, tmp_path):
            return {"kv_connector": "MyConnector", "kv_connector_module_path": "my.package",
                    "kv_connector_extra_config": {"folder": str(tmp_path)}}

vLLM's own factory makes the two halves of the connector. They are called in the order of vLLM's scheduler and
model runner (0.32), with vLLM's requests, scheduler output, forward context and attention metadata, and with
caches in vLLM's layout. Between the halves everything is pickled, as between vLLM's processes. The model-free
node takes the place of the model and of the scheduler's policy.
"""

from __future__ import annotations

import gc
import json
import pickle
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as VllmFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata as VllmMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole as VllmRole
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionMetadata
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import (
    CachedRequestData,
    KVConnectorBlockState,
    NewRequestData,
)
from vllm.v1.core.sched.output import SchedulerOutput as VllmSchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec as VllmSpec
from vllm.v1.kv_cache_interface import KVCacheConfig as VllmKVCacheConfig
from vllm.v1.kv_cache_interface import KVCacheGroupSpec as VllmGroup
from vllm.v1.kv_cache_interface import KVCacheTensor as VllmTensor
from vllm.v1.outputs import KVConnectorOutput as VllmOutput
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from ...transports.errors import ConfigurationError
from ..base import (
    ConnectorRequest,
    KVConnectorBase,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    ScheduledRequest,
    SchedulerHalf,
    SchedulerOutput,
    WorkerHalf,
)
from ..config import EngineConfig
from ..kv_cache_specs import AttentionSpec, KVCacheConfig
from ..output import KVConnectorOutput
from ..stats import KVConnectorStats
from .broken import promise
from .harness import MakeNode, node_maker
from .node import ModelFreeNode, _Entry
from .shapes import CacheShape, Step
from .suite import ConnectorConformance

_STATE_FIELDS = frozenset(item.name for item in fields(KVConnectorBlockState))
_STEP_FIELDS = frozenset(item.name for item in fields(VllmSchedulerOutput))
_POOL_FIELDS = frozenset(item.name for item in fields(VllmKVCacheConfig))
#: Key, among the options of `VllmConnector`, of what it needs itself.
_ADAPTER = "kvferry adapter"

_STATUS = {
    "stop": RequestStatus.FINISHED_STOPPED,
    "length": RequestStatus.FINISHED_LENGTH_CAPPED,
    "abort": RequestStatus.FINISHED_ABORTED,
    "error": RequestStatus.FINISHED_ERROR,
}


# -- what crosses between the halves -----------------------------------------------------------------


@dataclass(frozen=True)
class _Orders(KVConnectorMetadata):
    """One step of vLLM's.

    Attributes:
        step: vLLM's `SchedulerOutput`, with the connector's own metadata, as vLLM sends it to its workers.
        scheduled: What the step computes.
        loading: Blocks of each request that begins to load asynchronously.
    """

    step: Any
    scheduled: tuple[ScheduledRequest, ...]
    loading: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Handshake(KVConnectorHandshakeMetadata):
    pickled: bytes


@dataclass(frozen=True)
class _Report(KVConnectorStats):
    """vLLM's report of a step, which has more fields than kvferry's. It travels in place of the figures."""

    pickled: bytes = b""

    def received(self) -> Any:
        """Return the report as the scheduler's process gets it.

        vLLM pickles between its own processes. Here this process wrote the bytes itself.
        """
        return pickle.loads(self.pickled)


# -- the scheduler half ------------------------------------------------------------------------------


class _Requests:
    """vLLM's requests, one per request of the node, kept up to date with it."""

    def __init__(self, vllm_config: Any) -> None:
        hash_tokens = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_tokens)
        self._hasher = get_request_block_hasher(vllm_config.cache_config.block_size, hash_tokens)
        self._by_id: dict[str, Any] = {}

    def follow(self, request: ConnectorRequest) -> Any:
        """Return vLLM's request that stands for the node's, with its present state."""
        followed = self._by_id.get(request.request_id)
        if followed is None:
            followed = self._by_id[request.request_id] = self._make(request)
        followed.num_computed_tokens = request.num_computed_tokens
        if request.finish_reason is not None:
            followed.status = _STATUS[request.finish_reason]
        return followed

    def answer(self, item: ScheduledRequest) -> None:
        """Take note that a step has computed tokens.

        If they end the prompt or follow it, one more token is known now.
        """
        request = self._by_id[item.request_id]
        num_known = item.num_computed_tokens + item.num_scheduled_tokens + 1
        if num_known > max(request.num_prompt_tokens, request.num_tokens):
            request.append_output_token_ids(0)  # a node without a model: any token will do

    def __getitem__(self, request_id: str) -> Any:
        return self._by_id[request_id]

    def forget(self, request_id: str) -> None:
        self._by_id.pop(request_id, None)

    def _make(self, request: ConnectorRequest) -> Any:
        params = request.kv_transfer_params
        lora = request.lora_id
        return VllmRequest(
            request.request_id,
            None if request.prompt_embeds is not None else list(request.prompt_token_ids),
            SamplingParams(
                max_tokens=16,
                extra_args=None if params is None else {"kv_transfer_params": dict(params)},
            ),
            None,
            prompt_embeds=request.prompt_embeds,
            mm_features=[
                MultiModalFeatureSpec(
                    data=None,
                    modality="image",
                    identifier=item.identifier,
                    mm_position=PlaceholderRange(offset=item.offset, length=item.length),
                )
                for item in request.mm_features
            ],
            lora_request=lora
            and LoRARequest(lora, 1 + zlib.crc32(lora.encode()), f"/no/such/adapter/{lora}"),
            cache_salt=request.cache_salt,
            block_hasher=self._hasher,
        )


class _VllmScheduler(SchedulerHalf):
    """The scheduler half of a connector of vLLM's, as vLLM's scheduler calls it."""

    def __init__(self, connector: Any, vllm_config: Any) -> None:
        self._connector = connector
        self._requests = _Requests(vllm_config)
        self._sync_loads: set[str] = set()
        self._loading: dict[str, tuple[int, ...]] = {}
        self._is_async: dict[str, bool] = {}
        #: Block tables as vLLM's model runner has them, of the requests that were scheduled before.
        self._tables: dict[str, Sequence[Sequence[int]]] = {}
        self._lost_blocks: set[str] = set()
        self._scheduled: tuple[ScheduledRequest, ...] = ()

    def set_handshake_metadata(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        sent = {(0, rank): pickle.loads(own.pickled) for rank, own in metadata.items()}  # type: ignore[attr-defined]
        if sent:
            self._connector.set_xfer_handshake_metadata_pp_aware(sent)

    def on_new_request(self, request: ConnectorRequest) -> None:
        self._connector.on_new_request(self._requests.follow(request))

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        num_tokens, is_async = self._connector.get_num_new_matched_tokens(
            self._requests.follow(request), num_computed_tokens
        )
        promise(
            "get_num_new_matched_tokens returns False with 0 tokens; vLLM's scheduler ends the engine otherwise",
            kept=num_tokens != 0 or not is_async,
            seen=f"it returned {(num_tokens, is_async)} for request {request.request_id!r}",
        )
        self._is_async[request.request_id] = is_async
        return num_tokens, is_async

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        request_id = request.request_id
        blocks = KVCacheBlocks(tuple([KVCacheBlock(block) for block in group] for group in block_ids))
        self._connector.update_state_after_alloc(self._requests.follow(request), blocks, num_external_tokens)
        if num_external_tokens and self._is_async[request_id]:
            self._requests[request_id].status = RequestStatus.WAITING_FOR_REMOTE_KVS
            self._loading[request_id] = tuple(block for group in block_ids for block in group)
        elif num_external_tokens:
            self._sync_loads.add(request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        previous = {item.request_id for item in self._scheduled}
        scheduled = tuple(scheduler_output.scheduled_requests)
        step = self._step(scheduled, previous, scheduler_output)
        tables = {
            request_id: tuple(map(list, self._tables[request_id])) for request_id in step.num_scheduled_tokens
        }
        state = {
            "req_ids": set(tables),
            "resolve_block_ids": tables.__getitem__,
            "block_ids": tables,  # before 0.30, in place of the two above
            "boundary_state_offloads": {},
        }
        step.kv_connector_block_state = KVConnectorBlockState(
            **{name: value for name, value in state.items() if name in _STATE_FIELDS}
        )
        before = repr(step)
        metadata = self._connector.build_connector_meta(step)
        promise(
            "build_connector_meta returns a KVConnectorMetadata",
            kept=isinstance(metadata, VllmMetadata),
            seen=f"it returned {metadata!r}",
        )
        promise(
            "build_connector_meta does not change its argument",
            kept=repr(step) == before,
            seen=f"{before} was changed to {step}",
        )
        step.kv_connector_metadata, step.kv_connector_block_state = metadata, None
        self._scheduled = scheduled
        loading, self._loading = self._loading, {}
        self._sync_loads.clear()
        return _Orders(step, scheduled, loading)

    def _step(self, scheduled: Sequence[ScheduledRequest], previous: set[str], step: SchedulerOutput) -> Any:
        """Describe what a step computes in vLLM's terms: new requests in full, the others by what has
        changed.
        """
        self._lost_blocks |= step.preempted_req_ids
        for request_id in step.preempted_req_ids:
            self._requests[request_id].status = RequestStatus.PREEMPTED
            self._requests[request_id].num_preemptions += 1
        new, others = [], CachedRequestData.make_empty()
        tables = {item.request_id: item.block_ids for item in scheduled}
        for item in scheduled:
            request, table = self._requests[item.request_id], tuple(map(list, item.block_ids))
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = item.num_computed_tokens
            before = self._tables.get(item.request_id)
            if before is None:
                new.append(NewRequestData.from_request(request, table))
                continue
            others.req_ids.append(item.request_id)
            if item.request_id in self._lost_blocks:
                others.resumed_req_ids.add(item.request_id)
            else:
                table = tuple(ids[len(known) :] for ids, known in zip(table, before, strict=True))
            if item.request_id not in previous:
                others.all_token_ids[item.request_id] = list(request.all_token_ids)
            others.new_block_ids.append(table if any(table) else None)
            others.num_computed_tokens.append(item.num_computed_tokens)
            others.num_output_tokens.append(request.num_output_tokens)
        self._lost_blocks -= tables.keys()
        self._tables |= tables
        counts = {item.request_id: item.num_scheduled_tokens for item in scheduled}
        older = {"num_common_prefix_blocks": [0]}  # before 0.32
        return VllmSchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=others,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=set(step.finished_req_ids),
            free_encoder_mm_hashes=[],
            preempted_req_ids=set(step.preempted_req_ids),
            has_sync_kv_loads=bool(self._sync_loads),
            **{name: value for name, value in older.items() if name in _STEP_FIELDS},
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        for item in self._scheduled:
            self._requests.answer(item)
        report = connector_output.kv_connector_stats
        if isinstance(report, _Report):
            self._connector.update_connector_output(report.received())
        self._connector.get_kv_connector_stats()

    def request_finished(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        followed, groups = self._requests.follow(request), tuple(map(list, block_ids))
        if supports_hma(self._connector):
            delay_free, params = self._connector.request_finished_all_groups(followed, groups)
        else:
            delay_free, params = self._connector.request_finished(followed, groups[0])
        for known in (self._tables, self._loading, self._is_async):
            known.pop(request.request_id, None)
        self._lost_blocks.discard(request.request_id)
        self._requests.forget(request.request_id)
        return delay_free, params

    def take_events(self) -> Sequence[Any]:
        return list(self._connector.take_events())

    def shutdown(self) -> None:
        self._connector.shutdown()


# -- the worker half ---------------------------------------------------------------------------------


class _Layer(AttentionLayerBase):  # type: ignore[misc]
    """An attention layer that has a cache and computes nothing."""

    isa = "model-free"  # CPU attention names the order of a page's keys here; the node does not reorder them

    def __init__(self, spec: Any, kv_cache: torch.Tensor) -> None:
        self.spec = spec
        self.bind_kv_cache(kv_cache)

    def get_attn_backend(self) -> Any:
        return CPUAttentionBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return self.spec


class _VllmWorker(WorkerHalf):
    """The worker half of a connector of vLLM's, as vLLM's model runner calls it."""

    def __init__(
        self, connector: Any, vllm_config: Any, kv_cache_config: Any, *, prefers_uniform: bool
    ) -> None:
        self._connector = connector
        self._vllm_config = vllm_config
        self._group = kv_cache_config.kv_cache_groups[0]
        self._prefers_uniform = prefers_uniform
        self._caches: dict[str, torch.Tensor] = {}
        self._step = ExitStack()
        self._scheduler_output: Any = None
        self._attn_metadata: Any = None
        self._failed: dict[str, str] = {}
        self._failed_blocks: set[int] = set()
        self._loading: dict[str, tuple[int, ...]] = {}
        self._report: Any = VllmOutput()

    # -- memory --------------------------------------------------------------------------------------

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return self._prefers_uniform

    def allocate_kv_memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        context = getattr(self._connector, "get_mem_pool_context", nullcontext)  # since 0.31
        with context() or nullcontext():
            return torch.zeros(num_bytes, dtype=torch.int8, device=device)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Register the caches in vLLM's form: (block, head, slot, key and value).

        Args:
            kv_caches: Logical views of pages in which each head has its slots, and each slot its key and then
                its value; see `VllmNode`.
        """
        self._caches = {name: cache.permute(0, 3, 2, 1, 4).flatten(3) for name, cache in kv_caches.items()}
        for name, cache in self._caches.items():
            assert cache.data_ptr() == kv_caches[name].data_ptr()  # a copy would never see what is loaded
            layer = _Layer(self._group.kv_cache_spec, cache)
            self._vllm_config.compilation_config.static_forward_context[name] = layer
        self._connector.register_kv_caches(self._caches)

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: type[Any]) -> None:
        self.register_kv_caches(dict(zip(self._group.layer_names, kv_cache, strict=True)))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        sent = self._connector.get_handshake_metadata()
        return None if sent is None else _Handshake(pickle.dumps(sent))

    # -- one step ------------------------------------------------------------------------------------

    def begin_step(self, orders: KVConnectorMetadata) -> None:
        """Make the first call of every step of vLLM's, before a block that a request has lost can be
        overwritten.
        """
        assert isinstance(orders, _Orders)
        self._scheduler_output = pickle.loads(pickle.dumps(orders.step))  # it comes from another process
        self._connector.handle_preemptions(self._scheduler_output.kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, _Orders)
        self._loading |= connector_metadata.loading
        scheduled = connector_metadata.scheduled
        attn_metadata = _attention_metadata(scheduled, self._group.kv_cache_spec.block_size)
        self._attn_metadata = dict.fromkeys(self._caches, attn_metadata) if scheduled else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Enter vLLM's own frame of a step: it binds the metadata, and starts loads that the step
        will read.
        """
        slots = {name: metadata.slot_mapping for name, metadata in (self._attn_metadata or {}).items()}
        context = create_forward_context(self._attn_metadata, self._vllm_config, slot_mapping=slots)
        with ExitStack() as stack:
            stack.enter_context(override_forward_context(context))
            stack.enter_context(_only_connector(self._connector))
            frame = KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(self._scheduler_output)
            self._report = stack.enter_context(frame)
            self._step = stack.pop_all()

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._attn_metadata is not None:
            self._connector.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self._attn_metadata is not None:
            self._connector.save_kv_layer(
                layer_name, self._caches[layer_name], self._attn_metadata[layer_name]
            )

    def wait_for_save(self) -> None:
        """Leave vLLM's frame of the step: it starts the other loads, waits for saves, and takes the
        report.
        """
        self._step.close()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._step.close()  # a step that computes nothing does not wait for saves; vLLM's does
        report = self._report
        self._failed_blocks = set(report.invalid_block_ids)
        for request_id in getattr(report, "failed_recving", ()):  # since 0.30
            self._failed_blocks.update(self._loading.get(request_id, ()))
            self._failed[request_id] = "the connector named it in failed_recving"
        for request_id in report.finished_recving or ():
            self._loading.pop(request_id, None)
        return set(report.finished_sending or ()), set(report.finished_recving or ())

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_load_errors(self) -> dict[str, str]:
        failed, self._failed = self._failed, {}
        return failed

    def get_kv_connector_stats(self) -> _Report | None:
        report, self._report = self._report, VllmOutput()
        is_needed = not report.is_empty() or self._attn_metadata is not None
        return _Report(pickled=pickle.dumps(report)) if is_needed else None

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._step.close()  # if the step failed
        self._attn_metadata = self._scheduler_output = None

    def shutdown(self) -> None:
        self._connector.shutdown()
        self._vllm_config.compilation_config.static_forward_context.clear()  # the layers hold the memory
        self._caches = {}


@contextmanager
def _only_connector(connector: Any) -> Iterator[None]:
    """Make a connector the one that vLLM uses in this process; several nodes share the process."""
    before = kv_transfer_state._KV_CONNECTOR_AGENT
    kv_transfer_state._KV_CONNECTOR_AGENT = connector
    try:
        yield
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = before


def _attention_metadata(scheduled: Sequence[ScheduledRequest], block_size: int) -> Any:
    """Make the attention metadata of a step as vLLM's CPU backend does, without its plan of the
    computation.
    """
    counts = [item.num_scheduled_tokens for item in scheduled]
    ends = [item.num_computed_tokens + item.num_scheduled_tokens for item in scheduled]
    tables = [item.block_ids[0] for item in scheduled]
    width = max(map(len, tables), default=0)
    slots = [
        table[token // block_size] * block_size + token % block_size
        for item, table, end in zip(scheduled, tables, ends, strict=True)
        for token in range(item.num_computed_tokens, end)
    ]
    return CPUAttentionMetadata(
        num_actual_tokens=sum(counts),
        max_query_len=max(counts, default=0),
        query_start_loc=torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
        max_seq_len=max(ends, default=0),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        block_table=torch.tensor(
            [[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32
        ),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        scheduler_metadata=None,
    )


# -- the node ----------------------------------------------------------------------------------------


class VllmConnector(KVConnectorBase):
    """Adapt a connector of vLLM's to kvferry's interface.

    Its options are those of vLLM's connector. Under the key `_ADAPTER` there are three more: `transfer`, the
    other fields of vLLM's `KVTransferConfig`; `folder`, where models' configurations may be written; and
    `is_uniform`, whether the pool is block-major.
    """

    def make_scheduler_half(self) -> SchedulerHalf:
        vllm_config, pool = self._vllm_configs()
        connector = VllmFactory.create_connector(vllm_config, VllmRole.SCHEDULER, pool)
        return _VllmScheduler(connector, vllm_config)

    def make_worker_half(self) -> WorkerHalf:
        vllm_config, pool = self._vllm_configs()
        with set_current_vllm_config(vllm_config):
            connector = VllmFactory.create_connector(vllm_config, VllmRole.WORKER, pool)
        layout = type(connector).get_required_kvcache_layout(vllm_config) or "LBHNC"
        return _VllmWorker(connector, vllm_config, pool, prefers_uniform=layout.startswith("B"))

    def begin_step(self, orders: KVConnectorMetadata) -> None:
        """See `_VllmWorker.begin_step`."""
        assert isinstance(self._worker, _VllmWorker)
        self._worker.begin_step(orders)

    def _vllm_configs(self) -> tuple[Any, Any]:
        config = self.kv_transfer_config
        options = dict(config.kv_connector_extra_config)
        adapter = options.pop(_ADAPTER)
        pool = _vllm_kv_cache_config(self.kv_cache_config, adapter["is_uniform"])
        transfer = KVTransferConfig(
            kv_role=config.kv_role,
            engine_id=config.engine_id,
            kv_load_failure_policy=config.kv_load_failure_policy,
            kv_connector_extra_config=options,
            **adapter["transfer"],
        )
        (group,) = pool.kv_cache_groups
        return _vllm_config(self.config, group, transfer, Path(adapter["folder"])), pool


def _vllm_config(config: EngineConfig, group: Any, transfer: Any, folder: Path) -> Any:
    """Configure vLLM for a model that has no weights."""
    spec, place = group.kv_cache_spec, folder / config.model.model
    place.mkdir(exist_ok=True)
    description = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.num_kv_heads * spec.head_size,
        "intermediate_size": spec.head_size,
        "num_hidden_layers": len(group.layer_names),
        "num_attention_heads": spec.num_kv_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_size,
        "max_position_embeddings": config.model.max_model_len,
        "vocab_size": 4096,
    }
    text = json.dumps(description)
    (place / "config.json").write_text(text)
    result = VllmConfig(
        model_config=_model_config(str(place), text, config.model.dtype, config.model.max_model_len),
        load_config=LoadConfig(load_format="dummy"),
        device_config=DeviceConfig(device="cpu"),
        cache_config=CacheConfig(block_size=spec.block_size),
        kv_transfer_config=transfer,
    )
    result.cache_config.block_size = spec.block_size  # a platform may have preferred another
    return result


@lru_cache(maxsize=4)  # most of the time that a node takes to start
def _model_config(place: str, description: str, dtype: str, max_model_len: int) -> Any:
    """Have vLLM read the configuration of the model at `place`; `description`, its contents, is part of the
    key.
    """
    return ModelConfig(
        place,
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=max_model_len,
        seed=zlib.crc32(Path(place).name.encode()),  # random weights of another seed are other weights
    )


def _vllm_kv_cache_config(pool: KVCacheConfig, is_uniform: bool) -> Any:
    (group,) = pool.kv_cache_groups
    assert isinstance(group.kv_cache_spec, AttentionSpec)
    ours, names = group.kv_cache_spec, list(group.layer_names)
    spec = VllmSpec(
        block_size=ours.block_size, num_kv_heads=ours.num_kv_heads, head_size=ours.head_size, dtype=ours.dtype
    )
    page = spec.page_size_bytes
    tensor = VllmTensor(
        size=page * len(names) * pool.num_blocks,
        layers=names,
        layer_stride=page if is_uniform else page * pool.num_blocks,
        block_stride=page * len(names) if is_uniform else page,
    )
    newer = {"hash_block_size": ours.block_size}  # since 0.32
    return VllmKVCacheConfig(
        num_blocks=pool.num_blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[VllmGroup(names, spec)],
        kv_cache_layout="BLHNC" if is_uniform else "LBHNC",
        **{name: value for name, value in newer.items() if name in _POOL_FIELDS},
    )


class VllmNode(ModelFreeNode):
    """A model-free node whose pages lie as vLLM's: each head has its slots, and each slot its key and then
    its value.
    """

    def __init__(self, config: EngineConfig, shape: CacheShape, **kwargs: Any) -> None:
        assert config.kv_transfer is not None
        if shape.num_ranks > 1:
            raise ConfigurationError(
                "several ranks: vLLM runs each in a process of its own, and this suite has one process"
            )
        options = dict(config.kv_transfer.kv_connector_extra_config)
        options[_ADAPTER] = {**options[_ADAPTER], "is_uniform": shape.layout == "uniform"}
        transfer = replace(config.kv_transfer, kv_connector_extra_config=options)
        super().__init__(replace(config, kv_transfer=transfer), shape, **kwargs)

    def _work(
        self, plan: Step, metadata: KVConnectorMetadata, failing_layer: int | None
    ) -> KVConnectorOutput:
        if failing_layer is not None:
            pytest.skip("a hook that raises ends vLLM's engine")
        assert isinstance(self.worker, VllmConnector)
        self.worker.begin_step(metadata)
        return super()._work(plan, metadata, failing_layer)

    def _admit(self, entry: _Entry, max_tokens: int) -> None:
        entry.may_load = True  # vLLM also asks when a request that lost its blocks begins again
        super()._admit(entry, max_tokens)

    def _register(self, worker: WorkerHalf) -> torch.Tensor:
        shape = self.shape
        num_bytes = sum(tensor.size for tensor in self.kv_cache_config.kv_cache_tensors)
        memory = worker.allocate_kv_memory(num_bytes, torch.device("cpu")).view(shape.dtype)
        page = (shape.num_kv_heads, shape.block_size, 2, shape.head_size)
        if shape.layout == "uniform":
            pages = memory.view(shape.num_blocks, shape.num_layers, *page).transpose(0, 1)
        else:
            pages = memory.view(shape.num_layers, shape.num_blocks, *page)
        cache = pages.permute(0, 1, 4, 3, 2, 5)
        worker.register_kv_caches(dict(zip(self.layer_names, cache, strict=True)))
        return cache


# -- the suite ---------------------------------------------------------------------------------------


class VllmConnectorConformance(ConnectorConformance):
    """The promises of any connector, for vLLM's. A subclass overrides the fixture `transfer`.

    Attributes:
        expected_violations: Promises that the connector breaks by design: name of the test, with or without
            its parameters → why. Such a test must fail.
    """

    expected_violations: ClassVar[Mapping[str, str]] = {}
    _process: ClassVar[ExitStack]

    @classmethod
    def setup_class(cls) -> None:
        cls._process = ExitStack()
        cls._process.enter_context(groups_of_one())
        gc.collect()
        gc.freeze()  # so that the check for leaks after each test need not look through all of vLLM
        cls._process.callback(gc.unfreeze)

    @classmethod
    def teardown_class(cls) -> None:
        cls._process.close()

    @pytest.fixture
    def transfer(self) -> Mapping[str, Any]:
        """Return fields of vLLM's `KVTransferConfig`; `kv_role` need not be among them."""
        raise NotImplementedError("override the fixture `transfer`")

    @pytest.fixture(autouse=True)
    def _expect_violations(self, request: pytest.FixtureRequest) -> None:
        for name in (request.node.name, request.node.originalname):
            if (why := self.expected_violations.get(name)) is not None:
                request.applymarker(pytest.mark.xfail(reason=why, strict=True))

    @pytest.fixture
    def make_node(
        self, transfer: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[MakeNode]:
        skip_unless_drivable(transfer)
        with nodes_of(transfer, tmp_path_factory.mktemp("models"), self.deadline_s) as make:
            yield make


@contextmanager
def nodes_of(transfer: Mapping[str, Any], folder: Path, deadline_s: float = 20.0) -> Iterator[MakeNode]:
    """Make nodes with one connector of vLLM's, and shut them down at the end; see `node_maker`.

    Args:
        transfer: Fields of vLLM's `KVTransferConfig`.
        folder: Where configurations of models may be written.
    """
    others = dict(transfer)
    options = others.pop("kv_connector_extra_config", {})
    ours: dict[str, Any] = {
        name: others.pop(name)
        for name in ("kv_role", "engine_id", "kv_load_failure_policy")
        if name in others
    }
    options = {**options, _ADAPTER: {"transfer": others, "folder": str(folder)}}
    ours |= {
        "kv_connector": VllmConnector.__name__,
        "kv_connector_module_path": __name__,
        "kv_connector_extra_config": options,
    }
    with node_maker(ours, deadline_s, VllmNode) as make:
        yield make


def skip_unless_drivable(transfer: Mapping[str, Any]) -> None:
    """Skip the test if the connector needs something that a model-free node does not have."""
    connector = VllmFactory.get_connector_class(KVTransferConfig(**{"kv_role": "kv_both", **transfer}))
    if getattr(connector, "can_do_without_block_pool", False):
        return
    for method in ("bind_kv_cache_manager", "bind_gpu_block_pool"):
        if getattr(connector, method, None) is not getattr(KVConnectorBase_V1, method, None):
            pytest.skip(f"{connector.__name__} overrides {method}: it needs vLLM's own block pool")


@contextmanager
def groups_of_one() -> Iterator[None]:
    """Set up vLLM's groups of processes with this one as the only member; many connectors ask them for their
    rank.
    """
    if parallel_state.model_parallel_is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
