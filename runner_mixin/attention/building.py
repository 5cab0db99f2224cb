"""One step's metadata for all groups, each made by its backend's builder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from ..block_sizes import expand_block_table
from .metadata import AttentionMetadata, CommonAttentionMetadata, StepBatch

if TYPE_CHECKING:
    import torch

    from .backend import MetadataBuilder


def build_attn_metadata(
    metadata_builders: Sequence[MetadataBuilder],
    batch: StepBatch,
    block_tables: Sequence[torch.Tensor],
    slot_mappings: Sequence[torch.Tensor],
) -> dict[str, AttentionMetadata]:
    """Build one step's metadata, once per group. The layers of a group share one object.

    Args:
        metadata_builders: As `init_attn_backend` made them.
        batch: The step's requests.
        block_tables: Per KV cache group, `(num_reqs, max_blocks)` int32 on the device: the manager's block
            ids.
        slot_mappings: Per KV cache group, `(num_tokens,)` int64 on the device.

    Returns:
        Layer name → metadata.
    """
    shared = {f.name: getattr(batch, f.name) for f in fields(StepBatch)}
    metadata: dict[str, AttentionMetadata] = {}
    for builder in metadata_builders:
        group = builder.group
        table = block_tables[group.kv_cache_group_id]
        common = CommonAttentionMetadata(
            **shared,
            block_table=expand_block_table(
                table, group.kv_cache_spec.block_size // builder.kernel_block_size
            ),
            slot_mapping=slot_mappings[group.kv_cache_group_id],
        )
        metadata.update(dict.fromkeys(group.layer_names, builder.build(common)))
    return metadata
