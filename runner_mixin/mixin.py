"""`KVConnectorModelRunnerMixin`: the worker half of a connector, run around one step of a model runner.

Source: names, argument order and the order of calls follow vLLM's KVConnectorModelRunnerMixin.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..connector.output import KVConnectorOutput
from ..transports.errors import KVTransferStateError
from . import state, uniform
from .forward_context import EMPTY_FORWARD_CONTEXT, get_forward_context, set_forward_context
from .outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

if TYPE_CHECKING:
    from ..connector.base import SchedulerOutput
    from ..connector.config import EngineConfig


class KVConnectorModelRunnerMixin:
    """Give a model runner the worker half of a connector. It has no state; `state.py` holds the connector.

    A runner with something to compute does

        with set_forward_context(context), self.maybe_get_kv_connector_output(scheduler_output) as output:
            logits = self.model(...)

    and puts `output` into its `ModelRunnerOutput`; one with nothing to compute returns
    `self.kv_connector_no_forward(scheduler_output, config)`.
    """

    @staticmethod
    def maybe_setup_kv_connector(scheduler_output: SchedulerOutput) -> None:
        """Begin a step: bind its metadata and start its loads. Without a connector, do nothing.

        Raises:
            KVTransferStateError: the step carries no connector metadata, or there is no forward context.
                No metadata is bound.
        """
        if not state.has_kv_transfer_group():
            return
        connector, metadata = state.get_kv_transfer_group(), scheduler_output.kv_connector_metadata
        if metadata is None:
            raise KVTransferStateError(
                "the step carries no kv_connector_metadata: the scheduler must call build_connector_meta in every step"
            )
        context = get_forward_context()
        if scheduler_output.preempted_req_ids:
            connector.handle_preemptions(scheduler_output.preempted_req_ids)
        connector.bind_connector_metadata(metadata)
        connector.start_load_kv(context)

    @staticmethod
    def maybe_wait_for_kv_save() -> None:
        """Block until what this step saves may be overwritten. Without a connector, do nothing."""
        if state.has_kv_transfer_group():
            state.get_kv_transfer_group().wait_for_save()

    @staticmethod
    def get_finished_kv_transfers(
        scheduler_output: SchedulerOutput,
    ) -> tuple[set[str] | None, set[str] | None]:
        """Take the requests whose transfers ended: `(finished_sending, finished_recving)`.

        Without a connector, return `(None, None)`.
        """
        if not state.has_kv_transfer_group():
            return None, None
        return state.get_kv_transfer_group().get_finished(scheduler_output.finished_req_ids)

    @staticmethod
    def get_kv_connector_stats() -> Any:
        """Take the connector's figures of the last interval, or None."""
        if not state.has_kv_transfer_group():
            return None
        return state.get_kv_transfer_group().get_kv_connector_stats()

    @staticmethod
    def ensure_kv_transfer_shutdown() -> None:
        """Shut this process's connector down, if there is one. Idempotent; may be called while Python shuts down."""
        # While the interpreter shuts down, module globals may already be None.
        if state is not None:
            state.ensure_kv_transfer_shutdown()

    @staticmethod
    def maybe_get_kv_connector_output(
        scheduler_output: SchedulerOutput,
    ) -> AbstractContextManager[KVConnectorOutput | None]:
        """Wrap one forward pass. Yields the step's report, filled in at the end, or None without a connector."""
        if not state.has_kv_transfer_group():
            return nullcontext()
        return KVConnectorModelRunnerMixin._get_kv_connector_output(scheduler_output)

    @staticmethod
    @contextmanager
    def _get_kv_connector_output(
        scheduler_output: SchedulerOutput, wait_for_save: bool = True
    ) -> Iterator[KVConnectorOutput]:
        """Run a step's whole lifecycle around the body of a `with`.

        `handle_preemptions` (only if there are preemptions) → bind metadata → `start_load_kv` → *body* →
        `wait_for_save` → `get_finished` → `get_block_ids_with_load_errors` → `take_load_errors` →
        `get_kv_connector_stats` → `clear_connector_metadata`.

        Loads are asynchronous: the requests that load may be disjoint from those that run. The calls
        after the body are made even if the body raises, and fill the yielded output, which then is the
        caller's only way to learn which transfers ended. Metadata is cleared whatever raises. If the calls after
        the body raise as well, their error carries the body's as `__context__`.

        Args:
            wait_for_save: False for a step that saves nothing.

        Raises:
            KVTransferStateError: no connector, no connector metadata, or no forward context. The body was
                not entered.
        """
        mixin, connector = KVConnectorModelRunnerMixin, state.get_kv_transfer_group()
        output = KVConnectorOutput()
        try:
            mixin.maybe_setup_kv_connector(scheduler_output)
            try:
                yield output
            finally:
                if wait_for_save:
                    mixin.maybe_wait_for_kv_save()
                sending, recving = mixin.get_finished_kv_transfers(scheduler_output)
                output.finished_sending = sending or set()
                output.finished_recving = recving or set()
                output.invalid_block_ids = connector.get_block_ids_with_load_errors()
                output.load_errors = connector.take_load_errors()
                output.kv_connector_stats = mixin.get_kv_connector_stats()
                output.failure, output.warning = connector.failure, connector.warning
        finally:
            connector.clear_connector_metadata()

    @staticmethod
    def kv_connector_no_forward(scheduler_output: SchedulerOutput, config: EngineConfig) -> ModelRunnerOutput:
        """Run a step with nothing to compute: it still sends and receives.

        Returns:
            The shared `EMPTY_MODEL_RUNNER_OUTPUT` if there is nothing to report, otherwise a copy of it with
            the report.

        Raises:
            KVTransferStateError: `config` asks for a connector and this process has none.
        """
        if config.kv_transfer is None and not state.has_kv_transfer_group():
            return EMPTY_MODEL_RUNNER_OUTPUT
        with set_forward_context(EMPTY_FORWARD_CONTEXT):
            with KVConnectorModelRunnerMixin._get_kv_connector_output(
                scheduler_output, wait_for_save=False
            ) as output:
                pass
        if output.is_empty():
            return EMPTY_MODEL_RUNNER_OUTPUT
        return replace(EMPTY_MODEL_RUNNER_OUTPUT, kv_connector_output=output)

    use_uniform_kv_cache = staticmethod(uniform.use_uniform_kv_cache)
    allocate_uniform_kv_caches = staticmethod(uniform.allocate_uniform_kv_caches)
