"""Executors run the steps: a model in this process, or (`parallel/`) one that is spread over several.

A step fails when the computation raises. What that means depends on whether the model still runs:

- It does: `StepFailedError`. The scheduler runs the step's requests again, each alone, and only a request that fails
  alone fails. See `Scheduler.step_failed`.
- It does not (the device is lost, a worker process is gone), or the connector's worker half raised: any other error.
  The engine ends, and its process exits so that a supervisor can start it again.

With worker processes, every failed step ends the engine: the other ranks wait in the middle of a collective operation
for the rank that failed, and cannot be called back from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Protocol

import torch
from transformers.modeling_utils import PreTrainedModel

from kvferry.connector.base import KVConnectorHandshakeMetadata
from kvferry.connector.config import EngineConfig
from kvferry.connector.kv_cache_specs import KVCacheConfig
from kvferry.runner_mixin import state
from kvferry.runner_mixin.outputs import ModelRunnerOutput

from .errors import EngineDeadError, StepFailedError, reason_of
from .runner import ModelRunner
from .settings import Layout
from .step import StepPlan
from .types import TransferHealth


class Executor(Protocol):
    """Runs the model over its pool, with the worker halves of the connector. One thread calls it."""

    @property
    def handshake_metadata(self) -> Mapping[int, KVConnectorHandshakeMetadata]:
        """What the connector's worker halves say of themselves, by rank; empty without a connector."""

    def execute(self, plan: StepPlan) -> ModelRunnerOutput:
        """Run one step on every rank: the tokens, and one report of all connectors.

        Raises:
            StepFailedError: nothing was computed, and the next step can be run.
            EngineDeadError: a worker process is gone, or the model no longer runs; there will be no further step.
        """

    def check(self) -> TransferHealth:
        """Make sure, between two steps, that everything is still there; say how the connector is.

        Raises:
            EngineDeadError: a worker process is gone; there will be no further step.
        """

    def close(self) -> None:
        """Shut the connector down, and end what was started. Idempotent."""


class SingleProcessExecutor:
    """The whole model in this process.

    Args:
        model: Loaded with the paged attention as its attention implementation.
        layout: See `ModelRunner.initialize_kv_cache`.

    Raises:
        ConfigurationError: the model or a connector option cannot work. Nothing is left over.
        KVTransferStateError: this process has a connector already.
    """

    def __init__(
        self, config: EngineConfig, pool: KVCacheConfig, model: PreTrainedModel, layout: Layout
    ) -> None:
        with ExitStack() as resources:
            self.runner = start_runner(config, pool, model, layout, resources)
            self.handshake_metadata = _own_handshake_metadata(config)
            self._resources = resources.pop_all()

    def execute(self, plan: StepPlan) -> ModelRunnerOutput:
        try:
            return self.runner.execute(plan)
        except StepFailedError as failure:
            self._require_working_model(failure)
            raise

    def _require_working_model(self, failure: StepFailedError) -> None:
        """Tell a step that cannot be computed from a model, or a device, that cannot compute anything any more.

        Raises:
            EngineDeadError: the model fails on a few tokens of no request as well.
        """
        try:
            self.runner.warm_up()
            if self.runner.device.type == "cuda":
                torch.cuda.synchronize(
                    self.runner.device
                )  # a kernel's error shows only when it is waited for
        except Exception as error:
            raise EngineDeadError(
                f"the model no longer runs: {failure}; then, on a few tokens of no request, {reason_of(error)}"
            ) from error

    def check(self) -> TransferHealth:
        return own_transfer_health()

    def close(self) -> None:
        self._resources.close()


def own_transfer_health() -> TransferHealth:
    """How this process's worker half is; well without one."""
    if not state.has_kv_transfer_group():
        return TransferHealth()
    connector = state.get_kv_transfer_group()
    return TransferHealth(connector.failure, connector.warning)


def start_runner(
    config: EngineConfig, pool: KVCacheConfig, model: PreTrainedModel, layout: Layout, resources: ExitStack
) -> ModelRunner:
    """Make a runner with its pool, and install the worker half of the connector; `resources` shuts that down.

    Raises:
        ConfigurationError: the model or a connector option cannot work.
        KVTransferStateError: this process has a connector already.
    """
    runner = ModelRunner(config, model, model.device)
    if config.kv_transfer is not None:
        resources.callback(runner.ensure_kv_transfer_shutdown)
        state.ensure_kv_transfer_initialized(config, pool)
    runner.initialize_kv_cache(pool, layout)
    runner.warm_up()
    return runner


def _own_handshake_metadata(config: EngineConfig) -> Mapping[int, KVConnectorHandshakeMetadata]:
    if config.kv_transfer is None:
        return {}
    metadata = state.get_kv_transfer_group().get_handshake_metadata()
    return {} if metadata is None else {config.parallel.rank: metadata}
