"""Random requests, loads, failures, offers and aborts: every request ends, and every block is freed."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest
import torch

from kvferry.connector.base import KVConnectorMetadata, SchedulerHalf
from kvferry.connector.config import EngineConfig, KVTransferConfig, ModelConfig, SchedulerConfig
from kvferry.connector.kv_cache_specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from kvferry.connector.output import KVConnectorOutput
from kvferry.lab.engine.request import Request
from kvferry.lab.engine.scheduler import Scheduler
from kvferry.lab.engine.step import StepPlan
from kvferry.lab.engine.types import GenerationRequest, SamplingParams
from kvferry.runner_mixin.kv_cache import KVCacheManager, get_request_block_hasher, sha256
from kvferry.runner_mixin.outputs import ModelRunnerOutput

BLOCK = 4
NUM_BLOCKS = 40
NUM_REQUESTS = 60
MAX_STEPS = 5000


class Metadata(KVConnectorMetadata):
    """Orders without contents."""


class RandomConnector(SchedulerHalf):
    """Loads and offers at random. Remembers unfinished loads and offers, and ends each of them once."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.loading: dict[str, set[int]] = {}
        self.offered: set[str] = set()
        self.num_ends: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        kind = zlib.crc32(request.request_id.encode()) % 3
        if kind == 0 or self.dice.random() < 0.1:
            return (0, False) if kind == 0 else (None, False)
        return max(0, request.num_prompt_tokens - num_computed_tokens), True

    def update_state_after_alloc(self, request: Any, block_ids: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            assert request.request_id not in self.loading, "a request has at most one load at a time"
            self.loading[request.request_id] = set().union(*block_ids) - {0}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return Metadata()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self.num_ends[request.request_id] = self.num_ends.get(request.request_id, 0) + 1
        is_offered = request.finish_reason == "length" and self.dice.random() < 0.5
        if is_offered:
            self.offered.add(request.request_id)
        return is_offered, None

    def report(self) -> KVConnectorOutput:
        """End some loads and offers. Returns the report about them."""
        out = KVConnectorOutput()
        for request_id in sorted(self.loading):
            if self.dice.random() < 0.3:
                blocks = self.loading.pop(request_id)
                out.finished_recving.add(request_id)
                if self.dice.random() < 0.3 and blocks:
                    out.invalid_block_ids |= set(self.dice.sample(sorted(blocks), 1))
        for request_id in sorted(self.offered):
            if self.dice.random() < 0.1:
                self.offered.discard(request_id)
                out.finished_sending.add(request_id)
        return out


def _pool(num_groups: int) -> KVCacheConfig:
    full = FullAttentionSpec(BLOCK, 1, 8, torch.float32)
    window = SlidingWindowSpec(BLOCK, 1, 8, torch.float32, sliding_window=10)
    groups = [KVCacheGroupSpec(("layers.0",), full), KVCacheGroupSpec(("layers.1",), window)]
    return KVCacheConfig(NUM_BLOCKS, (), tuple(groups[:num_groups]))


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_and_every_block_is_freed(seed: int, num_groups: int) -> None:
    dice = random.Random(seed)
    pool = _pool(num_groups)
    config = EngineConfig(
        ModelConfig("m", "float32", 60),
        scheduler=SchedulerConfig(max_num_batched_tokens=12, max_num_seqs=5),
        kv_transfer=KVTransferConfig("random", "kv_both"),
    )
    manager = KVCacheManager(pool, 60)
    connector = RandomConnector(dice)
    scheduler = Scheduler(config, manager, connector)
    hasher = get_request_block_hasher(BLOCK, sha256)
    wanted: dict[str, int] = {}

    def add(index: int) -> None:
        prompt = tuple(dice.choices(range(2), k=dice.randint(1, 40)))
        source = GenerationRequest(f"r{index}", prompt, SamplingParams())
        wanted[source.request_id] = dice.randint(1, 15)
        scheduler.add(Request(source.request_id, source, hasher, float(index)))

    num_added = num_steps = 0
    while num_added < NUM_REQUESTS or scheduler.has_work:
        num_steps += 1
        assert num_steps < MAX_STEPS, f"requests that never end: {scheduler.live_requests}"
        if num_added < NUM_REQUESTS and dice.random() < 0.4:
            add(num_added)
            num_added += 1
        if scheduler.live_requests and dice.random() < 0.02:
            scheduler.finish(dice.choice(scheduler.live_requests), "abort")
        plan = scheduler.plan()
        _check(plan, scheduler, manager)
        outcome = scheduler.update(plan, _result(plan, connector.report()))
        for request in outcome.new_tokens:
            if request.num_output_tokens >= wanted[request.request_id]:
                scheduler.finish(request, "length")
        manager.check_integrity()
    assert manager.num_free_blocks == NUM_BLOCKS - 1
    assert connector.num_ends == dict.fromkeys(wanted, 1)
    assert not connector.loading
    assert not connector.offered


def _check(plan: StepPlan, scheduler: Scheduler, manager: KVCacheManager) -> None:
    assert plan.total_num_scheduled_tokens <= 12
    assert len(scheduler.running) + len(scheduler.ready) + len(scheduler.handoffs.loading) <= 5
    for item in plan.scheduled_requests:
        num_slots = len(item.block_ids[0]) * BLOCK
        assert item.num_scheduled_tokens > 0
        assert item.request.num_computed_tokens + item.num_scheduled_tokens <= num_slots
        assert item.block_ids == manager.get_block_ids(item.request.request_id)


def _result(plan: StepPlan, report: KVConnectorOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        tuple(item.request_id for item in plan.scheduled_requests),
        tuple((1,) if item.yields_token else () for item in plan.scheduled_requests),
        report,
    )
