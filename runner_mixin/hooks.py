"""The connector's two calls around one attention layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from . import state
from .forward_context import get_forward_context


@contextmanager
def maybe_transfer_kv_layer(layer_name: str) -> Iterator[None]:
    """Wait for the layer's loads before the body, offer its cache to be saved after it.

    A context manager, and a decorator for a function that is one layer. Nothing happens without a
    connector, or outside a step of it (no metadata bound, e.g. while the engine profiles). When the
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
