"""Calls that vLLM has added since 0.29: what the connector answers, and what late or repeated calls do."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.connector.testing import ModelFreeNode, Request, load, settle
from tests.vllm.test_adapter import _request, _side

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings about vLLM's and torch's own code
    try:
        from kvferry.connector.testing.vllm import groups_of_one, nodes_of
    except ImportError as error:
        pytest.skip(f"this vLLM is too old for the nodes: {error}", allow_module_level=True)
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request as VllmRequest

#: Answer of each hook while the node has an offer that nothing has claimed.
LEFT = {
    "supports_divergent_local_hybrid_hits": False,
    "has_pending_block_frees": False,
    "has_pending_push_work": False,
}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[ModelFreeNode, ModelFreeNode]]:
    transfer = {
        "kv_connector": "KvferryConnector",
        "kv_connector_module_path": "kvferry.connector.vllm",
        "kv_connector_extra_config": {"transport": "shm", "lease_s": 60},
    }
    with groups_of_one(), nodes_of(transfer, tmp_path) as make_node:
        nodes = make_node(), make_node()
        yield nodes
        settle(*nodes)


def scheduler_of(node: ModelFreeNode) -> Any:
    half: Any = node.scheduler
    return half._scheduler._connector


def worker_of(node: ModelFreeNode) -> Any:
    half: Any = node.worker
    return half._worker._connector


def hand_over(producer: ModelFreeNode, consumer: ModelFreeNode) -> None:
    _, params = producer.prefill("p", 18)
    load(consumer, producer, Request("d", 18, params))
    assert not consumer.failed_loads
    consumer.finish("d", "stop")


def test_hooks_that_are_left_alone_answer_for_an_open_offer(
    nodes: tuple[ModelFreeNode, ModelFreeNode],
) -> None:
    producer, consumer = nodes
    _, params = producer.prefill("p", 18)
    producer.step()
    assert producer.held
    connector = scheduler_of(producer)
    for name, expected in LEFT.items():
        if hasattr(KVConnectorBase_V1, name):
            answer = getattr(connector, name)
            assert (answer() if callable(answer) else answer) is expected, name
    if hasattr(KVConnectorBase_V1, "register_finished_partial_tail"):
        assert connector.register_finished_partial_tail(None, ([1],), [(0, 1, 4)]) is False
    load(consumer, producer, Request("d", 18, params))
    consumer.finish("d", "stop")


@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
def test_only_a_request_that_owes_an_offer_loses_tokens_when_it_is_preempted(role: str) -> None:
    """vLLM asks a connector once, for all requests; the connector tells it about each one."""
    side = _side(role=role)
    owing, other = _request("owing", {"do_remote_decode": True}), _request("other", None)
    for request in (owing, other):
        request.drop_stale_output = False
        side.on_new_request(request)
    side.build_connector_meta(SimpleNamespace(preempted_req_ids={"owing", "other"}))
    assert (owing.drop_stale_output, other.drop_stale_output) == (role != "kv_consumer", False)
    for request in (owing, other):
        request.get_finished_reason = lambda: "abort"
        side.request_finished(request, ([],))
    assert not side.num_remembered_requests


@pytest.mark.skipif(not hasattr(KVConnectorBase_V1, "requires_kv_delivery"), reason="this vLLM does not ask")
def test_vllm_delivers_what_a_preempted_request_computes_unless_told_otherwise(
    nodes: tuple[ModelFreeNode, ModelFreeNode],
) -> None:
    assert all(scheduler_of(node).requires_kv_delivery is False for node in nodes)
    request = VllmRequest("r", [1], SamplingParams(max_tokens=1), None)
    assert request.drop_stale_output is False  # what the scheduler half sets


def test_metadata_that_is_bound_twice_is_carried_out_once(nodes: tuple[ModelFreeNode, ModelFreeNode]) -> None:
    producer, consumer = nodes
    for node in nodes:
        connector = worker_of(node)
        bind = connector.bind_connector_metadata

        def twice(metadata: Any, bind: Any = bind) -> None:
            bind(metadata)
            bind(metadata)

        connector.bind_connector_metadata = twice
    hand_over(producer, consumer)
    settle(*nodes)
    assert consumer.num_reports("d", "recving") == producer.num_reports("p", "sending") == 1
    (transfer,) = [record for output in consumer.outputs for record in _transfers_of(output)]
    assert transfer.request_id == "d"


def test_loads_start_when_metadata_is_bound_and_not_after_the_pass(
    nodes: tuple[ModelFreeNode, ModelFreeNode],
) -> None:
    """A load that started later would wait for the pass."""
    producer, consumer = nodes
    connector = worker_of(consumer)
    submitted = connector._worker._half.submit
    calls: list[str] = []

    def submit(orders: Any, **more: Any) -> None:
        calls.extend("load" for order in orders.requests if order.load is not None)
        submitted(orders, **more)

    bind, start = connector.bind_connector_metadata, connector.start_load_kv
    connector._worker._half.submit = submit
    connector.bind_connector_metadata = lambda metadata: (bind(metadata), calls.append("bound"))
    connector.start_load_kv = lambda context, **more: (calls.append("pass launched"), start(context, **more))
    hand_over(producer, consumer)
    index = calls.index("load")
    assert calls[index : index + 3] == ["load", "bound", "pass launched"]
    assert calls.count("load") == 1


def test_a_failed_load_is_named_by_its_request_and_not_by_blocks(
    nodes: tuple[ModelFreeNode, ModelFreeNode],
) -> None:
    """vLLM accepts failed blocks only of models with a single group of layers."""
    producer, consumer = nodes
    _, params = producer.prefill("p", 18)
    assert params is not None
    connector = worker_of(consumer)
    blocks = connector.get_block_ids_with_load_errors
    named: list[set[int]] = []
    connector.get_block_ids_with_load_errors = lambda: (named.append(found := blocks()), found)[1]
    load(consumer, producer, Request("d", 18, {**params, "remote_epoch": "1"}))
    assert consumer.failed_loads == {"d"}
    assert not any(named)
    consumer.finish("d", "error")
    release = {**params, "do_remote_prefill": False, "do_release": True}
    producer.add(Request("release", 1, release), seed=9)


def _transfers_of(output: Any) -> list[Any]:
    """Return the records of a step's loads, from what vLLM's runner reports."""
    report = output.kv_connector_stats.received() if output.kv_connector_stats else None
    stats = getattr(report, "kv_connector_stats", None)
    return list(stats.figures.transfers) if stats is not None else []
