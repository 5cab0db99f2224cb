"""One attention layer of a model, over its paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..forward_context import get_forward_context
from ..hooks import maybe_transfer_kv_layer
from .backend import AttentionBackend, AttentionParams

if TYPE_CHECKING:
    import torch


class AttentionLayer:
    """Write this step's keys and values and attend to the request's cache, between the connector's hooks.

    Args:
        name: The name in `AttentionLayerConfig`.
        params: Heads, scale and window.
        backend: The layer's entry in `AttentionSetup.attn_backends`.
        writes_cache: False for a layer that reads another's cache.

    Attributes:
        kv_cache: Empty until bound, then one tensor.
    """

    def __init__(
        self,
        name: str,
        params: AttentionParams,
        backend: type[AttentionBackend],
        *,
        writes_cache: bool = True,
    ) -> None:
        self.name = name
        self.params = params
        self.backend = backend
        self.writes_cache = writes_cache
        self.kv_cache: list[torch.Tensor] = []

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Run the layer for the tokens of the current forward context's step.

        Args:
            query: `(num_tokens, num_heads, head_size)`.
            key: `(num_tokens, num_kv_heads, head_size)`; ignored by a layer that reads another's cache.
            value: Like `key`.

        Returns:
            `(num_tokens, num_heads, head_size)`.

        Raises:
            KVTransferStateError: there is no forward context.
        """
        metadata = get_forward_context().attn_metadata[self.name]
        (kv_cache,) = self.kv_cache
        if not self.writes_cache:
            # The connector loads and saves the cache under the name of the layer that owns it.
            return self.backend.attend(query, kv_cache, metadata, self.params)
        with maybe_transfer_kv_layer(self.name):
            self.backend.write_kv(key, value, kv_cache, metadata)
            return self.backend.attend(query, kv_cache, metadata, self.params)
