"""Recurrent layers: the page that holds a state, and the page of each request in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..connector.kv_cache_specs import KVCacheSpec, MambaSpec
from ..transports.errors import ConfigurationError

if TYPE_CHECKING:
    from ..connector.config import EngineConfig, RecurrentLayerConfig
    from ..connector.kv_cache_specs import KVCacheConfig
    from .attention.metadata import StepBatch

#: The page size of a model without attention is a multiple of this, so that every page is aligned for any
#: element type.
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class StateMetadata:
    """One step of one group of recurrent layers.

    Attributes:
        batch: The step's requests.
        block_ids: `(num_reqs,)`: the block that holds each request's state. Its contents are valid only for a
            request with computed tokens; a request without any starts from a zero state, whatever the block
            held before.
    """

    batch: StepBatch
    block_ids: tuple[int, ...]


def get_recurrent_specs(
    config: EngineConfig, attention_specs: Mapping[str, KVCacheSpec]
) -> dict[str, MambaSpec]:
    """Return what each recurrent layer keeps.

    A page is padded to the size of the attention layers', to share their pool.

    Args:
        attention_specs: Layer name → spec, of the model's attention layers.

    Raises:
        ConfigurationError: a state does not fit into a page of the attention layers; the message names the
            smallest block size with which it does.
    """
    page = max((spec.page_size_bytes for spec in attention_specs.values()), default=0)
    return {
        layer.name: _recurrent_spec(layer, config.cache.block_size, page)
        for layer in config.model.recurrent_layers
    }


def _recurrent_spec(layer: RecurrentLayerConfig, block_size: int, attention_page_bytes: int) -> MambaSpec:
    dtypes = tuple(getattr(torch, name) for name in layer.state_dtypes)
    state_bytes = MambaSpec(block_size, layer.state_shapes, dtypes).state_size_bytes
    page = attention_page_bytes or -(-state_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    if state_bytes > page:
        smallest = -(-state_bytes * block_size // page)
        raise ConfigurationError(
            f"the state of layer {layer.name!r} does not fit into a block: it has {state_bytes} bytes, and a block of "
            f"{block_size} tokens of an attention layer {page}; use block_size={smallest} or more",
            key="block_size",
            value=block_size,
        )
    return MambaSpec(block_size, layer.state_shapes, dtypes, page_size_padded=page)


def build_state_metadata(
    kv_cache_config: KVCacheConfig, batch: StepBatch, block_tables: Sequence[torch.Tensor]
) -> dict[str, StateMetadata]:
    """Build one step's metadata of the recurrent groups. The layers of a group share one object.

    Args:
        batch: The step's requests.
        block_tables: Per KV cache group, `(num_reqs, max_blocks)` int32: the manager's block ids.

    Returns:
        Recurrent layer's name → metadata.
    """
    metadata: dict[str, StateMetadata] = {}
    for group, table in zip(kv_cache_config.kv_cache_groups, block_tables, strict=True):
        if isinstance(group.kv_cache_spec, MambaSpec):
            of_group = StateMetadata(batch, tuple(table[:, 0].tolist()))
            metadata.update(dict.fromkeys(group.layer_names, of_group))
    return metadata
