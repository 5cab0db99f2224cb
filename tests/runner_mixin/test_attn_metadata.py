"""A step's batch and slots, and its metadata, which is built once per group."""

from __future__ import annotations

import pytest
import torch

from kvferry.connector.kv_cache_specs import FullAttentionSpec
from kvferry.runner_mixin import AttentionGroup, build_attn_metadata, compute_slot_mapping
from kvferry.runner_mixin.attention.torch_backend import TorchAttentionBackend, TorchMetadataBuilder

SPEC = FullAttentionSpec(4, 1, 8, torch.float32)
TABLES = [
    torch.tensor([[5, 2], [3, 0]], dtype=torch.int32),
    torch.tensor([[1, 4], [6, 0]], dtype=torch.int32),
]


def test_a_batch_has_the_offsets_and_lengths_of_its_requests(make_batch):
    batch = make_batch([3, 1], [2, 3])
    assert batch.query_start_loc.tolist() == batch.query_start_loc_cpu.tolist() == [0, 3, 4]
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [5, 4]
    assert batch.num_computed_tokens_cpu.tolist() == [2, 3]
    assert (batch.num_reqs, batch.num_tokens, batch.max_query_len, batch.max_seq_len) == (2, 4, 3, 5)
    assert batch.causal
    assert batch.query_start_loc.dtype == batch.seq_lens.dtype == torch.int32


@pytest.mark.parametrize(("new", "computed"), [([], []), ([0], [1]), ([1], []), ([1], [-1])])
def test_an_impossible_batch_is_refused(make_batch, new, computed):
    with pytest.raises(ValueError, match="a step needs at least one request"):
        make_batch(new, computed)


def test_slots_follow_the_block_table(make_batch):
    batch = make_batch([3, 1], [2, 3])
    slots = compute_slot_mapping(TABLES[0], batch, 4)
    # Positions 2 and 3 are in block 5, and 4 is in block 2. Position 3 of the other request is in block 3.
    assert slots.tolist() == [22, 23, 8, 15]
    assert slots.dtype == torch.int64


def test_metadata_is_built_once_per_group(make_batch):
    batch = make_batch([3, 1], [2, 3], causal=False)
    builders = [
        TorchMetadataBuilder(
            AttentionGroup(TorchAttentionBackend, names, SPEC, index),
            size,
            torch.device("cpu"),
            torch.empty(0),
        )
        for index, (names, size) in enumerate([(("a", "b"), 4), (("c",), 2)])
    ]
    slots = [compute_slot_mapping(table, batch, 4) for table in TABLES]
    metadata = build_attn_metadata(builders, batch, TABLES, slots)
    assert metadata["a"] is metadata["b"]
    assert metadata["a"].common.block_table is TABLES[0]
    assert metadata["c"].common.block_table.tolist() == [[2, 3, 8, 9], [12, 13, 0, 1]]
    assert metadata["c"].common.slot_mapping is slots[1]
    assert not metadata["c"].common.causal
    assert metadata["c"].common.seq_lens is batch.seq_lens
