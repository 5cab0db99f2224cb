"""`MultiProcessExecutor`: run a model over several worker processes, from the scheduler's process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ....connector.aggregator import KVOutputAggregator
from ....connector.base import KVConnectorHandshakeMetadata
from ....connector.config import EngineConfig
from ....runner_mixin.outputs import ModelRunnerOutput
from ..settings import Layout
from ..step import StepPlan
from ..types import TransferHealth
from .group import WorkerGroup
from .messages import Ready, Start, StepDone
from .steps import StepSender

#: Seconds for a worker to import PyTorch and to load and cut the model, on a busy machine.
START_TIMEOUT_S = 300.0
#: Seconds for one step. If it takes longer, a worker is assumed to hang, and the engine ends.
STEP_TIMEOUT_S = 120.0


class MultiProcessExecutor:
    """Runs one worker process per rank. Each has its part of the model and of the pool.

    Args:
        config: Configuration of rank 0. The configurations of the other ranks differ only in the rank.
        model_folder: The model's files. Each worker reads the whole model and keeps its part.
        layout: See `ModelRunner.initialize_kv_cache`.
        num_threads: Threads of PyTorch per worker; 0 means an equal share of the machine's cores.

    Raises:
        ConfigurationError: the model or a connector option cannot work. No worker process is left.
        EngineDeadError: a worker did not start. No worker process is left.
    """

    def __init__(self, config: EngineConfig, model_folder: Path, layout: Layout, num_threads: int) -> None:
        num_ranks = config.parallel.world_size
        threads = num_threads or max(1, (os.cpu_count() or 1) // num_ranks)
        self._sender = StepSender()
        self._reports = KVOutputAggregator(num_ranks)
        self._group = WorkerGroup(num_ranks)
        starts = [
            Start(
                replace(config, parallel=replace(config.parallel, tensor_parallel_rank=rank)),
                str(model_folder),
                layout,
                threads,
            )
            for rank in range(num_ranks)
        ]
        ready = self._group.ask(starts, Ready, START_TIMEOUT_S)
        self.handshake_metadata: Mapping[int, KVConnectorHandshakeMetadata] = {
            rank: reply.handshake_metadata
            for rank, reply in enumerate(ready)
            if reply.handshake_metadata is not None
        }

    @property
    def worker_pids(self) -> list[int]:
        """The workers' process ids, by rank."""
        return [worker.pid for worker in self._group.workers]

    def execute(self, plan: StepPlan) -> ModelRunnerOutput:
        step = self._sender.step(plan)
        replies = self._group.ask([step] * len(self._group.workers), StepDone, STEP_TIMEOUT_S)
        report = self._reports.aggregate([reply.output.kv_connector_output for reply in replies])
        # All ranks compute the same logits, but each samples by itself, so sampled tokens may differ. Use the
        # first rank's.
        return replace(replies[0].output, kv_connector_output=report)

    def check(self) -> TransferHealth:
        return self._group.check()

    def close(self) -> None:
        self._group.stop()
