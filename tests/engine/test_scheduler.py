"""The scheduler with a scripted connector and without a model: which requests run, and which blocks they
hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvferry.connector.base import (
    ConnectorRequest,
    KVConnectorMetadata,
    SchedulerHalf,
    SchedulerOutput,
)
from kvferry.connector.config import EngineConfig, KVTransferConfig, ModelConfig, SchedulerConfig
from kvferry.connector.kv_cache_specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from kvferry.connector.output import KVConnectorOutput
from kvferry.lab.engine.request import Request, RequestStatus
from kvferry.lab.engine.scheduler import Scheduler
from kvferry.lab.engine.step import StepOutcome, StepPlan
from kvferry.lab.engine.types import GenerationRequest, SamplingParams
from kvferry.runner_mixin.kv_cache import KVCacheManager, get_request_block_hasher, sha256
from kvferry.runner_mixin.outputs import ModelRunnerOutput

BLOCK = 4


class ScriptedConnector(SchedulerHalf):
    """Answers as the test says: `loads` by request id, `offers` for finished requests that keep their
    blocks.
    """

    def __init__(self) -> None:
        self.loads: dict[str, tuple[int | None, bool]] = {}
        self.offers: set[str] = set()

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        num_tokens, is_async = self.loads.get(request.request_id, (0, False))
        return (None if num_tokens is None else num_tokens - num_computed_tokens), is_async

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Nothing has to be remembered."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return KVConnectorMetadata()  # no orders

    def request_finished(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        return request.request_id in self.offers, {"of": request.request_id}


class Node:
    """A scheduler with its pool, and a runner that answers every request with token 7."""

    def __init__(
        self, num_blocks: int = 64, budget: int = 16, max_num_seqs: int = 8, policy: Any = "recompute"
    ) -> None:
        spec = FullAttentionSpec(BLOCK, 1, 8, torch.float32)
        pool = KVCacheConfig(num_blocks, (), (KVCacheGroupSpec(("model.layers.0.attn",), spec),))
        config = EngineConfig(
            ModelConfig("m", "float32", 256),
            scheduler=SchedulerConfig(budget, max_num_seqs),
            kv_transfer=KVTransferConfig("scripted", "kv_both", kv_load_failure_policy=policy),
        )
        self.connector = ScriptedConnector()
        self.manager = KVCacheManager(pool, 256)
        self.scheduler = Scheduler(config, self.manager, self.connector)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._clock = itertools.count()

    def add(self, request_id: str, prompt: Sequence[int]) -> Request:
        source = GenerationRequest(request_id, tuple(prompt), SamplingParams())
        request = Request(request_id, source, self._hasher, float(next(self._clock)))
        self.scheduler.add(request)
        return request

    def step(self, report: KVConnectorOutput | None = None) -> tuple[dict[str, int], StepOutcome]:
        """Run one step. Returns the number of scheduled tokens by request, and the outcome."""
        plan = self.scheduler.plan()
        outcome = self.update(plan, report)
        return {item.request_id: item.num_scheduled_tokens for item in plan.scheduled_requests}, outcome

    def update(self, plan: StepPlan, report: KVConnectorOutput | None = None) -> StepOutcome:
        result = ModelRunnerOutput(
            tuple(item.request_id for item in plan.scheduled_requests),
            tuple((7,) if item.yields_token else () for item in plan.scheduled_requests),
            report,
        )
        outcome = self.scheduler.update(plan, result)
        self.manager.check_integrity()
        return outcome

    def scheduled(self, report: KVConnectorOutput | None = None) -> dict[str, int]:
        return self.step(report)[0]


@pytest.fixture
def node() -> Node:
    return Node()


def _tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def _received(*request_ids: str, invalid: set[int] | None = None) -> KVConnectorOutput:
    return KVConnectorOutput(finished_recving=set(request_ids), invalid_block_ids=invalid or set())


# -- a pool that is too small ------------------------------------------------------------------------


def test_a_preempted_request_is_reported_and_keeps_its_tokens() -> None:
    node = Node(num_blocks=5)
    node.add("old", _tokens(8))
    new = node.add("new", _tokens(7, 100))
    node.step()
    plan = node.scheduler.plan()
    assert plan.preempted_req_ids == {"new"}
    assert [item.request_id for item in plan.scheduled_requests] == ["old"]
    assert new.all_token_ids[7:] == [7]
    assert (new.status, new.num_computed_tokens) == (RequestStatus.WAITING, 0)


def test_while_blocks_are_offered_the_last_request_waits_instead_of_being_preempted() -> None:
    node = Node(num_blocks=5)
    node.connector.offers = {"gone"}
    gone = node.add("gone", _tokens(8))
    node.step()
    node.scheduler.finish(gone, "length")
    request = node.add("a", _tokens(7, 100))
    assert node.scheduled() == {"a": 7}
    assert node.scheduled() == {"a": 1}
    assert [node.scheduled() for _ in range(3)] == [{}, {}, {}]
    assert request.figures.num_preemptions == 0
    assert node.scheduled(KVConnectorOutput(finished_sending={"gone"})) == {}
    assert node.scheduled() == {"a": 1}


# -- loading -----------------------------------------------------------------------------------------


def test_loaded_blocks_enter_the_cache_only_after_they_have_arrived(node: Node) -> None:
    node.connector.loads = {"a": (12, True)}
    node.add("a", _tokens(12))
    node.step()
    early = node.add("early", _tokens(12))
    node.step(_received("a"))
    late = node.add("late", _tokens(12))
    node.step()
    assert early.figures.num_cached_tokens == 0
    assert late.figures.num_cached_tokens == 8


def test_others_run_while_one_loads(node: Node) -> None:
    node.connector.loads = {"a": (10, True)}
    node.add("a", _tokens(10))
    node.add("b", _tokens(5, 100))
    assert [node.scheduled(), node.scheduled()] == [{"b": 5}, {"b": 1}]


def test_a_connector_that_cannot_answer_yet_is_asked_again_while_others_run(node: Node) -> None:
    node.connector.loads = {"a": (None, False)}
    node.add("a", _tokens(10))
    node.add("b", _tokens(5, 100))
    assert [node.scheduled(), node.scheduled()] == [{"b": 5}, {"b": 1}]
    node.connector.loads = {}
    assert node.scheduled() == {"b": 1, "a": 10}


def test_a_failed_load_without_invalid_blocks_is_computed_from_the_cached_prefix(node: Node) -> None:
    node.connector.loads = {"a": (10, True)}
    node.add("a", _tokens(10))
    node.step()
    report = _received("a")
    report.load_errors["a"] = "peer lost"
    node.step(report)
    assert node.scheduled() == {"a": 10}


def test_invalid_blocks_reported_before_their_request_count_once_it_is_reported(node: Node) -> None:
    node.connector.loads = {"a": (8, True)}
    node.add("a", _tokens(8))
    node.step()
    table = node.manager.get_block_ids("a")[0]
    assert node.scheduled(KVConnectorOutput(invalid_block_ids={table[0]})) == {}
    assert node.manager.get_block_ids("a")[0] == table
    node.step(_received("a"))
    assert node.scheduled() == {"a": 8}


def test_with_policy_fail_a_failed_load_fails_the_request_with_the_reason() -> None:
    node = Node(policy="fail")
    free = node.manager.num_free_blocks
    node.connector.loads = {"a": (8, True)}
    request = node.add("a", _tokens(8))
    node.step()
    report = _received("a", invalid=set(node.manager.get_block_ids("a")[0]))
    report.load_errors["a"] = "the lease ran out"
    _, outcome = node.step(report)
    assert outcome.failed == [(request, "the KV cache of the prompt could not be loaded: the lease ran out")]
    node.scheduler.finish(request, "error")
    assert node.manager.num_free_blocks == free


def test_a_failed_synchronous_load_discards_the_steps_tokens(node: Node) -> None:
    node.connector.loads = {"a": (8, False)}
    request = node.add("a", _tokens(10))
    plan = node.scheduler.plan()
    table = node.manager.get_block_ids("a")[0]
    outcome = node.update(plan, KVConnectorOutput(invalid_block_ids={table[1]}))
    assert outcome.new_tokens == []
    assert request.num_computed_tokens == 4
    assert node.scheduled() == {"a": 6}


# -- ends --------------------------------------------------------------------------------------------


def test_offered_blocks_are_not_freed_until_they_are_sent(node: Node) -> None:
    free = node.manager.num_free_blocks
    node.connector.offers = {"a"}
    request = node.add("a", _tokens(10))
    node.step()
    assert node.scheduler.finish(request, "length") == {"of": "a"}
    assert node.manager.num_free_blocks == free - 3
    assert node.scheduler.handoffs.is_pending
    second = node.add("b", _tokens(12))
    node.step()
    assert second.figures.num_cached_tokens == 8
    node.scheduler.finish(second, "stop")
    node.step(KVConnectorOutput(finished_sending={"a"}))
    assert node.manager.num_free_blocks == free
    assert not node.scheduler.handoffs.is_pending
