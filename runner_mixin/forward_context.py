"""The part of a step that a layer can see, without a handle to the runner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ..transports.errors import KVTransferStateError

if TYPE_CHECKING:
    import torch

    from .attention.metadata import AttentionMetadata
    from .recurrent import StateMetadata


class LayerWithCache(Protocol):
    """A layer that keeps keys and values, or a state.

    Attributes:
        kv_cache: Empty until `bind_kv_cache`, then one tensor: the layer's cache in logical order.
    """

    kv_cache: list[torch.Tensor]


@dataclass(frozen=True)
class ForwardContext:
    """One step, as its layers see it.

    Attributes:
        layers: Layer name → layer.
        attn_metadata: Attention layer's name → the step's metadata; layers of one group share one object.
        state_metadata: The same for recurrent layers.
    """

    layers: Mapping[str, LayerWithCache] = field(default_factory=dict)
    attn_metadata: Mapping[str, AttentionMetadata] = field(default_factory=dict)
    state_metadata: Mapping[str, StateMetadata] = field(default_factory=dict)


#: A step without a forward pass.
EMPTY_FORWARD_CONTEXT = ForwardContext()

_current: ContextVar[ForwardContext] = ContextVar("kvferry_forward_context")


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make `context` the current one in this thread, for the duration of a `with`."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


def get_forward_context() -> ForwardContext:
    """Return the current step.

    Raises:
        KVTransferStateError: this thread is not running a step.
    """
    try:
        return _current.get()
    except LookupError:
        raise KVTransferStateError(
            "this thread has no forward context: run the step inside `with set_forward_context(...)`"
        ) from None
