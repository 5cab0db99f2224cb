"""`KVConnectorModelRunnerMixin`: the worker half of a connector, run around one step of a model runner.

Source: names, argument order and the order of calls follow vLLM's KVConnectorModelRunnerMixin.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..connector.errors import WorkerHookError
from ..connector.output import KVConnectorOutput
from ..transports.errors import KVTransferStateError
from . import state, uniform
from .forward_context import EMPTY_FORWARD_CONTEXT, get_forward_context, set_forward_context
from .hooks import StepHooks, calling, noting_hook_errors, wait_for_layer_load
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
            with calling("handle_preemptions"):
                connector.handle_preemptions(scheduler_output.preempted_req_ids)
        with calling("bind_connector_metadata"):
            connector.bind_connector_metadata(metadata)
        # Otherwise binding it raised, and there are no orders to carry out.
        if connector.has_connector_metadata():
            with calling("start_load_kv"):
                connector.start_load_kv(context)

    @staticmethod
    def maybe_wait_for_kv_save() -> None:
        """Block until what this step saves may be overwritten. Without a connector, do nothing."""
        if state.has_kv_transfer_group():
            with calling("wait_for_save"):
                state.get_kv_transfer_group().wait_for_save()

    @staticmethod
    def get_finished_kv_transfers(
        scheduler_output: SchedulerOutput,
    ) -> tuple[set[str] | None, set[str] | None]:
        """Take the requests whose transfers ended: `(finished_sending, finished_recving)`.

        Without a connector, return `(None, None)`.
        """
        if state.has_kv_transfer_group():
            with calling("get_finished"):
                sending, recving = state.get_kv_transfer_group().get_finished(
                    scheduler_output.finished_req_ids
                )
                return sending and set(sending), recving and set(recving)
        return None, None

    @staticmethod
    def get_kv_connector_stats() -> Any:
        """Take the connector's figures of the last interval, or None."""
        if state.has_kv_transfer_group():
            with calling("get_kv_connector_stats"):
                return state.get_kv_transfer_group().get_kv_connector_stats()
        return None

    @staticmethod
    def ensure_kv_transfer_shutdown() -> None:
        """Shut this process's connector down, if there is one.

        Idempotent; may be called while Python shuts down.
        """
        # While the interpreter shuts down, module globals may already be None.
        if state is not None:
            state.ensure_kv_transfer_shutdown()

    @staticmethod
    def maybe_get_kv_connector_output(
        scheduler_output: SchedulerOutput,
    ) -> AbstractContextManager[KVConnectorOutput | None]:
        """Wrap one forward pass.

        Yields the step's report, filled in at the end, or None without a connector.
        """
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
        `get_kv_connector_stats` → `failure` → `warning` → `clear_connector_metadata`.

        If a hook raises, the step goes on: the body runs, and the other hooks are called. If the body raises,
        the loads of the layers that it did not reach are waited for, because the host will use their blocks
        again; then the calls after the body are made. In both cases the yielded output is filled.

        Args:
            wait_for_save: False for a host that waits for the saves itself.

        Raises:
            KVTransferStateError: no connector, no connector metadata, or no forward context. The body was
                not entered.
            WorkerHookError: a hook raised, and the body did not.
        """
        mixin, connector = KVConnectorModelRunnerMixin, state.get_kv_transfer_group()
        output = KVConnectorOutput()
        with noting_hook_errors() as hooks:
            try:
                mixin.maybe_setup_kv_connector(scheduler_output)
                try:
                    yield output
                except BaseException:
                    _wait_for_other_layers(hooks)
                    raise
                finally:
                    if wait_for_save:
                        mixin.maybe_wait_for_kv_save()
                    sending, recving = mixin.get_finished_kv_transfers(scheduler_output)
                    output.finished_sending = sending or set()
                    output.finished_recving = recving or set()
                    with calling("get_block_ids_with_load_errors"):
                        output.invalid_block_ids = set(connector.get_block_ids_with_load_errors())
                    with calling("take_load_errors"):
                        output.load_errors = dict(connector.take_load_errors())
                    output.kv_connector_stats = mixin.get_kv_connector_stats()
                    with calling("failure"):
                        output.failure = connector.failure
                    with calling("warning"):
                        output.warning = connector.warning
            finally:
                with calling("clear_connector_metadata"):
                    connector.clear_connector_metadata()
                output.hook_errors = hooks.errors
        if hooks.errors:
            raise WorkerHookError(output)

    @staticmethod
    def kv_connector_no_forward(scheduler_output: SchedulerOutput, config: EngineConfig) -> ModelRunnerOutput:
        """Run a step with nothing to compute: it still sends and receives.

        Returns:
            The shared `EMPTY_MODEL_RUNNER_OUTPUT` if there is nothing to report, otherwise a copy of it with
            the report.

        Raises:
            KVTransferStateError: `config` asks for a connector and this process has none.
            WorkerHookError: a hook raised.
        """
        if config.kv_transfer is None and not state.has_kv_transfer_group():
            return EMPTY_MODEL_RUNNER_OUTPUT
        with set_forward_context(EMPTY_FORWARD_CONTEXT):
            with KVConnectorModelRunnerMixin._get_kv_connector_output(scheduler_output) as output:
                pass
        if output.is_empty():
            return EMPTY_MODEL_RUNNER_OUTPUT
        return replace(EMPTY_MODEL_RUNNER_OUTPUT, kv_connector_output=output)

    use_uniform_kv_cache = staticmethod(uniform.use_uniform_kv_cache)
    allocate_uniform_kv_caches = staticmethod(uniform.allocate_uniform_kv_caches)


def _wait_for_other_layers(hooks: StepHooks) -> None:
    if state.get_kv_transfer_group().has_connector_metadata():
        for layer_name in get_forward_context().layers:
            if layer_name not in hooks.waited:
                wait_for_layer_load(layer_name)
