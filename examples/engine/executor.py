"""Who runs the steps: a model in this process, or (`parallel/`) one that is spread over several."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Protocol

from transformers.modeling_utils import PreTrainedModel

from kvferry.connector.base import KVConnectorHandshakeMetadata
from kvferry.connector.config import EngineConfig
from kvferry.connector.kv_cache_specs import KVCacheConfig
from kvferry.runner_mixin import state
from kvferry.runner_mixin.outputs import ModelRunnerOutput

from .runner import ModelRunner
from .settings import Layout
from .step import StepPlan
from .types import TransferHealth

__all__ = ["Executor", "SingleProcessExecutor", "own_transfer_health", "start_runner"]


class Executor(Protocol):
    """Runs the model over its pool, with the worker halves of the connector. One thread calls it."""

    @property
    def handshake_metadata(self) -> Mapping[int, KVConnectorHandshakeMetadata]:
        """What the connector's worker halves say of themselves, by rank; empty without a connector."""

    def execute(self, plan: StepPlan) -> ModelRunnerOutput:
        """Run one step on every rank: the tokens, and one report of all connectors.

        Raises:
            EngineDeadError: a worker process is gone; there will be no further step.
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
        return self.runner.execute(plan)

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
