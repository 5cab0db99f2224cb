"""A connector is a scheduler half and a worker half; a class in vLLM's style, with the methods of both, works
as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from kvferry.connector import (
    KVConnectorBase,
    KVConnectorFactory,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    SchedulerHalf,
    WorkerHalf,
)
from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, Step, assert_whole, engine_config
from kvferry.transports.errors import ConfigurationError, KVTransferStateError

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER
PER_LAYER = CacheShape(layout="per-layer")


class Saves(KVConnectorMetadata):
    def __init__(self, requests: frozenset[str]) -> None:
        self.requests = requests


class KeepsForAStep:
    """Has the worker half keep each finished request's blocks for one step."""

    finished: frozenset[str] = frozenset()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, *args: Any) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> Saves:
        requests, self.finished = self.finished, frozenset()
        return Saves(requests)

    def request_finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[bool, None]:
        self.finished |= {request.request_id}
        return True, None


class TwoClassScheduler(KeepsForAStep, SchedulerHalf): ...


class TwoClassWorker(WorkerHalf):
    def __init__(self) -> None:
        self.caches: Mapping[str, torch.Tensor] = {}
        self.sent: set[str] = set()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self.connector_metadata
        assert isinstance(orders, Saves)
        self.sent = set(orders.requests)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], None]:
        return self.sent, None


class TwoClasses(KVConnectorBase):
    def make_scheduler_half(self) -> TwoClassScheduler:
        return TwoClassScheduler()

    def make_worker_half(self) -> TwoClassWorker:
        return TwoClassWorker()


class OneClass(KeepsForAStep, KVConnectorBase):
    """The same connector in the style of vLLM's interface: all methods on one class."""

    def __init__(self, config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(config, role, kv_cache_config)
        self.sent: set[str] = set()
        self.caches: Mapping[str, torch.Tensor] = {}

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self.caches = kv_caches

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert self.has_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self.connector_metadata
        assert isinstance(orders, Saves)
        self.sent = set(orders.requests)

    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], None]:
        return self.sent, None


class Unfinished(KVConnectorBase):
    def make_scheduler_half(self) -> TwoClassScheduler:
        return TwoClassScheduler()


def make(connector: type[KVConnectorBase], role: KVConnectorRole) -> KVConnectorBase:
    config = engine_config(connector.__name__, kv_connector_module_path=__name__)
    return KVConnectorFactory.create_connector(config, role, PER_LAYER.kv_cache_config())


EITHER = pytest.mark.parametrize("connector", [OneClass, TwoClasses])


@EITHER
def test_either_style_runs_a_node(connector: type[KVConnectorBase]) -> None:
    config = engine_config(connector.__name__, kv_connector_module_path=__name__)
    with ModelFreeNode(config, PER_LAYER) as node:
        node.prefill("p", 10)
        assert node.held
        node.step()
        assert node.num_reports("p", "sending") == 1
        assert_whole(node)


@EITHER
@pytest.mark.parametrize("role", KVConnectorRole)
def test_an_instance_is_a_connector_with_its_settings(
    connector: type[KVConnectorBase], role: KVConnectorRole
) -> None:
    made = make(connector, role)
    assert isinstance(made, connector)
    assert isinstance(made, KVConnectorBase)
    assert isinstance(made, SchedulerHalf)
    assert isinstance(made, WorkerHalf)
    assert (made.role, made.kv_transfer_config) == (role, made.config.kv_transfer)
    assert (made.failure, made.warning, made.get_kv_connector_stats()) == ("", "", None)
    made.shutdown()
    made.shutdown()


@EITHER
def test_methods_that_are_not_implemented_have_a_default(connector: type[KVConnectorBase]) -> None:
    scheduler, worker = make(connector, SCHEDULER), make(connector, WORKER)
    scheduler.request_progressed(Request("p", 4), ())
    assert scheduler.describe() == {}
    assert list(scheduler.take_events()) == []
    scheduler.on_new_request(Request("p", 4))
    scheduler.update_connector_output(KVConnectorOutput())
    assert not worker.prefer_cross_layer_blocks
    assert not worker.allocates_memory
    assert not worker.allocate_kv_memory(8, torch.device("cpu")).any()
    assert worker.get_handshake_metadata() is None
    assert (worker.get_block_ids_with_load_errors(), worker.take_load_errors()) == (set(), {})
    assert not worker.has_connector_metadata()
    with pytest.raises(KVTransferStateError, match="no step is under way"):
        _ = worker.connector_metadata
    with pytest.raises(NotImplementedError, match="return False from prefer_cross_layer_blocks"):
        worker.register_cross_layers_kv_cache(torch.empty(0), object)


def test_calling_the_other_half_is_refused_with_both_roles() -> None:
    with pytest.raises(
        KVTransferStateError, match=r"made with KVConnectorRole.WORKER; .* KVConnectorRole.SCHEDULER"
    ):
        make(TwoClasses, WORKER).build_connector_meta(Step())
    with pytest.raises(
        KVTransferStateError, match=r"made with KVConnectorRole.SCHEDULER; .* KVConnectorRole.WORKER"
    ):
        make(TwoClasses, SCHEDULER).start_load_kv(None)


def test_a_half_without_an_implementation_is_named() -> None:
    make(Unfinished, SCHEDULER)
    with pytest.raises(
        ConfigurationError, match="does not implement start_load_kv; .* override make_worker_half"
    ):
        make(Unfinished, WORKER)
