"""Calls of the connector's hooks: the two around one attention layer, and a guard around all hooks of
a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from ..transports.limited_log import LimitedLog
from ..transports.outside import log_traceback
from . import state
from .forward_context import get_forward_context


class StepHooks:
    """Notes what the hooks of one step raise, so that the step goes on to its end.

    A step must not stop halfway: the other ranks would wait for this one, and nothing would wait for the
    loads and saves that the step began.

    Attributes:
        errors: Hook → what it raised first, with the connector's name, in words for a client.
        waited: Layers whose loads were waited for.
    """

    def __init__(self, connector_name: str, log: LimitedLog) -> None:
        self.errors: dict[str, str] = {}
        self.waited: set[str] = set()
        self._connector_name = connector_name
        self._log = log

    @contextmanager
    def note(self, hook: str) -> Iterator[None]:
        """Run the body, which calls a hook; note and log what it raises."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - an author's code may raise anything
            what = f"{hook} of the connector {self._connector_name} failed"
            log_traceback(error, what, self._log)
            self.errors.setdefault(hook, f"{what}: {type(error).__name__}: {error}")


_step: ContextVar[StepHooks | None] = ContextVar("kvferry_step_hooks", default=None)


@contextmanager
def noting_hook_errors() -> Iterator[StepHooks]:
    """For the duration of a `with`, note what the hooks of this process's connector raise in this thread."""
    hooks = StepHooks(type(state.get_kv_transfer_group()).__name__, state.hook_log())
    token = _step.set(hooks)
    try:
        yield hooks
    finally:
        _step.reset(token)


def calling(hook: str) -> AbstractContextManager[None]:
    """Wrap a call of a hook. Within a step, what it raises is noted; outside a step, it is passed on."""
    hooks = _step.get()
    return nullcontext() if hooks is None else hooks.note(hook)


@contextmanager
def maybe_transfer_kv_layer(layer_name: str) -> Iterator[None]:
    """Wait for the layer's loads before the body, and save its cache after the body.

    Works as a context manager, and as a decorator of a function that is one layer. Does nothing without a
    connector, or outside a step (no metadata is bound, for example while the engine profiles). If the
    body raises, nothing is saved. If a hook raises within a step of `KVConnectorModelRunnerMixin`, the body
    and the other layers run all the same, nothing more is saved, and the step ends with a `WorkerHookError`.

    Raises:
        KVTransferStateError: there is no forward context. The body was not entered.
    """
    connector = state.get_kv_transfer_group() if state.has_kv_transfer_group() else None
    if connector is None or not connector.has_connector_metadata():
        yield
        return
    context = get_forward_context()
    wait_for_layer_load(layer_name)
    yield
    kv_cache, metadata = context.layers[layer_name].kv_cache[0], context.attn_metadata.get(layer_name)
    hooks = _step.get()
    # After a hook raised, the layer may have been computed from blocks that were not loaded. A store must not
    # keep that.
    if hooks is None or not hooks.errors:
        with calling("save_kv_layer"):
            connector.save_kv_layer(layer_name, kv_cache, metadata)


def wait_for_layer_load(layer_name: str) -> None:
    """Wait for the layer's loads, and note that they were waited for."""
    if (hooks := _step.get()) is not None:
        hooks.waited.add(layer_name)
    with calling("wait_for_layer_load"):
        state.get_kv_transfer_group().wait_for_layer_load(layer_name)
