"""Executors run the steps, on a model in this process or (`parallel/`) on one that is spread over several
processes.

A step fails when the computation raises. What that means depends on whether the model still runs:

- It does: `StepFailedError`. The scheduler runs the step's requests again, each alone, and ends only those
  that fail alone. See `Scheduler.step_failed`.
- It does not (the device is lost, a worker process has ended): any other error. The engine ends, and its
  process exits so that a supervisor can start it again.

With worker processes, every failed step ends the engine. The other ranks wait in a collective operation for
the rank that failed, and that wait cannot be interrupted.

An exception of the connector's worker half is not a failed step. Every rank computes the step to its end, and
the report says what was raised; see `Scheduler.update`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Protocol

import torch
from transformers.modeling_utils import PreTrainedModel

from ...connector.base import KVConnectorHandshakeMetadata
from ...connector.config import EngineConfig
from ...connector.kv_cache_specs import KVCacheConfig
from ...runner_mixin import state
from ...runner_mixin.outputs import ModelRunnerOutput
from .errors import EngineDeadError, StepFailedError, reason_of
from .runner import ModelRunner
from .settings import Layout
from .step import StepPlan
from .types import TransferHealth


class Executor(Protocol):
    """Runs the model over its pool, with the worker halves of the connector. Only one thread may call it."""

    @property
    def handshake_metadata(self) -> Mapping[int, KVConnectorHandshakeMetadata]:
        """The handshake metadata of the connector's worker halves, by rank; empty without a connector."""

    def execute(self, plan: StepPlan) -> ModelRunnerOutput:
        """Run one step on every rank; return the tokens, and one report of all worker halves.

        Raises:
            StepFailedError: nothing was computed; the next step can run.
            EngineDeadError: a worker process has ended, or the model no longer runs; no further step is
                possible.
        """

    def check(self) -> TransferHealth:
        """Check, between two steps, that all workers still run; return the connector's health.

        Raises:
            EngineDeadError: a worker process has ended; no further step is possible.
        """

    def close(self) -> None:
        """Shut the connector down, and stop the worker processes. Idempotent."""


class SingleProcessExecutor:
    """Runs the whole model in this process.

    Args:
        model: A model that was loaded with the paged attention as its attention implementation.
        layout: See `ModelRunner.initialize_kv_cache`.

    Raises:
        ConfigurationError: the model or a connector option cannot work. The connector was shut down.
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
        """Check that the model still runs, on a few test tokens.

        If it does, the step's own requests caused the failure.

        Raises:
            EngineDeadError: the test tokens fail as well, because the model or the device no longer works.
        """
        try:
            self.runner.warm_up()
            if self.runner.device.type == "cuda":
                # A kernel reports its error only when it is waited for.
                torch.cuda.synchronize(self.runner.device)
        except Exception as error:
            raise EngineDeadError(
                f"the model no longer runs: {failure}; a test step then failed as well: {reason_of(error)}"
            ) from error

    def check(self) -> TransferHealth:
        return own_transfer_health()

    def close(self) -> None:
        self._resources.close()


def own_transfer_health() -> TransferHealth:
    """Return the health of this process's worker half. Without one, nothing is wrong."""
    if not state.has_kv_transfer_group():
        return TransferHealth()
    connector = state.get_kv_transfer_group()
    try:
        return TransferHealth(connector.failure, connector.warning)
    except Exception as error:  # noqa: BLE001 - an author's code may raise anything, and a step will log it
        return TransferHealth(warning=f"the connector cannot say how it is: {reason_of(error)}")


def start_runner(
    config: EngineConfig, pool: KVCacheConfig, model: PreTrainedModel, layout: Layout, resources: ExitStack
) -> ModelRunner:
    """Make a runner with its pool, and install the worker half of the connector.

    Args:
        resources: Its `close` shuts the connector down.

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
