"""The connector's two calls around one attention layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from . import state
from .forward_context import get_forward_context


@contextmanager
def maybe_transfer_kv_layer(layer_name: str) -> Iterator[None]:
    """Wait for the layer's loads before the body, and save its cache after the body.

    Works as a context manager, and as a decorator of a function that is one layer. Does nothing without a
    connector, or outside a step (no metadata is bound, for example while the engine profiles). If the
    body raises, nothing is saved.

    Raises:
        KVTransferStateError: there is no forward context. The body was not entered.
    """
    connector = state.get_kv_transfer_group() if state.has_kv_transfer_group() else None
    if connector is None or not connector.has_connector_metadata():
        yield
        return
    context = get_forward_context()
    connector.wait_for_layer_load(layer_name)
    yield
    connector.save_kv_layer(
        layer_name, context.layers[layer_name].kv_cache[0], context.attn_metadata.get(layer_name)
    )
