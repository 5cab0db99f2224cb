"""A connector that records its calls, and minimal configurations and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvferry.connector.base import KVConnectorMetadata, ScheduledRequest, WorkerHalf
from kvferry.connector.config import (
    AttentionLayerConfig,
    CacheConfig,
    EngineConfig,
    KVTransferConfig,
    ModelConfig,
)
from kvferry.connector.kv_cache_specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from kvferry.runner_mixin import StepBatch, kv_transfer_group


class StepMetadata(KVConnectorMetadata):
    pass


@dataclass
class Step:
    """A scheduler output."""

    kv_connector_metadata: KVConnectorMetadata | None = field(default_factory=StepMetadata)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    scheduled_requests: Sequence[ScheduledRequest] = ()
    total_num_scheduled_tokens: int = 0


class RecordingConnector(WorkerHalf):
    """Records each call in `calls`. A call that is named in `raises` raises."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.raises: set[str] = set()
        self.cross_layers = False
        self.reports: dict[str, Any] = {}
        self.registered: Mapping[str, torch.Tensor] = {}
        self.registered_cross_layers: tuple[torch.Tensor, type[Any]] | None = None
        self.allocated: list[torch.Tensor] = []

    def _record(self, call: str) -> None:
        self.calls.append(call)
        name = call.partition(" ")[0]
        if name in self.raises:
            raise OSError(f"{name} failed")

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return self.cross_layers

    def allocate_kv_memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        self.allocated.append(super().allocate_kv_memory(num_bytes, device))
        return self.allocated[-1]

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self.registered = kv_caches

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: type[Any]) -> None:
        self.registered_cross_layers = (kv_cache, attn_backend)

    def handle_preemptions(self, preempted_req_ids: set[str]) -> None:
        self._record("handle_preemptions")

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._record("bind")
        super().bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._record("clear")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self.has_connector_metadata()
        self._record("start_load_kv")

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._record(f"wait_for_layer_load {layer_name}")

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._record(f"save_kv_layer {layer_name}")

    def wait_for_save(self) -> None:
        self._record("wait_for_save")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._record("get_finished " + ",".join(sorted(finished_req_ids)))
        return self.reports.get("finished", (None, None))

    def get_block_ids_with_load_errors(self) -> set[int]:
        self._record("get_block_ids_with_load_errors")
        return self.reports.get("blocks", set())

    def take_load_errors(self) -> dict[str, str]:
        self._record("take_load_errors")
        return self.reports.get("errors", {})

    def get_kv_connector_stats(self) -> Any:
        self._record("get_kv_connector_stats")
        return self.reports.get("stats")

    def shutdown(self) -> None:
        self._record("shutdown")


@pytest.fixture
def config() -> EngineConfig:
    layers = tuple(AttentionLayerConfig(f"layers.{i}.attn", num_kv_heads=2, head_size=8) for i in range(3))
    return EngineConfig(
        model=ModelConfig("tiny", "float32", 64, layers=layers),
        cache=CacheConfig(block_size=4),
        kv_transfer=KVTransferConfig("Recording", "kv_both", engine_id="node"),
    )


@pytest.fixture
def kv_cache_config(config: EngineConfig) -> KVCacheConfig:
    """Three layers in one group, six blocks."""
    spec = FullAttentionSpec(4, 2, 8, torch.float32)
    names = tuple(layer.name for layer in config.model.layers)
    tensors = tuple(KVCacheTensor(6 * spec.page_size_bytes, (name,)) for name in names)
    return KVCacheConfig(6, tensors, (KVCacheGroupSpec(names, spec),))


@pytest.fixture
def make_step() -> type[Step]:
    return Step


@pytest.fixture
def make_connector() -> Callable[[], RecordingConnector]:
    """Make a worker half that is not installed."""
    return RecordingConnector


@pytest.fixture
def connector(make_connector: Callable[[], RecordingConnector]) -> Iterator[RecordingConnector]:
    """Install a connector in this process during the test."""
    with kv_transfer_group(make_connector()) as installed:
        yield installed


@pytest.fixture
def make_batch() -> Callable[..., StepBatch]:
    def make(query_lens: Sequence[int], num_computed: Sequence[int], **options: Any) -> StepBatch:
        return StepBatch.from_lens(query_lens, num_computed, torch.device("cpu"), **options)

    return make
